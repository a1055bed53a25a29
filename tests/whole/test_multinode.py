"""A group whose ranks are on two nodes: two raylets of this machine, which to Ray and to us are two nodes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest

from cluster.messages.engine import FinishReason, SamplingParams
from cluster.ranks.host import known_card
from cluster.ranks.rank_actor import Location
from cluster.requests.engine_client import RequestStream
from cluster.serve.placement import group_bundles
from cluster.serve.running_engine import RunningEngine, describe
from configs.cards import Card
from configs.load import parse_engine_config
from tests.helpers.fake_driver import make_driver
from tests.helpers.streams import chunks_of, next_chunk

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

LOG = logging.getLogger(__name__)
PROMPT = np.array([504, 3575, 282, 4649, 314], np.int32).tobytes()

# `ray start` as it joins a cluster, at the first node's loopback address: the cluster of the run has no other.
JOIN = """
from ray._private import services
services.get_node_ip_address = lambda *_: "127.0.0.1"
from ray.scripts.scripts import main
main()
"""


@contextmanager
def another_node(*options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another node in the run's cluster, started with `options` of `ray start` and environment `variables`: its first
    process."""
    import ray

    count = sum(node["Alive"] for node in ray.nodes())
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", JOIN, "start", "--block", "--address", address, "--num-cpus=4", *options]
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1", **variables}
    node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) <= count:
        assert node.poll() is None, "the second node did not start"
        assert time.monotonic() < deadline, "the second node did not join"
        time.sleep(0.2)
    try:
        yield node
    finally:
        mine = processes_of(node)
        node.terminate()
        _, left = psutil.wait_procs(mine, 15)  # it may wait long for the head to answer
        for process in left:
            process.kill()
        node.wait(10)


def processes_of(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    first = psutil.Process(node.pid)
    return [first, *first.children(recursive=True)]


@pytest.fixture(scope="module")
def second_node(ray_cluster: None) -> Iterator[None]:
    """A second node in the run's cluster."""
    with another_node():
        yield


def test_the_gpus_of_another_node_are_asked_on_that_node(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    x9000 = Card("X9000", (13, 1), 300 << 10, 500 << 30)
    make_driver(tmp_path, [x9000])
    with another_node("--num-gpus=1", LD_LIBRARY_PATH=str(tmp_path)):
        assert known_card(ray.nodes()) == x9000


def generate(
    path: Path,
    strategy: str,
    *,
    num_nodes: int,
    kill_rank: int | None = None,
    with_signal: int = signal.SIGKILL,
    lose: Callable[[set[int]], None] | None = None,
    **changes: Any,
) -> list[int]:
    """Greedy tokens of a group of two ranks placed by `strategy`, of which one is struck afterwards or `lose` makes the
    second node unreachable."""
    from ray.util.placement_group import placement_group, remove_placement_group

    config = parse_engine_config(
        {
            "model": str(path),
            "device": "cpu",
            "dtype": "float32",
            "tensor_parallel_size": 2,
            "max_model_len": 1024,
            "kv_cache": {"num_tokens": 2048},
            "placement": {"strategy": strategy},
            **changes,
        }
    )

    async def read(stream: RequestStream) -> tuple[list[int], str | None]:
        tokens: list[int] = []
        async for chunk in chunks_of(stream):
            tokens += chunk.token_ids
            if chunk.finished is not None and chunk.finished.reason is FinishReason.ERROR:
                return tokens, chunk.finished.error
        return tokens, None

    async def use(group: Any) -> tuple[tuple[Location, ...], list[int]]:
        engine = await RunningEngine.start(describe(config, gpus=False), group, f"multinode-{time.monotonic_ns()}")
        try:
            locations = engine.facts.locations
            assert len({location.node_id for location in locations}) == num_nodes
            [stream] = engine.client.submit([PROMPT], [[SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)]])
            tokens, error = await asyncio.wait_for(read(stream), 60)
            assert error is None
            if kill_rank is not None or lose is not None:
                [stream] = engine.client.submit(
                    [PROMPT], [[SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)]]
                )
                await asyncio.wait_for(next_chunk(stream), 30)
                began = time.monotonic()
                if lose is not None:
                    lose({location.pid for location in locations})
                elif kill_rank is not None:
                    os.kill(locations[kill_rank].pid, with_signal)
                _, error = await asyncio.wait_for(read(stream), 5 if lose is None else 100)  # Ray asks five times
                LOG.info("ended after %.1f s", time.monotonic() - began)
                assert error is not None
                if lose is not None:
                    assert re.fullmatch(r"rank [01] died: its node was lost; .*", error)
                else:
                    assert f"rank {kill_rank} died: " in error or f"no word from rank {kill_rank}" in error
                LOG.info("ended with: %s", error)
        finally:
            await engine.close()
        return locations, tokens

    async def main() -> list[int]:
        group = placement_group(group_bundles(config, gpus=False), strategy=strategy)
        try:
            locations, tokens = await use(group)
        finally:
            remove_placement_group(group)
        deadline = time.monotonic() + 5
        while lose is None and any(psutil.pid_exists(location.pid) for location in locations):
            assert time.monotonic() < deadline, "ranks are left"
            await asyncio.sleep(0.05)
        return tokens

    return asyncio.run(main())


@pytest.mark.exhaustive
def test_a_node_that_is_silent_is_said_to_be_lost(ray_cluster: None, smollm2_path: Path) -> None:
    # Before the tests that share `second_node`, where the ranks would be otherwise.
    with another_node() as node:
        stopped: list[psutil.Process] = []

        def stop(ranks: set[int]) -> None:
            stopped.extend(processes_of(node))
            assert ranks & {process.pid for process in stopped}, "no rank is on that node"
            for process in stopped:
                process.suspend()

        try:
            generate(smollm2_path, "SPREAD", num_nodes=2, lose=stop)
        finally:
            for process in stopped:
                process.kill()


def test_ranks_on_two_nodes_give_the_tokens_of_one_node(second_node: None, smollm2_path: Path) -> None:
    one = generate(smollm2_path, "STRICT_PACK", num_nodes=1)
    assert len(one) == 32
    assert generate(smollm2_path, "SPREAD", num_nodes=2) == one


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_rank_killed_on_either_of_two_nodes_is_named(second_node: None, smollm2_path: Path, victim: int) -> None:
    generate(smollm2_path, "SPREAD", num_nodes=2, kill_rank=victim)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_stopped_on_either_of_two_nodes_is_ended(second_node: None, smollm2_path: Path, victim: int) -> None:
    parallel = {"step_timeout_s": 1.0}
    generate(smollm2_path, "SPREAD", num_nodes=2, kill_rank=victim, with_signal=signal.SIGSTOP, parallel=parallel)
