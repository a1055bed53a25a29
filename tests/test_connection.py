"""Hostile and slow clients on real sockets: what they get, and that they hold neither memory nor a connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.http.connection import SCOPE_KEY, LimitedConnection
from cluster.http.edge import Edge
from cluster.http.handover import HEADER
from cluster.serve.ingress import create_app
from configs.schema import ServerConfig
from tests.scripted_engine import MODEL, Run, Stack, served


class Quick(LimitedConnection):
    """With a test's patience."""

    head_timeout_s = 0.3
    stall_timeout_s = 0.5
    linger_s = 0.3


@contextlib.asynccontextmanager
async def limited(stack: Stack) -> AsyncIterator[tuple[str, int]]:
    """Host and port of the stack's app, as Ray Serve's proxy would serve it."""
    async with served(Edge(create_app(stack.model)), http=Quick) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


async def read_all(reader: asyncio.StreamReader, timeout_s: float = 5.0) -> bytes:
    """What comes until the server closes or resets the connection; raises TimeoutError when it does not."""
    received = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(timeout_s):
            while part := await reader.read(1 << 16):
                received += part
    return received


def error_in(answer: bytes) -> tuple[int, str]:
    """Status and code of the one response in `answer`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), json.loads(body)["error"]["code"]


def rss() -> int:
    return psutil.Process().memory_info().rss


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_head_that_does_not_end_is_refused_in_time(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            for sent in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(sent)
                answer = await read_all(reader)
                assert answer == b"" if not sent else error_in(answer) == (408, "request_timeout")
                writer.close()

    run(scenario)


def test_a_client_that_sends_a_byte_now_and_then_is_refused_too_also_on_its_second_request(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b'{"status":"ok",' in await reader.readuntil(b"}")
            writer.write(b"GET /health HTTP/1.1\r\n")
            answer = asyncio.create_task(read_all(reader))
            while not answer.done():
                writer.write(b"X")
                await asyncio.sleep(0.02)
            assert error_in(await answer) == (408, "request_timeout")

    run(scenario)


@pytest.mark.parametrize(
    "attack",
    [
        b"".join(b"x-%d: v\r\n" % i for i in range(10_000)),
        b"x-long: " + b"v" * (8 << 20),
        b"x" * (8 << 20),
    ],
    ids=["10,000 headers", "a long value", "a long name"],
)
def test_headers_without_end_are_refused(run: Run, attack: bytes) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            before = rss()
            writer.write(HEAD + attack)
            assert error_in(await read_all(reader)) == (431, "headers_too_large")
            assert rss() - before < 32 << 20
            writer.close()

    run(scenario)


def test_a_long_request_line_is_refused(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /" + b"a" * (1 << 20))
            assert error_in(await read_all(reader)) == (431, "headers_too_large")
            writer.close()

    run(scenario)


@pytest.mark.parametrize("attack", [b"x-trailer: " + b"v" * (4 << 20), b"1;ext=" + b"v" * (4 << 20)])
def test_trailers_and_chunk_extensions_without_end_close_the_connection(run: Run, attack: bytes) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            writer.write((b"2\r\n{}\r\n0\r\n" if attack.startswith(b"x") else b"") + attack)
            before = rss()
            await read_all(reader)
            assert rss() - before < 32 << 20
            writer.close()
        assert stack.coordinator.requests == []

    run(scenario)


def test_trailers_do_not_become_headers(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1}).encode()
            writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body))
            writer.write(b"content-encoding: gzip\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()

    run(scenario)


@pytest.mark.parametrize(
    "garbage", [b"\x80\x04\x95.", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 1000, b"EHLO x\r\n\r\n"]
)
def test_what_is_not_http_gets_the_one_shape_of_errors(run: Run, garbage: bytes) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(garbage)
            assert error_in(await read_all(reader)) == (400, "invalid_http")
            writer.close()

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_gets_an_answer_without_chunks(run: Run, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        fields = {"stream": True} if stream else {"prompt_logprobs": 20}  # so long that it comes in parts
        body = json.dumps({"model": MODEL, "prompt": [7] * 99, **fields}).encode()
        request = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
        async with limited(stack) as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request + body)
            answer = await read_all(reader)  # the connection's end is the answer's
            writer.close()
        head, _, text = answer.partition(b"\r\n\r\n")
        headers = head.lower().split(b"\r\n")
        assert headers[0].endswith(b" 200 ok")
        assert b"connection: close" in headers
        assert not any(line.startswith((b"transfer-encoding", b"content-length")) for line in headers)
        if stream:
            assert text.startswith(b"data: {")
            assert text.endswith(b"data: [DONE]\n\n")
        else:
            assert len(json.loads(text)["choices"][0]["prompt_logprobs"]) == 99

    run(scenario)


@pytest.mark.parametrize("declared", [True, False])
def test_a_gigabyte_is_refused_at_its_first_megabytes(run: Run, declared: bool) -> None:
    async def scenario(stack: Stack) -> None:
        async with limited(stack) as address:
            reader, writer = await asyncio.open_connection(*address)
            before, sent = rss(), 0
            length = b"Content-Length: %d" % (1 << 30) if declared else b"Transfer-Encoding: chunked"
            writer.write(HEAD + length + b"\r\n\r\n")
            answer = asyncio.create_task(read_all(reader))
            part = b"x" * (1 << 16)
            with contextlib.suppress(ConnectionError):
                while sent < 1 << 30 and not answer.done():
                    writer.write(part if declared else b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                    sent += len(part)
            assert rss() - before < 48 << 20
            assert error_in(await answer) == (413, "request_too_large")
            assert sent < 1 << 30  # the rest was not waited for
            writer.close()

    run(scenario, server=ServerConfig(max_body_bytes=4 << 20))


def test_a_client_that_does_not_read_loses_connection_and_request(run: Run) -> None:
    """Where the replica does not write to its socket, as behind TLS."""

    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model)

        async def without_offers(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "headers": [it for it in scope["headers"] if it[0] != HEADER]}, receive, send)

        async with served(Edge(without_offers), http=Quick) as url:
            address = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(*address, limit=1 << 10)
            writer.get_extra_info("socket").setsockopt(1, 8, 4096)  # SOL_SOCKET, SO_RCVBUF
            body = {"model": MODEL, "prompt": "hi", "max_tokens": 4000, "stream": True, "logprobs": 2}
            raw = json.dumps(body).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw))
            await reader.readline()
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            await stack.until(lambda: stack.coordinator.aborted == [1])
            assert stack.engine.num_open == 0
            writer.transport.abort()

    run(scenario, reply=[19556] * 4000, max_model_len=8192, hang_after=3900)


# --- The edge around Ray Serve's proxy --------------------------------------------------------------------------------


async def through_edge(app: Any, **scope: Any) -> tuple[list[Message], Scope]:
    """What a client of `app` behind the edge gets, and the scope that `app` saw."""
    sent: list[Message] = []
    seen: list[Scope] = []

    async def watched(inner: Scope, receive: Receive, send: Send) -> None:
        seen.append(inner)
        await app(inner, receive, send)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await Edge(watched)({"type": "http", "method": "GET", "path": "/", "headers": [], **scope}, receive, send)
    return sent, seen[0]


def replies(status: int, content_type: bytes, *parts: bytes, headers: Any = (), complete: bool = True) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        start = [(b"content-type", content_type), *headers]
        await send({"type": "http.response.start", "status": status, "headers": start})
        for i, part in enumerate(parts):
            more = not complete or i + 1 < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return app


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "not_found"), (408, "request_timeout"), (500, "engine_error"), (503, "engine_overloaded")],
)
def test_what_ray_serve_says_itself_gets_our_shape(status: int, code: str) -> None:
    app = replies(status, b"text/plain; charset=utf-8", b"Path '/secret' not found", headers=[(b"X-Request-ID", b"r")])
    sent, _ = asyncio.run(through_edge(app))
    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], headers[b"content-type"], headers[b"x-request-id"]) == (
        status,
        b"application/json",
        b"r",
    )
    assert json.loads(sent[1]["body"])["error"]["code"] == code
    assert b"secret" not in sent[1]["body"]
    assert (b"retry-after" in headers) == (status == 503)
    assert len(sent) == 2


def test_what_a_replica_says_passes_unchanged() -> None:
    json_error = replies(404, b"application/json", b"{}", headers=[(b"content-length", b"2")])
    plain = replies(404, b"text/plain", b"gone", headers=[(b"content-length", b"4")])
    fine = replies(200, b"text/plain", b"a", b"b")
    stream = replies(200, b"text/event-stream; charset=utf-8", b"data: 1\n\n", b"data: [DONE]\n\n")
    for app in (json_error, plain, fine, stream):
        direct: list[Message] = []

        async def send(message: Message, into: list[Message] = direct) -> None:
            into.append(message)

        asyncio.run(app({}, None, send))
        assert asyncio.run(through_edge(app))[0] == direct


def test_an_answer_that_is_cut_ends_with_an_error_and_may_be_asked_for_again() -> None:
    app = replies(200, b"text/event-stream", b"data: 1\n\n", complete=False)
    sent, _ = asyncio.run(through_edge(app))
    assert sent[-1]["more_body"] is False
    assert json.loads(sent[-1]["body"].removeprefix(b"data: "))["error"]["code"] == "engine_error"

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    sent, _ = asyncio.run(through_edge(silent))
    assert sent[0]["status"] == 503
    headers = dict(sent[0]["headers"])
    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"1", b"true")
    assert json.loads(sent[1]["body"])["error"]["code"] == "engine_error"


def test_headers_that_steer_ray_serve_are_dropped() -> None:
    headers = [
        (b"x-request-disconnect-disabled", b"?1"),
        (b"serve_multiplexed_model_id", b"a"),
        (b"serve-multiplexed-model-id", b"a"),
        (b"x-request-id", b"bad id"),
        (b"authorization", b"Bearer k"),
    ]
    _, scope = asyncio.run(through_edge(replies(200, b"a/b", b""), headers=headers))
    assert scope["headers"] == [(b"authorization", b"Bearer k")]
    _, scope = asyncio.run(through_edge(replies(200, b"a/b", b""), headers=[(b"x-request-id", b"good")]))
    assert scope["headers"] == [(b"x-request-id", b"good")]


def test_a_route_that_an_app_has_just_left_says_to_come_again() -> None:
    gone = False
    found = replies(200, b"application/json", b"{}", headers=[(b"content-length", b"2")])
    missing = replies(404, b"text/plain; charset=utf-8", b"Path not found")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not gone and scope["path"].startswith("/llm"):
            scope["root_path"] = "/llm"  # as Serve does
        await (found if scope.get("root_path") else missing)(scope, receive, send)

    async def status(edge: Edge, path: str) -> tuple[int, dict[bytes, bytes]]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request"}

        await edge({"type": "http", "method": "GET", "path": path, "headers": []}, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"])

    async def run() -> None:
        nonlocal gone
        edge = Edge(app)
        assert (await status(edge, "/llm/v1/models"))[0] == 200
        gone = True
        late, headers = await status(edge, "/llm/v1/chat/completions")
        assert (late, headers[b"retry-after"]) == (503, b"5")
        assert (await status(edge, "/llmx"))[0] == 404
        assert (await status(Edge(app), "/llm/v1/models"))[0] == 404  # nothing was ever there

    asyncio.run(run())


def test_serves_own_routes_pass() -> None:
    app = replies(503, b"text/plain", b"draining")
    sent, _ = asyncio.run(through_edge(app, path="/-/healthz"))
    assert sent[1]["body"] == b"draining"


def test_a_full_connection_is_news_to_the_replica() -> None:
    connection = LimitedConnection.__new__(LimitedConnection)
    connection.transport = SimpleNamespace(get_extra_info={"sslcontext": "TLS"}.get)  # type: ignore[assignment]
    received: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(3):
            received.append((await receive())["type"])
            assert connection.on_full is not None
            connection.on_full(len(received) == 1)
        received.append((await receive())["type"])

    _, scope = asyncio.run(through_edge(app, **{SCOPE_KEY: connection}))
    assert received == ["http.request", "lockstep.pause", "lockstep.resume", "lockstep.resume"]
    assert connection.on_full is None
    assert SCOPE_KEY not in scope
    assert scope["headers"] == []  # no offer of a socket whose bytes are not the client's
