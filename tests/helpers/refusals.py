"""What each route refuses: one table of bad requests, with the status, code and field that the client is told.

Run as `python -O -m tests.helpers.refusals MODEL`: the whole table holds where `assert` means nothing, and nothing is
unpickled on the way. Ends with status 1 and a line for each request that is answered otherwise.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from cluster import routes
from cluster.http.access import ADMINS
from cluster.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import MODEL, Stack, runner

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
MAX_MODEL_LEN = 128
"""Length of the scripted engine. Its vocabulary has 49152 tokens."""


@dataclass(frozen=True)
class Refusal:
    """A bad request, and what its client is told."""

    fields: Mapping[str, Any]
    """What is wrong in it; None: what is left out."""
    code: str
    param: str
    status: int = 400


@dataclass(frozen=True)
class Route:
    """Where requests go, and what it calls the fields that all routes that generate have."""

    path: str
    good: Mapping[str, Any]
    """A request that is answered."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Its own names of fields of `SHARED`."""
    within: str = ""
    """The field that holds those of `SHARED`. Empty: the request itself."""

    def translated(self, refusal: Refusal) -> Refusal:
        """One of `SHARED`, as it is here."""
        fields = {self.names.get(name, name): value for name, value in refusal.fields.items()}
        fields = {self.within: fields} if self.within else fields
        name, *rest = re.split(r"(?=[.\[])", refusal.param)
        param = "".join([self.names.get(name, name), *rest])
        return replace(refusal, fields=fields, param=f"{self.within}.{param}" if self.within else param)


def values(param: str, code: str, *wrong: Any) -> list[Refusal]:
    """The refusals of one field's wrong values."""
    return [Refusal({param: value}, code, param) for value in wrong]


SHARED: list[Refusal] = [
    *values("temperature", "invalid_value", -0.1, 2.1),
    *values("temperature", "invalid_type", True, "1", 10**400),
    *values("top_p", "invalid_value", 0, 1.01),
    *values("top_k", "invalid_value", -2, 2**31),
    *values("top_k", "invalid_type", 1.0),
    *values("min_p", "invalid_value", 1.5),
    *values("seed", "invalid_value", 2**63, -(2**63) - 1),
    *values("seed", "invalid_type", 1.5),
    *values("frequency_penalty", "invalid_value", 2.1),
    *values("frequency_penalty", "invalid_type", False),
    *values("presence_penalty", "invalid_value", -2.1),
    *values("repetition_penalty", "invalid_value", 0),
    *values("repetition_penalty", "invalid_type", 10**400),
    *values("min_tokens", "invalid_value", -1),
    *values("max_tokens", "invalid_value", -2, 10**30),
    *values("max_tokens", "invalid_type", True, "1"),
    Refusal({"min_tokens": 17, "max_tokens": 16}, "invalid_value", "min_tokens"),
    *values("skip_special_tokens", "invalid_type", 1),
    # Ids: never one outside of the vocabulary.
    *values("stop_token_ids", "invalid_type", 5),
    *values("stop_token_ids", "invalid_value", [5] * 5000),
    Refusal({"stop_token_ids": [1, "a"]}, "invalid_type", "stop_token_ids[1]"),
    Refusal({"stop_token_ids": [0, 49152]}, "invalid_value", "stop_token_ids[1]"),
    Refusal({"stop_token_ids": [10**9]}, "invalid_value", "stop_token_ids[0]"),
    Refusal({"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids[0]"),
    *values("allowed_token_ids", "invalid_type", 5),
    Refusal({"allowed_token_ids": [0, 49152]}, "invalid_value", "allowed_token_ids[1]"),
    Refusal({"allowed_token_ids": [-1]}, "invalid_value", "allowed_token_ids[0]"),
    *values("logprob_token_ids", "invalid_value", [0] * 129, list(range(5000))),
    *values("logit_bias", "invalid_type", []),
    *values("logit_bias", "invalid_value", {str(i): 1 for i in range(1025)}),
    Refusal({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias.x"),
    Refusal({"logit_bias": {"-1": 1}}, "invalid_value", "logit_bias.-1"),
    Refusal({"logit_bias": {"49152": 1}}, "invalid_value", "logit_bias.49152"),
    Refusal({"logit_bias": {"٣": 1}}, "invalid_value", "logit_bias.٣"),
    Refusal({"logit_bias": {"9" * 5000: 1}}, "invalid_value", f"logit_bias.{'9' * 40}"),
    Refusal({"logit_bias": {"5": "1"}}, "invalid_type", "logit_bias.5"),
    Refusal({"logit_bias": {"5": True}}, "invalid_type", "logit_bias.5"),
    Refusal({"logit_bias": {"5": 10**400}}, "invalid_type", "logit_bias.5"),
    # Texts.
    *values("bad_words", "invalid_type", "cat"),
    *values(
        "bad_words", "invalid_value", ["a"] * 129, ["a"] * 5000, ["lorem ipsum dolor " * 50] * 8 + ["other words " * 80]
    ),
    Refusal({"bad_words": ["a", ""]}, "invalid_value", "bad_words[1]"),
    *values("stop", "invalid_type", 5),
    *values("stop", "invalid_value", "", "x" * 1025, ["a"] * 33),
    Refusal({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
    Refusal({"stop": [1]}, "invalid_type", "stop[0]"),
    *values("stop_regex", "invalid_type", 5),
    *values("stop_regex", "invalid_value", "^a", "a$", r"\ba", r"a\B", "a*", "(?=a)", "(", r"(a)\1", "x" * 257),
    *values("stop_regex", "invalid_value", "[a-z]{900}{9}"),
    Refusal({"stop_regex": ["b", "a*"]}, "invalid_value", "stop_regex[1]"),
    *values("regex", "invalid_type", 1),
    *values("regex", "empty_string", ""),
    # Known, and not supported.
    *values("best_of", "unsupported_parameter", 2),
    *values("guided_json", "unsupported_parameter", {}),
    *values("guided_regex", "unsupported_parameter", "x"),
    *values("prompt_embeds", "unsupported_parameter", "x"),
    *values("custom_logit_processor", "unsupported_parameter", "x"),
    *values("lora_path", "unsupported_parameter", "x"),
    *values("chat_template", "unsupported_parameter", "{{ 1 }}"),
]
"""Refusals of every route that generates, whose own name stands in `Route.names`."""

OPENAI: list[Refusal] = [
    *values("n", "invalid_value", 0, 129, 10**6),
    *values("n", "invalid_type", "1"),
    *values("max_tokens", "invalid_value", 0),
    *values("logprob_token_ids", "invalid_value", [1]),
    *values("prompt_logprobs", "invalid_value", 21),
    *values("truncate_prompt_tokens", "invalid_value", -2),
    *values("priority", "invalid_value", 2**53),
    *values("cache_salt", "invalid_value", "", "a@b", "a/b", "a\\b", "a\0b", "x" * 129, "x" * 10_000),
    *values("request_id", "invalid_value", "", "a b", "x" * 129),
    *values("stream", "invalid_type", 1),
    *values("model", "invalid_type", 1),
    Refusal({"model": "other"}, "model_not_found", "model", 404),
    Refusal({"prompt_logprobs": 1, "stream": True}, "invalid_value", "prompt_logprobs"),
    Refusal({"stream": False, "stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    Refusal({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_type", "stream_options.include_usage"),
]
"""Refusals of chats and completions."""


def call(**function: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]


def content(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def turn(code: str, param: str, *wrong: dict[str, Any]) -> list[Refusal]:
    """Refusals of a first message's field."""
    return [Refusal({"messages": [message]}, code, f"messages[0]{param}") for message in wrong]


COMPLETIONS: list[Refusal] = [
    Refusal({"prompt": None}, "missing_required_parameter", "prompt"),
    *values("prompt", "empty_string", ""),
    *values("prompt", "invalid_type", 5, {}, []),
    *values("prompt", "invalid_value", ["x"] * 1025, [[1]] * 5000),
    *values("prompt", "context_length_exceeded", [5] * 200),
    Refusal({"max_tokens": 10**6, "prompt": [5] * 128}, "context_length_exceeded", "prompt"),
    Refusal({"max_tokens": 128, "truncate_prompt_tokens": -1}, "context_length_exceeded", "max_tokens"),
    Refusal({"prompt": [""]}, "empty_string", "prompt[0]"),
    Refusal({"prompt": [[]]}, "empty_array", "prompt[0]"),
    Refusal({"prompt": [True]}, "invalid_type", "prompt[0]"),
    Refusal({"prompt": [-1]}, "invalid_value", "prompt[0]"),
    Refusal({"prompt": [49152]}, "invalid_value", "prompt[0]"),
    *(Refusal({"prompt": bad}, "invalid_type", "prompt[1]") for bad in ([1, "x"], ["x", 1], ["x", [1]], [1, True])),
    Refusal({"prompt": [[1], "x"]}, "invalid_type", "prompt[1]"),
    Refusal({"prompt": [[1], [49152]]}, "invalid_value", "prompt[1][0]"),
    Refusal({"prompt": [[1], [2**70]]}, "invalid_value", "prompt[1][0]"),
    Refusal({"prompt": [[1], [1.5]]}, "invalid_type", "prompt[1][0]"),
    Refusal({"prompt": ["a"] * 9, "n": 128}, "invalid_value", "n"),
    Refusal({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "invalid_value", "n"),
    *values("logprobs", "invalid_value", 21),
    *values("suffix", "unsupported_parameter", "x"),
]

CHAT: list[Refusal] = [
    Refusal({"messages": None}, "missing_required_parameter", "messages"),
    *values("messages", "empty_array", []),
    *values("messages", "invalid_type", {}, "hello"),
    *values("messages", "context_length_exceeded", [{"role": "user", "content": "word " * 3000}]),
    Refusal({"messages": ["x"]}, "invalid_type", "messages[0]"),
    *turn("missing_required_parameter", ".content", {"role": "user"}),
    *turn("invalid_type", ".content", {"role": "user", "content": 5}, {"role": "user", "content": 5, "user": 5}),
    *turn("missing_required_parameter", ".role", {"content": "x"}),
    *values("response_format", "invalid_type", "json"),
    Refusal({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    Refusal({"tool_choice": {"type": "tool"}}, "invalid_value", "tool_choice.type"),
    Refusal({"response_format": {}}, "missing_required_parameter", "response_format.type"),
    *turn("invalid_value", ".role", {"role": "wizard", "content": "x"}, {"role": ["user"], "content": "x"}),
    *turn("unsupported_parameter", ".role", {"role": "function", "content": "x"}),
    *turn("invalid_type", ".tool_call_id", {"role": "tool", "content": "x", "tool_call_id": 1}),
    *turn("invalid_type", ".content[0]", *content("x")),
    *turn("invalid_type", ".content[0].text", *content({"type": "text", "text": 1})),
    *turn("invalid_type", ".content[0].type", *content({"type": ["image_url"]})),
    *turn("invalid_type", ".tool_calls", {"role": "assistant", "content": "", "tool_calls": {}}),
    *turn("missing_required_parameter", ".tool_calls[0].function", {"role": "assistant", "tool_calls": [{}]}),
    *turn("invalid_value", ".tool_calls", {"role": "user", "content": "x", "tool_calls": [{}]}),
    *turn("invalid_value", ".tool_calls[0].function.arguments", *call(name="f", arguments="[]")),
    *turn("missing_required_parameter", ".tool_calls[0].function.name", *call(arguments="{}")),
    *turn(
        "invalid_value",
        ".tool_calls[0].type",
        {"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]},
    ),
    *turn("invalid_type", ".reasoning", {"role": "assistant", "content": "", "reasoning": []}),
    Refusal({"continue_final_message": True, "add_generation_prompt": True}, "invalid_value", "continue_final_message"),
    *values("logprobs", "invalid_type", 1),
    *values("top_logprobs", "invalid_value", 2),
    Refusal({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    *values("documents", "invalid_type", "x"),
    *values("documents", "unsupported_parameter", [{"title": "a", "text": "b"}]),
    *values("chat_template_kwargs", "invalid_type", []),
    *(
        Refusal({"chat_template_kwargs": {name: "x"}}, "unsupported_parameter", f"chat_template_kwargs.{name}")
        for name in ("chat_template", "tokenize", "messages")
    ),
    *values("reasoning_effort", "invalid_value", "enormous"),
    *values("functions", "unsupported_parameter", [{"name": "f"}]),
    *values("function_call", "unsupported_parameter", {"name": "f"}),
    *values("echo", "unsupported_parameter", True),
    *values("suffix", "unsupported_parameter", "x"),
    *values("tools", "invalid_type", {}),
    Refusal({"tools": [1]}, "invalid_type", "tools[0]"),
]

AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
RESULT = {"type": "function_call_output", "call_id": "x", "output": "y"}
RESPONSES: list[Refusal] = [
    *values("input", "empty_array", []),
    *values("input", "invalid_type", 7),
    Refusal({"input": [RESULT]}, "invalid_value", "input[0].call_id"),
    *values("input", "context_length_exceeded", "word " * 200),
    Refusal({"input": [7]}, "invalid_type", "input[0]"),
    Refusal({"input": [{"type": 7}]}, "invalid_type", "input[0].type"),
    Refusal({"input": [{"role": "user"}]}, "missing_required_parameter", "input[0].content"),
    Refusal({"input": [{"role": "king", "content": "a"}]}, "invalid_value", "input[0].role"),
    Refusal({"input": content(AUDIO)}, "unsupported_parameter", "input[0].content[0].type"),
    Refusal({"model": "other"}, "model_not_found", "model", 404),
    *values("max_output_tokens", "invalid_value", 0),
    *values("background", "unsupported_parameter", True),
    Refusal({"include": ["file_search_call.results"]}, "unsupported_parameter", "include[0]"),
    Refusal({"tools": [{"type": ["web_search"]}]}, "invalid_type", "tools[0].type"),
    Refusal({"tools": [{"type": "namespace", "name": "a"}]}, "missing_required_parameter", "tools[0].tools"),
    Refusal({"tools": [{"type": "function", "name": "a b"}]}, "invalid_value", "tools[0].name"),
    *values("metadata", "invalid_value", {"k": "v" * 513}),
    *values("truncation", "invalid_value", "middle"),
    Refusal({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_not_found", "input", 404),
    Refusal({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
    Refusal({"stream": False, "stream_options": {}}, "invalid_value", "stream_options"),
    Refusal(
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 7}}}},
        "invalid_value",
        "text.format.schema",
    ),
]

ANTHROPIC: list[Refusal] = [
    *values("max_tokens", "missing_required_parameter", None),
    *values("max_tokens", "invalid_value", 0),
    *values("messages", "empty_array", []),
    Refusal({"messages": content({"type": ["image"]})}, "invalid_type", "messages[0].content[0].type"),
    Refusal({"messages": content({"text": "a"})}, "missing_required_parameter", "messages[0].content[0].type"),
    Refusal({"messages": content()}, "empty_array", "messages[0].content"),
    Refusal({"tools": [{"type": 1, "name": "a"}]}, "invalid_type", "tools[0].type"),
    Refusal({"tools": [7]}, "invalid_type", "tools[0]"),
    Refusal(
        {"tools": [{"type": "web_search_20250305", "name": "a"}], "tool_choice": {"type": "any"}},
        "unsupported_parameter",
        "This server cannot run a: ",
    ),
    Refusal({"tools": [{"name": "a b", "input_schema": {}}]}, "invalid_value", "tools[0].name"),
    Refusal({"tool_choice": {"type": "tool"}}, "missing_required_parameter", "tool_choice.name"),
    Refusal({"model": "claude"}, "model_not_found", "'claude'", 404),
    Refusal(
        {"max_tokens": 4096, "messages": [{"role": "user", "content": "word " * 3000}]},
        "context_length_exceeded",
        "+ 4096 > 128; prompt is too long: ",
    ),
]
"""Whose errors have no field but their message, which names it."""

GENERATE: list[Refusal] = [
    *values("text", "missing_required_parameter", None),
    *values("text", "empty_string", ""),
    *values("text", "invalid_value", ["a"] * 1025),
    *values("text", "invalid_type", 5, []),
    Refusal({"text": [1]}, "invalid_type", "text[0]"),
    *values("text", "context_length_exceeded", "a " * 300),
    Refusal({"input_ids": [1]}, "missing_required_parameter", "text"),
    Refusal({"text": ["a", 7]}, "invalid_type", "text[1]"),
    Refusal({"text": None, "input_ids": []}, "invalid_type", "input_ids"),
    Refusal({"text": None, "input_ids": ["a"]}, "invalid_type", "input_ids[0]"),
    Refusal({"text": None, "input_ids": [[]]}, "empty_array", "input_ids[0]"),
    Refusal({"text": None, "input_ids": [1, True]}, "invalid_type", "input_ids[1]"),
    Refusal({"text": None, "input_ids": [[1], [10**8]]}, "invalid_value", "input_ids[1][0]"),
    *values("sampling_params", "invalid_type", 7),
    *values("sampling_params", "invalid_value", [{}, {}]),
    Refusal({"sampling_params": {"custom_params": {}}}, "unsupported_parameter", "sampling_params.custom_params"),
    *(
        Refusal({"text": ["a", "b"], "sampling_params": bad}, "invalid_value", "sampling_params")
        for bad in ([{"n": 1}, {"n": 2}], [{}, {"stop": "x"}])
    ),
    Refusal(
        {"text": ["a", "b"], "sampling_params": [{}, {"stop_token_ids": [10**8]}]},
        "invalid_value",
        "sampling_params[1].stop_token_ids[0]",
    ),
    Refusal({"text": ["a", "b"], "return_logprob": [True]}, "invalid_value", "return_logprob"),
    Refusal({"return_logprob": True, "top_logprobs_num": 21}, "invalid_value", "top_logprobs_num"),
    Refusal({"return_logprob": True, "token_ids_logprob": [-1]}, "invalid_value", "token_ids_logprob[0]"),
    Refusal({"return_logprob": True, "token_ids_logprob": [1] * 129}, "invalid_value", "token_ids_logprob"),
    *values("image_data", "unsupported_parameter", "x"),
    *values("rid", "invalid_value", "a b"),
]

SCORE: list[Refusal] = [
    *values("label_token_ids", "invalid_value", [], list(range(129))),
    Refusal({"label_token_ids": [10**8]}, "invalid_value", "label_token_ids[0]"),
    *values("items", "invalid_value", [], ["b"] * 1025),
    *values("items", "invalid_type", [[1]]),
    Refusal({"items": ["b " * 200]}, "context_length_exceeded", "items[0]"),
    Refusal({"query": [1]}, "invalid_type", "items[0]"),
    Refusal({"query": [1], "items": [[-1]]}, "invalid_value", "items[0][0]"),
    Refusal({"query": [], "items": [[]]}, "empty_string", "items[0]"),
    Refusal({"model": "other"}, "model_not_found", "model", 404),
    Refusal({"text_1": "a", "text_2": "b"}, "unsupported_parameter", "text_1"),
]

TOKENIZE: list[Refusal] = [
    *values("prompt", "missing_required_parameter", None),
    *values("prompt", "invalid_type", 7),
    Refusal({"messages": MESSAGES}, "missing_required_parameter", "prompt"),
    Refusal({"prompt": None, "messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    Refusal({"model": "other"}, "model_not_found", "model", 404),
]

DETOKENIZE: list[Refusal] = [
    *values("tokens", "missing_required_parameter", None),
    Refusal({"tokens": [5, 10**9]}, "invalid_value", "tokens[1]"),
    Refusal({"tokens": [-1]}, "invalid_value", "tokens[0]"),
    Refusal({"tokens": [True]}, "invalid_type", "tokens[0]"),
]


def _routes() -> dict[str, tuple[Route, list[Refusal]]]:
    model = {"model": MODEL}
    openai, native = [*SHARED, *OPENAI], {"max_tokens": "max_new_tokens"}
    routes = [
        (Route("/v1/completions", {**model, "prompt": "hi"}), openai, COMPLETIONS),
        (Route("/v1/chat/completions", {**model, "messages": MESSAGES}), openai, CHAT),
        (Route("/v1/responses", {**model, "input": "hi"}, {"max_tokens": "max_output_tokens"}), SHARED, RESPONSES),
        (
            Route("/v1/messages", {**model, "max_tokens": 8, "messages": MESSAGES}, {"stop": "stop_sequences"}),
            SHARED,
            ANTHROPIC,
        ),
        (Route("/generate", {"text": "a"}, native, within="sampling_params"), SHARED, GENERATE),
        (Route("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]}), [], SCORE),
        (Route("/tokenize", {"prompt": "a"}), [], TOKENIZE),
        (Route("/detokenize", {"tokens": [5]}), [], DETOKENIZE),
    ]
    return {route.path: (route, [*map(route.translated, shared), *own]) for route, shared, own in routes}


ROUTES = _routes()
"""By path: the route, and all that it refuses."""

BROKEN: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b'"a"',
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": 0x1}',
    b'{"a": ' + b"1" * 5000 + b"}",
    b'{"a": "\\ud800"}',
    b'{"\xed\xa0\x80": 1}',
    b"\x80\x04\x95.",
    b"[" * 100_000,
    b'{"": ' * 5000,
    b'{"messages":' + b"[" * 100_000,
]
"""Bodies that are no JSON object that every reader takes for the same."""
WITH_BODY = [it.path for it in routes.ROUTES if it.request is not None and it.roles != ADMINS]

ANTHROPIC_TYPES = {"invalid_request_error": 400, "not_found_error": 404}


def told(reply: httpx.Response, expected: Refusal) -> tuple[int, object, object]:
    """Status, code and field that a client was told: those of `expected`, where its words are right."""
    body: Any = reply.json()
    error = body.get("error", {})
    if reply.request.url.path == "/v1/messages":
        kind, words = error.get("type"), error.get("message", "")
        right = set(body) == {"type", "error", "request_id"} and ANTHROPIC_TYPES.get(kind) == reply.status_code
        return reply.status_code, expected.code if right else kind, expected.param if expected.param in words else words
    if set(body) != {"error"} or set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return reply.status_code, "an error of another shape", body
    return reply.status_code, error["code"], error["param"]


async def answered_otherwise(stack: Stack, path: str, *, stream: bool) -> list[str]:
    """A line for each refusal of a route that is not told as the table has it."""
    route, refusals = ROUTES[path]
    wrong = []
    for refusal in refusals:
        fields = {"stream": stream, **route.good, **refusal.fields}
        body = json.dumps({name: value for name, value in fields.items() if value is not None})
        reply = await stack.http.post(path, content=body.encode())
        expected = (refusal.status, refusal.code, refusal.param)
        if reply.status_code < 400 or told(reply, refusal) != expected:
            wrong.append(f"{str(refusal.fields)[:80]}: {reply.status_code} {reply.text[:200]}, not {expected}")
    if stack.coordinator.requests:
        wrong.append(f"{len(stack.coordinator.requests)} requests reached the engine")
    return wrong


async def broken_and_taken(stack: Stack) -> list[str]:
    """A line for each body that is no JSON object, and that a route does not refuse."""
    wrong = []
    for path in WITH_BODY:
        for body in BROKEN:
            reply = await stack.http.post(path, content=body)
            if reply.status_code != 400 or "error" not in reply.json():
                wrong.append(f"{path} {body[:20]!r}: {reply.status_code} {reply.text[:200]}")
    return wrong


def forbid(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        raise RuntimeError(f"a pickle asks for {arguments}")


def main() -> None:
    if __debug__:
        sys.exit("run with -O")
    wrong: list[str] = []

    async def scenario(stack: Stack) -> None:
        sys.addaudithook(forbid)
        for path in ROUTES:
            wrong.extend(await answered_otherwise(stack, path, stream=False))
        wrong.extend(await broken_and_taken(stack))
        response = await stack.complete()
        if response.status_code != 200:
            wrong.append(f"a good request: {response.text}")

    with tempfile.TemporaryDirectory() as folder:
        runner(Tokenizer.load(Path(sys.argv[1])), Path(folder))(scenario)
    sys.stdout.write("\n".join(wrong) or "refused as they should be")
    asyncio.set_event_loop(None)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
