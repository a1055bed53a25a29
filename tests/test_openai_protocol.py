"""Which requests are taken, which are refused, and with what words; and what a chunk looks like on the wire."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cluster.http.errors import error_body
from cluster.openai import checks
from cluster.openai.body import decode_body
from cluster.openai.chat import parse_messages
from cluster.openai.protocol import ChatRequest, CompletionRequest, parse_request, unknown_fields
from configs.errors import ContextLengthError, OverloadedError, RequestError
from configs.schema import ServerConfig

SERVER = ServerConfig()


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_request(ChatRequest, json.dumps(body).encode(), SERVER)


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(CompletionRequest, json.dumps({"model": "m", "prompt": "x", **fields}).encode(), SERVER)


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    return caught.value


def test_every_supported_field_is_read() -> None:
    request = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-5,
        max_tokens=3,
        stop=["a"],
        stop_token_ids=[7],
        ignore_eos=True,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=3,
    )
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.0, 0.5, -1, 0.1)
    assert (request.seed, request.asked_max_tokens, request.num_choices, request.num_logprobs) == (-5, 3, 2, 3)
    assert request.include_usage


def test_null_means_the_default_everywhere() -> None:
    names = set(ChatRequest.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).asked_max_tokens == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.0),
        ("top_k", 2**31),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("n", 0),
        ("n", 129),
        ("n", "1"),
        ("stream", 1),
        ("stop_token_ids", 5),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("model", 1),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", False),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10**400),
        ("temperature", 10**400),
        ("min_tokens", -1),
        ("allowed_token_ids", 5),
        ("logprob_token_ids", [0] * 129),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", -2),
        ("priority", 2**53),
        ("cache_salt", ""),
        ("cache_salt", "a@b"),
        ("cache_salt", "a/b"),
        ("cache_salt", "a\\b"),
        ("cache_salt", "a\0b"),
        ("cache_salt", "x" * 129),
        ("request_id", "a b"),
        ("request_id", "x" * 129),
        ("request_id", ""),
        ("documents", "x"),
        ("chat_template_kwargs", []),
        ("reasoning_effort", "enormous"),
        ("skip_special_tokens", 1),
    ],
)
def test_a_value_out_of_type_or_range_is_refused_by_name(field: str, value: object) -> None:
    extra = {"logprobs": True} if field == "top_logprobs" else {}
    error = refused(**{field: value}, **extra)
    assert (error.status, error.param) == (400, field)
    assert error.code in ("invalid_type", "invalid_value")


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "0x1", "1" * 5000])
def test_what_is_no_finite_json_number_is_refused(literal: str) -> None:
    body = f'{{"model": "m", "prompt": "x", "temperature": {literal}}}'.encode()
    with pytest.raises(RequestError) as caught:
        parse_request(CompletionRequest, body, SERVER)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}', b'"\xed\xa0\x80"', b"[" * 100_000],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_nested_field_is_named_by_its_path() -> None:
    assert refused(stop_token_ids=[1, "a"]).param == "stop_token_ids[1]"
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RequestError, match="messages is required") as caught:
        parse_request(ChatRequest, b'{"model": "m"}', SERVER)
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "messages")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("best_of", 2),
        ("suffix", "x"),
        ("echo", True),
        ("guided_json", {}),
        ("chat_template", "x"),
        ("prompt_embeds", "x"),
        ("custom_logit_processor", "x"),
        ("lora_path", "x"),
        ("guided_regex", "x"),
    ],
)
def test_a_known_but_unsupported_field_is_never_ignored(field: str, value: object) -> None:
    error = refused(**{field: value})
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", field)


def test_unsupported_fields_that_ask_for_nothing_pass() -> None:
    chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        best_of=2,
        n=2,
        echo=False,
        suffix=None,
    )


def test_openai_housekeeping_and_unknown_fields_are_ignored() -> None:
    assert chat(user="u", metadata={"a": "b"}, store=True, service_tier="auto", some_new_thing=1) == chat()


def test_only_unknown_fields_are_listed_as_ignored() -> None:
    raw = {"model": "m", "user": "u", "tools": [], "wat": 1, "stream_options": {"include_usage": True, "hm": 1}}
    assert unknown_fields(ChatRequest, raw) == ["wat", "stream_options.hm"]


@pytest.mark.parametrize(
    ("field", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("zzz", None), ("top-k", "top_k")]
)
def test_strict_fields_refuse_what_nobody_knows_with_the_nearest_name(field: str, near: str | None) -> None:
    body = json.dumps({"model": "m", "prompt": "x", field: 1}).encode()
    with pytest.raises(RequestError) as caught:
        parse_request(CompletionRequest, body, ServerConfig(strict_fields=True))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unknown_parameter", field)
    assert (f"Did you mean {near}?" in str(caught.value)) is (near is not None)


def test_fields_that_need_or_exclude_one_another_are_told_so() -> None:
    assert refused(continue_final_message=True, add_generation_prompt=True).param == "continue_final_message"
    assert refused(logprob_token_ids=[1]).param == "logprob_token_ids"
    assert refused(prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    for fields, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ):
        with pytest.raises(RequestError) as caught:
            completion(**fields)
        assert caught.value.param == param
    assert completion(max_tokens=0, echo=True).asked_max_tokens == 0


def test_stream_options_need_a_stream() -> None:
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).continuous_usage
    assert not chat(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


def test_top_logprobs_need_logprobs() -> None:
    assert refused(top_logprobs=2).param == "top_logprobs"
    assert chat(top_logprobs=0).num_logprobs == -1
    assert chat(logprobs=True).num_logprobs == 0
    assert completion(logprobs=0).num_logprobs == 0
    assert completion().num_logprobs == -1


@pytest.mark.parametrize(("stop", "expected"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_is_a_string_or_a_list(stop: object, expected: list[str]) -> None:
    assert checks.stop_strings(stop, SERVER) == expected


@pytest.mark.parametrize(
    ("stop", "param"),
    [("", "stop"), (["a", ""], "stop[1]"), ([1], "stop[0]"), (5, "stop"), (["a"] * 5, "stop"), ("x" * 1025, "stop")],
)
def test_a_bad_stop_is_named(stop: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        checks.stop_strings(stop, SERVER)
    assert caught.value.param == param


def test_a_prompt_is_text_or_ids_or_a_list_of_either() -> None:
    assert checks.prompts("x", 10) == ["x"]
    assert checks.prompts(["x", "y"], 10) == ["x", "y"]
    assert checks.prompts([1, 9], 10) == [[1, 9]]
    assert checks.prompts([[1], [2, 3]], 10) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([""], "prompt[0]"),
        ([[]], "prompt[0]"),
        ([1, "x"], "prompt[1]"),
        (["x", 1], "prompt[1]"),
        (["x", [1]], "prompt[1]"),
        ([[1], "x"], "prompt[1]"),
        ([True], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1, 10], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([[1], [2**70]], "prompt[1][0]"),
        ([[1], [1.5]], "prompt[1][0]"),
        (["x"] * 1025, "prompt"),
    ],
)
def test_a_bad_prompt_is_named(prompt: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        checks.prompts(prompt, 10)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "developer", "content": parts}]) == [{"role": "system", "content": "a\nb"}]


def test_calls_have_their_arguments_as_objects_and_results_their_ids() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
    parsed = parse_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ]
    )
    assert [call["function"]["arguments"] for call in parsed[0]["tool_calls"]] == [{"x": [1]}, {}]
    assert (parsed[0]["content"], parsed[0]["reasoning"]) == ("", "hm")
    assert parsed[1] == {"role": "tool", "content": "7", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "empty_array"),
        ({}, "messages", "invalid_type"),
        (["x"], "messages[0]", "invalid_type"),
        ([{"role": "user"}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": 5}], "messages[0].content", "invalid_type"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": "function", "content": "x"}], "messages[0].role", "unsupported_parameter"),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id", "invalid_type"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "invalid_type"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]", "invalid_type"),
        ([{"role": "assistant", "content": "", "tool_calls": {}}], "messages[0].tool_calls", "invalid_type"),
        (
            [{"role": "assistant", "content": "", "reasoning_content": "hm", "reasoning": []}],
            "messages[0].reasoning",
            "invalid_type",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls", "invalid_value"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "invalid_value",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
            "missing_required_parameter",
        ),
    ],
)
def test_a_bad_message_is_named_by_its_path(messages: object, param: str, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_messages(messages)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_an_error_body_has_the_four_fields_clients_read() -> None:
    error = ContextLengthError(max_model_len=10, num_prompt_tokens=8, max_tokens=4)
    body = json.loads(msgspec.json.encode(error_body(error)))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 10 tokens" in body["error"]["message"].lower()
    overloaded = error_body(OverloadedError("later")).error
    assert (overloaded.type, overloaded.code) == ("overloaded_error", "engine_overloaded")
