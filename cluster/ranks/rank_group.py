"""Starts, watches, replaces and ends the rank actors of one group.

The coordinator's process owns the actors: if that process dies, Ray ends them. It also hosts the rendezvous store, so
that the store survives the death of any rank.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from cluster.ranks import recovery
from cluster.ranks.calls import call, call_failure, log_stacks, watch
from cluster.ranks.group_memory import GroupMemory, pool_within
from cluster.ranks.held_gpus import HeldGPU
from cluster.ranks.meeting_place import MeetingPlace
from cluster.ranks.rank import Rank, RankStarter
from cluster.ranks.rank_actor import Location, PoolShape, RankLoad
from cluster.ranks.spares import WarmSpares
from cluster.ranks.step_channel import StepChannel
from cluster.scheduling.pages import Kept
from configs.errors import EngineError, LockstepError, RankDiedError, RankLostError, StepHungError
from configs.kv_pages import dtype_bytes
from configs.model_config import ModelConfig
from configs.schema import EngineConfig, resolved
from configs.weight_dtypes import weight_dtypes
from parallel.channel.ring import FrameReader, FrameWriter
from parallel.persistent_memory import WEIGHTS, Keeper, kv_block
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost

logger = logging.getLogger(__name__)

GENERATION = 1
_LEAVE_TIMEOUT_S = 10.0
# Seconds for ranks to leave after a hang. They wait for the hanging rank, and leave as soon as they are aborted. On
# GPUs, NCCL takes half a second for that, and a rank reports after three that its device makes no progress.
_LEAVE_HUNG_TIMEOUT_S = {"cpu": 2.0, "cuda": 5.0}
_ABORT_TIMEOUT_S = 1.0
_END_TIMEOUT_S = 2.0
_MOST_FAILED = 2
_LAYERS_AT_ONCE = 8
_PROGRESS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class PersistentKV:
    """KV and states that ranks left in persistent memory when they left or died."""

    keeper: Keeper
    """Keeps the persistent memory of those ranks open."""
    num_ranks: int
    kept: Kept
    """What to take over."""


class RankGroup:
    """The ranks of one group. `starter` starts the ranks' actors."""

    frames: FrameWriter
    """Sends frames to every rank. Set by `run`."""
    results: FrameReader
    """Receives results from rank 0. Set by `run`."""

    def __init__(self, starter: RankStarter) -> None:
        self.config = starter.config
        self._keeper = Keeper()
        self.starter = dataclasses.replace(starter, keeper=self._keeper.address)
        """Starts the group's actors."""
        self._ranks: list[Rank] = []
        self._measured = self._ranks  # the ranks that report the group's progress
        self._spares = WarmSpares(resolved(self.config.recovery.warm_spares), starter.start_spare)
        self._runs: dict[int, ray.ObjectRef[None]] = {}  # rank -> its call of `RankActor.run`, which is watched
        self._pool: PoolShape | None = None
        self._on_failure: Callable[[LockstepError], None] | None = None
        self._meeting: MeetingPlace | None = None  # None until the ranks have met
        self._memory: GroupMemory | None = None
        self.one_node = True
        """Whether all ranks are on this node. Known after `load`."""
        self._closing = threading.Event()
        self._channel: StepChannel | None = None

    def resized(self, config: EngineConfig, held: tuple[HeldGPU, ...]) -> RankGroup:
        """A group with the number of ranks in `config`, not started, that can replace this one. It does not use the
        devices of `lost` ranks.

        Args:
            held: reserved GPUs for ranks without a bundle in the placement group.
        """
        taken = tuple(device for index, device in enumerate(self.devices) if index not in self.lost)
        changes: dict[str, Any] = {"config": config, "held": held, "taken": taken}
        return RankGroup(dataclasses.replace(self.starter, suffix=f"of{config.tensor_parallel_size}", **changes))

    def give(self, tensors: Sequence[ray.ObjectRef[dict[str, Any]]]) -> RankStarter:
        """Sends tensors of a checkpoint, by name, to every rank. Returns the argument of `stage` for all tensors so
        far."""
        self._on(self._ranks, "give", list(tensors))
        return dataclasses.replace(self.starter, is_in_memory=True, weights=secrets.token_hex())

    def stage(self, starter: RankStarter) -> list[bool]:
        """Makes every rank read the weights of `starter` while steps run, without a timeout. Returns the result of
        `Shard.stage` on each rank."""
        return call(self._ranks, "stage", starter.spec(-1), size=self.size, timeout_s=math.inf)

    def take_staged(self, starter: RankStarter) -> None:
        """Makes the ranks use the staged weights. Ranks that are started later use them too. No step may be in flight.

        Raises:
            LockstepError: a rank failed. All ranks have ended then, because it is unknown which of them use the new
                weights.
        """
        self.starter, self.config = starter, starter.config
        try:
            self._on(self._ranks, "take_staged")
        except LockstepError:
            for rank in self._ranks:
                rank.end()
            raise

    def drop_staged(self) -> None:
        """Makes the ranks drop the staged weights. Does not wait."""
        for rank in self._ranks:
            rank.actor.drop_staged.remote()

    @property
    def lost(self) -> list[int]:
        """Ranks that failed by themselves twice in a row after their process was replaced."""
        return [rank.index for rank in self._ranks if rank.num_failed >= _MOST_FAILED]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.config.tensor_parallel_size

    @property
    def model(self) -> ModelConfig:
        """The model that the ranks hold shards of."""
        return self.starter.model

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of a rank's bundle in the placement group."""
        bundle: dict[str, float] = self.starter.placement_group.bundle_specs[1]
        return bundle

    @property
    def room_bytes(self) -> list[int]:
        """Bytes that were free on each rank's GPU before the rank used it. 0 for ranks on CPU."""
        return [rank.room_bytes for rank in self._ranks]

    @property
    def plan(self) -> ShardPlan:
        """The shard plan of the group."""
        return ShardPlan.create(self.model, self.size, exact=self.config.is_exact)

    @property
    def cost(self) -> StepCost:
        """The cost of steps, summed over all ranks."""
        config = self.config
        dtypes, kv_bytes = weight_dtypes(config, self.model), dtype_bytes(config.kv_dtype)
        return StepCost.of(self.plan, dtype_bytes(config.dtype), kv_element_bytes=kv_bytes, dtypes=dtypes)

    @property
    def pool(self) -> PoolShape:
        """The pool sizes that `run` has allocated."""
        assert self._pool is not None, "run comes first"
        return self._pool

    @property
    def is_persistent(self) -> bool:
        """Whether weights and KV of all ranks are in persistent memory. Known after `load`."""
        return self._memory is not None and all(load.is_persistent for load in self._memory.loads)

    @property
    def reason_never(self) -> str | None:
        """The reason why failed ranks of this group are never replaced. None if they may be. Known after `load`."""
        if self._closing.is_set():
            return "its ranks have ended"
        if self.starter.is_in_memory and not self.is_persistent:
            return "its weights came from memory, so no new rank can read them; a change to weights of a path ends that"
        return recovery.reason_never(self.config, one_node=self.one_node)

    @property
    def locations(self) -> list[Location]:
        """Locations of the started ranks, by rank. Any thread may call this."""
        return [rank.location for rank in self._ranks if rank.location is not None]

    @property
    def devices(self) -> list[str]:
        """The device of each rank, named as in `Location.device`. Any thread may call this."""
        return [location.device for location in self.locations]

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each rank on this node, by rank. Any thread may call this."""
        return {rank.index: rank.location.pid for rank in self._ranks if rank.location is not None and rank.pidfd >= 0}

    @property
    def spare_pids(self) -> list[int]:
        """Process ids of the warm spares."""
        return self._spares.pids

    def heartbeat_ages(self) -> list[float]:
        """Seconds since each rank last took or awaited a frame. Empty if the ranks are on several nodes."""
        return [] if self._channel is None else self._channel.heartbeat_ages(self.size)

    def progress(self) -> list[float]:
        """Share of the weights that each rank has loaded, or each node downloaded, 0 to 1. Empty before `start`."""
        if not self._measured:
            return []
        return ray.get([rank.actor.progress.remote() for rank in self._measured], timeout=_PROGRESS_TIMEOUT_S)

    @property
    def fetches(self) -> bool:
        """Whether `fetch` must come before `load`, because the weights are on the Hub."""
        return not self.config.is_local_model and self.config.load_format != "dummy"

    def start(self) -> None:
        """Starts the ranks' processes, and waits for their locations."""
        if self.size > 1:
            # The store of `load` needs torch, and importing torch takes seconds. So torch is imported while the ranks
            # start.
            threading.Thread(target=importlib.import_module, args=("torch.distributed",), daemon=True).start()
        self._ranks += [Rank(index, self.starter.start(self.starter.spec(index))) for index in range(self.size)]
        self._settle(self._ranks)

    def _settle(self, started: Sequence[Rank]) -> None:
        """Waits for the new processes of ranks. Notices meanwhile if another rank dies."""
        others = [rank for rank in self._ranks if rank not in started]
        for rank, location in zip(started, self._on(started, "where", watched=others), strict=True):
            rank.settle(location)

    def fetch(self) -> None:
        """Makes every node download missing weights, without a timeout."""
        of_nodes = {location.node_id: rank for rank, location in zip(self._ranks, self.locations, strict=True)}
        self._measured = list(of_nodes.values())
        call(self._measured, "fetch", size=self.size, timeout_s=math.inf)
        # One rank per node downloads. The other ranks of the node then find its files.
        others = [rank for rank in self._ranks if rank not in self._measured]
        self._measured = self._ranks
        self._on(others, "fetch")

    def load(self) -> GroupMemory:
        """Joins the ranks into one process group and loads every shard."""
        self._meet()
        return self._loaded(self._on(self._ranks, "load"))

    def prepare(self) -> None:
        """Joins ranks on GPUs that other ranks use, and loads every shard beside the shards there, or into the host's
        memory if the GPU is too full. This group then waits until it replaces the other one."""
        self._meet()
        self._on(self._ranks, "prepare")

    def _meet(self) -> None:
        here = ray.get_runtime_context().get_node_id()
        self.one_node = all(location.node_id == here for location in self.locations)
        self._meeting = MeetingPlace(self.size, one_node=self.one_node)
        for rank, room_bytes in zip(self._ranks, self._join(GENERATION), strict=True):
            rank.room_bytes = room_bytes

    def _loaded(self, loads: list[RankLoad]) -> GroupMemory:
        for rank in self._ranks:
            rank.has_weights = True
        self._memory = GroupMemory(tuple(loads), self.config.device == "cpu")
        return self._memory

    def _load_in_place_of(self, old: RankGroup) -> GroupMemory:
        """Loads every shard after `old` has released its pools. Shards in the host's memory are moved to the device."""
        if self._meeting is None:
            return self.load()
        assert old._memory is not None, "it has loaded"
        # No step is run to measure its memory: together, the new ranks need at most as much as the old ones.
        step_bytes = max(load.step_bytes for load in old._memory.loads) * max(old.size, self.size) // self.size
        return self._loaded(self._on(self._ranks, "load_to_device", step_bytes))

    def _join(self, generation: int) -> list[int]:
        assert self._meeting is not None, "the ranks meet before they join"
        for rank in self._ranks:
            rank.is_starting = False
        return self._on(self._ranks, "join", self._meeting.store, generation, self.one_node)

    def measure(self) -> tuple[float, float]:
        """Measures all ranks at the same time. Returns the sums (FLOP/s, bytes/s of memory traffic)."""
        peaks = self._on(self._ranks, "measure")
        return sum(peak.flops for peak in peaks), sum(peak.bandwidth for peak in peaks)

    def run(
        self,
        pool: PoolShape,
        on_failure: Callable[[LockstepError], None],
        *,
        at_once: bool = False,
        kv: PersistentKV | None = None,
    ) -> None:
        """Allocates the KV pools, connects the channel and starts every rank's step loop.

        Args:
            at_once: whether requests wait, so that no CUDA graph is captured first. See `TPWorker.allocate`.
            kv: KV to continue with: of the ranks' own earlier pools, or of other ranks.
            on_failure: called from a thread when a rank's loop ends, unless the group was closed or its ranks replaced.
        """
        self._pool, self._on_failure = pool, on_failure
        is_own = kv is not None and kv.keeper is self._keeper
        self._on(self._ranks, "allocate", pool, at_once, is_own)
        if kv is not None and not is_own:
            self._take_kv(kv)
        channel = self._channel = self._connect(pool.max_message_bytes)
        self.frames, self.results = channel.frames, channel.results
        self._runs = {rank.index: rank.actor.run.remote() for rank in self._ranks}
        runs = self._runs
        watch(runs, self.size, lambda: self._closing.is_set() or self._runs is not runs, on_failure)

    def _connect(self, max_message_bytes: int) -> StepChannel:
        how = self.size, max_message_bytes, self.config.parallel, functools.partial(self._on, self._ranks)
        if self.one_node:
            return StepChannel.over_shared_memory(*how)
        assert self._meeting is not None, "the ranks have met"
        return StepChannel.over_tcp(*how, self._meeting.host)

    def start_spares(self) -> None:
        """Starts the spares that will replace dead ranks. Does not wait for them."""
        if self.reason_never is None:
            self._spares.fill([] if self.config.device == "cpu" else self.devices)

    def _take_kv(self, kv: PersistentKV) -> None:
        """Makes the ranks copy the KV that other ranks left. The other ranks' memory is released layer by layer."""
        mixers = [layer.mixer for layer in self.model.all_layers]
        with_kv = [i for i, mixer in enumerate(mixers) if mixer.token_elements or mixer.state]
        for first in range(0, len(with_kv), _LAYERS_AT_ONCE):
            layer_ids = with_kv[first : first + _LAYERS_AT_ONCE]
            self._on(self._ranks, "take_kv", kv.keeper.address, kv.num_ranks, layer_ids, *kv.kept)
            for layer_id in layer_ids:
                kv.keeper.drop(name=kv_block(layer_id))

    def takes_kv(self, old: RankGroup) -> bool:
        """Whether these ranks can use the KV of `old` when they replace it."""
        return self.is_persistent and old.is_persistent and old.pool.num_window_pages is None

    def keeps_kv(self, failure: LockstepError) -> bool:
        """Whether the KV of retired steps survives `failure`. KV is not trusted if a rank failed or crashed by
        itself."""
        crashes = {rank.index: words for rank in self._ranks if (words := self._keeper.crash(rank.index))}
        for index, words in crashes.items():
            logger.error("rank %d crashed:\n%s", index, words)
        return self.is_persistent and not crashes and isinstance(failure, RankLostError | StepHungError)

    def replace_ranks(self, generation: int, how: LockstepError | RankGroup, kept: Kept | None = None) -> RankGroup:
        """Ends the current generation, and starts the next one with new channels.

        Args:
            how: the failure that ended the generation, or a loaded group that replaces this one. After a failure, each
                rank that died, failed by itself or does not answer gets a new process, and the other ranks keep their
                weights. If a group takes over, the ranks of this one keep their weights until that group runs.
            kept: what the ranks continue with, as `keeps_kv` or `takes_kv` allowed. If None, all KV is dropped.

        Returns:
            The group that runs now.

        Raises:
            LockstepError: no rank runs. The caller may try again, with this error as the failure.
        """
        began = time.monotonic()
        assert self._on_failure is not None, "run comes first"
        kv = None if kept is None else PersistentKV(self._keeper, self.size, kept)
        if isinstance(how, RankGroup):
            how._take_over(self, kv)
            return how
        replaced = self._stop(how, keeps_kv=kv is not None)
        stopped = time.monotonic()
        self._start_again(replaced)
        started = self._join_again(replaced, generation)
        loaded = time.monotonic()
        for rank in replaced if kv is not None else ():
            if not rank.await_end(_LEAVE_TIMEOUT_S):
                raise EngineError(
                    f"rank {rank.index}'s process does not end, and may still write to its KV pool; end it by hand"
                )
        self.run(self.pool, self._on_failure, at_once=True, kv=kv)
        logger.warning(
            "rank %s replaced (pid %s) in generation %d: the others left after %.2f s, start %.2f s, weights %.2f s, "
            "tables and channel %.2f s",
            ", ".join(str(rank.index) for rank in replaced) or "none",
            ", ".join(str(rank.location.pid) for rank in replaced if rank.location is not None),
            generation,
            stopped - began,
            started - stopped,
            loaded - started,
            time.monotonic() - loaded,
        )
        return self

    def _start_again(self, replaced: Iterable[Rank]) -> None:
        """Gives each of the `replaced` ranks a new process on the rank's device, unless one is starting already: a warm
        spare if one is left. The next spares start at the same time, because the next failure may come soon."""
        for rank in replaced:
            if rank.is_starting:
                continue
            assert rank.location is not None, "it has run"
            spec = dataclasses.replace(
                self.starter.spec(rank.index),
                device=rank.location.device,
                room_bytes=rank.room_bytes - self._keeper.num_bytes(rank.index),
            )
            rank.actor, rank.has_weights = self._spares.take(spec) or self.starter.start(spec), False
            rank.is_starting = True
        self.start_spares()

    def _join_again(self, replaced: list[Rank], generation: int) -> float:
        """Waits for the new processes of `replaced`, joins all ranks and makes the new ones read their weights. Returns
        when the processes had started: time.monotonic()."""
        try:
            self._settle(replaced)
            self._on(self._ranks, "where")  # a rank that died meanwhile would make the other ranks wait for it
            started = time.monotonic()
            if self.fetches:
                self._on(replaced, "fetch")
            self._join(generation)
            self._on(replaced, "read_weights")
        except LockstepError as error:
            blamed = error.rank if isinstance(error, RankDiedError) else None
            if blamed is not None and not isinstance(error, RankLostError):
                self._ranks[blamed].num_failed += 1
            for rank in replaced:  # if another rank failed, the next try waits for the same processes
                rank.is_starting &= isinstance(error, RankDiedError) and rank.index != blamed
            raise
        for rank in replaced:
            rank.has_weights, rank.num_failed = True, 0
        return started

    def sleep(self) -> None:
        """Makes the ranks release the memory of their devices until `replace_ranks`: KV is lost, and weights move to
        the host. Ranks that cannot do this are replaced afterwards."""
        lost = self._stop(EngineError("the engine sleeps"))
        try:
            self._on([rank for rank in self._ranks if rank not in lost], "move_to_host")
        finally:
            # The keeper's blocks with crash reports stay.
            for name in WEIGHTS:
                self._keeper.drop(name=name)

    def _take_over(self, old: RankGroup, kv: PersistentKV | None) -> None:
        """Starts this group in place of `old`. The ranks of `old` keep only their weights. On GPUs the new ranks'
        weights move to the device now, where the pools of `old` were. If the pool does not fit, it gets fewer pages."""
        assert old._on_failure is not None, "it has run"
        began, pool = time.monotonic(), old.pool
        if old.lost:
            old.close("fewer ranks take over")
        else:
            old._stop(EngineError("other ranks take over"), keeps_kv=kv is not None)
        stopped = time.monotonic()
        try:
            if not self._ranks:
                self.start()
            if self._memory is None:
                pool = pool_within(self._load_in_place_of(old), pool, self.config, self.model)
                for rank, before in zip(self._ranks, old._ranks, strict=False):
                    rank.room_bytes = max(rank.room_bytes, before.room_bytes)
            loaded = time.monotonic()
            self.run(pool, old._on_failure, at_once=True, kv=kv)
        except LockstepError as error:
            self.close(str(error))
            raise
        logger.info(
            "replaced the group: the old ranks left after %.2f s, weights %.2f s, tables and channel %.2f s",
            stopped - began,
            loaded - stopped,
            time.monotonic() - loaded,
        )
        old.close()
        self.start_spares()

    def _stop(self, reason: LockstepError, *, keeps_kv: bool = False) -> list[Rank]:
        """Makes all ranks stop waiting and keep only their weights. Kills the processes of ranks that do not answer,
        that have no weights, or that failed by themselves. Leaves processes alone that are starting.

        Returns:
            The ranks without weights. Unless `keeps_kv`, all memory of these ranks and the KV of every rank is
            released.
        """
        runs, self._runs = self._runs, {}  # the watcher must not report the end of these calls
        self._close_channel()
        calls: dict[Any, int] = {}
        for rank in self._ranks:
            if rank.is_starting:
                continue
            # Ranks leave on their own threads. On GPUs, NCCL's abort waits for the graphs, which `leave` drops, and
            # `leave` waits for the collectives, which the abort ends.
            calls |= {rank.actor.abort.remote(str(reason)): rank.index, rank.actor.leave.remote(): rank.index}
        is_hung = isinstance(reason, StepHungError)
        timeout_s = _LEAVE_HUNG_TIMEOUT_S[self.config.device] if is_hung else _LEAVE_TIMEOUT_S
        done, silent = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        lost = {calls[call] for call in silent}
        lost |= {calls[call] for call in done if call_failure(calls[call], self.size, call) is not None}
        ended, _ = ray.wait(list(runs.values()), num_returns=len(runs), timeout=0) if runs else ([], [])
        ends = {index: call_failure(index, self.size, run) for index, run in runs.items() if run in ended}
        lost |= {index for index, end in ends.items() if isinstance(end, RankDiedError)}
        replaced = [rank for rank in self._ranks if rank.index in lost or not rank.has_weights]
        for rank in replaced:
            if not rank.is_starting:
                rank.end()
            if not keeps_kv:
                self._keeper.drop(rank.index)
        if not keeps_kv:
            self._keeper.drop(name="kv")
        return replaced

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def log_stacks(self, step_age_s: float) -> None:
        """Logs the stacks of each rank's threads, because a step takes suspiciously long. Does not wait for them."""
        log_stacks(self._ranks, step_age_s)

    def close(self, failure: str | None = None) -> None:
        """Ends the ranks' processes. Waits briefly for them to leave their loops by themselves.

        Args:
            failure: the error that ends what the ranks wait for. None if they were sent a CLOSE frame.
        """
        self._closing.set()
        if failure is not None:
            for rank in self._ranks:
                rank.actor.abort.remote(failure)
        if self._runs:
            timeout_s = _LEAVE_TIMEOUT_S if failure is None else _ABORT_TIMEOUT_S
            ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=timeout_s)
        for rank in self._ranks:
            # Other processes may need the memory of the ranks.
            rank.end()
            rank.await_end(0.0 if failure is None else _END_TIMEOUT_S)
        self._spares.close()
        self._keeper.close()
        if self._meeting is not None:
            self._meeting.close()
        self._ranks = self._measured = []
        self._runs = {}
        self._close_channel()

    def _on(self, ranks: Iterable[Rank], method: str, *args: object, watched: Sequence[Rank] = ()) -> list[Any]:
        """Runs `call` on ranks of this group. Raises DeadlineError after `parallel.init_timeout_s`."""
        timeout_s = self.config.parallel.init_timeout_s
        return call(ranks, method, *args, size=self.size, timeout_s=timeout_s, watched=watched)
