"""Lanes between proxy and replica: the same bytes as without, backpressure, and what happens when an end is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.http import lane as lanes
from cluster.http.connection import LimitedConnection
from cluster.http.edge import Edge
from cluster.http.lane import HEADER, LaneHub, Lanes, LaneStream
from cluster.openai.ingress import create_app
from tests.scripted_engine import MODEL, REPLY, Run, Stack, events, served

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Sink:
    """A client's connection."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write_part(self, part: bytes) -> None:
        self.parts.append(part)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 -- what it waits for has no event
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[LaneHub, Lanes]]:
    hub = LaneHub()
    await hub.open()
    yield hub, Lanes()
    hub.close()


def with_hub(scenario: Callable[[LaneHub, Lanes], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), opened() as (hub, replica):
            await scenario(hub, replica)

    asyncio.run(run())


def test_parts_arrive_whole_and_in_order_each_at_its_stream() -> None:
    async def scenario(hub: LaneHub, replica: Lanes) -> None:
        sinks = [Sink() for _ in range(40)]
        streams = [LaneStream(sink) for sink in sinks]
        sent: list[list[bytes]] = [[] for _ in sinks]
        found = []
        for stream in streams:
            _, name = hub.add(stream)
            found.append(await replica.find([(HEADER, name)]))
        for i, stream in enumerate(streams):
            if i % 2:
                stream.start()
        for step in range(200):
            for i, place in enumerate(found):
                assert place is not None
                part = bytes([i]) * (1 + (step * 37 + i) % 3000)
                sent[i].append(part)
                await place[0].write(place[1], part)
            if step % 10 == 0:
                await asyncio.sleep(0)
        for place in found:
            assert place is not None
            place[0].end(place[1])
        for stream in streams:
            await stream.ended.wait()
            stream.start()
        assert [b"".join(sink.parts) for sink in sinks] == [b"".join(parts) for parts in sent]
        assert len({id(place[0]) for place in found if place}) == 1  # one lane for all

    with_hub(scenario)


def test_a_full_client_is_told_to_its_own_stream_only() -> None:
    async def scenario(hub: LaneHub, replica: Lanes) -> None:
        told: list[tuple[str, bool]] = []
        places = []
        for name in "ab":
            stream = LaneStream(Sink())
            stream_id, value = hub.add(stream)
            found = await replica.find([(HEADER, value)])
            assert found is not None
            lane, same_id = found
            assert same_id == stream_id
            lane.add(stream_id, lambda full, name=name: told.append((name, full)))  # type: ignore[misc]
            assert not stream.tell_full(stream_id, True)  # nothing came by the lane yet
            await lane.write(stream_id, b"x")
            places.append((stream, stream_id))
        await until(lambda: all(stream.tell_full(stream_id, True) for stream, stream_id in places[:1]))
        await until(lambda: told != [])
        assert set(told) == {("a", True)}
        places[0][0].tell_full(places[0][1], False)
        await until(lambda: told[-1] == ("a", False))

    with_hub(scenario)


def test_a_name_that_leads_nowhere_is_no_lane() -> None:
    async def scenario(hub: LaneHub, replica: Lanes) -> None:
        _, name = hub.add(LaneStream(Sink()))
        for headers in (
            [],
            [(HEADER, b"x")],
            [(HEADER, b"/run/some.sock/5")],
            [(HEADER, b"lockstep-lane-1-" + b"0" * 32 + b"/5")],
            [(HEADER, b"lockstep-lane-1-" + b"0" * 32 + b"/5")],
            [(HEADER, name), (HEADER, name)],
            [(HEADER, name.split(b"/")[0] + b"/" + str(1 << 63).encode())],
            [(HEADER, name.split(b"/")[0] + b"/x")],
        ):
            assert await replica.find(headers) is None
        # A stream that is no longer there takes nothing and harms nobody.
        found = await replica.find([(HEADER, name.split(b"/")[0] + b"/77")])
        assert found is not None
        await found[0].write(77, b"lost")
        found[0].end(77)

    with_hub(scenario)


def test_the_other_end_must_be_the_same_users(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(hub: LaneHub, replica: Lanes) -> None:
        sink = Sink()
        stream = LaneStream(sink)
        stream.start()
        _, name = hub.add(stream)
        monkeypatch.setattr(lanes, "_peer_is_us", lambda transport: False)
        assert await replica.find([(HEADER, name)]) is None
        address, stream_id = name.split(b"/")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stranger, b"\0" + address)
            with contextlib.suppress(OSError):
                stranger.send(lanes._PART.pack(int(stream_id), 4) + b"evil")
            await asyncio.sleep(0.05)
        assert sink.parts == []

    with_hub(scenario)


def test_a_lost_replica_ends_the_streams_it_carried() -> None:
    async def scenario(hub: LaneHub, replica: Lanes) -> None:
        stream = LaneStream(Sink())
        _, name = hub.add(stream)
        found = await replica.find([(HEADER, name)])
        assert found is not None
        lane, stream_id = found
        await lane.write(stream_id, b"x")
        await asyncio.sleep(0.02)
        assert not stream.ended.is_set()
        assert lane._transport is not None
        lane._transport.abort()
        await stream.ended.wait()
        await until(lambda: not lane.is_open)
        with pytest.raises(ConnectionError):
            await lane.write(stream_id, b"y")
        assert await replica.find([(HEADER, name)]) is None
        assert await replica.find([(HEADER, name)]) is not None  # a new one

    with_hub(scenario)


# --- The whole way ----------------------------------------------------------------------------------------------------


class Serve:
    """Ray Serve's proxy between edge and app: what passes it, some parts with a delay."""

    def __init__(self, app: Any, head_delay_s: float = 0.0) -> None:
        self._app = app
        self._head_delay_s = head_delay_s
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def passed(message: Message) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(self._head_delay_s)
            elif message["body"]:
                self.bodies.append(message["body"])
            await send(message)

        await self._app(scope, receive, passed)


@pytest.mark.parametrize("head_delay_s", [0.0, 0.05])
def test_a_stream_by_lane_has_the_bytes_of_one_without(run: Run, head_delay_s: float) -> None:
    async def scenario(stack: Stack) -> None:
        between = Serve(create_app(stack.model), head_delay_s)
        async with (
            served(Edge(between), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            for _ in range(2):  # the second on the same connection
                response = await client.post("/v1/chat/completions", json=BODY)
                assert HEADER.decode() not in response.headers
                *chunks, done = events(response)
                assert done == "[DONE]"
                assert "".join(it["choices"][0]["delta"].get("content", "") for it in chunks if it["choices"]) == REPLY
            whole = await client.post("/v1/chat/completions", json={**BODY, "stream": False})
            assert whole.json()["choices"][0]["message"]["content"] == REPLY
            assert len(between.bodies) == 1  # only the whole answer went through Serve

    run(scenario, step_s=0.001)


def test_an_error_within_a_stream_comes_by_the_lane_too(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with (
            served(Edge(create_app(stack.model)), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            *_, last = events(await client.post("/v1/chat/completions", json=BODY))
            assert last["error"]["code"] == "engine_error"

    run(scenario, fail_after=2, step_s=0.001)


def test_a_client_that_leaves_a_lane_aborts_its_request(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with (
            served(Edge(create_app(stack.model)), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            async with client.stream("POST", "/v1/chat/completions", json=BODY) as response:
                async for _ in response.aiter_lines():
                    break
            await stack.until(lambda: stack.coordinator.aborted == [1])
            assert stack.engine.num_open == 0

    run(scenario, hang_after=3)


def test_a_client_cannot_name_a_lane(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        seen: list[list[tuple[bytes, bytes]]] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append([it for it in scope["headers"] if it[0] == HEADER])
            await create_app(stack.model)(scope, receive, send)

        async with (
            served(Edge(app), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            await client.get("/health", headers={HEADER.decode(): "lockstep-lane-1-" + "0" * 32 + "/5"})
        assert len(seen[0]) == 1
        assert b"0" * 32 not in seen[0][0][1]

    run(scenario)


def test_a_replica_that_dies_ends_its_streams_with_an_error(run: Run) -> None:
    """The end of the body never comes, as when Ray Serve notices a dead replica."""

    async def scenario(stack: Stack) -> None:
        async def dying(scope: Scope, receive: Receive, send: Send) -> None:
            async def passed(message: Message) -> None:
                if message["type"] != "http.response.body" or message.get("more_body", False):
                    await send(message)

            await create_app(stack.model)(scope, receive, passed)

        async with (
            served(Edge(dying), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            response = await client.post("/v1/chat/completions", json=BODY)
            last = json.loads(response.text.rstrip().rsplit("data: ", 1)[1])
            assert last["error"]["code"] == "engine_error"

    run(scenario)
