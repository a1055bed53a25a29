"""Clients' sockets handed from proxy to replica: the same bytes as without, backpressure, and an end that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.http import delivery, handover
from cluster.http.active import ActiveRequests
from cluster.http.connection import LimitedConnection
from cluster.http.edge import Edge
from cluster.http.handover import HEADER, ClientSocket, HandoverHub, Handovers
from cluster.openai.ingress import create_app
from configs.schema import ServerConfig
from tests.scripted_engine import MODEL, REPLY, Run, Stack, events, served

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Client:
    """A connection as the proxy holds it, and the client's end."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.far.setblocking(False)
        self.num_unwritten = 0
        self.closing = False

    async def read(self, size: int = 1 << 16) -> bytes:
        """Up to `size` bytes from the far end."""
        return await asyncio.get_running_loop().sock_recv(self.far, size)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.num_unwritten

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self.near}[name]

    def close(self) -> None:
        self.near.close()
        self.far.close()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[tuple[HandoverHub, Handovers, Client]]:
    hub, client = HandoverHub(), Client()
    hub.open()
    try:
        yield hub, Handovers(), client
    finally:
        hub.close()
        client.close()


def with_hub(scenario: Callable[[HandoverHub, Handovers, Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(10), opened() as (hub, replica, client):
            await scenario(hub, replica, client)

    asyncio.run(run())


def target(fd: int | str) -> str:
    """What a descriptor of this process leads to; duplicates of a socket lead to the same."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the descriptor of the listing itself
        return ""


def num_fds(of: str) -> int:
    """Descriptors that lead there: other tests' sockets, which may be collected at any moment, do not count."""
    return sum(target(fd) == of for fd in os.listdir("/proc/self/fd"))


def test_a_replica_writes_to_the_socket_it_was_handed() -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        offers = [hub.offer(client) for _ in range(3)]  # type: ignore[arg-type]  # as much of a transport as it takes
        claims = [replica.claim([(HEADER, offer.header)]) for offer in offers]
        for offer, claim in reversed(list(zip(offers, claims, strict=True))):
            assert claim is not None
            _, sock = await asyncio.gather(offer.hand_over(), claim.socket())
            assert sock is not None
            assert sock.send(b"x" * (offer.id % 20 + 1))
            size = offer.id % 20 + 1
            assert await client.read() == b"%x\r\n%b\r\n" % (size, b"x" * size)
            hub.withdraw(offer)
        near = target(client.near.fileno())
        assert num_fds(near) == 4
        for claim in claims:
            assert claim is not None
            claim.close()
        assert num_fds(near) == 1
        client.near.send(b"the proxy's")
        assert await client.read() == b"the proxy's"

    with_hub(scenario)


def test_nothing_piles_up_for_a_client_that_reads_slowly() -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        sock = ClientSocket(client.near.detach())
        part = bytes(range(256)) * 4096  # more than a socket takes
        assert not sock.send(part)
        with pytest.raises(ConnectionError):
            sock.send(b"y")
        flushing = asyncio.create_task(sock.flush())
        await asyncio.sleep(0.05)
        assert not flushing.done()
        received = b""
        while len(received) < len(part) + len(b"100000\r\n\r\n"):
            received += await client.read()
        await flushing
        assert received == b"100000\r\n" + part + b"\r\n"
        assert sock.send(b"")  # which must not end the body
        assert sock.send(b"y")
        assert await client.read() == b"1\r\ny\r\n"
        sock.close()
        assert await client.read() == b""

    with_hub(scenario)


def test_a_part_that_was_left_unfinished_ends_the_connection() -> None:
    """Whatever followed would be read as its rest."""

    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        sock = ClientSocket(os.dup(client.near.fileno()))
        assert not sock.send(b"x" * (1 << 20))
        flushing = asyncio.create_task(sock.flush())
        await asyncio.sleep(0.01)
        flushing.cancel()
        await asyncio.wait([flushing])
        sock.close()
        while await client.read():
            pass
        with pytest.raises(BrokenPipeError):  # for the proxy too
            client.near.send(b"x")

    with_hub(scenario)


def test_a_client_that_is_gone_is_an_error() -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        sock = ClientSocket(os.dup(client.near.fileno()))
        assert not sock.send(b"x" * (1 << 20))
        flushing = asyncio.create_task(sock.flush())
        await asyncio.sleep(0.01)
        client.far.close()
        with pytest.raises(ConnectionError):
            await flushing
        sock.close()

    with_hub(scenario)


@pytest.mark.parametrize("state", ["unwritten", "closing"])
def test_a_socket_that_is_not_flushed_is_refused(state: str) -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        client.num_unwritten, client.closing = (5, False) if state == "unwritten" else (0, True)
        offer = hub.offer(client)  # type: ignore[arg-type]
        claim = replica.claim([(HEADER, offer.header)])
        assert claim is not None
        _, sock = await asyncio.gather(offer.hand_over(), claim.socket())
        assert sock is None

    with_hub(scenario)


def test_an_offer_that_leads_nowhere_is_no_claim() -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        name = hub.offer(client).header  # type: ignore[arg-type]
        for headers in (
            [],
            [(HEADER, b"x")],
            [(HEADER, b"/run/some.sock/5")],
            [(HEADER, b"lockstep-proxy-1-" + b"0" * 32 + b"/5")],
            [(HEADER, name), (HEADER, name)],
            [(HEADER, name.split(b"/")[0] + b"/" + str(1 << 63).encode())],
            [(HEADER, name.split(b"/")[0] + b"/x")],
        ):
            assert replica.claim(headers) is None

    with_hub(scenario)


def test_an_offer_that_was_withdrawn_gets_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_SOCKET_S", 0.1)

    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        offer = hub.offer(client)  # type: ignore[arg-type]
        hub.withdraw(offer)
        claim = replica.claim([(HEADER, offer.header)])
        assert claim is not None
        assert await claim.socket() is None

    with_hub(scenario)


def test_a_socket_that_comes_too_late_is_let_go() -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        offer = hub.offer(client)  # type: ignore[arg-type]
        claim = replica.claim([(HEADER, offer.header)])
        assert claim is not None
        claim.close()
        await offer.hand_over()
        await asyncio.sleep(0.05)
        assert num_fds(target(client.near.fileno())) == 1

    with_hub(scenario)


def test_the_other_end_must_be_the_same_users(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        offer = hub.offer(client)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(handover, "is_ours", lambda peer: False)
            assert replica.claim([(HEADER, offer.header)]) is None
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(b"\0" + offer.header.split(b"/")[0])
                stranger.send(handover._OFFER.pack(offer.id))
                await asyncio.sleep(0.05)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(8) == b""  # it was closed
        assert not offer._claimed.is_set()

    with_hub(scenario)


def test_a_proxy_that_is_gone_lets_its_claims_go_on_without() -> None:
    async def scenario(hub: HandoverHub, replica: Handovers, client: Client) -> None:
        offer = hub.offer(client)  # type: ignore[arg-type]
        claim = replica.claim([(HEADER, offer.header)])
        assert claim is not None
        waiting = asyncio.create_task(claim.socket())
        await asyncio.sleep(0.02)
        hub.close()
        assert await waiting is None
        assert replica.claim([(HEADER, offer.header)]) is None

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
def test_a_stream_by_its_clients_socket_has_the_bytes_of_one_without(run: Run, head_delay_s: float) -> None:
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
            assert len(between.bodies) == 3  # the first parts and the whole answer went through Serve

    run(scenario, step_s=0.001)


def test_an_error_within_a_stream_comes_by_the_socket_too(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with (
            served(Edge(create_app(stack.model)), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            *_, last = events(await client.post("/v1/chat/completions", json=BODY))
            assert last["error"]["code"] == "engine_error"

    run(scenario, fail_after=2, step_s=0.001)


def test_a_client_that_leaves_aborts_its_request(run: Run) -> None:
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


def test_a_request_that_is_cancelled_twice_lets_its_socket_go(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve does so: once for the call, once for the client that has left."""
    handed_over: list[ClientSocket] = []

    class Recorded(ClientSocket):
        def __init__(self, fd: int) -> None:
            super().__init__(fd)
            handed_over.append(self)

    monkeypatch.setattr(handover, "ClientSocket", Recorded)

    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model)
        answering: list[asyncio.Task[None]] = []

        async def cancellable(scope: Scope, receive: Receive, send: Send) -> None:
            answering.append(asyncio.create_task(app(scope, receive, send)))
            await asyncio.wait(answering)

        async with (
            served(Edge(cancellable), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=BODY),
        ):
            await stack.until(lambda: len(handed_over) == 1)
            await asyncio.sleep(0.05)
            answering[0].cancel()
            await asyncio.sleep(0)
            answering[0].cancel()
            await stack.until(lambda: handed_over[0]._sock.fileno() == -1)

    run(scenario, hang_after=3)


def test_a_client_cannot_name_an_offer(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        seen: list[list[tuple[bytes, bytes]]] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append([it for it in scope["headers"] if it[0] == HEADER])
            await create_app(stack.model)(scope, receive, send)

        async with (
            served(Edge(app), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            await client.get("/health", headers={HEADER.decode(): "lockstep-proxy-1-" + "0" * 32 + "/5"})
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


def test_a_client_that_reads_nothing_is_cut_off_and_leaves_nothing(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model, active=ActiveRequests(send_timeout_s=0.3))
        async with served(Edge(app), http=LimitedConnection) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            raw = json.dumps({**BODY, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw))
            await stack.until(lambda: stack.engine.num_open == 1)
            own_port = writer.get_extra_info("sockname")[1]
            [accepted] = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == own_port]
            served_socket = target(accepted.fd)
            await stack.until(lambda: num_fds(served_socket) == 2)  # the proxy's and the replica's
            await stack.until(lambda: stack.engine.num_open == 0)
            writer.transport.abort()
            await stack.until(lambda: not num_fds(served_socket))

    run(scenario, reply=[19556] * 4000, max_model_len=8192, hang_after=3999)


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_silent_stream_says_that_it_is_alive(run: Run, monkeypatch: pytest.MonkeyPatch, handed_over: bool) -> None:
    monkeypatch.setattr(delivery, "KEEP_ALIVE_S", 0.05)

    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model)
        async with (
            served(Edge(app) if handed_over else app, http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=BODY) as response,
        ):
            assert response.status_code == 200
            blocks = [line async for line in response.aiter_lines() if line]
        kept = [i for i, line in enumerate(blocks) if line == ": keep-alive"]
        said = [json.loads(line.removeprefix("data: ")) for line in blocks if line.startswith("data: {")]
        assert kept[0] == 0  # before the first token
        assert any(line.startswith("data: {") for line in blocks[: kept[-1]])  # and between tokens
        assert len(kept) + len(said) + 1 == len(blocks)
        assert "".join(it["choices"][0]["delta"].get("content", "") for it in said if it["choices"]) == REPLY

    run(scenario, step_s=0.12, burst=4)


def test_an_error_after_a_sign_of_life_is_told_in_the_stream(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "KEEP_ALIVE_S", 0.05)

    async def scenario(stack: Stack) -> None:
        async with (
            served(Edge(create_app(stack.model)), http=LimitedConnection) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
        ):
            response = await client.post("/v1/chat/completions", json=BODY)
            assert response.status_code == 200
            first, *_, last = [line for line in response.text.split("\n") if line]
            assert first == ": keep-alive"
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"

    run(scenario, hang_after=0, server=ServerConfig(request_timeout_s=0.3))
