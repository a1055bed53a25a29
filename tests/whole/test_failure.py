"""What a failure does to a running group: every request ends with its cause, every process of the group ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

import cluster.serve.running_engine
from cluster.engine.coordinator_actor import EngineFacts
from cluster.messages.engine import Finished, FinishReason, SamplingParams
from cluster.ranks.calls import failure_of, rank_death, watch
from cluster.ranks.rank_actor import RankActor
from cluster.requests.engine_client import RequestStream
from cluster.serve.placement import group_bundles
from cluster.serve.running_engine import RunningEngine, describe
from configs.errors import CheckpointError, DeadlineError, EngineError, LockstepError, RankDiedError
from configs.load import parse_engine_config
from configs.read_config import read_model_config
from tests.helpers.odd_ranks import use_ranks
from tests.helpers.streams import chunks_of, next_chunk
from worker.weights.checkpoint import expected_shapes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

LOG = logging.getLogger(__name__)
CONTEXT = 65536
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "vocab_size": 300,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def write_tiny(path: Path) -> Path:
    """The checkpoint of `tiny_path`, in an empty directory."""
    (path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(read_model_config(path))
    save_file(
        {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()},
        path / "model.safetensors",
    )
    return path


def coordinator_pid(facts: EngineFacts) -> int:
    return int(facts.address.split("-")[1])


def pids(facts: EngineFacts) -> list[int]:
    return [coordinator_pid(facts), *(location.pid for location in facts.locations)]


def processes(*words: str) -> dict[int, psutil.Process]:
    """Processes of this run's cluster that Ray has named by one of `words`."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word in process.name() for word in words):
                found[process.pid] = process
    return found


def rank_processes() -> set[int]:
    return set(processes("Rank", "Coordinator"))


async def until(done: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `done`."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() < began + timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def shared_memory() -> set[str]:
    """What lies in /dev/shm, but for semaphores of multiprocessing: no rank makes them, others here do."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@asynccontextmanager
async def running(path: Path, **changes: Any) -> AsyncIterator[RunningEngine]:
    """A group of two ranks, not to be rebuilt; at the end it must leave nothing behind, whatever became of it."""
    from ray.util.placement_group import placement_group, remove_placement_group

    shm = shared_memory()
    config = parse_engine_config(
        {
            "model": str(path),
            "device": "cpu",
            "tensor_parallel_size": 2,
            "kv_cache": {"num_tokens": CONTEXT},
            "recovery": {"max_rebuilds": 0},
            **changes,
        }
    )
    group = placement_group(group_bundles(config, gpus=False))
    try:
        engine = await RunningEngine.start(describe(config, gpus=False), group, f"test-failure-{time.monotonic_ns()}")
        try:
            yield engine
        finally:
            began = time.monotonic()
            await engine.close()
            assert time.monotonic() < began + 10, "closing took long"
        await until(lambda: not any(map(psutil.pid_exists, pids(engine.facts))), 20, "the group's processes are gone")
        assert shared_memory() <= shm
    finally:
        remove_placement_group(group)


def submit(engine: RunningEngine, count: int = 1) -> list[RequestStream]:
    params = SamplingParams(max_tokens=CONTEXT - 8, ignore_eos=True)
    return engine.client.submit([np.arange(5, 10, dtype=np.int32).tobytes()], [[params] * count])


async def end_of(stream: RequestStream) -> Finished:
    async for chunk in chunks_of(stream):
        if chunk.finished is not None:
            return chunk.finished
    raise AssertionError("the stream ended without saying how")


async def ends_after(engine: RunningEngine, fail: Callable[[], None], timeout_s: float) -> tuple[list[Finished], float]:
    """How three requests ended that were running when `fail` was called, and how long that took."""
    streams = submit(engine, 3)
    for stream in streams:
        await asyncio.wait_for(next_chunk(stream), 30)
    began = time.monotonic()
    fail()
    ends = await asyncio.wait_for(asyncio.gather(*map(end_of, streams)), timeout_s)
    took = time.monotonic() - began
    LOG.info("requests ended after %.3f s: %s", took, ends[0].error)
    # The connection ends after the requests: from then on none is taken.
    await asyncio.wait_for(engine.client.wait_closed(), 20)
    with pytest.raises(EngineError):
        submit(engine)
    assert engine.failure is not None
    return ends, took


async def cause(engine: RunningEngine) -> LockstepError:
    """What the engine gives as its failure once the coordinator's call has ended."""
    await until(lambda: "connection" not in str(engine.failure), 20, "the engine says why it failed")
    assert engine.failure is not None
    return engine.failure


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_killed_rank_ends_every_request_with_its_name_and_the_group_with_it(
    ray_cluster: None, tiny_path: Path, victim: int
) -> None:
    async def main() -> None:
        async with running(tiny_path) as engine:
            pid = engine.facts.locations[victim].pid
            ends, took = await ends_after(engine, lambda: os.kill(pid, signal.SIGKILL), 20)
            assert took < 5  # a machine may stand still for a while; the next deadline is one of 120 s
            for end in ends:
                assert end.reason is FinishReason.ERROR
                assert end.error_code == "engine_error"
                assert end.error is not None
                assert end.error.startswith(f"rank {victim} died: ")
                assert end.public_message is not None
                assert end.public_message.startswith(f"Rank {victim} of 2 died: its process was killed (signal 9")
                assert end.public_message.endswith("send the request again.")
            assert isinstance(error := await cause(engine), RankDiedError)
            assert str(error) == ends[0].error
            # Ended by the coordinator itself, before anybody closes the engine.
            ranks = [location.pid for location in engine.facts.locations]
            await until(lambda: not any(map(psutil.pid_exists, ranks)), 20, "the surviving rank ends")

    asyncio.run(main())


@pytest.mark.slow
def test_a_hung_rank_ends_every_request_at_the_step_deadline(ray_cluster: None, tiny_path: Path) -> None:
    async def main() -> None:
        # So long that no machine stands still for it while the ranks are well.
        async with running(tiny_path, parallel={"step_timeout_s": 5.0}) as engine:
            pid = engine.facts.locations[1].pid
            ends, took = await ends_after(engine, lambda: os.kill(pid, signal.SIGSTOP), 30)
            assert took >= 4  # the step began earlier
            assert isinstance(await cause(engine), DeadlineError)
            for end in ends:
                assert end.error is not None
                assert "no word from rank 1" in end.error
                assert "parallel.step_timeout_s=5" in end.error

    asyncio.run(main())


class FaultyRank(RankActor):
    """A rank 1 with a bug in its tenth step."""

    def run(self) -> None:
        worker = self._ready()
        step, count = worker.launch, 0

        def faulty(frame: Any) -> Any:
            nonlocal count
            count += 1
            if count == 10:
                raise ZeroDivisionError("a bug in this very step")
            return step(frame)

        if self._spec.rank == 1:
            worker.launch = faulty  # type: ignore[method-assign]
        super().run()


@pytest.mark.slow
def test_a_rank_that_raises_ends_every_request_with_its_own_words(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(tiny_path) as engine:
            [stream] = submit(engine)
            end = await asyncio.wait_for(end_of(stream), 30)
            assert end.error == "rank 1 failed: ZeroDivisionError: a bug in this very step"

    use_ranks(monkeypatch, FaultyRank)
    asyncio.run(main())


@pytest.mark.slow
def test_a_killed_coordinator_ends_every_request_and_the_ranks(ray_cluster: None, tiny_path: Path) -> None:
    async def main() -> None:
        async with running(tiny_path) as engine:
            pid = coordinator_pid(engine.facts)
            ends, took = await ends_after(engine, lambda: os.kill(pid, signal.SIGKILL), 20)
            assert took < 5  # a machine may stand still for a while; the next deadline is one of 120 s
            assert {end.error_code for end in ends} == {"engine_error"}
            assert "coordinator died" in str(await cause(engine))
            gone = await until(lambda: not any(map(psutil.pid_exists, pids(engine.facts))), 20, "the ranks end")
            LOG.info("ranks gone after %.3f s", gone)
            await engine.close()  # and once more at the end of `running`

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(("stall_timeout_s", "words"), [(1.0, "is stopped for longer"), (60.0, "has not reported")])
def test_a_coordinator_that_is_stuck_itself_counts_as_failed(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, stall_timeout_s: float, words: str
) -> None:
    monkeypatch.setattr(cluster.serve.running_engine, "_SILENCE_S", 5.0)

    async def main() -> None:
        recovery = {"max_rebuilds": 0, "stall_timeout_s": stall_timeout_s}
        async with running(tiny_path, recovery=recovery) as engine:
            await asyncio.sleep(6)
            assert engine.failure is None, "an idle one reports all the same"
            pid = coordinator_pid(engine.facts)
            os.kill(pid, signal.SIGSTOP)
            try:
                await until(lambda: words in str(engine.failure), 20, "it is noticed")
            finally:
                os.kill(pid, signal.SIGCONT)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [("missing", "model.norm.weight"), pytest.param("cut", "model.safetensors", marks=pytest.mark.exhaustive)],
)
def test_a_damaged_checkpoint_ends_the_start_at_once_with_its_own_error(
    ray_cluster: None, tiny_path: Path, tmp_path: Path, damage: str, words: str
) -> None:
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if damage == "missing":
        tensors = load_file(tiny_path / "model.safetensors")
        save_file({name: tensor for name, tensor in tensors.items() if name != words}, file)
    else:
        file.write_bytes((tiny_path / "model.safetensors").read_bytes()[:-1000])

    async def main() -> None:
        before = rank_processes()
        with pytest.raises(CheckpointError, match=words) as raised:
            async with running(tmp_path):
                raise AssertionError("it started")
        assert len(str(raised.value)) < 300, raised.value
        await until(lambda: rank_processes() <= before, 20, "the ranks end")

    asyncio.run(main())


class DyingRank(RankActor):
    """A rank 1 whose process the kernel ends while it loads, as it does where the node is out of memory."""

    def load(self) -> Any:
        if self._spec.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load()


@pytest.mark.slow
def test_a_rank_that_dies_while_loading_ends_the_start_at_once(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        before = rank_processes()
        began = time.monotonic()
        with pytest.raises(RankDiedError, match=r"rank 1 died: its process was killed .* out of memory\)"):
            async with running(tiny_path):
                raise AssertionError("it started")
        assert time.monotonic() < began + 90  # the start may take 600 s
        await until(lambda: rank_processes() <= before, 20, "the ranks end")

    use_ranks(monkeypatch, DyingRank)
    asyncio.run(main())


def test_a_watch_over_the_ranks_that_breaks_counts_as_a_failure(ray_cluster: None) -> None:
    nothing: Any = None
    failures: queue.Queue[LockstepError] = queue.Queue()
    watch({0: nothing}, 1, lambda: False, failures.put)
    assert "watching the ranks failed" in str(failures.get(timeout=30))


@pytest.mark.slow
def test_closing_twice_or_before_the_start_is_done_leaves_nothing(ray_cluster: None, tiny_path: Path) -> None:
    async def main() -> None:
        before = rank_processes()
        async with running(tiny_path) as engine:
            [stream] = submit(engine)
            await next_chunk(stream)
            await asyncio.gather(engine.close(), engine.close())
            assert (await end_of(stream)).reason is FinishReason.ERROR
        starting = asyncio.create_task(running(tiny_path).__aenter__())
        await until(lambda: bool(rank_processes() - before), 30, "the coordinator is there")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: rank_processes() <= before, 20, "coordinator and ranks end")

    asyncio.run(main())


async def complete(client: httpx.AsyncClient, endpoint: Any, **fields: Any) -> httpx.Response:
    body = {"model": endpoint.model, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, **fields}
    return await client.post(f"{endpoint.url}/v1/completions", json=body)


@pytest.mark.slow
def test_serve_replaces_a_replica_whose_group_failed(endpoint: Any) -> None:
    async def refused_until_served(client: httpx.AsyncClient) -> None:
        while True:
            with contextlib.suppress(httpx.TransportError):  # the replica ended with the request
                if (reply := await complete(client, endpoint, max_tokens=2)).status_code == 200:
                    return
                assert reply.status_code in (500, 503), reply.text
            await asyncio.sleep(0.05)

    async def main() -> None:
        replica = processes("ServeReplica:shared")
        old = set(replica) | rank_processes()
        async with httpx.AsyncClient(timeout=60) as client:
            streaming = asyncio.create_task(complete(client, endpoint, stream=True))
            whole = asyncio.create_task(complete(client, endpoint))
            await asyncio.sleep(1)
            os.kill(max(processes("Coordinator")), signal.SIGKILL)
            async with asyncio.timeout(20):
                streamed, failed = await streaming, await whole
            last = json.loads(streamed.text.strip().split("\n\n")[-1].removeprefix("data: "))
            for error in (last["error"], failed.json()["error"]):
                assert error["code"] in ("engine_error", "engine_overloaded")
            assert failed.status_code in (500, 503)
            began = time.monotonic()
            # Refused while the failed replica is still there, held by Serve until the next one is.
            async with asyncio.TaskGroup() as clients:
                for _ in range(8):
                    clients.create_task(refused_until_served(client))
            LOG.info("serving again after %.1f s", time.monotonic() - began)

        def left() -> set[int]:
            return old & (set(processes("ServeReplica:shared")) | rank_processes())

        await until(lambda: not left(), 20, "what was there before ends")
        endpoint.wait_idle()

    asyncio.run(main())


@pytest.mark.slow
def test_an_idle_group_uses_no_cpu(endpoint: Any) -> None:
    endpoint.wait_idle()
    group = processes("Rank", "Coordinator")
    assert len(group) == 3

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in group.values())

    time.sleep(1)
    before = used()
    time.sleep(3)
    share = (used() - before) / 3
    LOG.info("coordinator and two ranks use %.1f %% of a core", 100 * share)
    assert share < 0.2  # 0.023 on a machine of two cores; others have cores a quarter as fast


def descriptors(pid: int) -> Counter[str]:
    """What a process has open: files by their names, sockets, pipes and such by their kinds."""
    opened: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            opened[re.sub(r":\[\d+\]", "", os.readlink(fd))] += 1
    return opened


@pytest.mark.slow
def test_two_hundred_aborted_requests_leave_no_file_descriptor(endpoint: Any) -> None:
    group = processes("ServeReplica:shared", "Coordinator", "Rank")
    assert len(group) == 4

    async def abort(count: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:

            async def one() -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await complete(client, endpoint, stream=True)

            for _ in range(count // 20):
                await asyncio.gather(*(one() for _ in range(20)))

    def left(before: dict[int, Counter[str]]) -> dict[int, Counter[str]]:
        """What is open since `before`, where it is more than three."""
        more = {pid: descriptors(pid) - before[pid] for pid in group}
        return {pid: opened for pid, opened in more.items() if opened.total() > 3}

    asyncio.run(abort(20))
    endpoint.wait_idle()
    # Ray's processes connect to one another when they first have something to say, at a moment of
    # their own, and once: what requests leave behind, every round of them leaves.
    for _ in range(3):
        before = {pid: descriptors(pid) for pid in group}
        asyncio.run(abort(200))
        endpoint.wait_idle()
        # A closed connection of the proxy's pool may take a moment.
        deadline = time.monotonic() + 5
        while (more := left(before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not more:
            break
        LOG.info("open since: %s", more)
    assert not more


def test_a_failed_call_names_its_own_rank_where_not_all_ranks_were_called(ray_cluster: None) -> None:
    @ray.remote(num_cpus=0)
    def fetch(rank: int) -> None:
        if rank == 3:
            raise ZeroDivisionError("no weights in /tmp")

    calls = {1: fetch.remote(1), 3: fetch.remote(3)}
    ray.wait(list(calls.values()), num_returns=2, timeout=60)
    error = failure_of(calls, 4)
    assert isinstance(error, RankDiedError)
    assert str(error) == "rank 3 failed: ZeroDivisionError: no weights in /tmp"
    assert error.public_message is not None
    assert error.public_message.startswith("Rank 3 of 4 failed")
    assert "/tmp" not in error.public_message


@pytest.mark.parametrize(
    ("ray_says", "told"),
    [
        (
            "ip: 192.0.2.2\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
            "its process was killed (signal 9",
        ),
        ("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: on 192.0.2.2", "the node was out of memory"),
        ("The actor died because its node has died. Node Id: 5be1 ip: 192.0.2.2", "its node was lost"),
        ("The actor is temporarily unavailable: rpc error to 192.0.2.2", "Ray lost its process"),
    ],
)
def test_a_ranks_death_is_told_without_addresses(ray_says: str, told: str) -> None:
    death = rank_death(ray_says)
    assert told in death
    assert "192.0.2.2" not in death
