"""/v1/messages over the scripted engine: blocks, the order of events, errors, and the anthropic package."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from cluster.anthropic.builder import MessageBuilder
from cluster.anthropic.request import MessagesRequest, chat_fields, in_own_words
from cluster.requests.usage import PromptTokensDetails, Usage
from configs.errors import RequestError
from tests.scripted_engine import MODEL, REPLY, Run, Stack, served

USAGE = Usage(30, 4, 34, PromptTokensDetails(16))
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
MESSAGES = [{"role": "user", "content": "hi"}]


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


def chat_of(**fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 64, "messages": MESSAGES, **fields}
    return chat_fields(MessagesRequest.model_validate(body))[0]


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
    builder = MessageBuilder("msg_1", MODEL)
    stream = builder.begin(USAGE) + builder.think("Hm") + builder.think("m.") + builder.say("I look.")
    stream += builder.call("toolu_1", "weather") + builder.argue('{"city":') + builder.argue('"Rome"}')
    stream += builder.call("toolu_2", "time") + builder.finish("tool_use", None, USAGE)
    events = sse_events(stream.decode())
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"] == {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    assert json.loads(builder.encoded())["content"] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
    ]
    Message.model_validate_json(builder.encoded())


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
    text = {"type": "text", "text": "I look."}
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    assert chat["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [text], "reasoning_content": "Hm.", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": "Error:"}, {"type": "text", "text": "down"}],
        },
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ]


def test_an_answer_begun_by_the_caller_is_continued() -> None:
    chat = chat_of(messages=[*MESSAGES, {"role": "assistant", "content": "Sure: "}])
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in chat_of()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
def test_tool_choices_have_their_counterpart_in_a_chat(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    chat = chat_of(tool_choice=choice, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    assert {name: chat[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat} == expected
    assert chat["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_a_chats_error_names_the_message_it_is_about() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "c"}
    text = {"type": "text", "text": "Well?"}
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "system": "Be kind.",
        "messages": [*MESSAGES, {"role": "assistant", "content": "ok"}, {"role": "user", "content": [result, text]}],
    }
    chat, sources = chat_fields(MessagesRequest.model_validate(body))
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant", "tool", "user"]
    for path, own in (
        ("messages[0].content", "system.content"),
        ("messages[2].tool_calls[0].function.name", "messages[1].content"),
        ("messages[3].role", "messages[2].content"),
        ("messages[4].content", "messages[2].content"),
    ):
        error = in_own_words(RequestError(f"{path}: no.", param=path), sources)
        assert (error.param, str(error)) == (own, f"{own}: no.")


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
