"""What happens to fields that a route does not know, or that ask for what this server does not do: alike everywhere."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cluster.requests.json_body import decode_body
from configs.errors import RequestError
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_field_is_ignored_and_named_in_a_header(run: Run, path: str) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], "modle": 1})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"] == "modle"
        known = await stack.http.post(path, json={"model": MODEL, **ROUTES[path]})
        assert "x-ignored-fields" not in known.headers

    run(scenario)


@pytest.mark.parametrize("path", ROUTES)
def test_strict_mode_refuses_an_unknown_field_and_names_the_nearest(run: Run, path: str) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], "modle": 1})
        assert reply.status_code == 400
        assert "Did you mean model?" in reply.json()["error"]["message"]

    run(scenario, ServerConfig(strict_fields=True))


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", {"web_search_options": {}}),
        ("/v1/responses", {"conversation": "conv_1"}),
        ("/v1/responses", {"prompt": {"id": "p"}}),
        ("/v1/responses", {"guided_json": {}}),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}),
        ("/v1/messages", {"container": "c"}),
        ("/v1/messages", {"thread": {"type": "create"}}),
        ("/v1/chat/completions", {"moderation": {"policy": {"input": {"mode": "block"}}}}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(run: Run, path: str, field: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], **field})
        assert reply.status_code == 400
        assert f"{next(iter(field))} is not supported" in reply.json()["error"]["message"]

    run(scenario)


@pytest.mark.parametrize(
    ("field", "instead"),
    [
        ({"conversation": {"id": "conv_1"}}, "continue a stored response with previous_response_id"),
        ({"prompt": {"id": "pmpt_1", "version": "2"}}, "send its text as instructions and input"),
        ({"background": True}, "use stream: true"),
    ],
)
def test_what_openai_keeps_for_a_client_is_refused_with_another_way(
    run: Run, field: dict[str, Any], instead: str
) -> None:
    async def scenario(stack: Stack) -> None:
        for stream in (False, True):
            reply = await stack.http.post(
                "/v1/responses", json={"model": MODEL, "input": "hi", "stream": stream, **field}
            )
            error = error_of(reply, 400, "unsupported_parameter")
            assert error["param"] == next(iter(field))
            assert instead in error["message"]

    run(scenario)


@pytest.mark.parametrize("stream", [{}, {"stream": True}])
@pytest.mark.parametrize("path", [*list(ROUTES)[:5], "/generate"])
def test_every_answer_of_the_engine_says_where_its_time_went(run: Run, path: str, stream: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        if path == "/v1/score" and stream:
            pytest.skip("scores are not streamed")
        body = {"text": "hi"} if path == "/generate" else {"model": MODEL, **ROUTES[path]}
        reply = await stack.http.post(path, json={**body, **stream})
        assert reply.status_code == 200, reply.text
        assert reply.headers["server-timing"].startswith("queue;dur=")

    run(scenario)


IGNORED: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/chat/completions", {"verbosity": "low"}, "verbosity"),
    ("/v1/chat/completions", {"verbosity": "medium"}, None),
    ("/v1/chat/completions", {"prediction": {"type": "content", "content": "a"}}, "prediction"),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/responses", {"text": {"verbosity": "high"}}, "text.verbosity"),
    ("/v1/responses", {"text": {"verbosity": "medium"}}, None),
    ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ("/v1/responses", {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ("/v1/messages", {"thinking": {"type": "adaptive"}}, None),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, None),
    ("/v1/messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
    ("/v1/messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ("/v1/messages", {"speed": "fast"}, "speed"),
    ("/v1/messages", {"speed": "standard"}, None),
]


@pytest.mark.parametrize(("path", "field", "named"), IGNORED)
def test_what_only_asks_for_a_style_or_for_thinking_is_ignored_by_name(
    run: Run, path: str, field: dict[str, Any], named: str | None
) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], **field})
        assert reply.status_code == 200, reply.text
        assert reply.headers.get("x-ignored-fields") == named

    run(scenario)


def test_sixteen_stop_strings_are_taken(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        stops = [f"stop {i}" for i in range(16)]
        assert (await stack.complete(stop=stops)).status_code == 200
        assert (await stack.complete(stop=[*stops, "more"])).status_code == 400

    run(scenario)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (rb'{"a": "x\ud83d"}', r"\ud83d at byte 8"),
        (rb'{"a": "\ude00x"}', r"\ude00 at byte 7"),
        (rb'{"a": "\\\ud83d\ud83d\ude00"}', r"\ud83d at byte 9"),
        (b'{"a": "\xed\xa0\xbd"}', r"\ud83d at byte 7"),
        (rb'{"\ud83dxxxxxx": 1}', r"\ud83d at byte 2"),
    ],
)
def test_a_lone_surrogate_is_said_to_be_one(body: bytes, shown: str) -> None:
    with pytest.raises(RequestError, match=re.escape(f"a lone surrogate, {shown}")):
        decode_body(body)


def test_brackets_in_texts_are_no_lists() -> None:
    text = '[{:\\"' * 100_000
    assert decode_body(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    parts = b"[" + b",".join([b"[]"] * ((1 << 17) - 3)) + b"]"
    assert len(decode_body(b'{"prompt": %b}' % parts)["prompt"]) == (1 << 17) - 3
    with pytest.raises(RequestError, match="more than 131072 lists") as caught:
        decode_body(b'{"prompt": [%b]}' % parts)
    assert caught.value.status == 413


def test_commas_in_texts_separate_no_values() -> None:
    text = ',\\",' * 200_000
    assert decode_body(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    values = b"[" + b",".join([b"1"] * (1 << 18)) + b"]"
    assert len(decode_body(b'{"prompt": %b}' % values)["prompt"]) == 1 << 18
    with pytest.raises(RequestError, match="more than 262144 values") as caught:
        decode_body(b'{"prompt": %b, "n": 1, "m": 2}' % values)
    assert caught.value.status == 413
    assert decode_body(b'{"prompt": %b, "n": 1, "m": 2}' % values, max_values=300_000)["m"] == 2


@pytest.mark.parametrize("body", [rb'{"a": "\\ud83d", }', rb'{"a": "\ud83d\ude00", }', rb'{"a": NaN}'])
def test_whole_characters_and_other_faults_are_no_surrogates(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(body)
    assert "surrogate" not in str(caught.value)
