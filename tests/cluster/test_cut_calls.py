"""A call that `max_tokens` cuts off is part of a call, or nothing: never text, on any surface, wherever the cut is."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.text.answer_parser import AnswerFormat, AnswerReader
from cluster.text.reasoning import REASONING_STYLES
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools.events import Parsed, collect
from cluster.text.tools.styles import STYLES, CallStyle, StyleName
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import EOS, MODEL, Stack, events, runner

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "parameters": PARAMETERS}
ARGUMENTS = ['{"city": "<b>[São] {Paris}"}', '{"city": "Rome"}']
TAGS: list[tuple[StyleName, str]] = [
    ("hermes", "<tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("llama3_json", "<|python_tag|>"),
]
WRITTEN = [style for style in STYLES.values() if style.layout is not None and not style.layout.head]


def forced(style: CallStyle) -> str:
    """Two calls as a grammar writes them."""
    layout = style.layout
    assert layout is not None
    calls = [f'{{"name": "get_weather", "{layout.arguments_key}": {arguments}}}' for arguments in ARGUMENTS]
    return layout.begin + layout.separator.join(calls) + layout.end


def read(text: str, form: AnswerFormat, *, cut: bool) -> Parsed:
    return collect(AnswerReader(form).read(text, ended=True, cut=cut))


def check_beginning(arguments: list[str]) -> None:
    """That the calls are the first ones of ARGUMENTS, the last of them cut off or not."""
    if arguments:
        assert arguments[:-1] == ARGUMENTS[: len(arguments) - 1]
        assert ARGUMENTS[len(arguments) - 1].startswith(arguments[-1])


@pytest.mark.parametrize("style", WRITTEN, ids=lambda style: style.name)
def test_a_forced_call_cut_anywhere_leaves_no_text(style: CallStyle) -> None:
    think = REASONING_STYLES["think"]
    for thought in ("", "<think>\nI look.\n</think>\n\n"):
        form = AnswerFormat(
            calls=style, tools={"get_weather": PARAMETERS}, calls_only=True, reasoning=think if thought else None
        )
        text = thought + forced(style)
        for end in range(len(text)):
            got = read(text[:end], form, cut=True)
            assert got.content == ""
            assert "get_weather" not in got.reasoning
            check_beginning([call.arguments for call in got.calls])
        whole = read(text, form, cut=True)
        assert [call.arguments for call in whole.calls] == ARGUMENTS


@pytest.mark.parametrize(("name", "tag"), TAGS)
def test_a_call_of_the_models_own_will_is_not_text_once_its_tag_is_there(name: StyleName, tag: str) -> None:
    style = STYLES[name]
    text = "I look. " + forced(style).removeprefix(tag).join((tag, ""))
    form = AnswerFormat(calls=style, tools={"get_weather": PARAMETERS})
    for end in range(len("I look. " + tag), len(text)):
        content = read(text[:end], form, cut=True).content
        # The beginning of a next tag, cut off, may have been anything.
        assert content.startswith("I look.")
        assert "{" not in content
        assert tag not in content
    # A model that ends its answer there has spoken of the tag.
    assert read(f"I look. {tag}", form, cut=False).content == f"I look. {tag}"


@pytest.mark.parametrize("name", ["llama3_json", "json"])
def test_a_call_without_a_tag_is_not_text_once_it_names_a_tool(name: StyleName) -> None:
    style = STYLES[name]
    text = forced(style)
    form = AnswerFormat(calls=style, tools={"get_weather": PARAMETERS})
    named = text.index("get_weather")
    for end in range(named, len(text)):
        assert read(text[:end], form, cut=True).content == ""
    # Any other JSON may be what the model was asked for, and so may this one where the model ended it.
    for other in (text[: named - 1], '{"name": "Rome", "in": "Italy', '{"city": "get_weather', '["get_w'):
        assert read(other, form, cut=True).content == other
    assert read('{"name": "get_w', form, cut=False).content == '{"name": "get_w'


class Surface:
    """One way to ask for the same forced calls, streamed and whole."""

    def __init__(self, path: str, limit: str, body: dict[str, Any]) -> None:
        self.path, self.limit = path, limit
        self.body = {"model": MODEL, **body}

    async def ask(self, stack: Stack, max_tokens: int, *, stream: bool) -> tuple[str, list[str], str]:
        """Text, arguments of the calls, and why it ended."""
        response = await stack.http.post(self.path, json={**self.body, self.limit: max_tokens, "stream": stream})
        assert response.status_code == 200, response.text
        read: Any = getattr(self, "stream" if stream else "whole")
        return read(response)

    def go_on(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The request that sends `answer` back as the conversation's, with a question behind it."""
        raise NotImplementedError

    def whole(self, response: Any) -> tuple[str, list[str], str]:
        raise NotImplementedError

    def stream(self, response: Any) -> tuple[str, list[str], str]:
        raise NotImplementedError


class Chat(Surface):
    def go_on(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {**self.body, "messages": [*QUESTION, answer["choices"][0]["message"], *QUESTION]}

    def whole(self, response: Any) -> tuple[str, list[str], str]:
        [choice] = response.json()["choices"]
        calls = choice["message"].get("tool_calls", [])
        return (
            choice["message"]["content"] or "",
            [it["function"]["arguments"] for it in calls],
            choice["finish_reason"],
        )

    def stream(self, response: Any) -> tuple[str, list[str], str]:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        calls: dict[int, str] = {}
        for choice in choices:
            for call in choice["delta"].get("tool_calls", ()):
                calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        return text, list(calls.values()), choices[-1]["finish_reason"]


def named_events(response: Any) -> list[dict[str, Any]]:
    return [json.loads(block.split("data: ", 1)[1]) for block in response.text.split("\n\n") if "data: " in block]


class Messages(Surface):
    def go_on(self, answer: dict[str, Any]) -> dict[str, Any]:
        said = {"role": answer["role"], "content": answer["content"]}
        return {**self.body, "messages": [*QUESTION, said, *QUESTION], "max_tokens": 1}

    def whole(self, response: Any) -> tuple[str, list[str], str]:
        body = response.json()
        text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
        inputs = [json.dumps(block["input"], ensure_ascii=False) for block in body["content"] if "input" in block]
        # An input that was cut off is an empty object.
        return text, [value for value in inputs if value != "{}"], body["stop_reason"]

    def stream(self, response: Any) -> tuple[str, list[str], str]:
        text, inputs, reason = "", dict[int, str](), ""
        for event in named_events(response):
            delta = event.get("delta", {})
            text += delta.get("text", "")
            if "partial_json" in delta:
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            reason = delta.get("stop_reason", reason)
        return text, [value for value in inputs.values() if value in ARGUMENTS], reason


class Responses(Surface):
    def go_on(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {**self.body, "previous_response_id": answer["id"]}

    def _read(self, body: dict[str, Any]) -> tuple[str, list[str], str]:
        text = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(text), [it["arguments"] for it in body["output"] if "arguments" in it], body["status"]

    def whole(self, response: Any) -> tuple[str, list[str], str]:
        return self._read(response.json())

    def stream(self, response: Any) -> tuple[str, list[str], str]:
        told = named_events(response)
        text, calls, status = self._read(told[-1]["response"])
        assert "".join(it["delta"] for it in told if it["type"] == "response.output_text.delta") == text
        deltas = [it["delta"] for it in told if it["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(calls)
        return text, calls, status


QUESTION = [{"role": "user", "content": "hi"}]
CHAT = {
    "messages": QUESTION,
    "tools": [{"type": "function", "function": WEATHER}],
    "tool_choice": "required",
}
SURFACES = [
    Chat("/v1/chat/completions", "max_tokens", CHAT),
    Messages(
        "/v1/messages",
        "max_tokens",
        {**CHAT, "tools": [{"name": "get_weather", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"}},
    ),
    Responses(
        "/v1/responses",
        "max_output_tokens",
        {"input": "hi", "tools": [{"type": "function", **WEATHER}], "tool_choice": "required"},
    ),
]


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.path)
@pytest.mark.parametrize("name", ["hermes", "json"])
def test_every_surface_gives_part_of_a_cut_call_as_a_call_and_streams_the_same(
    surface: Surface, name: Any, smollm2: Tokenizer, tmp_path: Path
) -> None:
    reply = [*smollm2.encode(forced(STYLES[name]), add_special_tokens=False), EOS]

    async def scenario(stack: Stack) -> None:
        async def at(cut: int) -> list[str]:
            whole, streamed = [await surface.ask(stack, cut, stream=stream) for stream in (False, True)]
            assert whole == streamed
            text, arguments, reason = whole
            assert text == ""
            assert reason in ("length", "max_tokens", "incomplete")
            check_beginning(arguments)
            return arguments

        got = await asyncio.gather(*(at(cut) for cut in range(1, len(reply))))
        assert [] in got
        assert got[-1] == ARGUMENTS

    runner(smollm2, tmp_path)(scenario, ServerConfig(tool_call_parser=name), 1024, reply=reply, timeout_s=120)


STOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("length", {"stop": "Paris"}),
    "/v1/messages": ("max_tokens", {"stop_sequences": ["Paris"]}),
    "/v1/responses": ("incomplete", {"stop": "Paris"}),
}


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.path)
@pytest.mark.parametrize("ends", ["stop string", "end of sequence"])
def test_a_call_that_a_stop_cuts_is_never_told_as_complete(
    surface: Surface, ends: str, smollm2: Tokenizer, tmp_path: Path
) -> None:
    whole = forced(STYLES["hermes"])
    text = whole if ends == "stop string" else whole[: whole.index("Paris")]
    reply = [*smollm2.encode(text, add_special_tokens=False), EOS]
    reason, stop = STOPS[surface.path]
    surface = copy.copy(surface)
    surface.body = {**surface.body, **(stop if ends == "stop string" else {})}

    async def scenario(stack: Stack) -> None:
        answers = [await surface.ask(stack, 200, stream=stream) for stream in (False, True)]
        assert answers[0] == answers[1]
        content, arguments, told = answers[0]
        assert (content, told) == ("", reason)
        check_beginning(arguments)

    runner(smollm2, tmp_path)(scenario, ServerConfig(tool_call_parser="hermes"), 1024, reply=reply, timeout_s=120)


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.path)
def test_an_answer_that_was_cut_off_anywhere_can_be_sent_back(
    surface: Surface, smollm2_path: Path, tmp_path: Path
) -> None:
    template = tmp_path / "alternating.jinja"  # as Mistral's and Gemma's are
    template.write_text(
        "{{ tools }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{{ message.tool_calls }}"
        "{% endfor %}"
    )
    tokenizer = Tokenizer.load(smollm2_path, chat_template=str(template))
    reply = [*tokenizer.encode(forced(STYLES["hermes"]), add_special_tokens=False), EOS]

    async def scenario(stack: Stack) -> None:
        async def at(cut: int) -> None:
            answer = await stack.http.post(surface.path, json={**surface.body, surface.limit: cut})
            again = await stack.http.post(surface.path, json=surface.go_on(answer.json()))
            assert again.status_code == 200, f"{answer.text}\n{again.text}"

        await asyncio.gather(*(at(cut) for cut in range(1, len(reply), 3)))

    runner(tokenizer, tmp_path)(scenario, ServerConfig(tool_call_parser="hermes"), 1024, reply=reply, timeout_s=120)
