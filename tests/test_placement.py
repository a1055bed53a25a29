"""What a replica asks of a cluster, and what is said when no node can give it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.ranks.host import least_compute_capability
from cluster.ranks.rank_actor import device_index
from cluster.serve.placement import NodeResources, check_fits, group_bundles, uses_gpus
from configs.errors import PlacementError
from configs.schema import EngineConfig, PlacementConfig


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


def test_the_weakest_gpu_of_the_cluster_counts_and_none_where_a_type_is_unknown() -> None:
    def node(*types: str, gpus: float = 8.0, alive: bool = True) -> dict[str, Any]:
        return {"Alive": alive, "Resources": {"GPU": gpus, **{f"accelerator_type:{name}": 1.0 for name in types}}}

    assert least_compute_capability([node("H200")]) == (9, 0)
    assert least_compute_capability([node("H100"), node("A100", "A100-80G"), node(gpus=0.0)]) == (8, 0)
    assert least_compute_capability([node("H200"), node("T4", alive=False)]) == (9, 0)
    assert least_compute_capability([node("H200"), node("X9000")]) is None
    assert least_compute_capability([node()]) is None
