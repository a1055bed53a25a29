"""The coordinator's process: starts the ranks, creates a scheduler that fits their memory, and runs the loop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from cluster.engine.changes import Sleep
from cluster.engine.coordinator import Coordinator
from cluster.engine.engine_spec import EngineSpec
from cluster.engine.resizing import Resized, fewer, resize
from cluster.engine.weight_change import change_weights
from cluster.logs import log_to_stderr
from cluster.messages.engine import WeightsChanged
from cluster.messages.state import EngineState
from cluster.ranks.group_memory import GroupMemory
from cluster.ranks.liveness import Liveness, end_stopped, is_replica
from cluster.ranks.rank import RankStarter
from cluster.ranks.rank_actor import Location, PoolShape, RankLoad
from cluster.ranks.rank_group import GENERATION, RankGroup
from cluster.ranks.recovery import Recovery
from cluster.scheduling.limits import SchedulerLimits, max_item_tokens
from cluster.scheduling.scheduler import Scheduler
from configs.errors import ConfigError
from configs.kv_pages import PoolRule, cut_max_model_len, num_kv_pages, pool_bytes
from worker.protocol import StepResult

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger(__name__)

_FETCHING = "downloading weights"
_LOADING = "loading weights"
_MEASURED_PHASES = (_FETCHING, _LOADING)


@dataclass(frozen=True)
class EngineFacts:
    """Facts about a started group."""

    address: str
    """Address of the coordinator's socket, the argument of `EngineClient.connect`."""
    pid: int
    """Process id of the coordinator."""
    num_pages: int
    max_model_len: int
    max_item_tokens: int
    """`SchedulerLimits.max_item_tokens`."""
    locations: tuple[Location, ...]
    loads: tuple[RankLoad, ...]
    peak_flops: float
    """Measured FLOP/s of large matrix products, the sum over all ranks."""
    peak_bandwidth: float
    """Measured bytes per second of memory traffic, the sum over all ranks."""
    phase_s: tuple[tuple[str, float], ...]
    """Name of each phase of the start, with its seconds, in order."""


@dataclass(frozen=True)
class Progress:
    """The phases of a start so far, in order. The last one is the current phase."""

    phases: tuple[str, ...]
    done: tuple[float, ...] = ()
    """Share of the current phase that each rank has done, 0 to 1. Empty if it is not measured."""


@dataclass(frozen=True)
class ReplicaState:
    """What operators have changed of a replica since its start."""

    start: tuple[str, str | None]
    """Model and revision of the replica's config file."""
    source: dict[str, Any]
    """Arguments of `update_weights` that lead to the weights of now."""
    size: int | None
    """The number of ranks of the last resize. None if there was no resize."""
    sleeps: bool
    """Whether the replica sleeps."""

    @property
    def has_other_weights(self) -> bool:
        """Whether the weights are not those of the start."""
        return (self.source["model"], self.source["revision"]) != self.start or bool(self.source["version"])

    def starts_as(self, spec: EngineSpec) -> bool:
        """Whether an engine of `spec` starts with the same checkpoint as this replica."""
        return self.start == (spec.config.model, spec.config.revision)


class CoordinatorActor:
    """The Ray actor around a `Coordinator` and its `RankGroup`."""

    def __init__(self, spec: EngineSpec, name: str) -> None:
        # This import loads llguidance, which only this process needs.
        from cluster.structured.guides import RequestGuides

        log_to_stderr(spec.config.observability.log_format, replica=name, rank="coordinator")
        self._spec = spec
        self._name = name
        self._phase = "starting"
        self._phase_began = time.monotonic()
        self._phase_s: list[tuple[str, float]] = []
        self._starting: RankGroup | None = None  # the group that reports the progress of its start
        self._coordinator: Coordinator | None = None
        self._changing = threading.Lock()
        self._sleep: Sleep | None = None
        self._size: int | None = None  # number of ranks of the last resize
        self._platforms: list[str] = []  # `platform_of` each rank
        self._guides = RequestGuides(spec.model.vocab_size, spec.model.eos_token_ids, self._wake)

    def __repr__(self) -> str:
        return "Coordinator"

    def start(self, placement_group: PlacementGroup) -> EngineFacts:
        """Starts the ranks and loads the model. After this, the socket accepts connections, which `run` serves."""
        spec, config = self._spec, self._spec.config
        self._enter("starting ranks")
        starter = RankStarter(
            config=config,
            model=spec.model,
            model_path=spec.model_path,
            placement_group=placement_group,
            name=self._name,
        )
        group = self._starting = RankGroup(starter)
        group.start()
        if group.fetches:
            self._enter(_FETCHING)
            group.fetch()
        self._enter(_LOADING)
        memory = group.load()
        self._platforms = [load.platform for load in memory.loads]
        self._enter("measuring the devices")
        peaks = group.measure()
        rule = PoolRule.of(config, spec.model)
        num_pages = num_kv_pages(config.kv_cache, memory.bytes_per_page, memory.free_bytes, rule)
        max_model_len = cut_max_model_len(config, spec.model, num_pages)
        _log_pool(num_pages, config.kv_cache.page_size, memory, rule)
        self._enter("allocating the KV pool")
        limits = _scheduler_limits(spec, num_pages, max_model_len, rule)
        result_bytes = StepResult.max_bytes(
            limits.speculation.max_sampled(limits.max_num_seqs), config.server.max_logprobs
        )
        message_bytes = max(limits.max_frame_bytes, result_bytes)
        recovery = config.recovery
        finds_hangs = group.reason_never is None
        coordinator = Coordinator(
            Scheduler(limits, GENERATION, self._guides.make),
            group,
            step_timeout_s=config.parallel.step_timeout_s,
            recovery=Recovery(recovery.max_rebuilds),
            liveness=Liveness(peaks, recovery.hang_timeout_s if finds_hangs else math.inf),
            fewer=lambda ranks: fewer(spec, ranks),
        )
        pool = PoolShape(num_pages, max_model_len, limits.num_window_pages, rule.num_states(num_pages), message_bytes)
        group.run(pool, coordinator.fail)
        self._coordinator = coordinator
        self._enter("ready")
        return EngineFacts(
            address=coordinator.address,
            pid=os.getpid(),
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_item_tokens=limits.max_item_tokens,
            locations=tuple(group.locations),
            loads=memory.loads,
            peak_flops=peaks[0],
            peak_bandwidth=peaks[1],
            phase_s=tuple(self._phase_s),
        )

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        self._phase_s.append((self._phase, now - self._phase_began))
        self._phase, self._phase_began = phase, now

    def run(self) -> None:
        """Serves until `close`, then ends the ranks. If the engine fails, raises EngineError with the cause."""
        coordinator = self._coordinator
        assert coordinator is not None, "start comes first"
        coordinator.ranks.start_spares()
        ended = threading.Event()
        end_stopped(self._processes, self._spec.config.recovery.stall_timeout_s, ended)
        try:
            coordinator.run()
        finally:
            ended.set()
            self._phase = "ended"
            coordinator.ranks.close(coordinator.failure)
            self._guides.close()

    def _processes(self) -> dict[str, int]:
        """Process ids to kill when stopped, by name: the ranks if they would be replaced, and the Engine replica if Ray
        Serve would replace it."""
        assert self._coordinator is not None, "it runs"
        ranks, pid = self._coordinator.ranks, self._coordinator.engine_pid
        found = {f"rank {rank}": of_rank for rank, of_rank in ranks.pids.items() if ranks.reason_never is None}
        return found | ({"the Engine replica": pid} if pid is not None and is_replica(pid) else {})

    @ray.method(concurrency_group="ctl")
    def set_tokenizer(self, tokenizer: str) -> None:
        """Enables grammars, which need the model's tokenizer.

        Args:
            tokenizer: the text of the model's tokenizer.json.
        """
        self._guides.set_tokenizer(tokenizer)

    @ray.method(concurrency_group="ctl")
    def resize(self, size: int) -> Resized:
        """Changes the number of ranks to `size` while the engine runs, and returns when the new ranks run. Raises the
        errors of `cluster.engine.resizing.resize`. While the engine sleeps, only its own size is possible."""
        if self._sleep is not None and self._coordinator is not None and size == self._coordinator.ranks.size:
            return Resized(size, 0.0)
        with self._one_change() as coordinator:
            resized = resize(size, self._spec, coordinator)
            self._size = resized.size
            return resized

    @ray.method(concurrency_group="ctl")
    def update_weights(self, model: str | None = None, **how: Any) -> WeightsChanged | None:
        """Changes to the weights of checkpoint `model`, or of tensors in a trainer's memory, while the engine runs.
        Returns when the ranks use them. `cluster.engine.weight_change.change_weights` has the other arguments and the
        errors."""
        with self._one_change() as coordinator:
            return change_weights(coordinator, self._spec, self._platforms, model, **how)

    @ray.method(concurrency_group="ctl")
    def state_in_app(self) -> ReplicaState | None:
        """What another replica needs to become like this one. None before the start, and if the weights came from a
        trainer's memory."""
        if self._coordinator is None or self._coordinator.ranks.starter.is_in_memory:
            return None
        start, now, weights = self._spec.config, self._coordinator.ranks.starter.config, self._coordinator.weights
        version = "" if weights is None else weights.version
        source = {"model": now.model, "revision": now.revision, "version": version}
        return ReplicaState((start.model, start.revision), source, self._size, self._sleep is not None)

    @ray.method(concurrency_group="ctl")
    def flush_cache(self) -> None:
        """Drops all cached prefixes that no running request uses."""
        if self._coordinator is not None:
            self._coordinator.inspect(lambda scheduler: scheduler.flush_cache())

    @ray.method(concurrency_group="ctl")
    def sleep(self) -> float:
        """Frees the memory of the ranks' devices until `wake_up`. KV is lost, weights move to the host, and requests
        wait. Returns the seconds until the devices were free.

        Raises:
            ConfigError: this engine cannot sleep.
        """
        with self._one_change() as coordinator:
            if not coordinator.ranks.is_persistent:
                raise ConfigError(
                    "ranks on several nodes cannot sleep, nor can ranks on GPUs without persistent memory; stop the "
                    "app instead"
                )
            sleep = Sleep()
            seconds = coordinator.change(sleep).result()
            self._sleep = sleep
            return seconds

    @ray.method(concurrency_group="ctl")
    def wake_up(self) -> float:
        """Ends a `sleep`. Returns the seconds until requests continue. Raises ConfigError if the engine is awake."""
        with self._one_change(in_sleep=True) as coordinator:
            assert self._sleep is not None, "it sleeps"
            sleep, self._sleep = self._sleep, None
            sleep.is_over.set()
            coordinator.wake()
            return sleep.woken.result()

    @contextlib.contextmanager
    def _one_change(self, *, in_sleep: bool = False) -> Iterator[Coordinator]:
        """Gives the coordinator to one change at a time.

        Raises:
            ConfigError: another change is under way, or the engine sleeps. With `in_sleep`, it must sleep instead.
        """
        if self._coordinator is None:
            raise ConfigError("the engine has not started yet; try again when it has")
        if not self._changing.acquire(blocking=False):
            raise ConfigError("another resize or change of weights is under way; try again after it")
        try:
            if (self._sleep is not None) != in_sleep:
                raise ConfigError("the engine is awake" if in_sleep else "the engine sleeps; wake it up first")
            yield self._coordinator
        finally:
            self._changing.release()

    @ray.method(concurrency_group="ctl")
    def progress(self) -> Progress:
        """The progress of the start. May be called while `start` runs."""
        done = self._starting.progress() if self._starting is not None and self._phase in _MEASURED_PHASES else []
        return Progress((*(phase for phase, _ in self._phase_s), self._phase), tuple(done))

    @ray.method(concurrency_group="ctl")
    def status(self) -> dict[str, Any]:
        """The scheduler's figures, the number of steps, and the failure if there is one. Raises AssertionError if the
        scheduler's tables contradict each other."""
        coordinator = self._coordinator
        if coordinator is None:
            return {"phase": self._phase, "state": EngineState.STARTING}
        coordinator.inspect(lambda scheduler: scheduler.check_integrity())
        stats = coordinator.inspect(lambda scheduler: scheduler.stats())
        return {
            "phase": self._phase,
            "failure": coordinator.failure,
            "state": coordinator.life.state,
            "num_rebuilds": coordinator.num_rebuilds,
            "pids": coordinator.ranks.pids,
            "spare_pids": coordinator.ranks.spare_pids,
            "num_steps": coordinator.num_steps,
            "is_preparing": coordinator.is_preparing,
            **dataclasses.asdict(stats),
        }

    def _wake(self) -> None:
        if self._coordinator is not None:
            self._coordinator.wake()

    @ray.method(concurrency_group="ctl")
    def close(self) -> None:
        """Makes `run` return after the steps in flight, which ends the ranks. Does nothing before `start` is done."""
        if self._coordinator is not None:
            self._coordinator.close()


def _scheduler_limits(spec: EngineSpec, num_pages: int, max_model_len: int, rule: PoolRule) -> SchedulerLimits:
    """The scheduler's limits for a group with `num_pages` pages on each rank."""
    return SchedulerLimits(
        num_pages=num_pages,
        page_size=spec.config.kv_cache.page_size,
        max_model_len=max_model_len,
        vocab_size=spec.model.vocab_size,
        enable_prefix_caching=spec.config.kv_cache.enable_prefix_caching,
        eos_token_ids=spec.model.eos_token_ids,
        num_window_pages=rule.num_window_pages(num_pages),
        window=1 if rule.window is None else rule.window.window,
        num_states=rule.num_states(num_pages),
        max_item_tokens=max_item_tokens(spec.config, spec.model),
        speculation=spec.config.speculation,
        **spec.config.scheduler.model_dump(),
    )


def _log_pool(num_pages: int, page_size: int, memory: GroupMemory, rule: PoolRule) -> None:
    """Logs the pool of each rank. All ranks have the same number of pages, limited by the one with the least memory."""
    for rank, (page, free) in enumerate(zip(memory.bytes_per_page, memory.free_bytes, strict=True)):
        pool = f"{num_pages + 1} pages x {page.full + page.windowed} bytes"
        if (num_windowed := rule.num_window_pages(num_pages)) is not None:
            windowed = f"{num_windowed + 1} x {page.windowed} of layers with a window"
            pool = f"{num_pages + 1} pages x {page.full} bytes + {windowed}"
        if num_states := rule.num_states(num_pages):
            pool += f" + {num_states} states x {page.state}"
        logger.info(
            "rank %d: KV pool of %s = %.2f GiB of %.2f GiB, for %d tokens",
            rank,
            pool,
            pool_bytes(num_pages, page, rule) / (1 << 30),
            free / (1 << 30),
            num_pages * page_size,
        )
