"""Starts, watches and ends the rank actors of one tensor-parallel group.

The coordinator's process owns them: when it dies, Ray ends them. It also hosts the rendezvous store, so that any rank
may die and the store stays.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import Location, RankActor, RankLoad, RankSpec, actor_class
from configs.errors import DeadlineError, EngineError, RankDiedError
from configs.model_config import ModelConfig
from configs.schema import EngineConfig
from parallel.channel import FrameReader, FrameWriter, Ring
from parallel.tcp_channel import TcpListener, TcpReader, TcpWriter

logger = logging.getLogger(__name__)

NAMESPACE = "lockstep"
GENERATION = 1
_WATCH_INTERVAL_S = 1.0
_LEAVE_TIMEOUT_S = 10.0
_CHANNEL_SLOTS = 8  # more than the steps in flight, so that the writer never waits

# Every process of a GPU group: multicast objects can wedge the host's NVSwitch, and Ray's own device masking
# would hide the peers that CUDA IPC and symmetric memory must open.
_CUDA_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}


@dataclass(frozen=True)
class GroupMemory:
    """What loading found out: the ranks' answers, in rank order."""

    loads: tuple[RankLoad, ...]
    on_cpu: bool

    @property
    def bytes_per_page(self) -> tuple[int, ...]:
        """KV bytes of one page on each rank."""
        return tuple(load.kv_bytes_per_page for load in self.loads)

    @property
    def free_bytes(self) -> tuple[int, ...]:
        """Memory that each rank may still use; ranks on CPU share their node's."""
        shared_by = len(self.loads) if self.on_cpu else 1
        return tuple(load.free_bytes // shared_by for load in self.loads)


class RankGroup:
    """The ranks of one group.

    Args:
        config: resolved.
        model: what `model_path` holds.
        model_path: directory or .gguf file, on every node that holds a rank.
        placement_group: bundle 1 + r is rank r's.
        name: prefix of the actors' names.
    """

    def __init__(
        self, *, config: EngineConfig, model: ModelConfig, model_path: Path, placement_group: PlacementGroup, name: str
    ) -> None:
        self._config = config
        self._model = model
        self._model_path = model_path
        self._placement_group = placement_group
        self._name = name
        self._ranks: list[Any] = []
        self._runs: list[ray.ObjectRef[None]] = []
        self._store: Any = None
        self._host = "127.0.0.1"
        self._one_node = True
        self._closing = threading.Event()

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._config.tensor_parallel_size

    def start(self) -> list[Location]:
        """Starts the processes and says where they are."""
        actor = actor_class(RankActor)
        gpus = 1 if self._config.device == "cuda" else 0
        for rank in range(self.size):
            spec = RankSpec(self._config, self._model, str(self._model_path), rank)
            self._ranks.append(
                actor.options(
                    name=f"{self._name}:tp{rank}",
                    namespace=NAMESPACE,
                    num_cpus=0,
                    num_gpus=gpus,
                    runtime_env={"env_vars": _CUDA_ENVIRONMENT} if gpus else None,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._placement_group, placement_group_bundle_index=1 + rank
                    ),
                ).remote(spec)
            )
        return self._on_all("where")

    def load(self, locations: list[Location]) -> GroupMemory:
        """Joins the ranks into one process group and loads every shard."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared

        here = ray.get_runtime_context().get_node_id()
        self._one_node = all(location.node_id == here for location in locations)
        self._host = "127.0.0.1" if self._one_node else ray.util.get_node_ip_address()
        self._store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._on_all("join", self._host, self._store.port, GENERATION, self._one_node)
        return GroupMemory(tuple(self._on_all("load")), self._config.device == "cpu")

    def progress(self) -> list[float]:
        """Share of its weights that each rank has loaded, 0 to 1. Empty before the ranks are there."""
        if not self._ranks:
            return []
        return self._get([rank.progress.remote() for rank in self._ranks], 5.0)

    def run(self, num_pages: int, max_model_len: int, max_message_bytes: int) -> tuple[FrameWriter, FrameReader]:
        """Allocates the KV pools, connects the channel and puts every rank into its step loop.

        Args:
            max_message_bytes: of a frame or a result.
        """
        self._on_all("allocate", num_pages, max_model_len)
        frames, results = (self._connect_ring if self._one_node else self._connect_tcp)(max_message_bytes)
        self._runs = [rank.run.remote() for rank in self._ranks]
        return frames, results

    def _connect_ring(self, max_message_bytes: int) -> tuple[FrameWriter, FrameReader]:
        parallel = self._config.parallel
        assert parallel.spin_us is not None, "spin_us is resolved before the ranks start"

        def ring(num_readers: int) -> Ring:
            return Ring.create(
                num_readers=num_readers,
                slots=_CHANNEL_SLOTS,
                slot_bytes=max_message_bytes,
                spin_us=parallel.spin_us or 0,
            )

        frames, results = ring(self.size), ring(1)
        self._on_all("attach_ring", frames.address, results.address)
        return frames.writer(), results.reader(0)

    def _connect_tcp(self, max_message_bytes: int) -> tuple[FrameWriter, FrameReader]:
        """All ranks over TCP, also those of this node: one way to send a frame is enough."""
        parallel = self._config.parallel
        frames, results = TcpListener.create(self._host), TcpListener.create(self._host)
        # The ranks connect while this side accepts.
        attached = [rank.attach_tcp.remote(frames.address, results.address, max_message_bytes) for rank in self._ranks]
        to_ranks = frames.accept(self.size, timeout_s=parallel.init_timeout_s)
        [from_rank_0] = results.accept(1, timeout_s=parallel.init_timeout_s)
        self._get(attached, parallel.init_timeout_s)
        frames.close()
        results.close()
        return (
            TcpWriter(to_ranks, max_frame_bytes=max_message_bytes),
            TcpReader(from_rank_0, max_frame_bytes=max_message_bytes),
        )

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Calls `on_death` with the reason when a rank's loop ends before `close`; returns at once."""
        threading.Thread(target=self._watch, args=(on_death,), name="rank-watch", daemon=True).start()

    def close(self) -> None:
        """Waits shortly for the ranks to leave their loops, then ends their processes."""
        self._closing.set()
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_LEAVE_TIMEOUT_S)
        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []
        self._runs = []

    def _watch(self, on_death: Callable[[str], None]) -> None:
        while not self._closing.is_set():
            # A pending call fails within 25 ms of the process's death; the timeout only bounds the thread's own end.
            done, _ = ray.wait(self._runs, num_returns=1, timeout=_WATCH_INTERVAL_S)
            if not done or self._closing.is_set():
                continue
            rank = self._runs.index(done[0])
            try:
                ray.get(done[0])
                reason = f"rank {rank} left its step loop"
            except ray.exceptions.RayTaskError as error:
                reason = f"rank {rank} failed: {error.cause}"
            except ray.exceptions.RayActorError as error:
                reason = f"rank {rank} died: {str(error).splitlines()[0]}"
            on_death(reason)
            return

    def _on_all(self, method: str, *args: object) -> list[Any]:
        return self._get(
            [getattr(rank, method).remote(*args) for rank in self._ranks], self._config.parallel.init_timeout_s
        )

    def _get(self, refs: list[Any], timeout_s: float) -> list[Any]:
        """Every rank's answer, or the first failure at once: the others may wait in a collective for the failed one."""
        deadline = time.monotonic() + timeout_s
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise DeadlineError(
                    f"{len(pending)} of {self.size} ranks did not answer within parallel.init_timeout_s={timeout_s:g} s"
                )
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, EngineError | ValueError) else RankDiedError(str(error))) from None
            except ray.exceptions.RayActorError as error:
                raise RankDiedError(f"rank {refs.index(done[0])} died while starting: {error}") from None
        return ray.get(refs)


def node_cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0))
