"""/v1/messages over the scripted engine: blocks, the order of events, errors, and the anthropic package."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from cluster.anthropic.message_turns import conversation
from cluster.anthropic.message_writer import MessageWriter
from cluster.anthropic.messages_request import MessagesRequest
from cluster.messages.engine import FinishReason
from cluster.requests.generation import Delta
from cluster.requests.images import LeftOut
from cluster.requests.job import PromptTokensDetails, Usage
from cluster.requests.job import Run as JobRun
from cluster.requests.json_body import validated
from cluster.text.conversation import Call, Conversation, Turn
from cluster.text.tools.events import Arguments, CallStarted, Content, Reasoning
from cluster.text.tools.tool_use import ToolMode
from configs.errors import RequestError
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import MODEL, REPLY, Run, Stack, served

USAGE = Usage(30, 4, 34, PromptTokensDetails(16))
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
MESSAGES = [{"role": "user", "content": "hi"}]
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}


async def create(stack: Stack, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 64, "messages": MESSAGES, **fields}
    return await stack.http.post("/v1/messages", json=body)


def sse_events(text: str) -> list[dict[str, Any]]:
    """The payloads of a stream, each of the type its event line says."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def chat_of(**fields: Any) -> Conversation:
    body = {"model": MODEL, "max_tokens": 64, "messages": MESSAGES, **fields}
    return conversation(validated(MessagesRequest, body), LeftOut(ServerConfig()))


def test_a_message_has_its_text_and_counts_what_was_cached_apart(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await create(stack, system="Be kind.")
        message = Message.model_validate(reply.json())
        assert [block.to_dict() for block in message.content] == [{"type": "text", "text": REPLY}]
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
        assert message.id.startswith("msg_")
        assert message.usage.cache_read_input_tokens == 16
        [request] = stack.coordinator.requests
        assert message.usage.input_tokens == len(request.prompt) // 4 - 16
        assert message.usage.output_tokens == len(stack.coordinator.reply)
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
        counted = await stack.http.post(
            "/v1/messages/count_tokens", json={"model": MODEL, "messages": MESSAGES, "system": "Be kind."}
        )
        assert counted.json() == {"input_tokens": len(request.prompt) // 4}

    run(scenario)


def test_a_stream_has_anthropics_events_in_order_and_the_same_text(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        events = sse_events((await create(stack, stream=True)).text)
        kinds = [event["type"] for event in events]
        assert kinds == [
            "message_start",
            "ping",
            "content_block_start",
            *["content_block_delta"] * kinds.count("content_block_delta"),
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        assert text == REPLY
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == len(stack.coordinator.reply)
        for event in events:
            if event["type"] != "ping":
                EVENT.validate_python(event)

    run(scenario)


def test_stop_reasons_are_anthropics(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        cut = (await create(stack, max_tokens=3)).json()
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        stopped = (await create(stack, stop_sequences=[" there"])).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " there")
        assert stopped["content"] == [{"type": "text", "text": "Hello"}]

    run(scenario)


def test_thinking_text_and_tools_are_blocks_of_their_own() -> None:
    said = [Reasoning("Hm"), Reasoning("m."), Content("I look."), CallStarted(0, "toolu_1", "weather")]
    said += [Arguments(0, '{"city":'), Arguments(0, '"Rome"}'), CallStarted(1, "toolu_2", "time")]
    run = cast("JobRun", SimpleNamespace(job=SimpleNamespace(id="msg_1"), usage=lambda: USAGE))
    writer = MessageWriter(run, MODEL, "req_1")
    delta = Delta(0, "", [], finish_reason=FinishReason.STOP, events=said)
    stream = b"".join((*writer.events([delta]), *writer.end()))
    events = sse_events(stream.decode())
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    [message] = writer.whole()
    assert json.loads(message)["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
    ]
    Message.model_validate_json(message)


def test_turns_of_blocks_become_a_chat() -> None:
    chat = chat_of(
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "down", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    )
    assert chat.turns == [
        Turn(role="system", text="Be kind."),
        Turn(role="user", text="Weather?", path="messages[0].content"),
        Turn(
            role="assistant",
            text="I look.",
            thinking="Hm.",
            calls=(Call("weather", {"city": "Rome"}, "a"),),
            path="messages[1].content[2]",
        ),
        Turn(role="tool", text="Error:\ndown", call_id="a", path="messages[2].content[0]"),
        Turn(role="user", text="Well?", path="messages[2].content"),
    ]


def test_lists_without_texts_say_nothing() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": []}
    chat = chat_of(system=[], messages=[*MESSAGES, {"role": "user", "content": [result]}])
    assert [(turn.role, turn.text) for turn in chat.turns] == [("user", "hi"), ("tool", "")]


def test_what_coding_agents_send_is_taken(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        tools = [{"name": f"mcp__{i:0123}", "input_schema": {"type": "object"}} for i in range(300)]
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
        reply = await create(stack, context_management={"edits": edits}, tools=tools, tool_choice={"type": "none"})
        assert (reply.status_code, reply.headers.get("x-ignored-fields")) == (200, None), reply.text

    run(scenario)


def test_an_answer_begun_by_the_caller_is_continued() -> None:
    chat = chat_of(messages=[*MESSAGES, {"role": "assistant", "content": "Sure: "}])
    assert (chat.continue_final, chat.add_generation_prompt) == (True, False)
    assert (chat_of().continue_final, chat_of().add_generation_prompt) == (False, True)
    with pytest.raises(RequestError, match="no content to continue"):
        chat_of(messages=[*MESSAGES, {"role": "assistant", "content": [USE]}])


@pytest.mark.parametrize("content", [[], "", [{"type": "text", "text": ""}]])
def test_an_answer_that_says_nothing_is_a_turn_and_at_the_end_none(content: Any) -> None:
    nothing = {"role": "assistant", "content": content}
    assert chat_of(messages=[*MESSAGES, nothing]) == chat_of(messages=MESSAGES)
    roles = [turn.role for turn in chat_of(messages=[*MESSAGES, nothing, *MESSAGES]).turns]
    assert roles == ["user", "assistant", "user"]
    with pytest.raises(RequestError, match="no content to continue"):
        chat_of(messages=[nothing])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, (ToolMode.AUTO, True)),
        ({"type": "none"}, (ToolMode.NONE, True)),
        ({"type": "any", "disable_parallel_tool_use": True}, (ToolMode.REQUIRED, False)),
        ({"type": "tool", "name": "f"}, (ToolMode.NAMED, False)),
    ],
)
def test_tools_are_used_as_the_request_chooses(choice: dict[str, Any], expected: tuple[ToolMode, bool]) -> None:
    use = chat_of(tool_choice=choice, tools=[{"name": "f", "input_schema": {"type": "object"}}]).tools
    assert use is not None
    assert (use.mode, use.parallel) == expected
    assert [tool.shown for tool in use.tools] == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    ]


TOOL = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        (
            {
                "messages": [
                    *MESSAGES,
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": 1}]}],
                    },
                ]
            },
            "messages[1].content[0].content[0].type",
        ),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(RequestError) as raised:
        chat_of(**fields)
    assert raised.value.param == path


def test_a_failing_engine_ends_a_stream_with_an_error_event(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        events = sse_events((await create(stack, stream=True)).text)
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "api_error"
        wrong_method = await stack.http.get("/v1/messages")
        assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")
        assert "type" not in (await stack.http.get("/v1/messagesandmore")).json()

    run(scenario, fail_after=2)


def test_the_anthropic_package_works_unmodified(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with (
            served(stack.model) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
        ):
            whole = await client.messages.create(model=MODEL, max_tokens=64, messages=MESSAGES)
            assert whole.content[0].to_dict() == {"type": "text", "text": REPLY}
            async with client.messages.stream(model=MODEL, max_tokens=64, messages=MESSAGES) as stream:
                assert "".join([text async for text in stream.text_stream]) == REPLY
                final = await stream.get_final_message()
            assert final.stop_reason == whole.stop_reason == "end_turn"
            assert final.usage == whole.usage
            counted = await client.messages.count_tokens(model=MODEL, messages=MESSAGES)
            assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
            assert counted._request_id
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.messages.create(model="other", max_tokens=1, messages=MESSAGES)
            assert caught.value.type == "not_found_error"
            assert caught.value.request_id == caught.value.body["request_id"]
            [listed] = [model async for model in client.models.list()]
            retrieved = await client.models.retrieve(MODEL)
            assert (listed.id, listed.type, listed.display_name) == (MODEL, "model", MODEL)
            assert retrieved.created_at == listed.created_at
            assert abs(listed.created_at.timestamp() - time.time()) < 600

    run(scenario)


def test_a_chat_of_empty_system_messages_alone_is_refused() -> None:
    with pytest.raises(RequestError, match="only system messages"):
        chat_of(messages=[{"role": "system", "content": []}])
