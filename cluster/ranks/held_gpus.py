"""Reserves GPUs of this node outside the replica's placement group, which cannot grow.

An actor that does nothing else reserves each GPU. The rank processes on the GPU may be replaced, and see all GPUs of
the node. Ray ends such an actor with the process that started it, whereas a second placement group would remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ranks.rank_actor import actor_class, given_gpu
from configs.errors import ConfigError

_TIMEOUT_S = 10.0


class _Holder:
    """The actor for which Ray reserves a GPU."""

    def device(self) -> str:
        """The reserved GPU, `cuda:N` as in `Location.device`."""
        return given_gpu()


@dataclass(frozen=True)
class HeldGPU:
    """A GPU that is reserved for a rank."""

    actor: Any
    """The GPU is reserved while this actor lives."""
    device: str
    """The GPU's name, as in `Location.device`."""


def hold(bundle: Mapping[str, float], count: int, env_vars: Mapping[str, str]) -> tuple[HeldGPU, ...]:
    """Reserves the resources of `bundle`, including a GPU, `count` times on this node, until `release` or the end of
    this process.

    Raises:
        ConfigError: fewer GPUs are free, even after some seconds.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    resources = {"num_cpus": bundle.get("CPU", 0.0), "num_gpus": bundle["GPU"]}
    options = {**resources, "scheduling_strategy": here, "runtime_env": {"env_vars": dict(env_vars)}}
    actors = [actor_class(_Holder).options(**options).remote() for _ in range(count)]
    devices = [actor.device.remote() for actor in actors]
    found, _ = ray.wait(devices, num_returns=count, timeout=_TIMEOUT_S)
    if len(found) == count:
        return tuple(map(HeldGPU, actors, ray.get(devices)))
    for actor in actors:
        ray.kill(actor)
    cpus = f"{resources['num_cpus']:g} CPUs"
    raise ConfigError(f"{count} more GPUs, with {cpus} each, are needed on this node, and {len(found)} are free")


def release(held: Iterable[HeldGPU]) -> None:
    """Ends the reservations of `held`."""
    for gpu in held:
        ray.kill(gpu.actor)
