"""What a failure does to a running group: every request ends with its cause, every process of the group ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import cluster.engine
import cluster.rank_group
from cluster.actors import RankActor
from cluster.coordinator_actor import CoordinatorActor, EngineFacts
from cluster.engine import RunningEngine, describe
from cluster.engine_client import RequestStream
from cluster.messages import Finished, FinishReason, SamplingParams
from cluster.placement import group_bundles
from configs.errors import CheckpointError, DeadlineError, EngineError, LockstepError, RankDiedError
from configs.load import parse_engine_config
from configs.model_config import read_model_config
from worker.weights import expected_shapes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

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


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose steps take a millisecond and whose requests, CONTEXT tokens long, take minutes."""
    path = tmp_path_factory.mktemp("tiny")
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


def rank_processes() -> set[int]:
    """Processes of this run's cluster that are a rank or a coordinator."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if any(word in process.name() for word in ("Rank", "Coordinator"))
    }


async def until(done: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `done`."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() < began + timeout_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


@asynccontextmanager
async def running(path: Path, **changes: Any) -> AsyncIterator[RunningEngine]:
    """A group of two ranks; at the end it must leave nothing behind, whatever became of it."""
    from ray.util.placement_group import placement_group, remove_placement_group

    shm = set(os.listdir("/dev/shm"))
    config = parse_engine_config(
        {
            "model": str(path),
            "device": "cpu",
            "tensor_parallel_size": 2,
            "kv_cache": {"num_tokens": CONTEXT},
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
            assert time.monotonic() < began + 5, "closing took long"
        await until(lambda: not any(map(psutil.pid_exists, pids(engine.facts))), 5, "the group's processes are gone")
        assert set(os.listdir("/dev/shm")) <= shm
    finally:
        remove_placement_group(group)


def submit(engine: RunningEngine, count: int = 1) -> list[RequestStream]:
    params = SamplingParams(max_tokens=CONTEXT - 8, ignore_eos=True)
    return engine.client.submit(np.arange(5, 10, dtype=np.int32).tobytes(), [params] * count)


async def end_of(stream: RequestStream) -> Finished:
    async for chunk in stream:
        if chunk.finished is not None:
            return chunk.finished
    raise AssertionError("the stream ended without saying how")


async def ends_after(engine: RunningEngine, fail: Callable[[], None], timeout_s: float) -> tuple[list[Finished], float]:
    """How three requests ended that were running when `fail` was called, and how long that took."""
    streams = submit(engine, 3)
    for stream in streams:
        await asyncio.wait_for(anext(stream), 30)
    began = time.monotonic()
    fail()
    ends = await asyncio.wait_for(asyncio.gather(*map(end_of, streams)), timeout_s)
    took = time.monotonic() - began
    LOG.info("requests ended after %.3f s: %s", took, ends[0].error)
    # The connection ends after the requests: from then on none is taken.
    await asyncio.wait_for(engine.client.wait_closed(), 5)
    with pytest.raises(EngineError):
        submit(engine)
    assert engine.failure is not None
    return ends, took


async def cause(engine: RunningEngine) -> LockstepError:
    """What the engine gives as its failure once the coordinator's call has ended."""
    await until(lambda: "connection" not in str(engine.failure), 5, "the engine says why it failed")
    assert engine.failure is not None
    return engine.failure


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_every_request_with_its_name_and_the_group_with_it(
    ray_cluster: None, tiny_path: Path, victim: int
) -> None:
    async def main() -> None:
        async with running(tiny_path) as engine:
            pid = engine.facts.locations[victim].pid
            ends, took = await ends_after(engine, lambda: os.kill(pid, signal.SIGKILL), 5)
            assert took < 2
            for end in ends:
                assert end.reason is FinishReason.ERROR
                assert end.error_code == "engine_error"
                assert end.error is not None
                assert end.error.startswith(f"rank {victim} died: ")
            assert isinstance(error := await cause(engine), RankDiedError)
            assert str(error) == ends[0].error
            # Ended by the coordinator itself, before anybody closes the engine.
            ranks = [location.pid for location in engine.facts.locations]
            await until(lambda: not any(map(psutil.pid_exists, ranks)), 5, "the surviving rank ends")

    asyncio.run(main())


def test_a_hung_rank_ends_every_request_at_the_step_deadline(ray_cluster: None, tiny_path: Path) -> None:
    async def main() -> None:
        async with running(tiny_path, parallel={"step_timeout_s": 2.0}) as engine:
            pid = engine.facts.locations[1].pid
            ends, took = await ends_after(engine, lambda: os.kill(pid, signal.SIGSTOP), 10)
            assert took >= 2
            assert isinstance(await cause(engine), DeadlineError)
            for end in ends:
                assert end.error is not None
                assert "rank 1" in end.error
                assert "parallel.step_timeout_s=2" in end.error

    asyncio.run(main())


class FaultyRank(RankActor):
    """A rank 1 with a bug in its tenth step."""

    def run(self) -> None:
        worker = self._ready()
        step, count = worker.step, 0

        def faulty(frame: Any) -> Any:
            nonlocal count
            count += 1
            if count == 10:
                raise ZeroDivisionError("a bug in this very step")
            return step(frame)

        if self._spec.rank == 1:
            worker.step = faulty  # type: ignore[method-assign]
        super().run()


class FaultyCoordinator(CoordinatorActor):
    """A coordinator that starts faulty ranks."""

    def start(self, placement_group: Any) -> EngineFacts:
        cluster.rank_group.RankActor = FaultyRank  # type: ignore[misc]
        return super().start(placement_group)


def test_a_rank_that_raises_ends_every_request_with_its_own_words(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(tiny_path) as engine:
            [stream] = submit(engine)
            end = await asyncio.wait_for(end_of(stream), 10)
            assert end.error == "rank 1 failed: ZeroDivisionError: a bug in this very step"

    monkeypatch.setattr(cluster.engine, "CoordinatorActor", FaultyCoordinator)
    asyncio.run(main())


def test_a_killed_coordinator_ends_every_request_and_the_ranks(ray_cluster: None, tiny_path: Path) -> None:
    async def main() -> None:
        async with running(tiny_path) as engine:
            pid = coordinator_pid(engine.facts)
            ends, took = await ends_after(engine, lambda: os.kill(pid, signal.SIGKILL), 5)
            assert took < 2
            assert {end.error_code for end in ends} == {"engine_error"}
            assert "coordinator died" in str(await cause(engine))
            gone = await until(lambda: not any(map(psutil.pid_exists, pids(engine.facts))), 5, "the ranks end")
            LOG.info("ranks gone after %.3f s", gone)
            await engine.close()  # and once more at the end of `running`

    asyncio.run(main())


@pytest.mark.parametrize(("damage", "words"), [("missing", "model.norm.weight"), ("cut", "model.safetensors")])
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
        await until(lambda: rank_processes() <= before, 5, "the ranks end")

    asyncio.run(main())


class DyingRank(RankActor):
    """A rank 1 whose process ends while it loads."""

    def load(self) -> Any:
        if self._spec.rank == 1:
            os._exit(1)
        return super().load()


class DyingCoordinator(CoordinatorActor):
    """A coordinator that starts dying ranks."""

    def start(self, placement_group: Any) -> EngineFacts:
        cluster.rank_group.RankActor = DyingRank  # type: ignore[misc]
        return super().start(placement_group)


def test_a_rank_that_dies_while_loading_ends_the_start_at_once(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        before = rank_processes()
        began = time.monotonic()
        with pytest.raises(RankDiedError, match="rank 1 died: "):
            async with running(tiny_path):
                raise AssertionError("it started")
        assert time.monotonic() < began + 30
        await until(lambda: rank_processes() <= before, 5, "the ranks end")

    monkeypatch.setattr(cluster.engine, "CoordinatorActor", DyingCoordinator)
    asyncio.run(main())
