"""Starts, watches, replaces and ends the rank actors of one tensor-parallel group.

The coordinator's process owns them: when it dies, Ray ends them. It also hosts the rendezvous store, so that any rank
may die and the store stays.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ranks.rank_actor import Location, RankActor, RankLoad, RankSpec, actor_class
from cluster.ranks.spares import WarmSpares
from cluster.ranks.stopped import end_stopped
from configs.addresses import family_of
from configs.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    LockstepError,
    RankDiedError,
    RankLostError,
    StepHungError,
)
from configs.kv_pages import PageBytes
from configs.model_config import ModelConfig
from configs.schema import EngineConfig
from parallel.channel import FrameReader, FrameWriter, Ring
from parallel.environment import RANK_ENVIRONMENT
from parallel.tcp_channel import TcpListener, TcpReader, TcpWriter
from worker.cgroup import available_cores

logger = logging.getLogger(__name__)

NAMESPACE = "lockstep"
GENERATION = 1
_WATCH_INTERVAL_S = 1.0
_LEAVE_TIMEOUT_S = 10.0
# After a hang: the others wait for the one that hangs, and leave as soon as they are told. On GPUs that takes NCCL
# half a second, and a rank says after three that its device never gets done.
_LEAVE_HUNG_TIMEOUT_S = {"cpu": 2.0, "cuda": 5.0}
_ABORT_TIMEOUT_S = 1.0
_PROGRESS_TIMEOUT_S = 5.0
_STACKS_TIMEOUT_S = 2.0
# A process that dies breaks its peers' connections, and their errors may come first.
_CAUSE_S = 0.5
# What is waited for here takes a step, and spinning that long takes a core from the ranks.
_MOST_CHANNEL_SPIN_US = 50
_CHANNEL_SLOTS = 8  # more than the steps in flight, so that the writer never waits
_NEXT = "The replica is being replaced; send the request again."

# Ray's own masking of devices would hide the peers that CUDA IPC and symmetric memory must open.
_CUDA_ENVIRONMENT = {**RANK_ENVIRONMENT, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass(frozen=True)
class GroupMemory:
    """What loading found out: the ranks' answers, in rank order."""

    loads: tuple[RankLoad, ...]
    on_cpu: bool

    @property
    def bytes_per_page(self) -> tuple[PageBytes, ...]:
        """KV bytes of one page on each rank."""
        return tuple(load.kv_page_bytes for load in self.loads)

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
        placement_group: bundle 1 + r is rank r's; ranks on CPU beyond the last bundle share with the first ones.
        name: prefix of the actors' names.
        suffix: of the actors' names, where two groups of one name live for a while.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: ModelConfig,
        model_path: Path,
        placement_group: PlacementGroup,
        name: str,
        suffix: str = "",
    ) -> None:
        self._config = config
        self._model = model
        self._model_path = model_path
        self._placement_group = placement_group
        self._name = name
        self._suffix = suffix
        self._ranks: list[Any] = []
        self._measured = self._ranks  # those whose progress is the group's
        self._processes: dict[int, tuple[int, int]] = {}  # by rank on this node: process id and a pidfd of it
        self._devices: dict[int, str] = {}  # by rank, as in Location: each bundle has one
        self._rooms: list[int] = []  # by rank, bytes free on its GPU before it was first used
        self._spares = WarmSpares(config.recovery.warm_spares, self._start_spare)
        self._runs: list[ray.ObjectRef[None]] = []
        self._run_args: tuple[int, int, int | None, int] | None = None
        self._store: Any = None
        self._host = "127.0.0.1"
        self.one_node = True
        """All ranks run where this is; known after `load`."""
        self._closing = threading.Event()
        self._rings: tuple[Ring, ...] = ()  # of frames and of results, where the ranks are on one node
        self._fetches = False
        self._on_failure: Callable[[LockstepError], None] | None = None

    @property
    def config(self) -> EngineConfig:
        """Of these ranks, resolved."""
        return self._config

    @property
    def run_args(self) -> tuple[int, int, int | None, int]:
        """What `run` was called with."""
        assert self._run_args is not None, "run comes first"
        return self._run_args

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._config.tensor_parallel_size

    @property
    def devices(self) -> list[str]:
        """By rank, as in Location; callable from another thread."""
        return [device for _, device in sorted(dict(self._devices).items())]

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, of those on this node; callable from another thread."""
        return {rank: pid for rank, (pid, _) in sorted(dict(self._processes).items())}

    def start(self) -> list[Location]:
        """Starts the processes and says where they are."""
        self._ranks += [self._start(self._spec(rank)) for rank in range(self.size)]
        return self._locate(range(self.size))

    def _start(self, spec: RankSpec) -> Any:
        gpus = 1 if self._config.device == "cuda" else 0
        bundle = 1 + spec.rank % (self._placement_group.bundle_count - 1)
        return self._start_actor(spec, f"tp{spec.rank}", bundle=bundle, gpus=gpus)

    def _start_spare(self, number: int) -> Any:
        return self._start_actor(self._spec(-1), f"tp-spare{number}", bundle=0, gpus=0)

    def _spec(self, rank: int) -> RankSpec:
        return RankSpec(self._config, self._model, str(self._model_path), rank, self._name)

    def _start_actor(self, spec: RankSpec, name: str, *, bundle: int, gpus: int) -> Any:
        return (
            actor_class(RankActor)
            .options(
                name=f"{self._name}:{name}{self._suffix}",
                namespace=NAMESPACE,
                num_cpus=0,
                num_gpus=gpus,
                runtime_env={"env_vars": _CUDA_ENVIRONMENT} if self._config.device == "cuda" else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement_group, placement_group_bundle_index=bundle
                ),
            )
            .remote(spec)
        )

    @property
    def spare_pids(self) -> list[int]:
        """Process ids of the spares that are warm."""
        return self._spares.pids

    def start_spares(self) -> None:
        """Starts the processes that a rebuild takes; returns at once."""
        self._spares.fill()

    def _locate(self, ranks: Iterable[int]) -> list[Location]:
        """Where `ranks`, just started, run."""
        ranks = list(ranks)
        locations: list[Location] = self._on(ranks, "where")
        here = ray.get_runtime_context().get_node_id()
        for rank, location in zip(ranks, locations, strict=True):
            self._devices[rank] = location.device
            if location.node_id == here:
                with contextlib.suppress(OSError):  # a sandbox may not know the call; see `close` for who else ends it
                    self._processes[rank] = (location.pid, os.pidfd_open(location.pid))
        return locations

    def fetch(self, locations: list[Location]) -> None:
        """Has every node fetch the weights that it lacks, however long that takes."""
        self._fetches = True
        fetchers = sorted({location.node_id: rank for rank, location in enumerate(locations)}.values())
        self._measured = [self._ranks[rank] for rank in fetchers]
        self._get({rank: self._ranks[rank].fetch.remote() for rank in fetchers}, math.inf)
        # The others of a node find what its one has left.
        others = [rank for rank in range(self.size) if rank not in fetchers]
        self._measured = self._ranks
        self._get({rank: self._ranks[rank].fetch.remote() for rank in others}, self._config.parallel.init_timeout_s)

    def load(self, locations: list[Location]) -> GroupMemory:
        """Joins the ranks into one process group and loads every shard."""
        here = ray.get_runtime_context().get_node_id()
        self.one_node = all(location.node_id == here for location in locations)
        self._host = "127.0.0.1" if self.one_node else ray.util.get_node_ip_address()
        self._store = _open_store(self._host)
        self._rooms = self._on_all("join", self._host, self._store.port, GENERATION, self.one_node)
        return GroupMemory(tuple(self._on_all("load")), self._config.device == "cpu")

    def measure(self) -> tuple[float, float]:
        """What the loaded ranks can do together, measured at the same time: (FLOP/s, bytes/s of memory)."""
        peaks = self._on_all("measure")
        return sum(peak.flops for peak in peaks), sum(peak.bandwidth for peak in peaks)

    def progress(self) -> list[float]:
        """Share of the weights loaded, or of the graphs captured, by each rank, or of the weights fetched by each node,
        0 to 1. Empty without ranks."""
        if not self._measured:
            return []
        return ray.get([rank.progress.remote() for rank in self._measured], timeout=_PROGRESS_TIMEOUT_S)

    def run(
        self, num_pages: int, max_model_len: int, num_window_pages: int | None, max_message_bytes: int
    ) -> tuple[FrameWriter, FrameReader]:
        """Allocates the KV pools, connects the channel and puts every rank into its step loop.

        Args:
            num_window_pages: as in `TPWorker.allocate`.
            max_message_bytes: of a frame or a result.
        """
        self._run_args = (num_pages, max_model_len, num_window_pages, max_message_bytes)
        self._on_all("allocate", num_pages, max_model_len, num_window_pages)
        frames, results = (self._connect_ring if self.one_node else self._connect_tcp)(max_message_bytes)
        self._runs = [rank.run.remote() for rank in self._ranks]
        if self._on_failure is not None:
            self.watch(self._on_failure)
        return frames, results

    def leave(self, dismiss: Callable[[], None]) -> None:
        """Has the ranks leave their step loops, which `dismiss` tells them to; they give their pools up and keep their
        weights, and `rebuild` puts them to work again."""
        runs, self._runs = self._runs, []  # who watches them has nothing more to say
        dismiss()
        ray.wait(runs, num_returns=len(runs), timeout=_LEAVE_TIMEOUT_S)

    def rebuild(self, generation: int, failure: LockstepError) -> tuple[FrameWriter, FrameReader]:
        """Puts a new process in the place of each rank that died, failed by itself or does not answer, and all into the
        step loop of a new generation; the others keep their weights. The channel's ends are of no use any more.

        Args:
            failure: of the generation before.

        Raises:
            LockstepError: it did not succeed within `parallel.init_timeout_s`; the next attempt begins anew.
        """
        assert self._run_args is not None, "run comes first"
        began, runs = time.monotonic(), self._runs
        self._runs = []  # who watches them has nothing more to say
        rings, self._rings = self._rings, ()
        for ring in rings:
            ring.close()
        replaced = self._end_lost(failure, runs)
        ended = time.monotonic()
        for rank in replaced:
            spec = replace(self._spec(rank), device=self._devices[rank], room_bytes=self._rooms[rank])
            self._ranks[rank] = self._spares.take(spec) or self._start(spec)
        locations = self._locate(replaced)
        self._on_all("where")  # one that died since would keep the others waiting for it
        started = time.monotonic()
        if self._fetches:
            self._on(replaced, "fetch")
        self._on_all("join", self._host, self._store.port, generation, self.one_node)
        self._on(replaced, "read_weights")
        loaded = time.monotonic()
        channel = self.run(*self._run_args)
        logger.warning(
            "rank %s replaced (pid %s) in generation %d: the others left after %.2f s, start %.2f s, weights %.2f s, "
            "tables and channel %.2f s",
            ", ".join(map(str, replaced)) or "none",
            ", ".join(str(location.pid) for location in locations),
            generation,
            ended - began,
            started - ended,
            loaded - started,
            time.monotonic() - loaded,
        )
        self.start_spares()
        return channel

    def _end_lost(self, failure: LockstepError, runs: Sequence[ray.ObjectRef[None]]) -> list[int]:
        """Makes all ranks leave what they wait in, and ends the processes of those that do not or cannot, or whose
        `runs` failed by themselves; returns these, dead ones among them."""
        calls: dict[Any, int] = {}
        for rank, actor in enumerate(self._ranks):
            # On threads of their own: on GPUs NCCL's abort waits for the graphs, which go in `leave`, and `leave` for
            # the collectives, which the abort ends.
            calls |= {actor.abort.remote(str(failure)): rank, actor.leave.remote(): rank}
        is_hung = isinstance(failure, StepHungError)
        timeout_s = _LEAVE_HUNG_TIMEOUT_S[self._config.device] if is_hung else _LEAVE_TIMEOUT_S
        done, silent = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        lost = {calls[call] for call in silent}
        lost |= {calls[call] for call in done if _failure(calls[call], self.size, call) is not None}
        ended, _ = ray.wait(list(runs), num_returns=len(runs), timeout=0) if runs else ([], [])
        ends = {rank: _failure(rank, self.size, run) for rank, run in enumerate(runs) if run in ended}
        lost |= {rank for rank, end in ends.items() if isinstance(end, RankDiedError)}
        for rank in lost:
            ray.kill(self._ranks[rank])
            self._end_process(rank)
        return sorted(lost)

    def _end_process(self, rank: int) -> None:
        """Ends the rank's process, where it is on this node."""
        _, process = self._processes.pop(rank, (0, -1))
        if process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)

    def _connect_ring(self, max_message_bytes: int) -> tuple[FrameWriter, FrameReader]:
        parallel = self._config.parallel
        assert parallel.spin_us is not None, "spin_us is resolved before the ranks start"

        def ring(num_readers: int) -> Ring:
            return Ring.create(
                num_readers=num_readers,
                slots=_CHANNEL_SLOTS,
                slot_bytes=max_message_bytes,
                spin_us=min(parallel.spin_us or 0, _MOST_CHANNEL_SPIN_US),
            )

        frames, results = ring(self.size), ring(1)
        self._rings = (frames, results)
        self._on_all("attach_ring", frames.address, results.address)
        return frames.writer(), results.reader(0)

    def _connect_tcp(self, max_message_bytes: int) -> tuple[FrameWriter, FrameReader]:
        """All ranks over TCP, also those of this node: one way to send a frame is enough."""
        timeout_s = self._config.parallel.init_timeout_s
        frames, results = TcpListener.create(self._host), TcpListener.create(self._host)
        # The ranks connect while this side accepts; a rank that fails ends the wait for the others.
        accepting = ThreadPoolExecutor(2)
        to_ranks = accepting.submit(frames.accept, self.size, timeout_s=timeout_s)
        from_rank_0 = accepting.submit(results.accept, 1, timeout_s=timeout_s)
        self._on_all("attach_tcp", frames.address, results.address, max_message_bytes)
        writer = TcpWriter(to_ranks.result(timeout_s), max_frame_bytes=max_message_bytes)
        reader = TcpReader(from_rank_0.result(timeout_s)[0], max_frame_bytes=max_message_bytes)
        accepting.shutdown()
        frames.close()
        results.close()
        return writer, reader

    def heartbeat_ages(self) -> list[float]:
        """Seconds since each rank last took or awaited a frame. Empty where the ranks are on several nodes."""
        return [ring.reader_status(rank).heartbeat_age_s for ring in self._rings[:1] for rank in range(self.size)]

    def log_stacks(self, step_age_s: float) -> None:
        """Logs where each rank's threads are, since a step takes suspiciously long; returns at once."""
        threading.Thread(target=self._log_stacks, args=(step_age_s,), name="rank-stacks", daemon=True).start()

    def _log_stacks(self, step_age_s: float) -> None:
        logger.warning("a step runs for %.1f s; what the ranks do:", step_age_s)
        for rank, call in enumerate([rank.stacks.remote() for rank in self._ranks]):
            try:
                logger.warning("rank %d:\n%s", rank, ray.get(call, timeout=_STACKS_TIMEOUT_S))
            except ray.exceptions.RayError as error:  # a stopped process does not answer, a dead one neither
                logger.warning("rank %d says nothing: %s", rank, type(error).__name__)

    def watch(self, on_failure: Callable[[LockstepError], None]) -> None:
        """Calls `on_failure` when a rank's loop ends before `close`, and after `rebuild` again; returns at once."""
        self._on_failure = on_failure
        threading.Thread(target=self._watch, args=(on_failure,), name="rank-watch", daemon=True).start()

    def end_stopped(self, stall_timeout_s: float) -> None:
        """From now on ends ranks of this node that are stopped for so long; returns at once."""
        end_stopped(lambda: {f"rank {rank}": pid for rank, pid in self.pids.items()}, stall_timeout_s, self._closing)

    def close(self, failure: str | None = None) -> None:
        """Ends the ranks' processes; waits shortly for them to leave their loops on their own.

        Args:
            failure: why they must leave what they wait in. None: they were sent a CLOSE frame.
        """
        self._closing.set()
        if failure is not None:
            for rank in self._ranks:
                rank.abort.remote(failure)
        if self._runs:
            timeout_s = _LEAVE_TIMEOUT_S if failure is None else _ABORT_TIMEOUT_S
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)
        for rank in self._ranks:
            ray.kill(rank)
        self._spares.close()
        # Ray asks the process to end, which a stopped or stuck one does not hear. Without this, and on another node,
        # the raylet ends it when the placement group goes.
        for rank in list(self._processes):
            self._end_process(rank)
        self._ranks = self._measured = []
        self._runs = []
        for ring in self._rings:
            ring.close()
        self._rings = ()

    def _watch(self, on_failure: Callable[[LockstepError], None]) -> None:
        runs = self._runs
        try:
            done: list[Any] = []
            while not done and not self._closing.is_set():
                # A pending call fails within 25 ms of its process's death; the timeout only bounds the thread's end.
                done, _ = ray.wait(runs, num_returns=1, timeout=_WATCH_INTERVAL_S)
            if self._closing.is_set() or runs is not self._runs:
                return
            on_failure(failure_of(dict(enumerate(runs)), self.size))
        except Exception as error:  # whatever stops the watch, the requests must not go on unwatched
            logger.exception("the watch over the ranks failed")
            if runs is self._runs:
                on_failure(EngineError(f"the watch over the ranks failed: {error!r}"))

    def _on_all(self, method: str, *args: object) -> list[Any]:
        return self._on(range(self.size), method, *args)

    def _on(self, ranks: Iterable[int], method: str, *args: object) -> list[Any]:
        calls = {rank: getattr(self._ranks[rank], method).remote(*args) for rank in ranks}
        return self._get(calls, self._config.parallel.init_timeout_s)

    def _get(self, calls: Mapping[int, Any], timeout_s: float) -> list[Any]:
        """The answers to `calls` by rank, or the first failure at once: the others may wait in a collective for the
        failed one."""
        deadline = time.monotonic() + timeout_s
        pending = list(calls.values())
        while pending:
            left_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=left_s)
            if not done:
                raise DeadlineError(
                    f"{len(pending)} of {self.size} ranks did not answer within parallel.init_timeout_s={timeout_s:g} s"
                )
            if _failure(0, self.size, done[0]) is not None:
                raise failure_of(calls, self.size)
        return ray.get(list(calls.values()))


def failure_of(calls: Mapping[int, Any], size: int) -> LockstepError:
    """Why `calls` by rank, one of which has ended, failed: a rank that died or raised of itself, where one did.

    Args:
        size: ranks of the group.
    """
    done: list[Any] = []
    failures: list[LockstepError] = []
    for wait_s in (0.0, _CAUSE_S):
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=wait_s)
        found = [_failure(rank, size, call) for rank, call in calls.items() if call in done]
        failures = [error for error in found if error is not None]
        # Other errors of the engine may be what the loss of a peer did to this rank.
        for error in failures:
            if isinstance(error, RankDiedError | ConfigError):
                return error
    if not failures:
        return RankDiedError("a rank left its step loop without an error")
    silent = [str(rank) for rank, call in calls.items() if call not in done]
    if isinstance(failures[0], DeadlineError) and silent:
        return DeadlineError(f"{failures[0]} (no word from rank {', '.join(silent)})")
    return failures[0]


def _failure(rank: int, size: int, call: Any) -> LockstepError | None:
    """How the ended `call` of rank `rank` failed; None if it returned."""
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError):
            return cause
        if isinstance(cause, EngineError):
            kind = type(cause)
            return kind(f"rank {rank} failed: {cause}")
        return RankDiedError(
            f"rank {rank} failed: {type(cause).__name__}: {cause}",
            told=f"Rank {rank} of {size} failed with an error of its own, which is in the log. {_NEXT}",
        )
    except ray.exceptions.RayError as error:
        death = rank_death(str(error))
        return RankLostError(
            f"rank {rank} died: {death}; see its log and the kernel's",
            told=f"Rank {rank} of {size} died: {death}. {_NEXT}",
        )
    return None


def rank_death(ray_says: str) -> str:
    """What ended an actor, in one line without Ray's addresses; Ray does not know the signal."""
    if "node has died" in ray_says:
        return "its node was lost"
    exit_type = re.search(r"Worker exit type: (\w+)", ray_says)
    if exit_type is None:
        return "Ray lost its process"
    if exit_type[1] == "NODE_OUT_OF_MEMORY":
        return "Ray ended its process because the node was out of memory"
    return (
        "its process was killed (signal 9, which the kernel sends when the node or the container is out of memory) or "
        f"crashed ({exit_type[1]})"
    )


def _open_store(host: str) -> Any:
    """A rendezvous store that listens on `host` only; by itself it would on every interface, and it knows no keys."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared

    listener = socket.create_server((host, 0), family=family_of(host))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def node_cores() -> int:
    """CPU cores this process may use: those it may run on, or fewer whole ones where its container has a quota."""
    cores, quota = len(os.sched_getaffinity(0)), available_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))
