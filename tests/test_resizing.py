"""Another number of ranks while requests run: streams go on as if nothing had been; one that fails costs no request."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cluster.engine
from cluster.actors import RankActor
from cluster.commands.resize import resize_all
from cluster.coordinator_actor import CoordinatorActor, EngineFacts
from configs.errors import ConfigError, EngineError
from tests.served_group import served_group
from tests.test_failure import running, write_tiny
from tests.test_recovery import BODIES, answer, status, streams

LOG = logging.getLogger(__name__)

LONG_BODIES = [{"max_tokens": 320, "ignore_eos": True, **body} for body in BODIES]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of tests/test_failure.py."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_goes_on_with_more_and_with_fewer_ranks(ray_cluster: None, tiny_path: Path) -> None:
    async def main() -> None:
        async with running(tiny_path, tensor_parallel_size=1, recovery={"max_rebuilds": 2}) as engine:
            expected, _ = await answer(engine)
            answering = asyncio.create_task(answer(engine))
            await asyncio.sleep(0.1)
            old = set((await status(engine))["pids"].values())
            for size in (2, 1):
                resized = await engine.resize(size)
                assert resized.size == size
                assert 0 < resized.pause_s < 20
                pids = (await status(engine))["pids"]
                assert sorted(pids) == list(range(size))
                assert not old & set(pids.values())
                old = set(pids.values())
                assert (await answer(engine))[0] == expected
            assert (await answering)[0] == expected
            with pytest.raises(ConfigError, match="tensor_parallel_size=1000"):
                await engine.resize(1000)
            assert (await engine.resize(1)).pause_s == 0

    asyncio.run(main())


class FragileRank(RankActor):
    """A rank whose process is killed when it is to have a KV pool, as rank 1 of three."""

    def allocate(self, num_pages: int, max_model_len: int, num_window_pages: int | None) -> None:
        if self._spec.rank == 1 and self._spec.config.tensor_parallel_size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().allocate(num_pages, max_model_len, num_window_pages)


class FragileCoordinator(CoordinatorActor):
    """A coordinator that starts such ranks."""

    def start(self, placement_group: Any) -> EngineFacts:
        pytest.MonkeyPatch().setattr("cluster.rank_group.RankActor", FragileRank)
        return super().start(placement_group)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ranks_there_were_go_on_when_a_new_one_dies(
    ray_cluster: None, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.engine, "CoordinatorActor", FragileCoordinator)

    async def main() -> None:
        async with running(tiny_path, recovery={"max_rebuilds": 1}) as engine:
            expected, _ = await answer(engine)
            before = (await status(engine))["pids"]
            answers = [asyncio.create_task(answer(engine)) for _ in range(3)]
            await asyncio.sleep(0.1)
            with pytest.raises(EngineError, match=r"tensor_parallel_size stays 2, requests waited .* rank 1 died"):
                await engine.resize(3)
            assert [tokens for tokens, _ in await asyncio.gather(*answers)] == 3 * [expected]
            after = await status(engine)
            assert (after["pids"], after["state"], after["num_rebuilds"]) == (before, "running", 0)
            # Whoever went back may still be rebuilt, and resized.
            os.kill(before[1], signal.SIGKILL)
            assert (await answer(engine))[0] == expected
            assert (await engine.resize(1)).size == 1
            assert (await answer(engine))[0] == expected

    asyncio.run(main())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_streams_go_through_one_two_three_and_two_ranks(ray_cluster: None, smollm2_path: Path) -> None:
    async def main() -> None:
        async with served_group(smollm2_path, "resizing:1", tensor_parallel_size=1) as group:
            expected = await streams(group, LONG_BODIES)
            assert all(len(it.reasons) == len(it.texts) > 0 for it in expected)
            group.engine.client.flush_cache()
            streaming = asyncio.create_task(streams(group, LONG_BODIES))
            await group.after_steps(3)
            pauses = []
            for size in (2, 3, 2):
                if size == 3:  # as the command does it
                    told = Console(file=io.StringIO(), width=200)
                    await asyncio.to_thread(resize_all, size, "resizing", told)
                    assert re.fullmatch(r"resizing:1: 3 ranks, requests waited \d+\.\d\d s\n", told.file.getvalue())
                else:
                    pauses.append((await group.engine.resize(size)).pause_s)
                info = (await group.http.get("/server_info")).json()["engine"]
                assert info["tensor_parallel_size"] == size
                assert (await group.status())["num_running"] + (await group.status())["num_waiting"] > 0
            got = await streaming
            for body, one, other in zip(LONG_BODIES, expected, got, strict=True):
                assert other.answer == one.answer, body
            LOG.info("pauses: %s", ", ".join(f"{pause:.2f} s" for pause in pauses))
            status = await group.status()
            assert (status["num_rebuilds"], status["state"]) == (0, "running")
            assert status["num_running"] == status["num_waiting"] == status["num_owned_pages"] == 0

    asyncio.run(main())
