"""One rank of a group as the coordinator's process knows it: its actor, where that runs, and how it is started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ranks.held_gpus import HeldGPU
from cluster.ranks.host import environment_options
from cluster.ranks.rank_actor import Location, RankActor, RankSpec, actor_class
from configs.model_config import ModelConfig
from configs.schema import EngineConfig
from parallel.environment import RANK_ENVIRONMENT

NAMESPACE = "lockstep"
# Pinning memory is most of what it takes to put weights on the host. Threads do it in a third of the time: 4 GiB in
# 0.56 s for 1.87 s on an H100's host.
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# Ray's own masking of devices would hide the peers that CUDA IPC and symmetric memory must open.
CUDA_ENVIRONMENT = {
    **RANK_ENVIRONMENT,
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    _ALLOCATOR: os.environ.get(_ALLOCATOR, "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"),
}
"""Variables of processes that are given a GPU."""
_SPINS = "GOMP_SPINCOUNT"
CPU_ENVIRONMENT = {_SPINS: os.environ.get(_SPINS, "1000")}
"""Variables of ranks on CPUs. A thread that waits for the other threads of its rank gives its core up after some
microseconds, not milliseconds. Beside another busy process a decode step of SmolLM2 on two cores takes 49 ms instead of
73, and 8 rows 68 instead of 175; on idle cores one row takes 30 instead of 23, and 8 rows take what they took."""


@dataclass(eq=False)
class Rank:
    """One rank; whoever replaces its process gives it another actor."""

    index: int
    actor: Any
    location: Location | None = None
    """The place where it runs; None until it has said so."""
    pidfd: int = -1
    """A file descriptor of its process, while that runs on this node; -1: none."""
    room_bytes: int = 0
    """Bytes that were free on its GPU before that was first used."""
    has_weights: bool = False
    """Whether its process has loaded its shard."""
    num_failed: int = 0
    """New processes in its place that failed by themselves, one after the other."""
    _ending: int = -1

    def settle(self, location: Location) -> None:
        """The rank's process, just started, runs at `location`."""
        self.location = location
        if location.node_id == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(OSError):  # a sandbox may not know the call; the raylet ends the process as well
                self.pidfd = os.pidfd_open(location.pid)

    def end(self) -> None:
        """Ends its process, without waiting for that. Ray only asks it to end, which one that is stopped or stuck does
        not hear; on another node the raylet ends such a one when the placement group goes."""
        ray.kill(self.actor)
        if self.pidfd < 0:
            return  # one that was ended before may still be on its way
        self.await_end(0.0)
        self._ending, self.pidfd = self.pidfd, -1
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ending, signal.SIGKILL)

    def await_end(self, timeout_s: float) -> bool:
        """Waits so long until the process that `end` ended last is gone; returns whether it is, as one of another node
        counts."""
        ending, self._ending = self._ending, -1
        if ending < 0:
            return True
        ended = select.poll()
        ended.register(ending)
        is_gone = bool(ended.poll(1000 * timeout_s))
        os.close(ending)
        return is_gone


@dataclass(frozen=True, kw_only=True)
class RankStarter:
    """Starts the actors of one group."""

    config: EngineConfig
    """Resolved."""
    model: ModelConfig
    """The model that `model_path` holds."""
    model_path: Path
    """A directory on every node that holds a rank."""
    weights: str = ""
    """`RankSpec.weights` of its ranks."""
    is_in_memory: bool = False
    """Whether the weights came from another process, so that no file has them."""
    placement_group: PlacementGroup
    """Bundle 1 + r is rank r's; ranks on CPU beyond the last bundle share with the first ones."""
    held: tuple[HeldGPU, ...] = ()
    """The GPUs of ranks beyond the last bundle."""
    taken: tuple[str, ...] = ()
    """Devices, as in `Location`, of the ranks that these take the places of."""
    name: str
    """Prefix of the actors' names."""
    keeper: str = ""
    """`RankSpec.keeper` of its ranks."""
    suffix: str = ""
    """End of the actors' names, where two groups of one name live for a while."""

    @property
    def num_bundles(self) -> int:
        """Bundles for ranks that the placement group has."""
        return self.placement_group.bundle_count - 1

    def spec(self, index: int) -> RankSpec:
        """The arguments of the rank of this index."""
        spec = RankSpec(
            self.config,
            self.model,
            str(self.model_path),
            index,
            self.name,
            keeper=self.keeper,
            weights=self.weights,
            is_in_memory=self.is_in_memory,
        )
        if 0 <= index < len(self.taken):
            return replace(spec, device=self.taken[index])
        extra = index - self.num_bundles
        return replace(spec, device=self.held[extra].device) if 0 <= extra < len(self.held) else spec

    def start(self, spec: RankSpec) -> Any:
        """The actor of a rank. Where the spec names its GPU, that is reserved already, and Ray is asked for none."""
        gpus = int(self.config.device == "cuda" and spec.device is None)
        return self._start(spec, f"tp{spec.rank}", bundle=1 + spec.rank % self.num_bundles, gpus=gpus)

    def start_spare(self, number: int, device: str | None = None) -> Any:
        """The actor of a spare, to which Ray gives no device; of one on GPUs, the one that it gets ready for."""
        return self._start(replace(self.spec(-1), device=device), f"tp-spare{number}", bundle=0, gpus=0)

    def _start(self, spec: RankSpec, name: str, *, bundle: int, gpus: int) -> Any:
        return (
            actor_class(RankActor)
            .options(
                name=f"{self.name}:{name}{self.suffix}",
                namespace=NAMESPACE,
                num_cpus=0,
                num_gpus=gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.placement_group, placement_group_bundle_index=bundle
                ),
                **environment_options(
                    CUDA_ENVIRONMENT if self.config.device == "cuda" else CPU_ENVIRONMENT, os.environ
                ),
            )
            .remote(spec)
        )
