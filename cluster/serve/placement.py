"""Resources that one replica requests from a Ray cluster, as plain numbers. Only the callers use Ray.

Bundle 0 is for the CPU processes (HTTP ingress and coordinator), and bundle 1 + r is for rank r.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.errors import PlacementError
from configs.schema import EngineConfig

Bundle = dict[str, float]


@dataclass(frozen=True)
class NodeResources:
    """Total resources of one live node of the cluster, busy or not."""

    name: str
    cpus: float
    gpus: float

    @classmethod
    def from_ray(cls, nodes: Iterable[Mapping[str, Any]]) -> list[NodeResources]:
        """The resources of the live nodes in `ray.nodes()`."""
        return [
            cls(node["NodeManagerHostname"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
            for node in nodes
            if node["Alive"]
        ]


def uses_gpus(config: EngineConfig, nodes: Iterable[NodeResources]) -> bool:
    """Whether the ranks run on GPUs. With `device: auto` they do if the cluster has any."""
    if config.device == "auto":
        return any(node.gpus >= 1 for node in nodes)
    return config.device == "cuda"


def group_bundles(config: EngineConfig, *, gpus: bool) -> list[Bundle]:
    """The bundles of one replica's placement group.

    Ranks on CPU request little by default. Sharing cores only makes them slower, and a laptop should be able to run
    five ranks.
    """
    default_cpus = 1.0 if gpus else 0.1
    engine = config.placement.cpus_for_engine
    per_rank = config.placement.cpus_per_rank
    rank: Bundle = {"CPU": default_cpus if per_rank is None else per_rank}
    if gpus:
        rank["GPU"] = 1.0
    first: Bundle = {"CPU": default_cpus if engine is None else engine}
    return [first, *(dict(rank) for _ in range(config.tensor_parallel_size))]


def check_fits(config: EngineConfig, bundles: list[Bundle], nodes: list[NodeResources]) -> None:
    """Raises PlacementError if the live nodes can never run a group, which would stay PENDING without end.

    Only STRICT_PACK can be checked exactly. Other strategies may spread over nodes, so the nodes' sum is compared.
    """
    one_node = config.placement.strategy == "STRICT_PACK"
    for resource, unit in (("GPU", "GPUs"), ("CPU", "CPUs")):
        needed = sum(bundle.get(resource, 0.0) for bundle in bundles)
        amounts = [node.gpus if resource == "GPU" else node.cpus for node in nodes]
        available = max(amounts, default=0.0) if one_node else sum(amounts)
        if needed > available + 1e-6:
            place = "on one node, the largest has" if one_node else "in the cluster, it has"
            raise PlacementError(
                f"tensor_parallel_size={config.tensor_parallel_size} needs {needed:g} {unit} {place} {available:g}; "
                f"lower tensor_parallel_size{' or placement.cpus_per_rank' * (unit == 'CPUs')}, or add {unit}"
            )
