"""Every recorded request of a real client is answered, streamed and whole, with a header that names what is ignored."""

from __future__ import annotations

import pytest

from tests.helpers.recordings import FOLDER, OMITTED, prompt_of, recorded
from tests.helpers.scripted_engine import MODEL, Run, Stack, prompt_ids

ROOM = 4096
"""Length of the scripted engine's context."""
CLAUDE = "thinking.display,{}output_config.effort"
CODEX = "client_metadata,tools.web_search,{}reasoning.summary"
CODEX_HISTORY = "client_metadata,tools.custom,tools.tool_search,tools.web_search,{},text.verbosity,reasoning.effort"
HOSTED = ("web_search", "file_search", "code_interpreter", "mcp", "local_shell", "image_generation")
AGENTS = [f"tools.{kind}" for kind in HOSTED]
AGENTS += [f"input.{kind}" for kind in ("web_search_call", "mcp_list_tools", "image_generation_call")]
PATCH = r'{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n*** Add File: sluice.txt'
ANSWERS: dict[str, tuple[str, list[str]]] = {
    "claude-code-2.1.332-after-a-cut": (CLAUDE.format(""), ["<system-reminder>\nOutput token"]),
    "claude-code-2.1.332-first-turn": (CLAUDE.format(""), ["LISTDIR: what is here?", '"name": "Workflow"']),
    "claude-code-2.1.332-history": (
        CLAUDE.format("messages.redacted_thinking,messages.web_search_tool_result,"),
        ["I search.\nIt rains.\nA lock lifts boats.", "<tool_response>\ncanal.txt\nlock.png\n", "One file.<"],
    ),
    "claude-code-2.1.332-image-pasted": (CLAUDE.format("messages.image,"), [f"{OMITTED}\nWhat is this?"]),
    "claude-code-2.1.332-image-read": (CLAUDE.format("messages.image,"), [f"<tool_response>\n{OMITTED}\n"]),
    "claude-code-2.1.332-interactive": ("safeguards," + CLAUDE.format(""), ["What is a canal lock?"]),
    "claude-code-2.1.332-subagent": (CLAUDE.format(""), ["SUBTASK"]),
    "claude-code-2.1.332-tool-search": (CLAUDE.format(""), ["<tool_response>\n4 C in Oslo\n"]),
    "claude-code-2.1.332-web-search": (
        "tools.web_search_20250305,output_config.effort",
        ["Perform a web search for the query: canal locks"],
    ),
    "codex-0.171.0-first-turn": (CODEX.format(""), ["WEATHER in Oslo?", '"name": "exec_command"']),
    "codex-0.171.0-gpt-6.2-turn": (
        "client_metadata,reasoning.context,input.additional_tools,text.verbosity,reasoning.effort",
        ["PATCH the folder"],
    ),
    "codex-0.171.0-history": (
        CODEX_HISTORY.format("input.web_search_call,input.tool_search_call,input.tool_search_output"),
        ["I add a file.", PATCH, "<tool_response>\nExit code: 0\n", "All done.<", "NEXT"],
    ),
    "codex-0.171.0-history-compacted": (
        CODEX_HISTORY.format(
            "input.compaction,input.tool_search_call,input.tool_search_output,input.compaction_trigger"
        ),
        ["PATCH the folder", "NEXT", "LAST"],
    ),
    "codex-0.171.0-image-pasted": (CODEX.format("input.input_image,"), [f'path="lock.png">\n{OMITTED}\n</image>']),
    "codex-0.171.0-image-viewed": (
        CODEX.format("input.input_image,"),
        ['{"name": "mcp__sky__weather", "arguments": {"city": "Oslo"}}', f"<tool_response>\n{OMITTED}\n"],
    ),
    "openai-agents-0.24.0-history": (
        ",".join(AGENTS),
        [
            '{"name": "file_search", "arguments": {"queries": ["locks"]}}',
            "<tool_response>\nA lock lifts boats.\n",
            '{"name": "code_interpreter", "arguments": {"code": "1 + 1"}}',
            "<tool_response>\n2\n",
            '{"name": "roll", "arguments": {"n": 2}}',
            "<tool_response>\n7\n",
            '{"name": "local_shell", "arguments": {"command": ["ls"]',
            "<tool_response>\ncanal.txt\n",
        ],
    ),
    "opencode-1.18.33-chat-image-read": ("messages.image_url", [f"Attached media from tool result:\n{OMITTED}"]),
    "opencode-1.18.33-messages-clear-tool-uses": (
        "speed,context_management,messages.image",
        [f"<tool_response>\nImage read successfully\n{OMITTED}\n"],
    ),
    "qwen-code-0.24.4-first-turn": ("", ["LISTDIR", '"name": "tool_search"']),
    "qwen-code-0.24.4-image-pasted": ("messages.image_url", [f"{OMITTED}\n\n--- End of content ---"]),
    "qwen-code-0.24.4-image-read": ("messages.image_url", [f"(attached media from previous tool call)\n{OMITTED}"]),
    "qwen-code-0.24.4-max-tokens-minus-one": ("", ["minus one"]),
}
"""Name of a recording -> what `x-ignored-fields` names, and texts of the prompt."""
REFUSED = {
    "openai-agents-0.24.0-conversation": "continue a stored response with previous_response_id, or send all items",
    "openai-agents-0.24.0-prompt": "send its text as instructions and input",
}
REFERENCE = "opencode-1.18.33-responses-item-reference"
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@streamed
@pytest.mark.parametrize("name", ANSWERS)
def test_a_recorded_request_is_answered(run: Run, name: str, *, stream: bool) -> None:
    ignored, shown = ANSWERS[name]
    recording = recorded(name)

    async def scenario(stack: Stack) -> None:
        stack.model.other_names = ["claude-*", "gpt-*"]
        reply = await recording.replay(stack, stream=stream)
        assert reply.status_code == 200, reply.text
        assert "Hello" in reply.text
        assert reply.headers.get("x-ignored-fields", "") == ignored
        for text in shown:
            assert text in prompt_of(stack), prompt_of(stack)
        for text in ("x-anthropic-billing-header", "base64", "iVBOR", "gAAAA", "Eq==", "DeferredToolPlaceholder"):
            assert text not in prompt_of(stack)
        # Of every limit, what fits is left.
        asked = recording.body.get("max_tokens", recording.body.get("max_output_tokens"))
        request = stack.coordinator.requests[-1]
        left = ROOM - len(prompt_ids(request))
        lowered = asked is not None and (asked > left or asked == -1)
        assert reply.headers.get("x-max-tokens") == (str(left) if lowered else None)
        assert request.sampling.max_tokens == (asked if asked is not None and not lowered else left)
        if recording.path.startswith("/v1/messages"):
            count = await stack.http.post("/v1/messages/count_tokens", json=recording.body)
            assert count.json() == {"input_tokens": ROOM - left}

    run(scenario, max_model_len=ROOM)


def test_every_recording_is_replayed() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted([*ANSWERS, *REFUSED, REFERENCE])


@streamed
@pytest.mark.parametrize("name", REFUSED)
def test_a_recorded_request_is_refused_with_what_to_send_instead(run: Run, name: str, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await recorded(name).replay(stack, stream=stream)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, name.rsplit("-", 1)[1])
        assert REFUSED[name] in error["message"]

    run(scenario)


@streamed
def test_opencode_1_18_33_refers_to_an_item_of_a_stored_response(run: Run, *, stream: bool) -> None:
    recording = recorded(REFERENCE)
    items = recording.body["input"]

    async def scenario(stack: Stack) -> None:
        first = await recording.replay(stack, stream=False, input=items[:2])
        said = first.json()["output"][0]
        items[2]["id"] = said["id"]
        reply = await recording.replay(stack, stream=stream)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"] == "input.input_image"
        assert f"assistant\n{said['content'][0]['text']}<" in prompt_of(stack)
        assert f"<tool_response>\nImage read successfully\n{OMITTED}\n" in prompt_of(stack)
        count = await stack.http.post("/v1/responses/input_tokens", json=recording.body)
        assert count.json()["input_tokens"] == len(prompt_ids(stack.coordinator.requests[-1]))
        # This response is stored with the item itself, so its conversation goes on without the first one.
        await stack.http.delete(f"/v1/responses/{first.json()['id']}")
        second = "resp_" + reply.text.split('"id":"resp_', 1)[1].split('"', 1)[0]
        later = {"model": MODEL, "previous_response_id": second, "input": "And?"}
        assert (await stack.http.post("/v1/responses", json=later)).status_code == 200
        items[2]["id"] = "msg_unknown"
        lost = await recording.replay(stack, stream=stream)
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "item_not_found")
        assert "send the item itself" in lost.json()["error"]["message"]

    run(scenario, max_model_len=ROOM)


@streamed
def test_openai_agents_0_24_0_with_truncation_auto_goes_on_in_a_short_context(run: Run, *, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        recording = recorded("openai-agents-0.24.0-history")
        reply = await recording.replay(stack, stream=stream, max_output_tokens=40)
        assert reply.status_code == 200, reply.text
        assert "Be brief." in prompt_of(stack)
        assert "And then?" in prompt_of(stack)
        assert "HOSTED" not in prompt_of(stack)
        refused = await recording.replay(stack, stream=stream, max_output_tokens=40, truncation=None)
        assert refused.json()["error"]["code"] == "context_length_exceeded"

    run(scenario, max_model_len=340)


@streamed
@pytest.mark.parametrize(
    "name", ["claude-code-2.1.332-first-turn", "codex-0.171.0-first-turn", "qwen-code-0.24.4-first-turn"]
)
def test_a_recorded_request_is_sent_again_after_503(run: Run, name: str, *, stream: bool) -> None:
    """The three clients sent the same body again when a server answered with 503."""

    async def scenario(stack: Stack) -> None:
        stack.coordinator.overloaded = True
        reply = await recorded(name).replay(stack, stream=stream)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "overloaded_error"
        stack.coordinator.overloaded = False
        assert (await recorded(name).replay(stack, stream=stream)).status_code == 200

    run(scenario, max_model_len=ROOM)
