"""A rank that dies or stops: the group is rebuilt around the others, and streams go on as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import torch

from cluster.messages.engine import Finished, FinishReason, SamplingParams
from cluster.ranks.liveness import RankClock
from cluster.ranks.rank_actor import RankActor, RankLoad
from cluster.ranks.recovery import Recovery, reason_never
from cluster.serve.running_engine import RunningEngine
from configs.errors import ConfigError, DeadlineError, EngineError, LockstepError, RankDiedError, RankLostError
from configs.load import parse_engine_config
from parallel.persistent_memory import PersistentMemory
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.odd_ranks import use_ranks
from tests.helpers.served_group import ServedGroup, Streamed, served_group
from tests.helpers.streams import chunks_of
from tests.whole.test_failure import complete, end_of, processes, running, until
from worker.protocol import StepFrame
from worker.step.pending_step import PendingStep

LOG = logging.getLogger(__name__)
WORDS = "The lock of the canal holds water, the boat waits, and the keeper of the gate counts his steps. "
BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 1, "seed": 2, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 3},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1, "seed": 4, "structured_outputs": {"regex": "([a-z]{2,9} ){20,}[a-z]+\\."}},
    {"temperature": 1, "seed": 5, "n": 3, "max_tokens": 48},
    {"temperature": 1, "seed": 6, "stop": ["the", "and"], "min_tokens": 40, "top_k": 50},
    {"temperature": 0, "prompt": 6 * WORDS, "logit_bias": {"260": -5}, "logprobs": 1},
]
"""Of eight streams: greedy, sampled, with penalties and logprobs, guided, of three answers, with stop strings."""
LONG = SamplingParams(max_tokens=60_000, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=600, ignore_eos=True, seed=7, frequency_penalty=0.1)
"""Of an answer that takes 600 steps of a millisecond each."""
PROMPT = np.arange(5, 10, dtype=np.int32).tobytes()
NOTHING: frozenset[tuple[int, int]] = frozenset()


def judge(max_rebuilds: int = 3, now: Callable[[], float] = lambda: 0.0) -> Recovery:
    return Recovery(max_rebuilds, clock=now)


def test_a_budget_of_rebuilds_comes_back_after_ten_minutes() -> None:
    times = iter([0.0, 10.0, 599.0, 601.0, 605.0])
    recovery = judge(2, lambda: next(times))
    killed = RankLostError("rank 1 died")
    reasons = [recovery.reason_against(killed, frozenset({(1, 5)})) for _ in range(5)]
    assert [reason is None for reason in reasons] == [True, True, False, True, False]
    assert "recovery.max_rebuilds=2" in str(reasons[2])


def test_rebuilds_count_only_until_the_group_samples_a_token() -> None:
    recovery, killed = judge(2), RankLostError("rank 1 died")
    num_tokens = [0, 0, 1, 1, 2, 3, 4, 5, 5, 5]
    reasons = [recovery.reason_against(killed, NOTHING, number) for number in num_tokens]
    assert [reason is None for reason in reasons] == [*[True] * 9, False]
    assert "max_rebuilds=2 times without a token" in str(reasons[-1])


def test_what_fails_twice_at_the_same_place_is_not_tried_a_third_time() -> None:
    def failures(*lost: set[tuple[int, int]], errors: list[LockstepError]) -> list[bool]:
        recovery = judge(9)
        return [
            recovery.reason_against(error, frozenset(about)) is None for error, about in zip(errors, lost, strict=True)
        ]

    bug, other = RankDiedError("rank 1 failed: ZeroDivisionError"), RankDiedError("rank 1 failed: KeyError")
    assert failures({(7, 20), (8, 30)}, {(7, 20), (9, 4)}, errors=[bug, bug]) == [True, False]
    assert failures({(7, 20)}, {(7, 21)}, errors=[bug, bug]) == [True, True]  # it got a token in between
    assert failures({(7, 20)}, {(7, 20)}, {(7, 20)}, errors=[bug, other, bug]) == [True, True, True]
    assert failures({(7, 20)}, {(7, 20)}, errors=[DeadlineError("late"), DeadlineError("late")]) == [True, False]
    # A kill says nothing of a request.
    assert failures({(7, 20)}, {(7, 20)}, errors=[RankLostError("rank 1 died"), RankLostError("rank 1 died")])[1]
    assert judge().reason_against(ConfigError("wrong"), NOTHING) == "it would fail again"


@pytest.mark.parametrize(
    ("changes", "one_node", "reason"),
    [
        ({}, True, None),
        ({}, False, "several nodes"),
        ({"device": "cuda"}, True, None),
        ({"device": "cuda", "tensor_parallel_size": 2}, True, None),
        ({"recovery": {"max_rebuilds": 0}}, True, "max_rebuilds=0"),
    ],
)
def test_what_can_never_be_rebuilt(changes: dict[str, Any], one_node: bool, reason: str | None) -> None:
    never = reason_never(parse_engine_config({"model": "m", "device": "cpu", **changes}), one_node=one_node)
    assert (never is None) if reason is None else (reason in str(never))


def drawn(path: Path) -> list[int]:
    """The whole answer of the model at `path`, by one rank in this process."""
    group = LocalGroup(path, 1, 64)
    try:
        [tokens] = group.generate([(np.frombuffer(PROMPT, np.int32).tolist(), DRAWN)], Limits(64), at_once=True).tokens
    finally:
        group.close()
    return tokens


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[int]:
    return drawn(tiny_path)


def no_matter(num_tokens: int) -> None:
    """Does nothing with the number of tokens."""


async def answer(engine: RunningEngine, on_token: Callable[[int], None] = no_matter) -> tuple[list[int], Finished]:
    """As `whole_answer`; fails with the request's error if it ended in one."""
    tokens, finished = await whole_answer(engine, on_token)
    assert finished.error is None, finished
    return tokens, finished


async def whole_answer(
    engine: RunningEngine, on_token: Callable[[int], None] = no_matter
) -> tuple[list[int], Finished]:
    """An answer to PROMPT, and how it ended; `on_token` is told how many tokens there are."""
    [stream] = engine.client.submit([PROMPT], [[DRAWN]])
    tokens: list[int] = []
    async for chunk in chunks_of(stream):
        tokens += chunk.token_ids
        on_token(len(tokens))
    assert chunk.finished is not None
    return tokens, chunk.finished


@pytest.mark.ray
def test_an_answer_goes_on_after_a_kill_and_a_stop(ray_cluster: None, tiny_path: Path, expected: list[int]) -> None:
    async def main() -> None:
        # A token resets the count of rebuilds.
        async with running(tiny_path, recovery={"max_rebuilds": 1}) as engine:
            for rank, fault in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
                pids = (await status(engine))["pids"]
                tokens, after = await answer_struck(engine, rank, fault)
                assert tokens == expected
                assert after[rank] != pids[rank]
                assert after[1 - rank] == pids[1 - rank]
            assert (await status(engine))["num_rebuilds"] == 2
            assert (latest := engine.client.board.latest) is not None
            assert latest.num_rebuilds == 2
            # Of two times 200 tokens and more only what the last page had is computed again.
            assert latest.scheduler.total_prefix_hit_tokens > 400 - 2 * 64

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.slow
def test_what_a_rank_that_crashed_had_computed_is_computed_again(
    ray_cluster: None, tiny_path: Path, expected: list[int]
) -> None:
    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 2}) as engine:
            tokens, _ = await answer_struck(engine, 1, signal.SIGSEGV)
            assert tokens == expected
            assert (latest := engine.client.board.latest) is not None
            assert latest.scheduler.total_prefix_hit_tokens == 0

    asyncio.run(main())


def keeper_of(pid: int) -> str:
    """The address of the keeper in the process `pid`."""
    words = Path("/proc/net/unix").read_text().split()
    [name] = {word for word in words if word.startswith(f"@lockstep-persistent-{pid}-")}
    return "\0" + name[1:]


@pytest.mark.ray
@pytest.mark.slow
def test_weights_that_something_wrote_to_are_read_again(
    ray_cluster: None, tiny_path: Path, expected: list[int]
) -> None:
    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 4}) as engine:
            pids = (await status(engine))["pids"]
            kept = PersistentMemory(keeper_of(engine.facts.pid), 1, torch.device("cpu")).find("layer 0")
            assert kept is not None
            kept.memory[0] ^= 1
            os.kill(pids[1], signal.SIGKILL)
            tokens, _ = await answer(engine)
            assert tokens == expected
            after = await status(engine)
            assert after["num_rebuilds"] == 1
            assert after["pids"][0] == pids[0]

    asyncio.run(main())


async def answer_struck(engine: RunningEngine, rank: int, fault: signal.Signals) -> tuple[list[int], dict[int, int]]:
    """An answer in whose midst `rank` is struck, and the ranks' processes after it."""
    before = await status(engine)
    hit = False

    def strike(count: int) -> None:
        nonlocal hit
        if count > 200 and not hit:
            hit = True
            os.kill(before["pids"][rank], fault)

    tokens, finished = await answer(engine, strike)
    assert hit
    assert finished.reason is FinishReason.LENGTH
    async with asyncio.timeout(60):
        # Where this process was held up, the engine may have given the last token before the strike.
        while (after := await status(engine))["num_rebuilds"] == before["num_rebuilds"]:  # noqa: ASYNC110 -- in another process
            await asyncio.sleep(0.05)
    return tokens, after["pids"]


async def spare(engine: RunningEngine) -> int:
    """The process of the one spare, once it is warm."""
    while not (pids := (await status(engine))["spare_pids"]):  # noqa: ASYNC110 -- in another process
        await asyncio.sleep(0.05)
    [pid] = pids
    return int(pid)


@pytest.mark.ray
@pytest.mark.slow
def test_a_warm_spare_takes_the_place_of_a_rank_that_dies(
    ray_cluster: None, tiny_path: Path, expected: list[int]
) -> None:
    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 3, "warm_spares": 1}) as engine:
            first = await spare(engine)
            tokens, pids = await answer_struck(engine, 1, signal.SIGKILL)
            assert tokens == expected
            assert pids[1] == first
            # One that has died itself is passed over.
            second = await spare(engine)
            assert second != first
            os.kill(second, signal.SIGKILL)
            tokens, pids = await answer_struck(engine, 0, signal.SIGSTOP)
            assert tokens == expected
            assert second not in pids.values()
            assert pids[1] == first
            assert await spare(engine) not in pids.values()

    asyncio.run(main())


async def status(engine: RunningEngine) -> dict[str, Any]:
    found: dict[str, Any] = await engine.coordinator.status.remote()
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_struck_during_a_rebuild_is_replaced_too_and_the_process_that_starts_is_used(
    ray_cluster: None, tiny_path: Path, expected: list[int], fault: signal.Signals
) -> None:
    async def main() -> None:
        async with running(tiny_path, tensor_parallel_size=3, recovery={"max_rebuilds": 4}) as engine:
            before = (await status(engine))["pids"]
            others = set(processes("Rank"))  # of other engines too
            begun = asyncio.Event()
            answering = asyncio.create_task(answer(engine, lambda _: begun.set()))
            await asyncio.wait_for(begun.wait(), 30)
            os.kill(before[0], signal.SIGKILL)
            while (await status(engine))["state"] != "rebuilding":  # noqa: ASYNC110 -- in another process
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # the process that replaces the first one is starting now
            os.kill(before[1], fault)
            started: set[int] = set()
            is_over = False
            while not is_over:
                is_over = answering.done()  # and a look after it: this process may have been held up
                with contextlib.suppress(psutil.NoSuchProcess):
                    found = {pid for pid, it in processes("Rank").items() if "raylet" in it.parent().name()}
                    started |= found - others
                await asyncio.sleep(0.02)
            assert answering.result()[0] == expected
            assert len(started) == 2
            after = (await status(engine))["pids"]
            assert [after[rank] == before[rank] for rank in range(3)] == [False, False, True]

    asyncio.run(main())


class UnableRank(RankActor):
    """A first rank 0 whose device is stuck once the group failed. One that takes a place must not load as the first
    ranks do together."""

    def leave(self) -> None:
        if self._spec.rank == 0 and self._spec.device is None:
            raise EngineError("cuda:0 is not idle after 3 s")
        super().leave()

    def load(self) -> RankLoad:
        assert self._spec.device is None
        return super().load()


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_that_cannot_leave_is_replaced_with_the_one_that_died(
    ray_cluster: None, tiny_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranks(monkeypatch, UnableRank)

    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 2}) as engine:
            before = (await status(engine))["pids"]
            tokens, after = await answer_struck(engine, 1, signal.SIGKILL)
            assert tokens == expected
            assert not set(before.values()) & set(after.values())
            assert (await status(engine))["num_rebuilds"] == 1

    asyncio.run(main())


class GoneRank(RankActor):
    """A rank 1 of three whose device is gone once it has died."""

    def join(self, store_at: int | str, generation: int, one_node: bool) -> int:
        if self._spec.rank == 1 and self._spec.config.tensor_parallel_size == 3 and generation > 1:
            raise RuntimeError("CUDA error: no such device")
        return super().join(store_at, generation, one_node)


@pytest.mark.ray
@pytest.mark.slow
def test_a_group_whose_device_is_gone_goes_on_with_fewer_ranks(
    ray_cluster: None, tiny_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranks(monkeypatch, GoneRank)
    recovery = {"max_rebuilds": 3, "min_ranks": 2}

    async def main() -> None:
        async with running(tiny_path, recovery=recovery, tensor_parallel_size=3) as engine:
            tokens, pids = await answer_struck(engine, 1, signal.SIGKILL)
            assert tokens == expected
            assert sorted(pids) == [0, 1]
            assert (await answer(engine))[0] == expected

    asyncio.run(main())


class PoisonedRank(RankActor):
    """A rank 1 with a bug in every step that computes a token at position 20."""

    def run(self) -> None:
        worker = self._ready()
        launch = worker.launch

        def faulty(frame: StepFrame) -> PendingStep:
            if self._spec.rank == 1 and len(frame.rows) and (frame.starts + frame.lens).max() > 20:
                raise ZeroDivisionError("a bug in what this request needs")
            return launch(frame)

        worker.launch = faulty  # type: ignore[method-assign]
        super().run()


@pytest.mark.ray
@pytest.mark.slow
def test_a_request_that_fails_its_step_again_ends_the_group_after_one_rebuild(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranks(monkeypatch, PoisonedRank)

    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 9}) as engine:
            tokens, finished = await whole_answer(engine)
            assert finished.error == "rank 1 failed: ZeroDivisionError: a bug in what this request needs"
            assert 5 + len(tokens) in (20, 21)
            assert engine.client.board.latest is not None
            assert engine.client.board.latest.num_rebuilds == 1

    asyncio.run(main())


class HangingRank(RankActor):
    """A rank 1 whose thread waits for ever at position 200, or computes; not when it computes the token again."""

    waits = True

    def run(self) -> None:
        worker = self._ready()
        launch = worker.launch

        def hanging(frame: StepFrame) -> PendingStep:
            if self._spec.rank == 1 and len(frame.rows) and frame.starts.max() == 200 and frame.generation == 1:
                if self.waits:
                    threading.Event().wait()
                while True:
                    pass
            return launch(frame)

        worker.launch = hanging  # type: ignore[method-assign]
        super().run()


class LoopingRank(HangingRank):
    """One that computes for ever."""

    waits = False


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", [HangingRank, pytest.param(LoopingRank, marks=pytest.mark.exhaustive)])
def test_a_rank_that_hangs_is_replaced_while_busy_ones_are_not(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RankActor]
) -> None:
    use_ranks(monkeypatch, kind)
    recovery = {"max_rebuilds": 1, "warm_spares": 1, "hang_timeout_s": 1.0}

    async def main() -> None:
        async with running(tiny_path, recovery=recovery) as engine:
            with burning(3 * (os.cpu_count() or 1)):
                [stream] = engine.client.submit([PROMPT], [[SamplingParams(max_tokens=60, ignore_eos=True)]])
                assert (await end_of(stream)).error is None
                assert (await status(engine))["num_rebuilds"] == 0
            await spare(engine)
            before = (await status(engine))["pids"]
            times = [time.monotonic()]
            tokens, _ = await answer(engine, lambda _: times.append(time.monotonic()))
            assert len(tokens) == 600
            pause = max(after - before for before, after in itertools.pairwise(times))
            LOG.info("a pause of %.1f s", pause)
            assert pause < 10  # one second, three steps, two for the others to leave, and the rebuild
            after = (await status(engine))["pids"]
            assert after[0] == before[0]
            assert after[1] != before[1]
            assert (await answer(engine))[0] == tokens

    asyncio.run(main())


@contextlib.contextmanager
def burning(count: int) -> Iterator[list[int]]:
    """Process ids of as many others, each of which takes all of a core that it gets."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [burner.pid for burner in burners]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize(
    ("code", "others", "least", "most"),
    [
        ("import time; time.sleep(60)", 0, 0.9, 1.01),
        ("while True: pass", 0, 0.3, 1.01),  # other programs run here too
        ("while True: pass", 8 * (os.cpu_count() or 1), 0.0, 0.4),
    ],
    ids=["waits", "computes", "is kept from computing"],
)
def test_the_clock_of_a_rank_runs_while_it_can(code: str, others: int, least: float, most: float) -> None:
    with burning(others), subprocess.Popen([sys.executable, "-c", code]) as process:
        clock = RankClock()
        time.sleep(0.5)  # it starts
        share = -1.0
        for _ in range(5):  # until the machine does not stand still meanwhile
            clock.restart()
            began = time.monotonic()
            shown = clock.look([process.pid])
            while time.monotonic() < began + 2:
                time.sleep(0.2)
                shown = clock.look([process.pid])
            share = shown / (time.monotonic() - began)
            if least <= share <= most:
                break
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.1)
        clock.restart()
        clock.look([process.pid])
        time.sleep(0.3)
        assert clock.look([process.pid]) == 0, "a stopped process"
        process.kill()
    assert least <= share <= most


def test_looks_at_the_threads_of_ranks_intern_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    interned: list[str] = []
    monkeypatch.setattr(sys, "intern", lambda text: interned.append(text) or text)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            clock = RankClock()
            asyncio.run(until(lambda: clock.look([process.pid]) > 0, 10, "a look at a process that waits"))
        finally:
            process.kill()
    assert str(process.pid) not in interned


def test_the_clock_of_ranks_stands_while_one_compiles_a_kernel_and_another_waits_for_it() -> None:
    pytest.importorskip("triton", reason="a CPU install has no Triton")
    compiles = (
        "import time; from triton import knobs; from worker.step.preparing import mark_compilations, preparing\n"
        "mark_compilations()\n"
        "with preparing():\n"
        "    knobs.runtime.jit_cache_hook(key='')\n"
        "    knobs.runtime.jit_post_compile_hook(key='')\n"
        "    print('prepares', flush=True); input()\n"
        "knobs.runtime.jit_cache_hook(key='')\n"
        "print('compiles', flush=True); input()\n"
        "knobs.runtime.jit_post_compile_hook(key='')\n"
        "print('waits', flush=True); input()\n"
    )

    def runs(seconds: float) -> bool:
        """Whether the clock advances within that time."""
        clock, began = RankClock(), time.monotonic()
        clock.look(pids)
        while time.monotonic() < began + seconds:
            time.sleep(0.2)
            if clock.look(pids) > 0:
                return True
        return False

    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with burning(1) as spinning, subprocess.Popen([sys.executable, "-c", compiles], **pipes) as process:
        pids = [process.pid, *spinning]
        for says, stands in (("prepares", True), ("compiles", True), ("waits", False)):
            assert process.stdout.readline().strip() == says
            assert runs(0.2 if stands else 10) != stands, says  # others may keep the spinning one from computing
            print(file=process.stdin, flush=True)


async def streams(group: ServedGroup, bodies: list[dict[str, Any]]) -> list[Streamed]:
    return await asyncio.gather(*(group.stream(body) for body in bodies))


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_eight_streams_of_three_ranks_go_on_through_kills_and_a_stop(ray_cluster: None, smollm2_path: Path) -> None:
    async def main() -> None:
        changes = {"tensor_parallel_size": 3, "recovery": {"max_rebuilds": 1}}  # a token resets the count
        async with served_group(smollm2_path, "recovery", **changes) as group:
            expected = await streams(group, BODIES)
            assert all(len(it.reasons) == len(it.texts) > 0 for it in expected)
            group.engine.client.flush_cache()
            streaming = asyncio.create_task(streams(group, BODIES))
            await asyncio.sleep(0.5)
            random_ = random.Random(0)
            faults = [await group.strike(fault, random_) for fault in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)]
            got = await streaming
            for body, one, other in zip(BODIES, expected, got, strict=True):
                assert other.answer == one.answer, body
            pauses = [pause for fault in faults for it in got if (pause := it.pause_between(*fault)) is not None]
            LOG.info("pauses of streams: median %.1f s, most %.1f s", statistics.median(pauses), max(pauses))
            status = await group.status()
            assert (status["num_rebuilds"], status["state"]) == (3, "running")
            assert status["num_running"] == status["num_waiting"] == status["num_owned_pages"] == 0

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.slow
def test_a_served_replica_stays_when_its_rank_is_killed(endpoint: Any) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            replicas = set(processes("ServeReplica:shared"))
            # The answer of one request, so that a float's last bit does not decide between two tokens.
            fields = {"max_tokens": 150, "temperature": 0.0}
            expected = (await complete(client, endpoint, **fields)).json()["choices"]
            whole = asyncio.create_task(complete(client, endpoint, **fields))
            while (await asyncio.to_thread(endpoint.status))["num_running"] == 0:
                assert not whole.done(), "nobody saw the request run"
            os.kill(max(processes("Rank")), signal.SIGKILL)
            seen = set()
            while not whole.done():
                health, ready = [await client.get(f"{endpoint.url}{path}") for path in ("/health", "/ready")]
                assert health.status_code == 200
                seen.add((health.json()["state"], ready.status_code))
                await asyncio.sleep(0.2)
            assert {("running", 200), ("rebuilding", 503)} <= seen
            reply = await whole
            assert (await client.get(f"{endpoint.url}/ready")).status_code == 200
            assert reply.status_code == 200
            assert reply.json()["choices"] == expected
            assert set(processes("ServeReplica:shared")) == replicas
            metrics = (await client.get(f"{endpoint.url}/metrics")).text
            assert re.search(r"^lockstep_rebuilds_total\{.*\} 1(\.0)?$", metrics, re.MULTILINE)
        endpoint.wait_idle()

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ServeReplica:shared", pytest.param("Coordinator", marks=pytest.mark.exhaustive)])
def test_a_replica_of_which_a_process_is_stopped_is_replaced(endpoint: Any, name: str) -> None:
    """Without anyone who ends them, Ray Serve notices a stopped replica after three checks of ten seconds each."""

    async def main() -> None:
        old = set(processes("ServeReplica:shared", "Coordinator", "Rank"))
        [pid] = processes(name)
        struck = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        ended = await until(lambda: not old & set(processes("ray::")), 20, "the group ends")
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await complete(client, endpoint, max_tokens=4, temperature=0.0)
            while reply.status_code == 503:
                await asyncio.sleep(0.5)
                reply = await complete(client, endpoint, max_tokens=4, temperature=0.0)
        assert reply.status_code == 200
        LOG.info("%s: ended after %.1f s, an answer after %.1f s", name, ended, time.monotonic() - struck)

    asyncio.run(main())
    endpoint.wait_idle()
