"""A rank in the coordinator's process: its actor, its location, and how it is started."""

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
# With these threads for pinning memory, moving 4 GiB of weights to the host takes 0.56 s instead of 1.87 s on an H100's
# host. Pinning takes most of that time.
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# Ray must not mask devices, because CUDA IPC and symmetric memory open the peers' devices.
CUDA_ENVIRONMENT = {
    **RANK_ENVIRONMENT,
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    _ALLOCATOR: os.environ.get(_ALLOCATOR, "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"),
}
"""Environment variables of processes that get a GPU."""
_SPINS = "GOMP_SPINCOUNT"
CPU_ENVIRONMENT = {_SPINS: os.environ.get(_SPINS, "1000")}
"""Environment variables of ranks on CPUs. A thread that waits for the other threads of its rank yields its core after
some microseconds instead of milliseconds. Beside another busy process, a decode step of SmolLM2 on two cores takes 49
ms instead of 73, and 8 rows take 68 instead of 175. On idle cores one row takes 30 instead of 23, and 8 rows take the
same."""


@dataclass(eq=False)
class Rank:
    """One rank. Replacing its process gives it another actor."""

    index: int
    actor: Any
    location: Location | None = None
    """Location of the rank's process. None until the process has reported it."""
    pidfd: int = -1
    """A pidfd of the rank's process, or -1 if the process runs on another node or has been killed."""
    room_bytes: int = 0
    """Bytes that were free on the rank's GPU before the rank used it."""
    has_weights: bool = False
    """Whether the rank's process has loaded its shard."""
    is_starting: bool = False
    """Whether the rank has a new process that has not begun to join the others."""
    num_failed: int = 0
    """Number of consecutive processes of the rank that failed by themselves after they replaced another."""
    _ending: int = -1

    def settle(self, location: Location) -> None:
        """Records where the rank's new process runs."""
        self.location = location
        # After another rank failed, a process that was starting is recorded once more.
        if self.pidfd < 0 and location.node_id == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(OSError):  # a sandbox may not support pidfds; the raylet ends the process too
                self.pidfd = os.pidfd_open(location.pid)

    def end(self) -> None:
        """Kills the rank's process and does not wait. Ray only asks a process to end, which a stopped or stuck one
        ignores. On another node, the raylet ends such a process when the placement group is removed."""
        ray.kill(self.actor)
        if self.pidfd < 0:
            return  # a process that was killed before may still be ending
        self.await_end(0.0)
        self._ending, self.pidfd = self.pidfd, -1
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ending, signal.SIGKILL)

    def await_end(self, timeout_s: float) -> bool:
        """Waits for the end of the process that `end` killed last. Returns whether it has ended; a process on another
        node counts as ended."""
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
    """The resolved configuration."""
    model: ModelConfig
    """The model at `model_path`."""
    model_path: Path
    """A directory with the model that exists on every node with a rank."""
    weights: str = ""
    """`RankSpec.weights` of these ranks."""
    is_in_memory: bool = False
    """Whether another process provided the weights, so that no file has them."""
    placement_group: PlacementGroup
    """Bundle 1 + r belongs to rank r. On CPUs, ranks without a bundle share the first bundles."""
    held: tuple[HeldGPU, ...] = ()
    """Reserved GPUs for ranks without a bundle."""
    taken: tuple[str, ...] = ()
    """GPUs of the ranks that these ranks replace, by rank, named as in `Location.device`."""
    name: str
    """Prefix of the actors' names."""
    keeper: str = ""
    """`RankSpec.keeper` of these ranks."""
    suffix: str = ""
    """Suffix of the actors' names. It distinguishes two groups of one name, which exist together during a resize."""

    @property
    def num_bundles(self) -> int:
        """Number of bundles that the placement group has for ranks."""
        return self.placement_group.bundle_count - 1

    def spec(self, index: int) -> RankSpec:
        """The RankSpec of the rank with this index."""
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
        """Creates the actor of a rank. A GPU that the spec names is reserved already, so Ray is not asked for one."""
        gpus = int(self.config.device == "cuda" and spec.device is None)
        return self._start(spec, f"tp{spec.rank}", bundle=1 + spec.rank % self.num_bundles, gpus=gpus)

    def start_spare(self, number: int, device: str | None = None) -> Any:
        """Creates the actor of a spare. Ray gives it no device. On GPUs, the spare prepares for `device`."""
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
