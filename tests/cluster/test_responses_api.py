"""/v1/responses over the scripted engine: the order of events, what is kept and for whom, and the openai package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.http.keys import KeyRing
from cluster.openai.responses.response_objects import ReasoningSettings
from cluster.openai.responses.response_objects import Response as OwnResponse
from cluster.openai.responses.response_store import ResponseStore, StoredResponse, StoreLimits
from cluster.openai.responses.response_turns import input_items, turns
from cluster.openai.responses.response_writer import ResponseBuilder
from cluster.requests.job import PromptTokensDetails, Usage
from cluster.serve.ingress import create_app
from cluster.text.conversation import Call, Turn
from cluster.text.tools.events import Arguments, CallStarted, Content, Reasoning
from configs.errors import OverloadedError, RequestError
from tests.helpers.scripted_engine import MODEL, REPLY, Run, Stack, error_of, served

USAGE = Usage(3, 4, 7, PromptTokensDetails(2))
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


async def create(stack: Stack, **fields: Any) -> httpx.Response:
    return await stack.http.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


def sse_events(text: str) -> list[dict[str, Any]]:
    """The payloads of a stream, each of the type its event line says, numbered without a gap."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_a_response_has_its_text_and_usage(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await create(stack, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5)).json()
        response = Response.model_validate(body)
        assert response.output_text == REPLY
        assert response.status == "completed"
        assert response.id.startswith("resp_")
        assert response.usage is not None
        assert response.usage.total_tokens == response.usage.input_tokens + len(stack.coordinator.reply)
        assert response.usage.input_tokens_details.cached_tokens == 16
        assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"a": "b"}, 0.5)

    run(scenario)


def test_a_stream_has_openais_events_in_order_and_the_same_text(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        events = sse_events((await create(stack, stream=True)).text)
        kinds = [event["type"].removeprefix("response.") for event in events]
        num_deltas = kinds.count("output_text.delta")
        assert kinds == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * num_deltas,
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta")) == REPLY
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == REPLY
        for event in events:
            EVENT.validate_python(event)

    run(scenario)


def test_log_probabilities_come_with_the_text_when_they_are_included(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        [message] = (await create(stack, **fields)).json()["output"]
        [part] = message["content"]
        assert (
            "".join(bytes(entry["bytes"]).decode("utf-8", "replace") for entry in part["logprobs"][:2]) == "Hello there"
        )
        assert [entry["logprob"] for entry in part["logprobs"]] == [-1.5] * (len(stack.coordinator.reply) - 1)
        assert len(part["logprobs"][1]["top_logprobs"]) == 2
        events = sse_events((await create(stack, stream=True, **fields)).text)
        told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
        assert told == part["logprobs"]

    run(scenario)


def test_max_output_tokens_leaves_a_response_incomplete(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await create(stack, max_output_tokens=3)).json()
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["output"][0]["status"] == "incomplete"
        assert body["usage"]["output_tokens"] == 3
        events = sse_events((await create(stack, max_output_tokens=3, stream=True)).text)
        assert events[-1]["type"] == "response.incomplete"

    run(scenario)


def test_a_failing_engine_ends_a_stream_with_a_failed_response(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        events = sse_events((await create(stack, stream=True)).text)
        assert events[-1]["type"] == "response.failed"
        response = events[-1]["response"]
        assert response["status"] == "failed"
        assert response["error"]["code"] == "server_error"
        assert "rank" not in response["error"]["message"]
        kept = await stack.http.get(f"/v1/responses/{response['id']}")
        assert kept.json()["status"] == "failed"
        error_of(await create(stack), 500, "engine_error")

    run(scenario, fail_after=2)


def test_a_response_that_never_began_is_an_http_error_and_is_not_kept(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error_of(await create(stack, stream=True), 503, "engine_overloaded")

    run(scenario, overloaded=True)


# --- Conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_what_is_kept(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        first = (await create(stack, instructions="Be kind.")).json()
        second = (await create(stack, input="And now?", previous_response_id=first["id"])).json()
        assert second["previous_response_id"] == first["id"]
        texts = [stack.model.tokenizer.decode(ids) for ids in prompts(stack)]
        # The instructions of the first turn are not the second's.
        assert "Be kind." in texts[0]
        assert "Be kind." not in texts[1]
        assert texts[1].index("hi") < texts[1].index(REPLY) < texts[1].index("And now?")

    run(scenario)


def prompts(stack: Stack) -> list[list[int]]:
    return [memoryview(request.prompt).cast("i").tolist() for request in stack.coordinator.requests]


def test_what_is_not_stored_is_not_found(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        response = (await create(stack, store=False)).json()
        error_of(await stack.http.get(f"/v1/responses/{response['id']}"), 404, "response_not_found")
        error_of(await create(stack, previous_response_id=response["id"]), 404, "previous_response_not_found")
        kept = (await create(stack)).json()
        path = f"/v1/responses/{kept['id']}"
        assert (await stack.http.get(path)).json() == kept
        assert (await stack.http.delete(path)).json() == {"id": kept["id"], "object": "response", "deleted": True}
        error_of(await stack.http.get(path), 404, "response_not_found")

    run(scenario)


def test_items_of_one_turn_become_one_message() -> None:
    items = input_items(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city":"Rome"}'},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "rain"}]},
            {"role": "assistant", "content": "Sunny."},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Next."}]},
        ]
    )
    assert turns(items, "Be kind.", 1) == [
        Turn(role="system", text="Be kind."),
        Turn(role="user", text="Weather?", path="previous_response_id"),
        Turn(
            role="assistant",
            text="I look.",
            thinking="Hm.",
            calls=(Call("weather", {"city": "Rome"}, "a"), Call("weather", {}, "b")),
            path="input[2]",
        ),
        Turn(role="tool", text="sunny", call_id="a", path="input[4]"),
        Turn(role="tool", text="rain", call_id="b", path="input[5]"),
        Turn(role="assistant", text="Sunny.", path="input[6]"),
        Turn(role="assistant", thinking="Next.", path="input[7]"),
    ]


def test_an_empty_message_is_a_turn_and_empty_thinking_is_none() -> None:
    said = [{"role": "assistant", "content": ""}, {"role": "assistant", "content": "Sunny."}]
    silent = [{"type": "reasoning", "content": []}, {"type": "reasoning"}]
    made = turns(input_items([*said, *silent]), None)
    assert [(turn.role, turn.text) for turn in made] == [("assistant", ""), ("assistant", "Sunny."), ("assistant", "")]


def test_what_is_wrong_with_an_item_is_named_by_its_path() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}
    items = input_items([{"role": "assistant", "content": "I look."}, call])
    for num_earlier, path in ((0, "input[1].arguments"), (2, "previous_response_id")):
        with pytest.raises(RequestError) as raised:
            turns(items, None, num_earlier)
        assert raised.value.param == path
        assert str(raised.value).startswith(f"{path} must be a JSON object")


def test_what_a_response_gave_out_can_be_given_back_as_input() -> None:
    builder = ResponseBuilder(own_response())
    builder.begin()
    for event in (Reasoning("Hm."), Content("I look."), CallStarted(0, "call_1", "weather"), Arguments(0, "{}")):
        builder.tell(event)
    b"".join(builder.finish(USAGE, cut=False))
    output = Response.model_validate_json(b"".join(builder.encoded())).to_dict()["output"]
    assert isinstance(output, list)
    given = [{"role": "user", "content": "Weather?"}, *output]
    given.append({"type": "function_call_output", "call_id": "call_1", "output": "sunny"})
    [_, turn, result] = turns(input_items(given), None)
    assert (turn.thinking, turn.calls[0].id) == ("Hm.", "call_1")
    assert result.role == "tool"


def test_no_client_gets_at_anothers_response(run: Run, tmp_path: Path) -> None:
    lines = [f"{name}:{hashlib.sha256(name.encode()).hexdigest()}" for name in ("alice", "bob")]
    (tmp_path / "keys").write_text("\n".join(lines))

    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model, keys=KeyRing(tmp_path / "keys"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            alice, bob = ({"x-api-key": name} for name in ("alice", "bob"))
            body = {"model": MODEL, "input": "hi"}
            made = (await http.post("/v1/responses", json=body, headers=alice)).json()
            path = f"/v1/responses/{made['id']}"
            for method in ("GET", "DELETE"):
                error_of(await http.request(method, path, headers=bob), 404, "response_not_found")
            follow = await http.post("/v1/responses", json={**body, "previous_response_id": made["id"]}, headers=bob)
            error_of(follow, 404, "previous_response_not_found")
            assert (await http.get(path, headers=alice)).json() == made

    run(scenario)


# --- Ending early -----------------------------------------------------------------------------------------------------


def test_deleting_a_response_on_its_way_cancels_it_and_frees_its_request(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url, httpx.AsyncClient(base_url=url) as http:
            body = {"model": MODEL, "input": "hi", "stream": True}
            async with http.stream("POST", "/v1/responses", json=body) as reply:
                lines = reply.aiter_lines()
                first = [await anext(lines) for _ in range(2)][-1]
                path = f"/v1/responses/{json.loads(first.removeprefix('data: '))['response']['id']}"
                assert (await http.get(path)).json()["status"] == "in_progress"
                assert (await http.delete(path)).json()["deleted"]
                rest = [line async for line in lines]
            assert json.loads(rest[-2].removeprefix("data: "))["response"]["status"] == "cancelled"
            await stack.until(lambda: stack.coordinator.aborted == [1])
            error_of(await http.get(path), 404, "response_not_found")
            assert stack.engine.num_open == 0

    run(scenario, hang_after=3)


def test_a_client_that_goes_away_leaves_a_cancelled_response(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url, httpx.AsyncClient(base_url=url) as http:
            async with http.stream(
                "POST", "/v1/responses", json={"model": MODEL, "input": "a", "stream": True}
            ) as reply:
                lines = reply.aiter_lines()
                await anext(lines)
                created = json.loads((await anext(lines)).removeprefix("data: "))
            await stack.until(lambda: stack.coordinator.aborted == [1])
            kept = await http.get(f"/v1/responses/{created['response']['id']}")
            assert kept.json()["status"] == "cancelled"

    run(scenario, hang_after=3)


# --- The builder ------------------------------------------------------------------------------------------------------


def own_response(id_: str = "resp_1") -> OwnResponse:
    return OwnResponse(
        id=id_,
        created_at=0,
        status="in_progress",
        instructions=None,
        max_output_tokens=None,
        metadata={},
        model=MODEL,
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=ReasoningSettings(),
        store=True,
        temperature=1.0,
        text={"format": {"type": "text"}},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
    )


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    builder = ResponseBuilder(own_response())
    said = [Reasoning("Let me "), Reasoning("see."), Content("I look."), CallStarted(0, "call_1", "weather")]
    said += [Arguments(0, '{"city":'), Arguments(0, '"Rome"}'), CallStarted(1, "call_2", "time"), Arguments(1, "{}")]
    stream = builder.begin() + b"".join(map(builder.tell, said)) + b"".join(builder.finish(USAGE, cut=False))
    events = sse_events(stream.decode())
    for event in events:
        EVENT.validate_python(event)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["type"] for event in added] == ["reasoning", "message", "function_call", "function_call"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    response = Response.model_validate(events[-1]["response"])
    assert response.to_dict()["output"] == [event["item"] for event in done]
    assert response.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert response.output[2].to_dict()["arguments"] == '{"city":"Rome"}'
    arguments = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in arguments] == [
        ("weather", '{"city":"Rome"}'),
        ("time", "{}"),
    ]


# --- The store --------------------------------------------------------------------------------------------------------


def entry(id_: str, num_bytes: int = 10, *, ended: bool = True) -> StoredResponse:
    builder = ResponseBuilder(own_response(id_))
    if ended:
        b"".join(builder.finish(USAGE, cut=False))
    return StoredResponse(builder=builder, items=[], run=None, num_bytes=num_bytes)


def test_a_client_neither_sees_nor_pushes_out_anothers_responses() -> None:
    store = ResponseStore(StoreLimits(responses_per_client=2, bytes_per_client=100, bytes_in_all=200))
    store.put("a", entry("1"))
    for i in range(5):
        store.put("b", entry(str(i + 2)))
    assert store.get("a", "1").id == "1"
    with pytest.raises(RequestError, match="no stored response"):
        store.get("b", "1")
    assert len(store) == 3
    assert store.get("b", "6").id == "6"


def test_the_bytes_kept_stay_below_their_limit_and_are_all_given_back() -> None:
    store = ResponseStore(StoreLimits(responses_per_client=10, bytes_per_client=100, bytes_in_all=150))
    for i in range(4):
        store.put("a", entry(f"a{i}", 30))
        store.put("b", entry(f"b{i}", 30))
        assert store.num_bytes <= 150
    kept = store.get("a", "a3")
    store.grow("a", kept, 60)
    assert store.num_bytes <= 150
    for client in ("a", "b"):
        for i in range(4):
            try:
                store.delete(client, f"{client}{i}")
            except RequestError:
                continue
    assert (store.num_bytes, len(store)) == (0, 0)


def test_what_runs_is_never_forgotten() -> None:
    now = [0.0]
    limits = StoreLimits(responses_per_client=2, bytes_per_client=100, bytes_in_all=100, ttl_s=5)
    store = ResponseStore(limits, clock=lambda: now[0])
    running = [entry("1", ended=False), entry("2", ended=False)]
    for stored in running:
        store.put("a", stored)
    with pytest.raises(OverloadedError):
        store.put("a", entry("3", ended=False))
    now[0] = 60
    assert store.get("a", "1") is running[0]
    b"".join(running[0].builder.finish(USAGE, cut=False))
    now[0] = 120
    with pytest.raises(RequestError):
        store.get("a", "1")
    assert store.get("a", "2") is running[1]


# --- The openai package -----------------------------------------------------------------------------------------------


def test_the_openai_package_works_unmodified(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with (
            served(stack.model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            whole = await client.responses.create(model=MODEL, input="hi")
            assert whole.output_text == REPLY
            async with client.responses.stream(model=MODEL, input="hi") as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_response()
            assert final.output_text == REPLY
            assert (await client.responses.retrieve(final.id)).output_text == REPLY
            counted = await client.responses.input_tokens.count(model=MODEL, input="hi")
            assert counted.input_tokens == whole.usage.input_tokens
            counted = await client.responses.input_tokens.count(previous_response_id=final.id)
            assert counted.input_tokens > whole.usage.input_tokens
            await client.responses.delete(final.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(final.id)
            with pytest.raises(openai.BadRequestError, match="background is not supported"):
                await client.responses.create(model=MODEL, input="hi", background=True)

    run(scenario, step_s=0.002)
