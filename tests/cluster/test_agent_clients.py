"""What coding agents meet at /v1/messages and at the chat and text routes: streamed and whole, over the scripted
engine. Tests that replay a recorded request, or a part of one, name the client and its version."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.helpers import recordings
from tests.helpers.recordings import OMITTED, prompt_of, recorded
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of, prompt_ids, runner

CLAUDE_CODE = recorded("claude-code-2.1.332-first-turn").body
QWEN_CODE = recorded("qwen-code-0.24.4-first-turn").body
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
    reply = await recordings.send(stack, path, body, stream=stream)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert "Hello" in reply.text
    return reply


@streamed
@pytest.mark.parametrize("asked", [32000, 128000])
def test_claude_code_2_1_332_and_qwen_code_0_24_4_get_as_many_tokens_as_fit(
    run: Run, asked: int, *, stream: bool
) -> None:
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
def test_claude_code_2_1_332_is_told_of_a_prompt_without_room_in_its_words(run: Run, *, stream: bool) -> None:
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


@streamed
def test_claude_code_2_1_332_finds_its_prompt_cached_although_its_billing_line_changes(
    run: Run, *, stream: bool
) -> None:
    async def scenario(stack: Stack) -> None:
        prompts = []
        for name in ("first-turn", "image-pasted", "subagent", "interactive"):
            body = claude_code()
            body["system"][0] = recorded(f"claude-code-2.1.332-{name}").body["system"][0]
            await send(stack, "/v1/messages", body, stream=stream)
            prompts.append(prompt_of(stack))
        assert len(set(prompts)) == 1
        assert "billing" not in prompts[0]
        assert "You are a Claude agent" in prompts[0]
        counted = [
            await stack.http.post("/v1/messages/count_tokens", json={**body, "system": body["system"][first:]})
            for first in (0, 1)
        ]
        assert (
            counted[0].json() == counted[1].json() == {"input_tokens": len(prompt_ids(stack.coordinator.requests[-1]))}
        )
        alone = {**body, "system": body["system"][:1], "tools": []}
        await send(stack, "/v1/messages", alone, stream=stream)
        without = prompt_of(stack)
        del alone["system"]
        await send(stack, "/v1/messages", alone, stream=stream)
        assert prompt_of(stack) == without

    run(scenario)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
NOTE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Buy milk."}}
PASTED = [
    {"role": "user", "content": [IMAGE, PDF, NOTE, {"type": "text", "text": "What is this?"}]},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file": "a.png"}}],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [IMAGE, {"type": "text", "text": "[Image: 800x600]"}],
            }
        ],
    },
]


@streamed
def test_images_and_documents_are_replaced_and_texts_are_read(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await send(stack, "/v1/messages", claude_code(messages=PASTED), stream=stream)
        assert reply.headers["x-ignored-fields"].split(",")[1:-1] == ["messages.image", "messages.document"]
        prompt = prompt_of(stack)
        document = OMITTED.replace("image", "document")
        assert f"{OMITTED}\n{document}\nBuy milk.\nWhat is this?" in prompt
        assert f"{OMITTED}\n[Image: 800x600]" in prompt
        assert "base64" not in prompt
        counted = await stack.http.post("/v1/messages/count_tokens", json=claude_code(messages=PASTED))
        assert "messages.image" in counted.headers["x-ignored-fields"]

    run(scenario)


@streamed
def test_claude_code_2_1_332_drops_an_image_that_is_refused_in_its_words(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await recorded("claude-code-2.1.332-image-read").replay(stack, stream=stream)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("Could not process image messages[7].content[0].content[0]: ")
        await send(stack, "/v1/messages", claude_code(), stream=stream)

    run(scenario, ServerConfig(images="refuse"))


@streamed
def test_claude_code_2_1_332_loads_tools_by_references_to_them(run: Run, *, stream: bool) -> None:
    """In the recording, ToolSearch refers to two tools, and one of them is called."""
    searched = recorded("claude-code-2.1.332-tool-search")
    messages = searched.body["messages"]

    async def scenario(stack: Stack) -> None:
        async def shown(messages: list[Any], **fields: Any) -> list[int]:
            """How often the prompt has the names of both tools, in their descriptions and calls."""
            assert (await searched.replay(stack, stream=stream, messages=messages, **fields)).status_code == 200
            assert "defer_loading" not in prompt_of(stack)
            return [prompt_of(stack).count(f'"name": "{name}"') for name in ("mcp__sky__weather", "WebSearch")]

        assert await shown(messages[:2]) == [0, 0]
        assert await shown(messages[:4]) == [1, 1]
        assert "The tool mcp__sky__weather is available now.\nThe tool WebSearch is" in prompt_of(stack)
        assert await shown(messages) == [2, 1]
        assert await shown(messages[:2], tool_choice={"type": "tool", "name": "WebSearch"}) == [0, 1]
        # The conversation was compacted: its call is left, and the references are gone.
        assert await shown([messages[0], *messages[4:]]) == [2, 0]

    run(scenario)


SERVER_TOOLS = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 8, "display_height_px": 8},
    {"type": "code_execution_20250522", "name": "code_execution"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "sky"},
]


@streamed
def test_claude_code_2_1_332_offers_anthropics_tools_which_are_left_out(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        body = claude_code(tools=[*SERVER_TOOLS, *CLAUDE_CODE["tools"]])
        reply = await send(stack, "/v1/messages", body, stream=stream)
        named = [f"tools.{tool['type']}" for tool in SERVER_TOOLS]
        assert reply.headers["x-ignored-fields"].split(",")[1:-1] == named
        shown = prompt_of(stack)
        await send(stack, "/v1/messages", claude_code(), stream=stream)
        assert prompt_of(stack) == shown
        # Its web search is a request of its own, with this tool alone.
        search = recorded("claude-code-2.1.332-web-search").body
        assert search["tools"] == SERVER_TOOLS[:1]
        await send(stack, "/v1/messages", search, stream=stream)
        for tools, choice in (
            (SERVER_TOOLS[:1], {"type": "tool", "name": "web_search"}),
            (SERVER_TOOLS[:1], {"type": "any"}),
            ([SERVER_TOOLS[-1]], {"type": "any"}),
            ([*SERVER_TOOLS, *CLAUDE_CODE["tools"]], {"type": "tool", "name": "web_search"}),
        ):
            forced = {**search, "tools": tools, "tool_choice": choice, "stream": stream}
            refused = await stack.http.post("/v1/messages", json=forced)
            assert refused.status_code == 400
            name = tools[0].get("name", "mcp_toolset")
            assert f"This server cannot run {name}: " in refused.json()["error"]["message"]

    run(scenario)


@streamed
def test_blocks_of_a_session_that_began_at_anthropic_are_read_or_named(run: Run, *, stream: bool) -> None:
    found = [{"type": "web_search_result", "url": "https://a.b", "title": "A", "encrypted_content": "Eq=="}]
    said = [
        {"type": "thinking", "thinking": "Look.", "signature": "Eq=="},
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": found},
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "content": [{"type": "text", "text": "It rains."}]},
        {"type": "text", "text": "Rain."},
    ]
    result = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "Found."}]}
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    odd = [{"type": "tool_reference", "tool_name": deep}, {"type": "image", "source": "https://a.b/c.png"}]
    told = [result, {"type": "container_upload", "file_id": "file_1"}, *odd]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": told},
    ]

    async def scenario(stack: Stack) -> None:
        reply = await send(stack, "/v1/messages", claude_code(messages=messages), stream=stream)
        left = ["server_tool_use", "web_search_tool_result", "mcp_tool_use", "container_upload", "tool_reference"]
        assert reply.headers["x-ignored-fields"].split(",")[1:6] == [f"messages.{kind}" for kind in left]
        assert "I search.\nIt rains.\nRain." in prompt_of(stack)
        assert f"user\nFound.\n{OMITTED}<|im_end|>" in prompt_of(stack)
        only = [*messages[:1], {"role": "assistant", "content": said[2:4]}, {"role": "user", "content": told[1:]}]
        await send(stack, "/v1/messages", claude_code(messages=only), stream=stream)

    run(scenario)


def test_strict_servers_refuse_what_they_would_leave_out(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"model": MODEL, "max_tokens": 8, "messages": PASTED[:1]}
        await send(stack, "/v1/messages", body, stream=False)  # a setting of its own says what happens to images
        upload = {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}
        for fields, path in (
            ({"tools": SERVER_TOOLS[:1]}, "tools[0]"),
            ({"messages": [upload]}, "messages[0].content[0]"),
        ):
            reply = await stack.http.post("/v1/messages", json={**body, **fields})
            assert reply.json()["error"]["message"] == f"{path} is not supported; leave it out."

    run(scenario, ServerConfig(strict_fields=True))


# --- Clients of OpenAI's API ------------------------------------------------------------------------------------------

URL = {"url": "data:image/png;base64,iVBORw0KGgo="}
PARTS = [
    {"type": "image_url", "image_url": URL},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}},
    {"type": "text", "text": "What is this?"},
]


@streamed
def test_images_audio_and_files_of_a_chat_are_replaced(run: Run, *, stream: bool) -> None:
    messages = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": "A dog.", "tool_calls": [{"id": "c", "function": {"name": "look"}}]},
        {"role": "tool", "tool_call_id": "c", "content": PARTS[:1]},
    ]

    async def scenario(stack: Stack) -> None:
        reply = await send(stack, "/v1/chat/completions", {**QWEN_CODE, "messages": messages}, stream=stream)
        assert reply.headers["x-ignored-fields"] == "messages.image_url,messages.input_audio,messages.file"
        shown = [OMITTED.replace("image", kind) for kind in ("image", "audio", "file")]
        assert "\n".join([*shown, "What is this?"]) in prompt_of(stack)
        assert prompt_of(stack).count(OMITTED) == 2
        tokens = await stack.http.post("/tokenize", json={"model": MODEL, "messages": messages})
        assert tokens.headers["x-ignored-fields"] == reply.headers["x-ignored-fields"]

    run(scenario)


def test_images_of_a_chat_are_refused_if_the_server_says_so(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.chat(messages=[{"role": "user", "content": PARTS}])
        error = error_of(reply, 400, "unsupported_parameter")
        assert error["param"] == "messages[0].content[0]"
        assert error["message"].startswith("Could not process image ")

    run(scenario, ServerConfig(images="refuse"))


@streamed
def test_a_custom_tool_of_a_chat_is_left_out(run: Run, *, stream: bool) -> None:
    custom = {"type": "custom", "custom": {"name": "apply_patch", "format": {"type": "text"}}}
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def scenario(stack: Stack) -> None:
        prompts = []
        for tools in ([custom, function], [function]):
            reply = await send(stack, "/v1/chat/completions", {**QWEN_CODE, "tools": tools}, stream=stream)
            prompts.append(prompt_of(stack))
            assert reply.headers.get("x-ignored-fields") == ("tools.custom" if custom in tools else None)
        assert prompts[0] == prompts[1]
        error_of(await stack.chat(tools=[custom], tool_choice="required"), 400, "invalid_value")

    run(scenario)


@streamed
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_qwen_code_0_24_4_asks_for_as_many_tokens_as_fit_with_minus_one(run: Run, name: str, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        body = {**recorded("qwen-code-0.24.4-max-tokens-minus-one").body, "model": MODEL}
        body[name] = body.pop("max_tokens")
        reply = await send(stack, "/v1/chat/completions", body, stream=stream)
        request = stack.coordinator.requests[-1]
        assert request.sampling.max_tokens == ROOM - len(prompt_ids(request)) == int(reply.headers["x-max-tokens"])
        zero = await recordings.send(stack, "/v1/chat/completions", {**body, name: 0}, stream=stream)
        assert "must be at least 1, or -1" in error_of(zero, 400, "invalid_value")["message"]

    run(scenario)


@streamed
def test_json_is_asked_for_under_the_old_name_too(run: Run, *, stream: bool) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"isNewTopic": {"type": "boolean"}}}}

    async def scenario(stack: Stack) -> None:
        grammars = []
        for fields in ({"output_format": form}, {"output_config": {"format": form}}):
            body = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}], **fields}
            reply = await send(stack, "/v1/messages", body, stream=stream)
            assert "x-ignored-fields" not in reply.headers
            grammars.append(stack.coordinator.requests[-1].sampling.grammar)
        assert grammars[0] == grammars[1] is not None
        no_type = {"type": "json_schema", "schema": {"type": 7}}
        wrong = await stack.http.post("/v1/messages", json={**body, "output_format": no_type, "output_config": None})
        assert wrong.status_code == 400

    run(scenario)


@streamed
def test_claude_code_2_1_332_reaches_the_model_of_its_subagents(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        haiku = recorded("claude-code-2.1.332-subagent").body
        refused = await stack.http.post("/v1/messages", json=haiku)
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        stack.model.other_names = ["second", "claude-*", "*-latest", "a*a"]
        for name in (haiku["model"], "second", "claude-", "gpt-latest", "aa"):
            await send(stack, "/v1/messages", {**haiku, "model": name}, stream=stream)
            answer = await send(stack, "/v1/messages", {**haiku, "model": name}, stream=False)
            assert answer.json()["model"] == MODEL
            await send(stack, "/v1/chat/completions", {**QWEN_CODE, "model": name}, stream=stream)
            await send(stack, "/v1/responses", {"model": name, "input": "hi"}, stream=stream)
            assert (await stack.http.get(f"/v1/models/{name}")).json()["id"] == name
        for name in ("seconds", "a-claude-", "a", "latest", "claude"):
            assert (await stack.http.get(f"/v1/models/{name}")).status_code == 404
        listed = (await stack.http.get("/v1/models")).json()
        assert [card["id"] for card in listed["data"]] == [MODEL, "second"]
        assert (listed["first_id"], listed["last_id"]) == (MODEL, "second")

    run(scenario)
