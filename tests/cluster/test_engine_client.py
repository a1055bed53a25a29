"""The engine client against a scripted coordinator on a real unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cluster.messages.engine import (
    Abort,
    EngineToCoordinator,
    Finished,
    FinishReason,
    Prefilled,
    PromptLogprobs,
    SamplingParams,
    StepOutput,
    Submit,
    Terms,
    TokenLogprobs,
)
from cluster.requests.engine_client import EngineClient, wait_ready
from configs.errors import DeadlineError, EngineError
from parallel.sockets import pack_frame, read_frame
from tests.helpers.streams import chunks_of, next_chunk

PROMPT = array("i", [1, 2, 3]).tobytes()
PARAMS = SamplingParams(max_tokens=8)


class ScriptedCoordinator:
    """Records what the client sends; the test sends the steps."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[Submit | Abort] = asyncio.Queue()
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        decoder = msgspec.msgpack.Decoder(EngineToCoordinator)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self.received.put_nowait(decoder.decode(await read_frame(reader)))
        writer.close()

    def step(
        self,
        tokens: list[tuple[int, int]],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[PromptLogprobs] | None = None,
        prefilled: list[Prefilled] | None = None,
        finished: list[Finished] | None = None,
    ) -> None:
        output = StepOutput(
            ids=b"".join(struct.pack("<q", id_) for id_, _ in tokens),
            tokens=b"".join(struct.pack("<i", token) for _, token in tokens),
            logprobs=logprobs or [],
            prompt_logprobs=prompt_logprobs or [],
            prefilled=prefilled or [],
            finished=finished or [],
        )
        assert self.writer is not None
        self.writer.write(pack_frame(msgspec.msgpack.encode(output)))


Scenario = Callable[[EngineClient, ScriptedCoordinator], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[EngineClient, ScriptedCoordinator]]:
    coordinator = ScriptedCoordinator()
    server = await asyncio.start_unix_server(coordinator.serve, path)
    client = await EngineClient.connect(str(path))
    try:
        yield client, coordinator
    finally:
        await client.close()
        server.close()


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with a connected pair, at most ten seconds."""

    async def with_pair(scenario: Scenario) -> None:
        async with asyncio.timeout(10), connected(tmp_path / "engine.sock") as (client, coordinator):
            await scenario(client, coordinator)

    return lambda scenario: asyncio.run(with_pair(scenario))


def test_each_choice_gets_its_own_id_and_the_prompt_arrives_unchanged(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        streams = client.submit([PROMPT], [[PARAMS, PARAMS]])
        submit = await coordinator.received.get()
        assert isinstance(submit, Submit)
        assert [request.id for request in submit.requests()] == [stream.id for stream in streams] == [1, 2]
        assert [request.prompt for request in submit.requests()] == [PROMPT, PROMPT]
        assert client.num_open == 2

    run(scenario)


def test_what_the_sequences_of_one_request_share_is_sent_once(run: Callable[[Scenario], None]) -> None:
    prompts = [bytes(range(256)) * 500, bytes(4)]
    common = {"top_p": 0.5, "grammar": "g" * 10_000, "logit_bias": tuple((i, 0.25) for i in range(1000))}
    params = [
        [
            SamplingParams(max_tokens=8 + prompt, seed=seed, prompt_logprobs=-1 if seed else 2, **common)  # type: ignore[arg-type]
            for seed in range(64)
        ]
        for prompt in range(2)
    ]

    terms = Terms(level=2, priority=3, client="who", cache_salt=b"salt", deadline_s=9.0)

    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        streams = client.submit(prompts, params, terms)
        submit = await coordinator.received.get()
        assert isinstance(submit, Submit)
        assert len(msgspec.msgpack.encode(submit)) < len(prompts[0]) + 35_000
        requests = submit.requests()
        assert [request.id for request in requests] == [stream.id for stream in streams]
        assert [request.prompt for request in requests] == 64 * [prompts[0]] + 64 * [prompts[1]]
        assert [request.sampling for request in requests] == [*params[0], *params[1]]
        assert {request.terms for request in requests} == {terms}

    run(scenario)


def test_parameters_that_differ_arrive_as_they_were_sent(run: Callable[[Scenario], None]) -> None:
    params = [[PARAMS, SamplingParams(max_tokens=8, top_k=3)], [SamplingParams(max_tokens=8, top_k=3, seed=-(2**63))]]

    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        client.submit([PROMPT, PROMPT], params)
        submit = await coordinator.received.get()
        assert isinstance(submit, Submit)
        assert [request.sampling for request in submit.requests()] == [*params[0], *params[1]]

    run(scenario)


def test_tokens_of_several_steps_come_in_one_chunk_to_a_slow_reader(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        one, two = client.submit([PROMPT], [[PARAMS, PARAMS]])
        await coordinator.received.get()
        coordinator.step([(1, 10), (2, 20)], prefilled=[Prefilled(1, 16, 0.5, 0.25), Prefilled(2, 0)])
        coordinator.step([(2, 21), (1, 11)])
        coordinator.step([(1, 12)], finished=[Finished(id=1, reason=FinishReason.STOP, stop_token_id=12)])
        await wait_ready([two])
        await asyncio.sleep(0.05)
        chunks = [chunk async for chunk in chunks_of(one)]
        assert len(chunks) == 1
        assert chunks[0].token_ids == [10, 11, 12]
        assert one.prefilled == Prefilled(1, 16, queue_s=0.5, prefill_s=0.25)
        assert chunks[0].finished == Finished(id=1, reason=FinishReason.STOP, stop_token_id=12)
        assert chunks[0].logprobs is None
        assert (await next_chunk(two)).token_ids == [20, 21]
        assert client.num_open == 1

    run(scenario)


def test_logprobs_are_nothing_for_the_garbage_collector() -> None:
    row = TokenLogprobs(2, -0.5, np.array([7, 8], "<i4").tobytes(), np.array([-0.25, -np.inf], "<f4").tobytes())
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=TokenLogprobs)
    assert read.top == [(7, -0.25), (8, -np.inf)]
    assert not any(map(gc.is_tracked, (read, read.top_ids, read.top_logprobs)))


def test_logprobs_go_to_the_request_that_asked(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        plain, asked = client.submit([PROMPT], [[PARAMS, SamplingParams(max_tokens=8, num_logprobs=1)]])
        await coordinator.received.get()
        row = TokenLogprobs(2, -0.5, np.int32(7).tobytes(), np.float32(-0.25).tobytes())
        coordinator.step([(1, 10), (2, 20)], logprobs=[row])
        assert (await next_chunk(asked)).logprobs == [row]
        assert (await next_chunk(plain)).logprobs is None

    run(scenario)


@pytest.mark.parametrize("k", [0, 2])
def test_a_prompts_scores_come_whole_and_once_with_the_first_token(run: Callable[[Scenario], None], k: int) -> None:
    def scored(start: int, logprobs: list[float]) -> PromptLogprobs:
        ids, top = np.arange(len(logprobs) * k, dtype=np.int32), np.full(len(logprobs) * k, -start, np.float32)
        return PromptLogprobs(1, start, np.array(logprobs, np.float32).tobytes(), ids.tobytes(), top.tobytes())

    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        params = SamplingParams(max_tokens=8, prompt_logprobs=k)
        stream, alone, plain = client.submit([PROMPT], [[params, params, PARAMS]])
        await coordinator.received.get()
        coordinator.step([], prompt_logprobs=[scored(1, [-1.0, -2.0])])
        coordinator.step([(2, 20), (3, 30)], prompt_logprobs=[scored(3, [-3.0])])
        first = await next_chunk(alone)
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs.top_ids.shape == (0, k), "a prompt of one token has nothing to score"
        assert not stream.ready
        coordinator.step([(1, 10)])
        first = await next_chunk(stream)
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs.logprobs.tolist() == [-1, -2, -3]
        assert first.prompt_logprobs.top_ids.shape == first.prompt_logprobs.top_logprobs.shape == (3, k)
        assert first.prompt_logprobs.top_logprobs.sum(axis=1).tolist() == [-k, -k, -3 * k]
        coordinator.step([(1, 11)])
        assert (await next_chunk(stream)).prompt_logprobs is None
        assert (await next_chunk(plain)).prompt_logprobs is None

    run(scenario)


def test_abort_is_sent_once_and_late_tokens_are_ignored(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        [stream] = client.submit([PROMPT], [[PARAMS]])
        await coordinator.received.get()
        stream.abort()
        stream.abort()
        assert await coordinator.received.get() == Abort([1])
        coordinator.step([(1, 10)])
        await asyncio.sleep(0.05)
        chunks = [chunk async for chunk in chunks_of(stream)]
        assert [chunk.token_ids for chunk in chunks] == [[]]
        assert chunks[0].finished == Finished(id=1, reason=FinishReason.ABORT)
        assert coordinator.received.empty()
        assert client.num_open == 0

    run(scenario)


def test_a_finished_stream_is_not_aborted(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        [stream] = client.submit([PROMPT], [[PARAMS]])
        await coordinator.received.get()
        coordinator.step([(1, 10)], finished=[Finished(id=1, reason=FinishReason.LENGTH)])
        assert [chunk.token_ids async for chunk in chunks_of(stream)] == [[10]]
        stream.abort()
        await asyncio.sleep(0.02)
        assert coordinator.received.empty()

    run(scenario)


def test_a_lost_connection_ends_every_stream_with_an_error(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        streams = client.submit([PROMPT], [[PARAMS, PARAMS]])
        await coordinator.received.get()
        coordinator.step([(1, 10)])
        await wait_ready(streams)
        assert coordinator.writer is not None
        coordinator.writer.close()
        await client.wait_closed()
        for stream, tokens in zip(streams, ([10], []), strict=True):
            chunks = [chunk async for chunk in chunks_of(stream)]
            assert chunks[-1].token_ids == tokens
            assert chunks[-1].finished is not None
            assert chunks[-1].finished.reason is FinishReason.ERROR
            assert chunks[-1].finished.error_code == "engine_error"
        assert (client.connected, client.num_open) == (False, 0)
        assert client.failure is not None
        with pytest.raises(EngineError, match="ended the connection"):
            client.submit([PROMPT], [[PARAMS]])

    run(scenario)


@pytest.mark.parametrize("garbage", [pack_frame(b"\xc1"), b"\xff\xff\xff\xff"])
def test_garbage_on_the_socket_is_a_lost_connection_with_its_reason(
    run: Callable[[Scenario], None], garbage: bytes
) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        [stream] = client.submit([PROMPT], [[PARAMS]])
        await coordinator.received.get()
        assert coordinator.writer is not None
        coordinator.writer.write(garbage)
        chunk = await next_chunk(stream)
        assert chunk.finished is not None
        assert chunk.finished.error is not None
        assert "not a step output" in chunk.finished.error

    run(scenario)


def test_closing_the_client_ends_its_streams(run: Callable[[Scenario], None]) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        [stream] = client.submit([PROMPT], [[PARAMS]])
        await client.close()
        chunk = await next_chunk(stream)
        assert chunk.finished is not None
        assert chunk.finished.reason is FinishReason.ERROR

    run(scenario)


def test_waiting_for_several_streams_ends_at_the_first_token_of_any_or_when_woken(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(client: EngineClient, coordinator: ScriptedCoordinator) -> None:
        streams = client.submit([PROMPT], [[PARAMS] * 3])
        await coordinator.received.get()
        asyncio.get_running_loop().call_later(0.02, streams[2].wake)
        await wait_ready(streams)
        assert not any(stream.ready for stream in streams)
        coordinator.step([(2, 5)])
        await wait_ready(streams)
        assert [stream.ready for stream in streams] == [False, True, False]

    run(scenario)


def test_connecting_to_nobody_ends_at_its_deadline(tmp_path: Path) -> None:
    async def scenario() -> None:
        await EngineClient.connect(str(tmp_path / "nobody"), timeout_s=0.05)

    with pytest.raises(DeadlineError, match=r"within 0\.05 s; see its log"):
        asyncio.run(scenario())
