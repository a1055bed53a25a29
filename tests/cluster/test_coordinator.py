"""The coordinator's loop between a real socket and a rank played by a thread that counts upwards."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.engine import coordinator as coordinator_module
from cluster.engine.changes import OtherRanks
from cluster.engine.coordinator import Coordinator
from cluster.messages.engine import EngineStats, Finished, FinishReason, SamplingParams
from cluster.messages.state import EngineState
from cluster.ranks.liveness import LOOK_S, Liveness, RankClock
from cluster.ranks.recovery import Recovery
from cluster.requests.engine_client import EngineClient, RequestStream
from cluster.scheduling.scheduler import Scheduler
from configs.errors import (
    DeadlineError,
    EngineError,
    LockstepError,
    OutOfMemoryError,
    RankDiedError,
    RankLostError,
    StepHungError,
)
from parallel.step_cost import StepCost
from tests.helpers import fake_engine
from tests.helpers.fake_engine import EOS
from tests.helpers.fake_ranks import FakeRanks, Pool
from tests.helpers.streams import chunks_of, next_chunk
from worker.protocol import FrameKind, RowFlag, StepFrame, StepResult, UInt32Array, mask_words

LIMITS = replace(
    fake_engine.LIMITS, max_num_batched_tokens=32, prefill_chunk_size=16, max_model_len=128, vocab_size=1000
)


COST = StepCost(1000, 100, 10, ())


class CountingRank(FakeRanks):
    """A rank whose every token is the row's last one plus 1."""

    def __init__(self, step_s: float = 0.0, cost: StepCost = COST) -> None:
        super().__init__(cost)
        self._frames: queue.Queue[bytes] = queue.Queue()
        self._results: queue.Queue[bytes] = queue.Queue()
        self._reason: str | None = None
        self._step_s = step_s
        self.num_graphs = 0
        """Graphs left to capture."""
        self.closed = threading.Event()
        self.sampled: list[list[int]] = []
        """Tokens of each step."""
        self.kinds: list[FrameKind] = []
        """What it was told to do so far."""
        self.go_on = threading.Event()
        """While it is not set, no step ends."""
        self.go_on.set()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, frame: bytes, timeout_s: float) -> None:
        if self._reason is not None:
            raise EngineError(self._reason)
        self._frames.put(frame)

    def recv(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._reason is not None:
                raise EngineError(self._reason)
            try:
                return self._results.get(timeout=0.01)
            except queue.Empty:
                continue
        raise DeadlineError("no result")

    def fail(self, reason: str) -> None:
        self._reason = reason

    def _run(self) -> None:
        last: dict[int, int] = {}
        while True:
            frame = StepFrame.decode(self._frames.get())
            self.kinds.append(frame.kind)
            if frame.kind is FrameKind.CLOSE:
                self.closed.set()
                return
            if frame.kind is FrameKind.CAPTURE:
                self.num_graphs = max(0, self.num_graphs - 1)
                self._results.put(StepResult(frame.generation, frame.step, np.array([self.num_graphs])).encode())
                continue
            time.sleep(self._step_s)
            self.go_on.wait(30)
            tokens, taken = [], 0
            for row, length, flags in zip(frame.rows, frame.lens, frame.flags, strict=True):
                if flags & RowFlag.HAS_TOKENS:
                    taken += int(length)
                    last[int(row)] = int(frame.token_ids[taken - 1])
                if flags & RowFlag.SAMPLE:
                    last[int(row)] += 1
                    tokens.append(last[int(row)])
            self.sampled.append(tokens)
            self._results.put(StepResult(frame.generation, frame.step, np.array(tokens, np.int32)).encode())


def coordinate(rank: Any, scheduler: Scheduler, **options: Any) -> Coordinator:
    options = {"step_timeout_s": 5.0, "recovery": Recovery(0), "liveness": Liveness(), **options}
    return Coordinator(scheduler, rank, **options)


@contextmanager
def running(
    rank: CountingRank, raises: LockstepError | None = None, scheduler: Scheduler | None = None, **options: Any
) -> Iterator[Coordinator]:
    """A coordinator whose loop, told to close, must end by itself or have raised `raises`."""
    coordinator = coordinate(rank, scheduler or Scheduler(LIMITS), **options)
    with ThreadPoolExecutor(1) as loop:
        ended = loop.submit(coordinator.run)
        try:
            yield coordinator
        finally:  # a test that fails must not wait for the loop
            coordinator.close()
            coordinator.close()
        assert ended.exception(10) is raises


async def read(stream: RequestStream) -> tuple[list[int], Finished | None]:
    tokens: list[int] = []
    finished = None
    async for chunk in chunks_of(stream):
        tokens += chunk.token_ids
        finished = chunk.finished or finished
    return tokens, finished


async def reported(client: EngineClient, condition: Callable[[EngineStats], bool]) -> EngineStats:
    """The first report of which `condition` holds."""
    deadline = time.monotonic() + 10
    while True:
        stats = client.board.latest
        if stats is not None and condition(stats):
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.005)


def prompt(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_tokens_come_back_in_order_and_every_request_ends_once() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        sampling = [SamplingParams(max_tokens=count) for count in (1, 5, 40)]
        streams = [client.submit([prompt(100 + i)], [[params]])[0] for i, params in enumerate(sampling)]
        answers = await asyncio.wait_for(asyncio.gather(*(read(stream) for stream in streams)), 20)
        for i, (tokens, finished) in enumerate(answers):
            assert tokens == list(range(101 + i, 101 + i + sampling[i].max_tokens))
            assert finished is not None
            assert finished.reason is FinishReason.LENGTH
        [stream] = client.submit([prompt(4)], [[SamplingParams(max_tokens=40)]])
        tokens, finished = await asyncio.wait_for(read(stream), 20)
        assert tokens == [5, 6, EOS]
        assert finished is not None
        assert finished.stop_token_id == EOS
        await client.close()

    rank = CountingRank()
    with running(rank) as coordinator:
        asyncio.run(main())
        coordinator.inspect(lambda scheduler: scheduler.check_integrity())
    assert rank.closed.wait(5), "the rank was not told to leave"


def test_graphs_are_captured_while_nobody_waits_and_requests_go_first() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=40)]])
        tokens, _ = await asyncio.wait_for(read(stream), 20)
        assert tokens[-1] == 140
        kinds = list(rank.kinds)
        last = len(kinds) - kinds[::-1].index(FrameKind.STEP)
        running = kinds[kinds.index(FrameKind.STEP) : last]
        assert running == [FrameKind.STEP] * 40, "graphs were captured while a request ran"
        deadline = time.monotonic() + 10
        while coordinator.is_preparing:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert rank.num_graphs == 0
        await client.close()

    rank = CountingRank(step_s=0.005)
    rank.num_graphs = 500
    with running(rank) as coordinator:
        asyncio.run(main())


def test_an_abort_frees_the_pages_and_a_lost_connection_frees_them_all() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        first, second = (client.submit([prompt(100 * i)], [[SamplingParams(max_tokens=100)]])[0] for i in (1, 2))
        await next_chunk(first)
        first.abort()
        await next_chunk(second)
        await client.close()

    with running(CountingRank(step_s=0.01)) as coordinator:
        asyncio.run(main())
        deadline = time.monotonic() + 10
        while coordinator.inspect(lambda scheduler: scheduler.has_work):
            assert time.monotonic() < deadline, "requests of a lost connection go on"
            time.sleep(0.01)
        coordinator.inspect(lambda scheduler: scheduler.check_integrity())
        assert coordinator.inspect(lambda scheduler: scheduler.stats().num_owned_pages) == 0


class SlowGuide:
    """Allows every token, `mask_s` after the last one; then wakes the loop."""

    def __init__(self, mask_s: float) -> None:
        self._mask_s = mask_s
        self._has_mask = False
        self.num_polls = 0
        self.is_finished = False
        self.ahead: list[UInt32Array] = []
        self.wake: Callable[[], None] = lambda: None
        self.accept(())

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._has_mask = False
        threading.Thread(target=self._compute, daemon=True).start()

    def _compute(self) -> None:
        time.sleep(self._mask_s)
        self._has_mask = True
        self.wake()

    def poll(self) -> UInt32Array | None:
        self.num_polls += 1
        return np.full(mask_words(LIMITS.vocab_size), 2**32 - 1, np.uint32) if self._has_mask else None

    def close(self) -> None:
        pass


def test_the_loop_sleeps_until_a_mask_wakes_it() -> None:
    guide = SlowGuide(0.05)

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        began = time.monotonic()
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=4)]])
        tokens, finished = await asyncio.wait_for(read(stream), 10)
        assert (tokens, finished) == ([101, 102, 103, 104], Finished(id=stream.id, reason=FinishReason.LENGTH))
        # Well below the second after which the loop looks by itself, for each of the five masks; with room for a
        # machine that stands still meanwhile.
        assert time.monotonic() - began < 3.5
        await client.close()

    with running(CountingRank(), scheduler=Scheduler(LIMITS, make_guide=lambda _: guide)) as coordinator:
        guide.wake = coordinator.wake
        asyncio.run(main())
    # Once when a mask is there and a few times beside, not all the time.
    assert guide.num_polls < 30


class LateGuide(SlowGuide):
    """Has no mask when it is asked first after a token; has it, and says so, right after."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._has_mask = False

    def poll(self) -> UInt32Array | None:
        mask = super().poll()
        if mask is None:
            self._compute()
        return mask


def test_a_guided_request_beside_others_is_sampled_in_every_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other work may keep the loop from looking for a millisecond.
    monkeypatch.setattr(coordinator_module, "_MASK_WAIT_S", 20 * coordinator_module._MASK_WAIT_S)
    guide = LateGuide()
    guides = iter([None, guide])

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [plain] = client.submit([prompt(100)], [[SamplingParams(max_tokens=100)]])
        await next_chunk(plain)
        [guided] = client.submit([prompt(200)], [[SamplingParams(max_tokens=20)]])
        await asyncio.wait_for(read(guided), 10)
        plain.abort()
        await client.close()
        first, last = ([token in tokens for tokens in rank.sampled].index(True) for token in (201, 220))
        assert last - first == 2 * 19

    rank = CountingRank(0.01)
    scheduler = Scheduler(LIMITS, make_guide=lambda _: next(guides))
    with running(rank, scheduler=scheduler) as coordinator:
        guide.wake = coordinator.wake
        asyncio.run(main())


def test_a_failed_engine_ends_every_request_with_its_reason_and_the_connection_after() -> None:
    error = RankDiedError("rank 1 died: out of luck", public_message="Rank 1 of 2 died.")

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=100)]])
        [waiting] = client.submit([prompt(100)], [[SamplingParams(max_tokens=100)]])
        await next_chunk(stream)
        coordinator.fail(error)
        coordinator.fail(RankDiedError("rank 0 died of the same"))
        for each in (stream, waiting):
            _, finished = await asyncio.wait_for(read(each), 5)
            assert finished is not None
            assert finished.reason is FinishReason.ERROR
            assert finished.error == "rank 1 died: out of luck"
            assert finished.public_message == "Rank 1 of 2 died."
        await asyncio.wait_for(client.wait_closed(), 5)
        with pytest.raises(EngineError, match="ended the connection"):
            client.submit([prompt(100)], [[SamplingParams(max_tokens=100)]])
        await client.close()

    with running(CountingRank(step_s=0.01), raises=error) as coordinator:
        asyncio.run(main())


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle loop that nobody wakes looks by itself much later than any machine stands still."""
    monkeypatch.setattr(coordinator_module, "_IDLE_POLL_S", 15.0)


def test_requests_wait_while_the_group_is_rebuilt_and_go_on_with_the_tokens_they_have(slow_looks: None) -> None:
    begun: list[tuple[int, str]] = []
    ready = threading.Event()

    def rebuild(generation: int, failure: LockstepError) -> CountingRank:
        begun.append((generation, str(failure)))
        if len(begun) == 1:
            raise RankDiedError("rank 0 died too")
        assert ready.wait(10)
        return CountingRank(0.002)

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=60)]])
        [leaving] = client.submit([prompt(300)], [[SamplingParams(max_tokens=60)]])
        first = await next_chunk(stream)
        await next_chunk(leaving)
        coordinator.fail(RankLostError("rank 1 died"))
        await reported(client, lambda stats: stats.state is EngineState.REBUILDING)
        assert coordinator.life.state is EngineState.REBUILDING
        leaving.abort()
        [late] = client.submit([prompt(200)], [[SamplingParams(max_tokens=3)]])
        await reported(client, lambda stats: stats.scheduler.num_waiting == 2)
        began = time.monotonic()
        ready.set()
        second = await asyncio.wait_for(next_chunk(stream), 20)
        assert time.monotonic() - began < 8, "the first step waited for a message"
        tokens, finished = await asyncio.wait_for(read(stream), 20)
        assert first.token_ids + second.token_ids + tokens == list(range(101, 161))
        assert finished is not None
        assert (finished.reason, finished.num_preemptions) == (FinishReason.LENGTH, 1)
        assert (await asyncio.wait_for(read(late), 20))[0] == [201, 202, 203]
        rest = await reported(client, lambda stats: not stats.scheduler.num_running)
        assert (rest.num_rebuilds, rest.state) == (1, EngineState.RUNNING)
        await client.close()

    rank = CountingRank(0.01)
    rank.replace = rebuild
    with running(rank, recovery=Recovery(2)) as coordinator:
        asyncio.run(main())
        coordinator.inspect(lambda scheduler: scheduler.check_integrity())
    assert coordinator.life.state is EngineState.DEAD
    assert begun == [(2, "rank 1 died"), (3, "rank 0 died too")]


def test_requests_wait_while_ranks_are_exchanged_and_lose_no_token(slow_looks: None) -> None:
    begun: list[int] = []
    ready = threading.Event()
    first = CountingRank(0.005)
    second, third = CountingRank(0.002, StepCost(7, 7, 7, ())), CountingRank(0.002)
    second.pool = Pool(48)
    first.size = 2

    def exchange(generation: int, others: CountingRank) -> CountingRank:
        begun.append(generation)
        assert ready.wait(10)
        return others

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=60)]])
        chunk = await next_chunk(stream)
        done = coordinator.change(OtherRanks(second))
        await reported(client, lambda stats: stats.state is EngineState.REBUILDING)
        [late] = client.submit([prompt(200)], [[SamplingParams(max_tokens=3)]])
        await reported(client, lambda stats: stats.scheduler.num_waiting == 2)
        ready.set()
        tokens, finished = await asyncio.wait_for(read(stream), 20)
        assert chunk.token_ids + tokens == list(range(101, 161))
        assert finished is not None
        stats = coordinator.inspect(lambda scheduler: scheduler.stats())
        assert stats.num_free_pages + stats.num_cached_pages + stats.num_owned_pages == 48
        assert coordinator._liveness._share == 0.5
        assert (await asyncio.wait_for(read(late), 20))[0] == [201, 202, 203]
        assert 0 < done.result(5) < 10
        rest = await reported(client, lambda stats: not stats.scheduler.num_running)
        assert (rest.num_rebuilds, rest.state) == (0, EngineState.RUNNING)
        [(begin, end)] = client.telemetry.pauses
        assert 0 < end - begin < 10
        # An idle engine exchanges them at once.
        assert coordinator.change(OtherRanks(third)).result(8) < 8
        await client.close()

    first.replace = second.replace = exchange
    with running(first) as coordinator:
        asyncio.run(main())
        coordinator.inspect(lambda scheduler: scheduler.check_integrity())
    assert begun == [2, 3]
    assert third.closed.wait(5), "the ranks that run were not told to leave"


@pytest.mark.parametrize("failures", [1, 2])
def test_ranks_go_on_where_those_in_their_place_do_not_run_and_are_rebuilt_where_they_do_not_either(
    failures: int,
) -> None:
    begun: list[tuple[int, str]] = []
    first, second = CountingRank(0.005), CountingRank(0.002)

    def exchange(generation: int, how: CountingRank | LockstepError) -> CountingRank:
        begun.append((generation, "" if isinstance(how, CountingRank) else str(how)))
        if len(begun) <= failures:
            raise RankDiedError(f"rank {len(begun)} died")
        return CountingRank(0.002)

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=60)]])
        chunk = await next_chunk(stream)
        words = ["", "tensor_parallel_size stays 1, requests waited .* rank 1 died", "^rank 2 died"][failures]
        with pytest.raises(EngineError, match=words):
            await asyncio.wrap_future(coordinator.change(OtherRanks(second)))
        tokens, _ = await asyncio.wait_for(read(stream), 20)
        assert chunk.token_ids + tokens == list(range(101, 161))
        await client.close()

    first.replace = exchange
    with running(first, recovery=Recovery(failures - 1)) as coordinator:
        asyncio.run(main())
    assert begun == [(2, ""), (2, "rank 1 died"), (3, "rank 2 died")][: failures + 1]
    assert coordinator.num_rebuilds == failures - 1


def test_an_exchange_that_is_awaited_ends_with_the_engine() -> None:
    coordinator = coordinate(CountingRank(), Scheduler(LIMITS))
    coordinator.close()
    done = coordinator.change(OtherRanks(CountingRank()))
    coordinator.run()
    with pytest.raises(EngineError, match="the engine ended"):
        done.result(1)


class StuckRank(CountingRank):
    """Whose steps end, but for one."""

    def __init__(self, step_s: float, hangs_at: int) -> None:
        self._hangs_at = hangs_at
        self.hung_at = 0.0
        super().__init__(step_s)

    def send(self, frame: bytes, timeout_s: float) -> None:
        self._kind = StepFrame.decode(frame).kind
        super().send(frame, timeout_s)

    def recv(self, timeout_s: float) -> bytes:
        if self._kind is FrameKind.STEP and len(self.sampled) >= self._hangs_at:
            self.hung_at = self.hung_at or time.monotonic()
            time.sleep(timeout_s)
            raise EngineError(self._reason) if self._reason is not None else DeadlineError("no result")
        return super().recv(timeout_s)


class CrampedRanks(CountingRank):
    """Ranks whose device has no memory for a step of more than so many prompt tokens."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.coordinator: Coordinator | None = None
        self.refused: list[int] = []
        """Prompt tokens of each step that failed, also on the ranks before."""

    def send(self, frame: bytes, timeout_s: float) -> None:
        num_tokens = len(StepFrame.decode(frame).token_ids)
        if num_tokens <= self._most:
            return super().send(frame, timeout_s)
        assert self.coordinator is not None, "tests set it"
        if self._reason is None:  # two steps are in flight
            self.refused.append(num_tokens)
        return self.coordinator.fail(OutOfMemoryError(f"rank 0: no room for {num_tokens} tokens"))

    def replace_ranks(self, generation: int, how: LockstepError | FakeRanks, kept_pages: Any = None) -> CrampedRanks:
        after = CrampedRanks(self._most)
        after.coordinator, after.refused = self.coordinator, self.refused
        return after


def test_a_device_that_is_out_of_memory_in_a_step_gets_smaller_steps_and_no_request_ends() -> None:
    prompts = [prompt(*range(start, start + 16)) for start in (100, 300, 500)]

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        streams = client.submit(prompts, [[SamplingParams(max_tokens=40)]] * 3)
        for stream, start in zip(streams, (100, 300, 500), strict=True):
            tokens, finished = await asyncio.wait_for(read(stream), 20)
            assert tokens == list(range(start + 16, start + 56))
            assert (finished is not None, finished and finished.error) == (True, None)
        await client.close()

    ranks = CrampedRanks(8)
    with running(ranks, recovery=Recovery(3)) as coordinator:
        ranks.coordinator = coordinator
        asyncio.run(main())
        assert ranks.refused == [32, 16]
        assert coordinator.num_rebuilds == 2


class LookClock(RankClock):
    """A clock of ranks whom nobody keeps from running, on a machine that may stand still: it counts looks."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self.restart()

    def restart(self) -> None:
        self._num_looks = 0

    def look(self, pids: Iterable[int]) -> float:
        self._num_looks += 1
        return self._speed * LOOK_S * self._num_looks


@pytest.mark.parametrize(
    ("hangs_at", "speed", "is_found"),
    [
        (30, 1.0, True),
        pytest.param(30, 0.01, False, marks=pytest.mark.slow),
        (0, 1.0, True),
    ],
    ids=["", "busy", "first"],
)
def test_a_step_that_hangs_is_found_by_what_steps_took_before(hangs_at: int, speed: float, is_found: bool) -> None:
    failures: list[tuple[LockstepError, float]] = []

    def rebuild(generation: int, failure: LockstepError) -> CountingRank:
        failures.append((failure, time.monotonic() - stuck.hung_at))
        return CountingRank(0.002)

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=60)]])
        tokens, _ = await asyncio.wait_for(read(stream), 20)
        assert tokens == list(range(101, 161))
        await client.close()

    liveness = Liveness(hang_timeout_s=0.5, clock=LookClock(speed))
    stuck = StuckRank(0.01, hangs_at)
    stuck.replace = rebuild
    with running(stuck, step_timeout_s=4.0, recovery=Recovery(2), liveness=liveness) as coordinator:
        asyncio.run(main())
    [(failure, after_s)] = failures
    assert isinstance(failure, StepHungError) == is_found
    assert (after_s < 3.9) == is_found


def test_a_group_that_cannot_be_rebuilt_ends_with_why_the_last_attempt_failed() -> None:
    error = RankDiedError("rank 0 died too")

    def rebuild(generation: int, failure: LockstepError) -> CountingRank:
        raise error

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=60)]])
        await next_chunk(stream)
        coordinator.fail(RankLostError("rank 1 died"))
        _, finished = await asyncio.wait_for(read(stream), 5)
        assert finished is not None
        assert finished.error == "rank 0 died too"
        await client.close()

    rank = CountingRank(0.01)
    rank.replace = rebuild
    with running(rank, raises=error, recovery=Recovery(1)) as coordinator:
        asyncio.run(main())


def test_an_idle_engine_that_fails_ends_the_connection(slow_looks: None) -> None:
    error = RankDiedError("rank 1 died: out of luck")

    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        await asyncio.sleep(0.05)
        coordinator.fail(error)
        await asyncio.wait_for(client.wait_closed(), 8)  # before an idle loop looks by itself
        await client.close()

    with running(CountingRank(), raises=error) as coordinator:
        asyncio.run(main())


def test_a_bug_in_the_loop_ends_every_request_and_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=100)]])
        await next_chunk(stream)
        monkeypatch.setattr(coordinator.scheduler, "retire", lambda result: 1 // 0)
        _, finished = await asyncio.wait_for(read(stream), 5)
        assert finished is not None
        assert finished.error is not None
        assert "ZeroDivisionError" in finished.error
        await client.close()

    coordinator = coordinate(CountingRank(0.01), Scheduler(LIMITS))
    with ThreadPoolExecutor(1) as loop:
        ended = loop.submit(coordinator.run)
        asyncio.run(main())
        assert isinstance(ended.exception(10), EngineError)


def test_a_second_connection_is_refused_while_the_first_is_open() -> None:
    async def main() -> None:
        first = await EngineClient.connect(coordinator.address)
        second = await EngineClient.connect(coordinator.address)
        await asyncio.wait_for(second.wait_closed(), 5)
        assert not second.connected
        assert first.connected
        await first.close()
        await second.close()

    with running(CountingRank()) as coordinator:
        asyncio.run(main())


def test_the_figures_of_the_engine_reach_its_client_with_the_tokens_and_when_it_rests() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        streams = [client.submit([prompt(100 + i)], [[SamplingParams(max_tokens=80)]])[0] for i in range(3)]
        busy = await reported(client, lambda stats: stats.scheduler.num_running == 3)
        assert busy.heartbeat_age_s == [0.5]
        for stream in streams:
            await asyncio.wait_for(read(stream), 20)
        rest = await reported(client, lambda stats: (stats.scheduler.num_running, stats.step_age_s) == (0, 0))
        assert client.board.totals.num_generated_tokens == 240
        assert client.board.totals.num_prefill_tokens == 3
        assert client.board.totals.read_bytes == 1000 * coordinator.num_steps
        assert client.board.totals.num_steps == rest.num_steps == coordinator.num_steps
        assert 0 < client.board.steps()["duration_s"].mean() < 0.1
        await client.close()

    rank = CountingRank(step_s=0.005)
    rank.ages = [0.5]
    with running(rank) as coordinator:
        asyncio.run(main())


def test_a_step_that_hangs_is_reported_while_it_lasts_and_asked_about_once() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        began = time.monotonic()
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=1)]])
        for least_s in (0.9, 1.9):
            stats = await reported(client, lambda stats, least_s=least_s: stats.step_age_s > least_s)
            assert stats.step_age_s < time.monotonic() - began
        assert len(rank.stuck_s) == 1
        rank.go_on.set()
        _, finished = await asyncio.wait_for(read(stream), 10)
        assert finished is not None
        assert finished.reason is FinishReason.LENGTH
        await client.close()

    rank = CountingRank()
    rank.go_on.clear()
    with running(rank, step_timeout_s=6.0) as coordinator:
        asyncio.run(main())
    [asked_s] = rank.stuck_s
    assert 1.5 <= asked_s < 6  # a quarter of the timeout, and a machine may stand still


def test_a_step_past_its_deadline_fails_the_engine_and_names_the_setting() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        [stream] = client.submit([prompt(100)], [[SamplingParams(max_tokens=1)]])
        _, finished = await asyncio.wait_for(read(stream), 10)
        assert finished is not None
        assert finished.error == (
            "no result came within parallel.step_timeout_s=0.3; see what holds the ranks up, or raise it"
        )
        await client.close()

    coordinator = coordinate(CountingRank(1.0), Scheduler(LIMITS), step_timeout_s=0.3)
    with ThreadPoolExecutor(1) as loop:
        ended = loop.submit(coordinator.run)
        asyncio.run(main())
        assert isinstance(ended.exception(10), DeadlineError)


def test_ranks_that_can_never_be_replaced_end_the_engine_whatever_its_budget() -> None:
    async def main() -> None:
        client = await EngineClient.connect(coordinator.address)
        coordinator.fail(error)
        await asyncio.wait_for(client.wait_closed(), 5)
        await client.close()

    error, rank = RankLostError("rank 1 died"), CountingRank()
    rank.reason_never = "its weights came from memory"
    with running(rank, raises=error, recovery=Recovery(3)) as coordinator:
        asyncio.run(main())
