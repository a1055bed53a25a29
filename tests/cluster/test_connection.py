"""Hostile, slow and leaving clients on real sockets: what they get, and that they hold neither memory nor a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import httpx
import psutil
import pytest

from cluster.http import delivery
from cluster.http.active import ActiveRequests
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import EOS, MODEL, REPLY, Run, Stack, served

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """The next response of a connection, whose length it says."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


def error_in(answer: bytes) -> tuple[int, str]:
    """Status and code of the one response in `answer`."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), json.loads(body)["error"]["code"]


def rss() -> int:
    return psutil.Process().memory_info().rss


def address_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


@pytest.mark.parametrize("declared", [True, False])
def test_a_gigabyte_is_refused_at_its_first_megabytes(run: Run, declared: bool) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url:
            reader, writer = await asyncio.open_connection(*address_of(url))
            before, sent = rss(), 0
            length = b"Content-Length: %d" % (1 << 30) if declared else b"Transfer-Encoding: chunked"
            writer.write(HEAD + length + b"\r\n\r\n")
            answer = asyncio.create_task(read_response(reader))
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


def test_a_client_that_does_not_read_its_socket_loses_its_request(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model, active=ActiveRequests(send_timeout_s=0.3))
        async with served(app) as url:
            reader, writer = await asyncio.open_connection(*address_of(url), limit=1 << 10)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            body = {"model": MODEL, "prompt": "hi", "max_tokens": 7900, "stream": True, "logprobs": 20}
            raw = json.dumps(body).encode()
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(raw), raw))
            await stack.until(lambda: stack.engine.num_open == 1)
            await stack.until(lambda: stack.coordinator.aborted == [1])
            await stack.until(lambda: stack.engine.num_open == 0)
            writer.transport.abort()

    run(scenario, reply=[19556] * 7900, max_model_len=8192, hang_after=7899)


def test_an_event_is_one_line_to_clients_that_end_lines_wherever_unicode_does(run: Run, smollm2: Tokenizer) -> None:
    text = "one\u2028two\u2029three\x85four"

    async def scenario(stack: Stack) -> None:
        async with (
            served(stack.model) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
        ):
            said = [json.loads(line[6:]) async for line in response.aiter_lines() if line.startswith("data: {")]
        assert "".join(it["choices"][0]["delta"].get("content", "") for it in said if it["choices"]) == text

    run(scenario, reply=[*smollm2.encode(text, add_special_tokens=False), EOS])


def test_a_silent_stream_says_that_it_is_alive(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "KEEP_ALIVE_S", 0.05)

    async def scenario(stack: Stack) -> None:
        async with (
            served(stack.model) as url,
            httpx.AsyncClient(base_url=url, trust_env=False) as client,
            client.stream("POST", "/v1/chat/completions", json=CHAT) as response,
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
        async with served(stack.model) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            response = await client.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 200
            first, *_, last = [line for line in response.text.split("\n") if line]
            assert first == ": keep-alive"
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"

    run(scenario, hang_after=0, server=ServerConfig(request_timeout_s=0.3))
