"""The machines that ranks run on: their processors, and what Ray knows about their GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from configs.attention import installed_packages
from configs.resolve import HostFacts
from worker.device.cgroup import available_cores

_TYPE = "accelerator_type:"
# The names are from `ray.util.accelerators`, without the memory that follows a dash there.
_COMPUTE_CAPABILITIES = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A10G": (8, 6),
    "L4": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H20": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
}


def least_compute_capability(nodes: Iterable[Mapping[str, Any]]) -> tuple[int, int] | None:
    """The smallest compute capability of all GPUs of the live nodes in `ray.nodes()`. None if Ray names no GPU type, or
    an unknown one."""
    names = [
        name.removeprefix(_TYPE).partition("-")[0]
        for node in nodes
        if node["Alive"] and node["Resources"].get("GPU")
        for name in node["Resources"]
        if name.startswith(_TYPE)
    ]
    found = [_COMPUTE_CAPABILITIES.get(name) for name in names]
    known = [capability for capability in found if capability is not None]
    return min(known) if known and len(known) == len(found) else None


def environment_options(wanted: Mapping[str, str], have: Mapping[str, str]) -> dict[str, Any]:
    """Actor options with which the actor's process gets the environment variables `wanted`. Empty if Ray's processes
    have them already (`have`), because then Ray can use an idle process instead of starting a new one."""
    return {} if wanted.items() <= have.items() else {"runtime_env": {"env_vars": dict(wanted)}}


def host_facts(*, gpus: bool) -> HostFacts:
    """Facts for `configs.resolve`: about this node, and with `gpus` about the cluster's GPUs."""
    capability = least_compute_capability(ray.nodes()) if gpus and ray.is_initialized() else None
    return HostFacts(node_cores(), int(gpus), compute_capability=capability, packages=installed_packages())


def node_cores() -> int:
    """Number of CPU cores that this process may use, given its affinity and its container's quota."""
    cores, quota = len(os.sched_getaffinity(0)), available_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))
