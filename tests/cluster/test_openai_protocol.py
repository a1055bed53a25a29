"""What requests say, and what an error looks like on the wire. What is refused: test_refusals."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cluster.http.http_errors import error_body
from cluster.openai.openai_request import ChatRequest, CompletionRequest, check_request
from cluster.requests import checks
from configs.errors import ContextLengthError, OverloadedError, RequestError
from configs.schema import ServerConfig
from tests.helpers.chats import parse_turns

SERVER = ServerConfig()


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return check_request(ChatRequest, body, SERVER)[0]


def completion(**fields: Any) -> CompletionRequest:
    return check_request(CompletionRequest, {"model": "m", "prompt": "x", **fields}, SERVER)[0]


def test_null_means_the_default_everywhere() -> None:
    names = set(ChatRequest.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).asked_max_tokens == 4


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
    raw = {"model": "m", "prompt": "x", "user": "u", "tools": [], "wat": 1, "stream": True}
    raw["stream_options"] = {"include_usage": True, "hm": 1}
    assert check_request(CompletionRequest, raw, SERVER)[1] == ["tools", "wat", "stream_options.hm"]


@pytest.mark.parametrize(
    ("field", "near"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("zzz", None), ("top-k", "top_k")]
)
def test_strict_fields_refuse_what_nobody_knows_with_the_nearest_name(field: str, near: str | None) -> None:
    body = {"model": "m", "prompt": "x", field: 1}
    with pytest.raises(RequestError) as caught:
        check_request(CompletionRequest, body, ServerConfig(strict_fields=True))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unknown_parameter", field)
    assert (f"Did you mean {near}?" in str(caught.value)) is (near is not None)


def test_no_token_is_asked_for_with_an_echo_alone() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0


def test_logprobs_are_counted_by_each_route_in_its_way() -> None:
    assert chat(top_logprobs=0).num_logprobs == -1
    assert chat(logprobs=True).num_logprobs == 0
    assert completion(logprobs=0).num_logprobs == 0
    assert completion().num_logprobs == -1


@pytest.mark.parametrize(("stop", "expected"), [(None, []), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_is_a_string_or_a_list(stop: str | list[str] | None, expected: list[str]) -> None:
    assert list(checks.stops(chat(stop=stop).stop, "stop", SERVER).values()) == expected


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 9], [[1], [2, 3]]])
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: object) -> None:
    assert completion(prompt=prompt).prompt == prompt


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [turn] = parse_turns([{"role": "developer", "content": parts}])
    assert turn.message() == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize("said", [{"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}])
def test_a_refusal_is_what_the_assistant_said(said: dict[str, Any]) -> None:
    [turn] = parse_turns([{"role": "assistant", **said}])
    assert turn.text == "No."


def test_calls_have_their_arguments_as_objects_and_results_their_ids() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"id": "c3", "type": "function", "function": {"name": "f", "arguments": '{"x": [1'}},
    ]
    turns = parse_turns(
        [
            {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
        ]
    )
    parsed = [turn.message() for turn in turns]
    assert [call["function"]["arguments"] for call in parsed[0]["tool_calls"]] == [{"x": [1]}, {}, '{"x": [1'], (
        "cut off: text"
    )
    assert (parsed[0]["content"], parsed[0]["reasoning"], parsed[0]["thinking"]) == ("", "hm", "hm")
    assert parsed[1] == {"role": "tool", "content": "7", "tool_call_id": "c1"}


def test_an_error_body_has_the_four_fields_clients_read() -> None:
    error = ContextLengthError(max_model_len=10, num_prompt_tokens=8, max_tokens=4)
    body = json.loads(msgspec.json.encode(error_body(error)))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 10 tokens" in body["error"]["message"].lower()
    overloaded = error_body(OverloadedError("later")).error
    assert (overloaded.type, overloaded.code) == ("overloaded_error", "engine_overloaded")
