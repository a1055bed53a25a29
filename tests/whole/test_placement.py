"""What a replica asks of a cluster, and what is said when no node can give it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

import cluster.ranks.rank
from cluster.ranks.held_gpus import HeldGPU
from cluster.ranks.rank import Rank, RankStarter
from cluster.ranks.rank_actor import RankActor, RankSpec, device_index
from cluster.serve.placement import NodeResources, check_fits, group_bundles, uses_gpus
from configs.cards import Card
from configs.errors import PlacementError
from configs.schema import EngineConfig, PlacementConfig
from tests.conftest import ROOT
from tests.helpers.fake_driver import make_driver


def config(tp_size: int, **settings: object) -> EngineConfig:
    return EngineConfig(model="m", tensor_parallel_size=tp_size, **settings)


def test_bundle_zero_is_the_engines_and_every_rank_has_its_own() -> None:
    bundles = group_bundles(config(3), gpus=True)
    assert bundles == [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * 3]


def test_ranks_on_cpu_ask_for_a_share_of_a_core() -> None:
    assert sum(bundle["CPU"] for bundle in group_bundles(config(5), gpus=False)) < 1
    placement = PlacementConfig(cpus_per_rank=2, cpus_for_engine=1)
    assert group_bundles(config(1, placement=placement), gpus=False) == [{"CPU": 1.0}, {"CPU": 2.0}]


def test_a_group_larger_than_every_node_is_refused_with_what_the_largest_has() -> None:
    nodes = [NodeResources("a", 64, 4), NodeResources("b", 64, 2)]
    with pytest.raises(PlacementError, match="tensor_parallel_size=6 needs 6 GPUs on one node, the largest has 4"):
        check_fits(config(6), group_bundles(config(6), gpus=True), nodes)
    check_fits(config(4), group_bundles(config(4), gpus=True), nodes)


def test_a_spread_group_is_compared_with_the_whole_cluster() -> None:
    nodes = [NodeResources("a", 64, 4), NodeResources("b", 64, 2)]
    spread = config(6, placement=PlacementConfig(strategy="SPREAD"))
    check_fits(spread, group_bundles(spread, gpus=True), nodes)
    too_large = config(7, placement=PlacementConfig(strategy="SPREAD"))
    with pytest.raises(PlacementError, match="in the cluster, it has 6"):
        check_fits(too_large, group_bundles(too_large, gpus=True), nodes)


def test_device_auto_follows_the_cluster() -> None:
    assert uses_gpus(config(1), [NodeResources("a", 8, 1)])
    assert not uses_gpus(config(1), [NodeResources("a", 8, 0)])
    assert not uses_gpus(config(1, device="cpu"), [NodeResources("a", 8, 1)])


def test_a_rank_finds_its_gpu_among_those_the_node_was_started_with() -> None:
    assert device_index("3", None) == 3
    assert device_index("3", "2,3") == 1
    assert device_index("GPU-b", "GPU-a, GPU-b") == 1


@dataclass
class Started:
    """An actor that was asked for."""

    spec: RankSpec
    bundle: int
    num_gpus: int


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """The actors that are asked for, none of which starts."""
    found: list[Started] = []

    def actor_class(_: type) -> Any:
        def options(*, num_gpus: int, scheduling_strategy: Any, **_: Any) -> Any:
            bundle = scheduling_strategy.placement_group_bundle_index
            return SimpleNamespace(remote=lambda spec: found.append(Started(spec, bundle, num_gpus)))

        return SimpleNamespace(options=options)

    monkeypatch.setattr(cluster.ranks.rank, "actor_class", actor_class)
    return found


@pytest.mark.parametrize(
    ("num_bundles", "taken", "held", "size", "expected"),
    [
        (2, (), (), 2, [(1, 1, None), (2, 1, None)]),
        (1, ("cuda:5",), ("cuda:3", "cuda:2"), 3, [(1, 0, "cuda:5"), (1, 0, "cuda:3"), (1, 0, "cuda:2")]),
        (1, ("cuda:5", "cuda:3"), (), 1, [(1, 0, "cuda:5")]),
        (2, ("cuda:5",), ("cuda:2",), 3, [(1, 0, "cuda:5"), (2, 1, None), (1, 0, "cuda:2")]),
    ],
    ids=["start", "grow", "shrink", "grow again"],
)
def test_a_rank_asks_ray_for_a_gpu_only_where_none_is_reserved_for_it(
    started: list[Started],
    num_bundles: int,
    taken: tuple[str, ...],
    held: tuple[str, ...],
    size: int,
    expected: list[tuple[int, int, str | None]],
) -> None:
    model: Any = None
    starter = RankStarter(
        config=config(size, device="cuda"),
        model=model,
        model_path=Path("/m"),
        placement_group=PlacementGroup(PlacementGroupID.nil(), [{}] * (1 + num_bundles)),
        name="app",
        held=tuple(HeldGPU(None, device) for device in held),
        taken=taken,
    )
    for index in range(size):
        starter.start(starter.spec(index))
    assert [(it.bundle, it.num_gpus, it.spec.device) for it in started] == expected
    starter.start_spare(0)
    assert (started[-1].bundle, started[-1].num_gpus, started[-1].spec.device) == (0, 0, None)


def test_ranks_that_are_replaced_leave_no_class_with_ray() -> None:
    classes = {id(kept): kept for kept in (cluster.ranks.rank.actor_class(RankActor) for _ in range(3))}
    assert len(classes) == 1


def test_the_end_of_a_rank_is_waited_for_where_others_need_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ranks.rank.ray, "kill", lambda _: None)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        rank = Rank(0, None, pidfd=os.pidfd_open(process.pid))
        rank.end()
        assert rank.await_end(10.0)
        assert process.poll() is not None


HOLD = """
import os, signal, sys, time
import ray
from cluster.ranks.held_gpus import hold, release
from configs.errors import ConfigError
import cluster.ranks.held_gpus

class Owner:
    def hold(self, count):
        cluster.ranks.held_gpus._TIMEOUT_S = 2.0 if count > 1 else 30.0
        try:
            self.held = hold({"CPU": 0.1, "GPU": 1.0}, count, {})
        except ConfigError as error:
            return os.getpid(), str(error)
        return os.getpid(), [gpu.device for gpu in self.held]

    def release(self):
        release(self.held)

def until_free(count):
    deadline = time.monotonic() + 20
    while ray.available_resources().get("GPU") != count:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)

ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
first, second = [ray.remote(Owner).options(num_cpus=0).remote() for _ in range(2)]
pid, held = ray.get(first.hold.remote(1))
print(held)
print(ray.get(second.hold.remote(2))[1])
ray.get(first.release.remote())
until_free(2)
ray.get(first.hold.remote(1))
os.kill(pid, signal.SIGKILL)
until_free(2)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_gpu_is_held_until_its_owner_ends_and_refused_where_none_is_free() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:2] == [  # Ray's own words come after these
        "['cuda:0']",
        "2 more GPUs, with 0.1 CPUs each, are needed on this node, and 1 are free",
    ]


ASK = """
import ray
from cluster.ranks.host import host_facts

ray.init(address="local", num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
print(host_facts(gpus=True).card)
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("knows", [True, False])
def test_a_clusters_gpus_are_known_by_their_nodes_drivers_and_never_guessed(knows: bool, tmp_path: Path) -> None:
    if knows:
        make_driver(tmp_path, [Card("X9000", (13, 1), 300 << 10, 500 << 30)] * 2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == ("X9000 has 13.1" if knows else "None")
    assert ("a node does not know its GPUs" in result.stderr) != knows
