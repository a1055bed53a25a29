"""Processes that have no file descriptors left: who is answered, what is logged, and what waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.engine.socket import EngineSocket
from cluster.messages.engine import SamplingParams
from cluster.ranks.recovery import Recovery
from cluster.requests.engine_client import EngineClient
from configs.errors import RankLostError
from parallel.sockets import num_descriptors_left
from tests.cluster.test_coordinator import CountingRank, prompt, read, running
from tests.helpers.scripted_engine import MODEL, Run, Stack, served
from tests.helpers.streams import next_chunk

CALLER = """
import json, socket, sys
body = json.dumps({"model": sys.argv[2], "prompt": "hi", "max_tokens": 2}).encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
head += b"Content-Length: %d\\r\\n\\r\\n"
answers, kept = [], []
sys.stdin.read(1)
for _ in range(150):
    try:
        one = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10)
        kept.append(one)
        one.sendall(head % len(body) + body)
        answer = b""
        while not answer.endswith(b"}") and (part := one.recv(65536)):
            answer += part
        answers.append(answer.decode())
    except OSError as error:
        answers.append(repr(error))
print(json.dumps(answers))
"""


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """A time in which this process may open `count` file descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is on their numbers: those below the highest one have to be taken.
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] + 1 < soft - num_descriptors_left():
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - num_descriptors_left() + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_every_request_is_answered_while_connections_take_up_the_descriptors(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url:
            await stack.complete()
            port = url.rsplit(":", 1)[1]
            pipe = asyncio.subprocess.PIPE
            caller = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CALLER, port, MODEL, stdin=pipe, stdout=pipe
            )
            with descriptors_left(84), caplog.at_level(logging.WARNING, "cluster.http.active"):
                out, _ = await asyncio.wait_for(caller.communicate(b"x"), 60)
            answers: list[str] = json.loads(out)
            kinds = [answer.split("\r\n")[0] for answer in answers]
            assert set(kinds) == {"HTTP/1.1 200 OK", "HTTP/1.1 503 Service Unavailable"}, set(kinds)
            assert 5 <= kinds.count("HTTP/1.1 200 OK") <= 25
            head, body = answers[-1].split("\r\n\r\n")
            assert {"retry-after: 1", "connection: close"} <= set(head.lower().split("\r\n"))
            assert json.loads(body)["error"]["code"] == "engine_overloaded"
            assert (await stack.complete()).status_code == 200

    run(scenario, timeout_s=90)
    [line] = caplog.messages
    assert "file descriptors are left, and more are needed; raise ulimit -n" in line


def test_the_engine_connects_once_a_descriptor_is_there_and_the_coordinator_does_not_spin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = EngineSocket()
    with socket.socket(socket.AF_UNIX) as engine:
        coordinator.start()
        time.sleep(0.1)
        try:
            with descriptors_left(0):
                engine.connect(coordinator.address)
                began = time.process_time()
                time.sleep(1.5)
                assert time.process_time() - began < 0.5
                assert coordinator.peer_pid is None
            deadline = time.monotonic() + 5
            while coordinator.peer_pid is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            coordinator.close()
    assert 1 <= len(caplog.messages) <= 3
    assert "no file descriptor is left" in caplog.messages[0]


def test_a_rebuild_waits_for_descriptors_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[int] = []

    def rebuild(generation: int, failure: Any) -> CountingRank:
        begun.append(num_descriptors_left())
        return CountingRank()

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=60)]])
        first = await next_chunk(stream)
        with descriptors_left(10):
            coordinator.fail(RankLostError("rank 0 died"))
            await asyncio.sleep(1.5)
            assert not begun, "ranks were started without descriptors"
        tokens, _ = await asyncio.wait_for(read(stream), 20)
        assert first.token_ids + tokens == list(range(101, 161))
        await client.close()

    rank = CountingRank(0.01)
    rank.replace = rebuild
    with running(rank, recovery=Recovery(2)) as coordinator:
        asyncio.run(main())
    assert begun[0] >= 32
    assert any("the ranks wait for file descriptors: 10 are left" in line for line in caplog.messages)
