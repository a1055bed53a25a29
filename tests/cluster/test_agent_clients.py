"""Bodies as coding agents send them, to /v1/messages and to the chat and text routes: streamed and whole, over the
scripted engine. Each test names the client and its version."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of, prompt_ids, runner

BILLING = "x-anthropic-billing-header: cc_version=2.1.36.{turn}; cc_entrypoint=cli; cch={turn};"
BASH = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": BILLING.format(turn=1)},
        {
            "type": "text",
            "text": "You are Claude Code, Anthropic's official CLI for Claude.",
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "text", "text": "Help with software.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Friday.\n</system-reminder>"},
                {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [BASH],
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
QWEN_CODE: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are Qwen Code, an interactive CLI agent."},
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
    ],
    "temperature": 0,
    "max_tokens": 32000,
    "metadata": {"sessionId": "1", "promptId": "1########0"},
}
ROOM = 2048
"""Length of the scripted engine's context in these tests."""
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def run(smollm2: Tokenizer, tmp_path: Path) -> Run:
    """A scenario over a context of `ROOM` tokens."""
    go = runner(smollm2, tmp_path)
    return lambda scenario, server=None, **script: go(scenario, server, ROOM, **script)


def claude_code(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy({**CLAUDE_CODE, **fields})


async def send(stack: Stack, path: str, body: dict[str, Any], *, stream: bool) -> httpx.Response:
    """The answer to `body`, which begins with the scripted text."""
    reply = await stack.http.post(path, json={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert "Hello" in reply.text
    return reply


def prompt_of(stack: Stack) -> str:
    """The text of the last prompt."""
    return stack.model.tokenizer.decode(prompt_ids(stack.coordinator.requests[-1]), skip_special_tokens=False)


@streamed
@pytest.mark.parametrize("asked", [32000, 128000])
def test_claude_code_2_1_and_qwen_code_0_8_get_as_many_tokens_as_fit(run: Run, asked: int, *, stream: bool) -> None:
    bodies = [
        ("/v1/messages", claude_code(max_tokens=asked)),
        ("/v1/chat/completions", {**QWEN_CODE, "max_tokens": asked}),
        ("/v1/chat/completions", {**QWEN_CODE, "max_tokens": None, "max_completion_tokens": asked}),
        ("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": asked}),
        ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": asked}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": asked}}),
    ]

    async def scenario(stack: Stack) -> None:
        for path, body in bodies:
            reply = await send(stack, path, body, stream=stream)
            request = stack.coordinator.requests[-1]
            assert request.sampling.max_tokens == ROOM - len(prompt_ids(request)), path
            assert reply.headers["x-max-tokens"] == str(request.sampling.max_tokens)
        fits = await send(stack, "/v1/messages", claude_code(max_tokens=8), stream=stream)
        assert "x-max-tokens" not in fits.headers

    run(scenario)


@streamed
def test_the_least_limit_of_several_prompts_is_told(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"model": MODEL, "prompt": [[9] * 2000, [9] * 10, [9] * 1990], "max_tokens": 50}
        reply = await send(stack, "/v1/completions", body, stream=stream)
        assert reply.headers["x-max-tokens"] == "48"
        limits = [request.sampling.max_tokens for request in stack.coordinator.requests]
        assert limits == [48, 50, 50]
        sampling = [{"max_new_tokens": 2000}, {"max_new_tokens": 10}]
        reply = await send(stack, "/generate", {"text": ["hi", "hi"], "sampling_params": sampling}, stream=stream)
        assert reply.headers.get("x-max-tokens") is None

    run(scenario)


@streamed
def test_claude_code_2_1_is_told_of_a_prompt_without_room_in_its_words(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        for words in (2100, 100_000):  # the longer one is refused before it is encoded as a whole
            messages = [{"role": "user", "content": "word " * words}]
            body = claude_code(messages=messages, stream=stream)
            reply = await stack.http.post("/v1/messages", json=body)
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
            first, second = error["message"].split("; ")
            told = first.removeprefix("input length and `max_tokens` exceed context limit: ").split()
            assert told[1:] == ["+", "32000", ">", str(ROOM)]
            assert int(told[0]) >= ROOM
            assert second == f"prompt is too long: {told[0]} tokens > {ROOM} maximum"
            chat = await stack.http.post("/v1/chat/completions", json={**QWEN_CODE, "messages": messages})
            assert "maximum context length is 2048 tokens" in error_of(chat, 400, "context_length_exceeded")["message"]
        assert stack.coordinator.requests == []

    run(scenario)


def test_limits_that_cannot_be_lowered_are_refused_as_before(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error = error_of(await stack.complete(min_tokens=3000, max_tokens=4000), 400, "invalid_value")
        assert error["param"] == "min_tokens"
        error_of(await stack.complete(prompt=[9] * ROOM, max_tokens=0, echo=True), 400, "context_length_exceeded")
        full = await stack.complete(prompt=[9] * (ROOM - 1), max_tokens=0, echo=True)
        assert (full.status_code, full.headers.get("x-max-tokens")) == (200, None)

    run(scenario)
