"""A group whose ranks are on two nodes: two raylets of this machine, which to Ray and to us are two nodes.

On two GPUs, with one for each raylet and NCCL between them as between two hosts:

    python -m pytest tests/whole/test_multinode.py -m multi_gpu

By itself: Ray starts here with a GPU. Where SHARE_GPUS is set, the two raylets may share one.
"""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest

from benchmarks.make_checkpoint import write_checkpoint
from cluster.messages.engine import FinishReason, SamplingParams
from cluster.ranks.host import known_card
from cluster.ranks.rank_actor import Location
from cluster.requests.engine_client import RequestStream
from cluster.serve.app_replicas import coordinators
from cluster.serve.placement import group_bundles
from cluster.serve.running_engine import RunningEngine, describe
from configs.cards import Card
from configs.load import parse_engine_config
from tests.conftest import ROOT, unused_port
from tests.helpers.fake_driver import make_driver
from tests.helpers.gpu_engine import write_shape
from tests.helpers.streams import chunks_of, next_chunk
from tests.helpers.tiny_engine import make_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LOG = logging.getLogger(__name__)
PROMPT = np.array([504, 3575, 282, 4649, 314], np.int32).tobytes()

# `ray start` as it joins a cluster, at the first node's loopback address: the cluster of the run has no other.
JOIN = """
from ray._private import services
services.get_node_ip_address = lambda *_: "127.0.0.1"
from ray.scripts.scripts import main
main()
"""


# Two GPUs of one host would be connected past the network.
HOSTS = [
    {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUDA_VISIBLE_DEVICES": gpu}
    for host, gpu in (("first", "0"), ("second", "1"))
]


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


@dataclass(frozen=True)
class Nodes:
    """A cluster of two nodes, and the model for its ranks."""

    second: subprocess.Popen[bytes]
    """The first process of the node that is not the head."""
    settings: dict[str, Any]
    """The model and its device."""


@contextmanager
def a_gpu_each() -> Iterator[subprocess.Popen[bytes]]:
    """A cluster of two nodes with a GPU each: the first process of the second."""
    import ray
    import torch

    from cluster.serve.session import prepare_own_cluster, remove_own_files

    if ray.is_initialized():
        pytest.skip("Ray runs already, without GPUs; run this file by itself with -m multi_gpu")
    first, second = HOSTS
    if torch.cuda.device_count() < 2:
        second = {**second, "CUDA_VISIBLE_DEVICES": "0"}
    with pytest.MonkeyPatch.context() as patch:
        prepare_own_cluster()
        for name, value in {**first, "PYTHONPATH": str(ROOT)}.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False)
        try:
            with another_node("--num-gpus=1", **second) as node:
                yield node
        finally:
            ray.shutdown()
            remove_own_files()


def on_cpus(path: Path) -> dict[str, Any]:
    return {"model": str(path), "device": "cpu", "dtype": "float32"}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu)])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """The run's cluster with a second node, or a cluster of its own for GPUs."""
    if request.param == "cpu":
        request.getfixturevalue("ray_cluster")
        with another_node() as second:
            yield Nodes(second, on_cpus(request.getfixturevalue("smollm2_path")))
    else:
        shape = write_shape(tmp_path_factory.mktemp("shape"))
        write_checkpoint(shape, shape)
        (shape / "tokenizer.json").write_text(make_tokenizer().to_json())
        with a_gpu_each() as second:
            yield Nodes(second, {"model": str(shape), "device": "cuda", "numerics": "exact"})


def group_settings(settings: dict[str, Any], strategy: str, size: int = 2) -> dict[str, Any]:
    """Those of a group with its coordinator on the head, and a rank of two on each node: of 8 and 4 CPUs."""
    return {
        "tensor_parallel_size": size,
        "max_model_len": 4096,
        "kv_cache": {"num_tokens": 4096},
        "placement": {"strategy": strategy, "cpus_for_engine": 5, "cpus_per_rank": 2.5},
        **settings,
    }


def sampled(index: int, max_tokens: int = 32) -> SamplingParams:
    how: dict[str, Any] = {"temperature": 0.0} if index % 2 == 0 else {"temperature": 1.0, "seed": index}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **how)


def test_the_gpus_of_another_node_are_asked_on_that_node(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    x9000 = Card("X9000", (13, 1), 300 << 10, 500 << 30)
    make_driver(tmp_path, [x9000])
    with another_node("--num-gpus=1", LD_LIBRARY_PATH=str(tmp_path)):
        assert known_card(ray.nodes()) == x9000


def generate(
    settings: dict[str, Any],
    strategy: str,
    *,
    num_nodes: int,
    size: int = 2,
    kill_rank: int | None = None,
    with_signal: int = signal.SIGKILL,
    lose: Callable[[set[int]], None] | None = None,
    **changes: Any,
) -> list[list[int]]:
    """The tokens of four streams at once, of a group placed by `strategy`. Afterwards one of its ranks is struck, or
    `lose` makes the second node unreachable."""
    from ray.util.placement_group import placement_group, remove_placement_group

    config = parse_engine_config({**group_settings(settings, strategy, size), **changes})
    gpus = config.device == "cuda"

    async def read(stream: RequestStream) -> tuple[list[int], str | None]:
        tokens: list[int] = []
        async for chunk in chunks_of(stream):
            tokens += chunk.token_ids
            if chunk.finished is not None and chunk.finished.reason is FinishReason.ERROR:
                return tokens, chunk.finished.error
        return tokens, None

    async def use(group: Any) -> tuple[tuple[Location, ...], list[list[int]]]:
        engine = await RunningEngine.start(describe(config, gpus=gpus), group, f"multinode-{time.monotonic_ns()}")
        try:
            locations = engine.facts.locations
            assert len({location.node_id for location in locations}) == num_nodes
            streams = [engine.client.submit([PROMPT[4 * i :]], [[sampled(i)]])[0] for i in range(4)]
            ends = await asyncio.wait_for(asyncio.gather(*map(read, streams)), 120)
            assert [error for _, error in ends] == [None] * 4
            if kill_rank is not None or lose is not None:
                [stream] = engine.client.submit([PROMPT], [[sampled(0, 900)]])
                await asyncio.wait_for(next_chunk(stream), 30)
                began = time.monotonic()
                if lose is not None:
                    lose({location.pid for location in locations})
                elif kill_rank is not None:
                    os.kill(locations[kill_rank].pid, with_signal)
                _, error = await asyncio.wait_for(read(stream), 30 if lose is None else 100)  # Ray asks five times
                LOG.info("ended after %.1f s", time.monotonic() - began)
                assert error is not None
                if lose is not None:
                    assert re.fullmatch(r"rank [01] died: its node was lost; .*", error)
                else:
                    assert f"rank {kill_rank} died: " in error or f"no word from rank {kill_rank}" in error
                LOG.info("ended with: %s", error)
        finally:
            await engine.close()
        return locations, [tokens for tokens, _ in ends]

    async def main() -> list[list[int]]:
        group = placement_group(group_bundles(config, gpus=gpus), strategy=strategy)
        try:
            locations, tokens = await use(group)
        finally:
            remove_placement_group(group)
        deadline = time.monotonic() + 20
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
            generate(on_cpus(smollm2_path), "SPREAD", num_nodes=2, lose=stop)
        finally:
            for process in stopped:
                process.kill()


def test_ranks_on_two_nodes_give_the_tokens_of_one_rank(nodes: Nodes) -> None:
    one = generate(nodes.settings, "STRICT_PACK", num_nodes=1, size=1)
    assert [len(tokens) for tokens in one] == [32] * 4
    assert generate(nodes.settings, "SPREAD", num_nodes=2) == one


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_rank_killed_on_either_of_two_nodes_is_named(nodes: Nodes, victim: int) -> None:
    generate(nodes.settings, "SPREAD", num_nodes=2, kill_rank=victim)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_stopped_on_either_of_two_nodes_is_ended(nodes: Nodes, victim: int) -> None:
    parallel = {"step_timeout_s": 1.0}
    generate(nodes.settings, "SPREAD", num_nodes=2, kill_rank=victim, with_signal=signal.SIGSTOP, parallel=parallel)


@contextmanager
def app_on(nodes: Nodes, name: str) -> Iterator[str]:
    """The URL of an app with a rank on each node."""
    from ray import serve

    from cluster.serve.app import build_app

    if serve.status().proxies:
        pytest.skip("Ray Serve runs already, at another port, and others need it; run this file by itself")
    port = unused_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    settings = {"served_model_name": "m", **group_settings(nodes.settings, "SPREAD")}
    serve.run(build_app(settings), name=name, route_prefix=f"/{name}")
    try:
        yield f"http://127.0.0.1:{port}/{name}"
    finally:
        serve.shutdown()


def test_an_app_on_two_nodes_refuses_what_it_cannot_do_and_is_replaced_when_a_rank_dies(nodes: Nodes) -> None:
    import ray

    def answer(max_new_tokens: int = 16) -> httpx.Response:
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [504, 3575, 282], "sampling_params": sampling}
        return httpx.post(f"{url}/generate", json=body, timeout=120)

    with app_on(nodes, "nodes") as url:
        expected = answer().json()["output_ids"]
        assert len(expected) == 16
        [(name, coordinator)] = coordinators("nodes").items()
        for change in (coordinator.resize.remote(1), coordinator.sleep.remote()):
            with pytest.raises(ray.exceptions.RayTaskError, match="ranks on several nodes cannot"):
                ray.get(change, timeout=60)
        how = {"version": "two", "running": "recompute"}
        assert ray.get(coordinator.update_weights.remote(nodes.settings["model"], **how), timeout=120).version == "two"
        assert answer().json()["output_ids"] == expected
        with ThreadPoolExecutor(1) as client:
            running = client.submit(answer, 4000)  # GPUs take seconds for it
            wait_for(lambda: ray.get(coordinator.status.remote(), timeout=60)["num_running"] == 1)
            ranks = [it for it in processes_of(nodes.second) if "Rank" in it.name()]
            assert ranks, "no rank is on the second node"
            ranks[0].kill()
            lost = running.result()
        assert (lost.status_code, lost.json()["error"]["code"]) == (500, "engine_error")
        wait_for(lambda: len(coordinators("nodes")) == 1 and name not in coordinators("nodes"))
        wait_for(lambda: answer().status_code == 200)
        assert answer().json()["output_ids"] == expected


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
