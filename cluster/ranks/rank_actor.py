"""The Ray actor of a rank, around a `TPWorker`, and helpers to create actors. It contains no serving logic."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cluster.logs import log_to_stderr
from configs.checkpoint import resolve_model_path
from configs.kv_pages import PageBytes
from configs.model_config import ModelConfig
from configs.resolve import ANY_NODES_STRATEGY, ONE_NODE_STRATEGY
from configs.schema import EngineConfig, ParallelConfig
from parallel.channel.ring import FrameReader, FrameWriter, Ring
from parallel.channel.store_relay import open_relay
from parallel.channel.tcp_channel import TcpReader, TcpWriter, connect
from parallel.plan import ShardPlan

if TYPE_CHECKING:  # These load torch, which the processes that start ranks do not need.
    import numpy as np
    import numpy.typing as npt
    import torch

    from parallel.collectives.group import Strategy, TensorParallelGroup
    from worker.device.memory import DeviceMemory
    from worker.device.peaks import Peaks
    from worker.tp_worker import TPWorker

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 1e-4
"""Python's switch interval in seconds, instead of 5 ms. On GPUs the step loop never sleeps, and the thread that stages
weights needs the interpreter after each of its many launches."""


@functools.cache  # Cached, because Ray stores every class that it gets, with its methods, without end.
def actor_class(cls: type) -> Any:
    """Makes a Ray actor class of `cls` that Ray never restarts. Its `ctl` methods run while another method runs."""
    options: Any = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"ctl": 2}}
    return ray.remote(**options)(cls)


def device_index(gpu: str, visible: str | None) -> int:
    """Index of the GPU that Ray calls `gpu` among the GPUs that a process sees with CUDA_VISIBLE_DEVICES=`visible`. On
    a node that was started with that variable, Ray uses its entries as names, which may be UUIDs."""
    entries = [entry.strip() for entry in visible.split(",")] if visible else []
    return entries.index(gpu) if gpu in entries else int(gpu)


def given_gpu() -> str:
    """The GPU that Ray gave to this actor: `cuda:N`, as in `Location.device`."""
    gpu = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
    return f"cuda:{device_index(gpu, os.environ.get('CUDA_VISIBLE_DEVICES'))}"


@dataclass(frozen=True)
class RankSpec:
    """The arguments with which a rank's process starts."""

    config: EngineConfig
    model: ModelConfig
    model_path: str
    rank: int
    """Index of the rank. -1 for a spare that is no rank yet."""
    replica: str
    """Name of the replica that the rank belongs to."""
    device: str | None = None
    """The rank's GPU, such as `cuda:1`, if another actor reserved it. If None, the process uses the device that Ray
    gave it."""
    room_bytes: int = 0
    """Bytes that must be free on the GPU before a replacement joins, because a dead process's memory is freed late."""
    keeper: str = ""
    """Address of the keeper of persistent memory. Not used if the ranks are on several nodes."""
    weights: str = ""
    """An id that distinguishes these weights from earlier and later weights of the group."""
    is_in_memory: bool = False
    """Whether the weights are tensors that the ranks received, not files at `model_path`."""


@dataclass(frozen=True)
class Location:
    """Location of a rank's process."""

    node_id: str
    pid: int
    device: str
    """`cpu`, or `cuda:N`, where N counts the GPUs that the node's processes see."""


@dataclass(frozen=True)
class RankLoad:
    """Facts about a rank that has loaded its shard."""

    kv_page_bytes: PageBytes
    free_bytes: int
    """Bytes of device memory that pages and cached states may take. On CPU, the node's free memory, which its ranks
    share."""
    step_bytes: int
    """Bytes of device memory that a step needs."""
    is_persistent: bool
    """Whether the rank's weights and KV are in persistent memory."""
    seconds: float
    platform: str
    """The result of `worker.device.platform.platform_of`."""


@dataclass(frozen=True)
class PoolShape:
    """Sizes of the pools that every rank of a group allocates before it runs, for any number of ranks."""

    num_pages: int
    max_model_len: int
    num_window_pages: int | None
    """Number of pages of the window pool. None without one."""
    num_states: int | None
    """Number of states in the prefix cache. None if the model has no recurrent layers."""
    max_message_bytes: int
    """Maximum bytes of a frame or a result."""


class RankActor:
    """One rank's process. Methods are called in the order of their declaration. `ctl` methods run while `run`
    blocks."""

    def __init__(self, spec: RankSpec) -> None:
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self.become(spec)
        self._group: TensorParallelGroup | None = None
        self._relay_port: int | None = None  # port of this node's relay to a store on another node
        self._worker: TPWorker | None = None
        self._progress = 0.0
        self._frames: FrameReader | None = None
        self._results: FrameWriter | None = None
        self._given: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"Rank[tp{self._spec.rank}]" if self._spec.rank >= 0 else "Rank[spare]"

    def become(self, spec: RankSpec) -> None:
        """Makes this process the rank of `spec`, before it joins."""
        name = f"tp{spec.rank}" if spec.rank >= 0 else "spare"
        log_to_stderr(spec.config.observability.log_format, replica=spec.replica, rank=name)
        self._spec = spec

    def warm_up(self) -> int:
        """Prepares the process for any rank that it may become. Returns its process id."""
        import torch

        from worker.warm_up import warm_up

        spec = self._spec
        warm_up(spec.config, spec.model, None if spec.device is None else torch.device(spec.device))
        return os.getpid()

    def where(self) -> Location:
        """The node, process and device of this rank."""
        # Importing torch takes seconds. It is imported here, because `join` must end within a step's timeout.
        import worker.tp_worker  # noqa: F401

        device = self._spec.device or ("cpu" if self._spec.config.device == "cpu" else given_gpu())
        return Location(ray.get_runtime_context().get_node_id(), os.getpid(), device)

    def join(self, store_at: int | str, generation: int, one_node: bool) -> int:
        """Joins the process group through the coordinator's store. In a later generation, the rank keeps its weights.

        Args:
            store_at: the store's port on this node, or the address of the store's gate if ranks are on several nodes. 0
                in a group of one rank, which has no store.

        Returns:
            Bytes that were free on the rank's GPU before it loads weights. 0 if it has weights already.
        """
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared

        from parallel.collectives.group import TensorParallelGroup
        from parallel.persistent_memory import PersistentMemory
        from worker.device.memory import await_room
        from worker.step.preparing import mark_compilations
        from worker.tp_worker import TPWorker, peer_sizes

        config, model, rank = self._spec.config, self._spec.model, self._spec.rank
        parallel = config.parallel
        if isinstance(store_at, str):
            store_at = self._relay_port = self._relay_port or open_relay(store_at, parallel.init_timeout_s)
        store = TCPStore("127.0.0.1", store_at, is_master=False, wait_for_workers=False) if store_at else None
        if self._group is not None:
            self._group.rejoin(store, generation)
            return 0
        assert parallel.threads_per_rank is not None, "threads_per_rank is resolved before the ranks start"
        assert parallel.spin_us is not None, "spin_us is resolved before the ranks start"
        torch.set_num_threads(parallel.threads_per_rank)
        device = torch.device(self.where().device)
        plan = ShardPlan.create(model, config.tensor_parallel_size, exact=config.is_exact)
        room_bytes = 0
        if device.type == "cuda":
            mark_compilations()
            torch.cuda.set_device(device)
            room_bytes = await_room(device, self._spec.room_bytes)
        self._group = TensorParallelGroup.create(
            rank=rank,
            size=config.tensor_parallel_size,
            store=store,
            device=device,
            strategy=_strategy(parallel, device.type, one_node=one_node),
            timeout_s=parallel.step_timeout_s,
            generation=generation,
            spin_us=parallel.spin_us,
            sizes=peer_sizes(config, model, plan),
        )
        persistent = PersistentMemory(self._spec.keeper, rank, device) if one_node else None
        if persistent is not None:
            persistent.write_down_crashes()
        self._worker = TPWorker(
            config=config,
            model=model,
            model_path=Path(self._spec.model_path),
            plan=plan,
            group=self._group,
            persistent=persistent if persistent is not None and persistent.is_possible else None,
        )
        return room_bytes

    def fetch(self) -> None:
        """Downloads the weights to this node if they are missing, before the ranks join. Raises CheckpointError."""
        config = self._spec.config
        self._progress = 0.0
        path = resolve_model_path(config.model, config.revision, on_progress=self._on_progress)
        self._spec = replace(self._spec, model_path=str(path))

    def load(self) -> RankLoad:
        """Loads this rank's shard and measures the memory left for the KV pool. On CUDA all ranks do this together."""
        began = time.monotonic()
        self.read_weights()
        seconds = time.monotonic() - began
        return self._loaded(self._ready().profile(), seconds)

    def prepare(self) -> None:
        """Loads the model's kernels and this rank's shard onto the device, while other ranks use it. If the shard does
        not fit there, it waits in the host's memory until `load_to_device`."""
        from worker.warm_up import warm_up

        warm_up(self._spec.config, self._spec.model, self._ready().device)
        self.read_weights(beside=True)

    def load_to_device(self, step_bytes: int) -> RankLoad:
        """Moves the shard of `prepare` to the device. Returns what is left for the KV pool besides `step_bytes`."""
        from worker.device.memory import DeviceMemory, free_bytes

        began, worker = time.monotonic(), self._ready()
        worker.shard.load_to_device()
        memory = DeviceMemory(free_bytes(worker.device), activation_bytes=step_bytes)
        return self._loaded(memory, time.monotonic() - began)

    def _loaded(self, memory: DeviceMemory, seconds: float) -> RankLoad:
        from worker.device.platform import platform_of

        worker = self._ready()
        return RankLoad(
            kv_page_bytes=worker.kv_page_bytes(),
            free_bytes=memory.usable_bytes,
            step_bytes=memory.step_bytes,
            is_persistent=worker.shard.persistent is not None,
            seconds=seconds,
            platform=platform_of(worker.device),
        )

    def move_to_host(self) -> None:
        """Moves the weights to the host's memory. `allocate` moves them back to the device."""
        self._ready().shard.move_to_host()

    def read_weights(self, beside: bool = False) -> None:
        """Loads this rank's shard without the other ranks, when the size of the KV pool is known. `beside` is the
        argument of `Shard.load`."""
        self._progress = 0.0
        must_find = self._spec.is_in_memory
        self._ready().shard.load(self._on_progress, self._spec.weights, must_find=must_find, beside=beside)

    def measure(self) -> Peaks:
        """Measures this rank's device. All ranks do this at the same time, because they may share it."""
        return self._ready().measure()

    def allocate(self, pool: PoolShape, at_once: bool, keeps_kv: bool) -> None:
        """Allocates the request tables and the KV pool, or reuses the persistent pool. On CUDA, also captures the
        largest graphs, unless requests wait (`at_once`)."""
        self._ready().allocate(
            pool.num_pages,
            pool.max_model_len,
            pool.num_window_pages,
            pool.num_states,
            at_once=at_once,
            later=True,
            keeps_kv=keeps_kv,
        )

    def take_kv(
        self,
        keeper: str,
        num_ranks: int,
        layer_ids: Sequence[int],
        pages: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
    ) -> None:
        """Copies this rank's part of the KV and states that `num_ranks` other ranks left with their `keeper`.
        `TPWorker.take_kv` has the arguments."""
        from parallel.persistent_memory import PersistentMemory

        worker = self._ready()
        left = [PersistentMemory(keeper, rank, worker.device) for rank in range(num_ranks)]
        worker.take_kv(layer_ids, pages, slots, left)

    def attach_ring(self, frames_address: str, results_address: str) -> None:
        """Connects to this node's shared-memory ring of frames. Rank 0 also connects to the ring of results."""
        self._frames = Ring.attach(frames_address).reader(self._spec.rank)
        self._results = Ring.attach(results_address).writer() if self._spec.rank == 0 else None

    def attach_tcp(self, frames_address: str, results_address: str, max_frame_bytes: int) -> None:
        """Connects over TCP, because the ranks are on several nodes."""
        rank, timeout_s = self._spec.rank, self._spec.config.parallel.init_timeout_s
        frames = connect(frames_address, rank, timeout_s=timeout_s)
        self._frames = TcpReader(frames, max_frame_bytes=max_frame_bytes)
        if rank == 0:
            results = connect(results_address, 0, timeout_s=timeout_s)
            self._results = TcpWriter([results], max_frame_bytes=max_frame_bytes)

    def run(self) -> None:
        """Runs the step loop. Returns after a CLOSE frame, and raises the error if the loop fails."""
        frames, results = self._frames, self._results
        assert frames is not None, "attach comes first"
        timeout_s = self._spec.config.parallel.step_timeout_s
        worker = self._ready()
        worker.run(frames, None if results is None else lambda result: results.send(result, timeout_s))
        worker.close()

    def leave(self) -> None:
        """Drops everything but the weights, for the next generation, once `run` (or another method that waits) has
        returned. Raises EngineError if this process cannot be used any more."""
        if self._worker is not None:
            self._worker.leave()

    @ray.method(concurrency_group="ctl")
    def give(self, tensors: list[ray.ObjectRef[dict[str, Any]]]) -> None:
        """Receives tensors of a checkpoint by name, for a later `stage`. A value is a tensor, or the result of
        torch.multiprocessing's reduction of one."""
        for name, handle in (item for ref in tensors for item in ray.get(ref).items()):
            if isinstance(handle, tuple):
                rebuild, arguments = handle
                handle = rebuild(*arguments)
            self._given[name] = handle

    @ray.method(concurrency_group="ctl")
    def stage(self, spec: RankSpec) -> bool:
        """Reads this rank's shard of the weights of `spec` while `run` blocks. Calls `Shard.stage`, which has the
        result and the errors."""
        config, path = spec.config, Path(spec.model_path)
        if spec.is_in_memory:
            return self._ready().shard.stage(spec.model, self._given, identity=spec.weights)
        if not config.is_local_model and config.load_format != "dummy":
            path = resolve_model_path(config.model, config.revision)  # ranks of a node wait for each other
        return self._ready().shard.stage(spec.model, path, config.revision, spec.weights)

    @ray.method(concurrency_group="ctl")
    def take_staged(self) -> None:
        """Uses the staged weights from the next step on. No step may be running."""
        self._ready().shard.take_staged()

    @ray.method(concurrency_group="ctl")
    def drop_staged(self) -> None:
        """Drops the staged weights and the received tensors."""
        self._given.clear()
        self._ready().shard.drop_staged()

    @ray.method(concurrency_group="ctl")
    def abort(self, reason: str) -> None:
        """Makes `run` raise EngineError(reason), even while it waits for other ranks."""
        if self._frames is not None:
            self._frames.fail(reason)
        if self._group is not None:
            self._group.abort(reason)

    @ray.method(concurrency_group="ctl")
    def progress(self) -> float:
        """Share of the weights that `fetch` or `load` has read so far, 0 to 1."""
        return self._progress

    @ray.method(concurrency_group="ctl")
    def stacks(self) -> str:
        """The stack of each thread of this process, innermost frame last. May be called while `run` blocks."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    def _on_progress(self, share: float) -> None:
        self._progress = share

    def _ready(self) -> TPWorker:
        assert self._worker is not None, "join comes first"
        return self._worker


def _strategy(config: ParallelConfig, device: str, *, one_node: bool) -> Strategy:
    """The all-reduce implementation of `config`, or another one if it needs one node and the ranks are on several."""
    chosen = config.all_reduce
    assert chosen != "auto", "all_reduce is resolved before the ranks start"
    if one_node or chosen != ONE_NODE_STRATEGY[device]:
        return chosen
    logger.warning("parallel.all_reduce: %s -> %s (ranks on several nodes)", chosen, ANY_NODES_STRATEGY[device])
    return ANY_NODES_STRATEGY[device]
