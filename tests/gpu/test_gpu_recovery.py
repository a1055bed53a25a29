"""A rank on a GPU that dies or stops, behind Ray: every answer is what it would have been. Random weights.

    python -m pytest tests/gpu/test_gpu_recovery.py

By itself: Ray starts here with the GPUs of the machine, or with two of one where SHARE_GPUS is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from cluster.messages.engine import FinishReason, SamplingParams
from cluster.ranks.rank_actor import Location, RankActor
from cluster.serve.placement import group_bundles
from cluster.serve.running_engine import RunningEngine, describe
from configs.load import parse_engine_config
from configs.read_config import read_model_config
from tests.conftest import SHARE_GPUS
from tests.helpers.gpu_engine import write_shape
from tests.helpers.odd_ranks import use_ranks
from tests.helpers.streams import chunks_of
from worker.protocol import StepFrame
from worker.step.pending_step import PendingStep

LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
NUM_STREAMS = 16
NUM_TOKENS = 300

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


class SharingRank(RankActor):
    """A rank that may have to share its GPU. NCCL refuses two ranks on one GPU of a host, so each says that its host is
    another, and they talk over TCP."""

    def where(self) -> Location:
        import torch

        location = super().where()
        index, num_gpus = int(location.device.removeprefix("cuda:")), torch.cuda.device_count()
        if num_gpus < self._spec.config.tensor_parallel_size:
            os.environ.update(NCCL_HOSTID=f"rank{self._spec.rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        return replace(location, device=f"cuda:{index % num_gpus}")


class HangingRank(SharingRank):
    """A rank that compiles a kernel for some seconds in its first step, and whose device hangs in step HANGS_AT; those
    that take a place do neither."""

    HANGS_AT = 1

    def run(self) -> None:
        from tests.helpers.slow_kernel import compile_slowly

        worker = self._ready()
        launch = worker.launch

        def hanging(frame: StepFrame) -> PendingStep:
            import torch

            if frame.step == 1:
                LOG.warning("compiled for %.1f s", compile_slowly())
            if frame.step == self.HANGS_AT:
                torch.cuda._sleep(1 << 62)
            return launch(frame)

        if self._spec.room_bytes == 0:
            worker.launch = hanging  # type: ignore[method-assign]
        super().run()


class LaterHangingRank(HangingRank):
    """One that hangs when it is known what steps take."""

    HANGS_AT = 200


class CrampedRank(SharingRank):
    """A rank whose device has no memory for a step of more than 600 prompt tokens."""

    def run(self) -> None:
        worker = self._ready()
        launch = worker.launch

        def cramped(frame: StepFrame) -> PendingStep:
            import torch

            if len(frame.token_ids) > 600:
                torch.empty(1 << 46, dtype=torch.uint8, device=worker.device)
            return launch(frame)

        worker.launch = cramped  # type: ignore[method-assign]
        super().run()


@pytest.fixture(scope="module")
def gpu_cluster() -> Iterator[None]:
    """A cluster with GPUs: the run's own has none."""
    if ray.is_initialized():
        pytest.skip("Ray runs already, without GPUs; run this file by itself")
    import torch

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    num_gpus = max(torch.cuda.device_count(), 2 if SHARE_GPUS in os.environ else 0)
    ray.init(address="local", num_cpus=8, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shape"))


@asynccontextmanager
async def running(shape: Path, size: int, strategy: str, spares: int) -> AsyncIterator[RunningEngine]:
    """A group of `size` ranks with graphs."""
    from ray.util.placement_group import placement_group, remove_placement_group

    config = parse_engine_config(
        {
            "model": str(shape),
            "load_format": "dummy",
            "device": "cuda",
            "numerics": "exact",
            "tensor_parallel_size": size,
            "parallel": {"all_reduce": strategy},
            "kv_cache": {"num_tokens": 32768},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 1024},
            "recovery": {"max_rebuilds": 9, "warm_spares": spares},
        }
    )
    group = placement_group(group_bundles(config, gpus=True))
    try:
        engine = await RunningEngine.start(describe(config, gpus=True), group, f"test-gpu-{time.monotonic_ns()}")
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        remove_placement_group(group)


async def status(engine: RunningEngine) -> dict[str, Any]:
    found: dict[str, Any] = await engine.coordinator.status.remote()
    return found


class Streams:
    """Sixteen at once, every other one greedy, of prompts of up to 120 tokens."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self.num_tokens = 0
        self.last = time.monotonic()
        """When one of them last got a token."""
        self.pause_s = 0.0
        """The longest time in which none of them got a token."""

    async def run(self) -> list[list[int]]:
        return await asyncio.gather(*map(self._stream, range(NUM_STREAMS)))

    async def _stream(self, index: int) -> list[int]:
        prompt = np.random.default_rng(index).integers(0, 150_000, 8 * index + 1, np.int32)
        sampling: dict[str, Any] = {"temperature": 0.0} if index % 2 else {"temperature": 1.0, "seed": index}
        if index % 4 == 0:
            sampling |= {"frequency_penalty": 0.3, "top_p": 0.9, "num_logprobs": 2}
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
        [stream] = self._engine.client.submit([prompt.tobytes()], [[params]])
        tokens: list[int] = []
        async for chunk in chunks_of(stream):
            now = time.monotonic()
            self.last, self.pause_s = now, max(self.pause_s, now - self.last)
            tokens += chunk.token_ids
            self.num_tokens += len(chunk.token_ids)
        assert chunk.finished is not None
        assert (chunk.finished.reason, chunk.finished.error) == (FinishReason.LENGTH, None)
        return tokens

    async def struck(self, rank: int, fault: signal.Signals) -> list[list[int]]:
        """What they bring when `rank` is struck once a third of it is there."""
        pid = (await status(self._engine))["pids"][rank]
        running = asyncio.create_task(self.run())
        while self.num_tokens < NUM_STREAMS * NUM_TOKENS // 3:
            assert not running.done()
            await asyncio.sleep(0.002)
        os.kill(pid, fault)
        return await running


CASES = [
    pytest.param(1, "auto", 0, marks=pytest.mark.gpu, id="tp1"),
    pytest.param(1, "auto", 1, marks=pytest.mark.gpu, id="tp1-spare"),
    pytest.param(2, "nccl", 0, marks=pytest.mark.multi_gpu, id="tp2-nccl"),
    pytest.param(2, "nccl", 1, marks=pytest.mark.multi_gpu, id="tp2-nccl-spare"),
    pytest.param(2, "symmetric_memory", 1, marks=pytest.mark.multi_gpu, id="tp2-symmetric-spare"),
]


@pytest.mark.parametrize(("size", "strategy", "spares"), CASES)
def test_answers_are_the_same_when_ranks_are_killed_and_stopped(
    gpu_cluster: None, shape: Path, monkeypatch: pytest.MonkeyPatch, size: int, strategy: str, spares: int
) -> None:
    import torch

    if torch.cuda.device_count() < size and (strategy == "symmetric_memory" or SHARE_GPUS not in os.environ):
        pytest.skip("the ranks need GPUs of their own")
    use_ranks(monkeypatch, SharingRank)

    async def main() -> None:
        async with running(shape, size, strategy, spares) as engine:
            expected = await Streams(engine).run()
            assert len({tuple(tokens) for tokens in expected}) == NUM_STREAMS
            assert await Streams(engine).run() == expected, "without any fault"
            faults = [(rank, fault) for rank in range(size) for fault in (signal.SIGKILL, signal.SIGSTOP)]
            for count, (rank, fault) in enumerate(faults, start=1):
                while len((await status(engine))["spare_pids"]) < spares:  # noqa: ASYNC110 -- in another process
                    await asyncio.sleep(0.1)
                before = (await status(engine))["pids"]
                streams = Streams(engine)
                tokens = await streams.struck(rank, fault)
                after = await status(engine)
                survived = [other for other in before if after["pids"][other] == before[other]]
                LOG.warning("%s of rank %d: %.2f s, survivors %s", fault.name, rank, streams.pause_s, survived)
                assert tokens == expected
                assert after["num_rebuilds"] == count
                assert survived == [other for other in before if other != rank]

    asyncio.run(main())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HangingRank, LaterHangingRank])
def test_a_device_that_hangs_is_found_within_seconds_and_one_that_compiles_is_left_alone(
    gpu_cluster: None, shape: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RankActor]
) -> None:
    use_ranks(monkeypatch, kind)

    async def main() -> None:
        async with running(shape, 1, "auto", 0) as engine:
            streams = Streams(engine)
            began = time.monotonic()
            running_streams = asyncio.create_task(streams.run())
            while (await status(engine))["state"] != "rebuilding":
                assert not running_streams.done()
                await asyncio.sleep(0.01)
            # The time since the last token, or of the first step, in which the kernel is compiled as well.
            silent_s = time.monotonic() - (streams.last if streams.num_tokens else began)
            LOG.warning("found after %.2f s, %d tokens", silent_s, streams.num_tokens)
            assert silent_s < (2.5 if streams.num_tokens else 15)
            tokens = await running_streams
            assert (await status(engine))["num_rebuilds"] == 1
            assert await Streams(engine).run() == tokens

    asyncio.run(main())


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("sizes", "strategy", "spares"),
    [((1, 2, 1, 2), "nccl", 0), ((2, 1, 2), "nccl", 1), ((1, 2, 1), "auto", 0)],
    ids=["grow", "shrink", "symmetric"],
)
def test_answers_are_the_same_while_the_number_of_ranks_changes(
    gpu_cluster: None,
    shape: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    strategy: str,
    spares: int,
) -> None:
    import torch

    if strategy == "auto" and torch.cuda.device_count() < max(sizes):
        pytest.skip("symmetric memory needs a GPU for each rank")
    use_ranks(monkeypatch, SharingRank)

    async def main() -> None:
        async with running(shape, sizes[0], strategy, spares) as engine:
            expected = await Streams(engine).run()
            for size in sizes[1:]:
                resizing = asyncio.create_task(engine.resize(size))
                rounds = 0
                while not resizing.done():
                    assert await Streams(engine).run() == expected
                    rounds += 1
                LOG.warning("%d ranks after %d rounds: a pause of %.2f s", size, rounds, (await resizing).pause_s)
                now = await status(engine)
                assert (sorted(now["pids"]), now["num_rebuilds"]) == (list(range(size)), 0)
                assert await Streams(engine).run() == expected
            if strategy == "nccl":
                # The rank of a GPU that was added is replaced as the others are.
                assert await Streams(engine).struck(sizes[-1] - 1, signal.SIGKILL) == expected

    asyncio.run(main())


@pytest.mark.parametrize(("size", "strategy", "spares"), [CASES[0], CASES[4]])
def test_a_group_that_sleeps_leaves_its_gpus_and_answers_the_same_when_it_wakes_up(
    gpu_cluster: None, shape: Path, monkeypatch: pytest.MonkeyPatch, size: int, strategy: str, spares: int
) -> None:
    import torch

    if strategy == "symmetric_memory" and torch.cuda.device_count() < size:
        pytest.skip("symmetric memory needs a GPU for each rank")
    use_ranks(monkeypatch, SharingRank)

    def free_bytes() -> list[int]:
        return [torch.cuda.mem_get_info(device)[0] for device in range(size)]

    async def main() -> None:
        async with running(shape, size, strategy, spares) as engine:
            expected = await Streams(engine).run()
            streams = Streams(engine)
            begun = asyncio.create_task(streams.run())
            while streams.num_tokens < NUM_STREAMS * NUM_TOKENS // 3:
                assert not begun.done()
                await asyncio.sleep(0.002)
            awake = free_bytes()
            slept_s = await engine.sleep()
            asleep = free_bytes()
            woke_s = await engine.sleep(wakes=True)
            LOG.warning("asleep after %.2f s, woke in %.2f s, free %s then %s", slept_s, woke_s, awake, asleep)
            assert await begun == expected
            assert (await status(engine))["num_rebuilds"] == 0
            # The shape has 0.4 GB of weights and 0.5 GB of KV.
            assert all(later - earlier > 8e8 / size for earlier, later in zip(awake, asleep, strict=True))
            assert await Streams(engine).struck(size - 1, signal.SIGKILL) == expected

    asyncio.run(main())


@pytest.mark.gpu
def test_a_device_that_is_out_of_memory_in_a_step_gets_smaller_steps_and_the_answer_is_the_same(
    gpu_cluster: None, shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(engine: RunningEngine) -> list[int]:
        prompt = np.random.default_rng(0).integers(0, 150_000, 900, np.int32)
        [stream] = engine.client.submit([prompt.tobytes()], [[SamplingParams(max_tokens=40, ignore_eos=True, seed=1)]])
        tokens: list[int] = []
        async for chunk in chunks_of(stream):
            tokens += chunk.token_ids
        assert chunk.finished is not None
        assert (chunk.finished.reason, chunk.finished.error) == (FinishReason.LENGTH, None)
        return tokens

    async def main() -> None:
        async with running(shape, 1, "auto", 0) as engine:
            expected = await answer(engine)
        use_ranks(monkeypatch, CrampedRank)
        async with running(shape, 1, "auto", 0) as engine:
            for _ in range(2):
                assert await answer(engine) == expected
                assert (await status(engine))["num_rebuilds"] == 1
                engine.client.flush_cache()

    asyncio.run(main())


@pytest.mark.parametrize(("size", "strategy", "spares"), [CASES[0], CASES[2]])
def test_a_trainer_on_the_same_gpus_hands_its_weights_over(
    gpu_cluster: None, shape: Path, monkeypatch: pytest.MonkeyPatch, size: int, strategy: str, spares: int
) -> None:
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    from worker.weights.dummy_weights import DummyCheckpoint

    use_ranks(monkeypatch, SharingRank)
    model = read_model_config(shape)
    trained = {it.name: torch.empty(it.shape, dtype=torch.bfloat16, device="cuda") for it in model.tensors()}
    for name, tensor in trained.items():
        DummyCheckpoint(model, "trained").read(name, tensor)
    torch.cuda.synchronize()

    async def main() -> None:
        async with running(shape, size, strategy, spares) as engine:
            first = await Streams(engine).run()
            changed = await engine.update_weights(str(shape), revision="trained")
            LOG.info("from files: %s", changed)
            expected = await Streams(engine).run()
            assert expected != first
            await engine.update_weights(str(shape))
            assert await Streams(engine).run() == first
            names = list(trained)
            for part, is_last in ((names[:9], False), (names[9:], True)):
                given = [ray.put({name: reduce_tensor(trained[name]) for name in part})]
                changed = await engine.update_weights(tensors=given, version="trained", last=is_last)
            LOG.info("from a trainer: %s", changed)
            assert await Streams(engine).run() == expected

    asyncio.run(main())
