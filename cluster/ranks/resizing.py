"""Another number of ranks for an engine that serves: its `tensor_parallel_size`, while requests run.

The new ranks start and load their shards beside those that serve. Only then do requests wait: until the steps in
flight have retired, the old ranks have given their KV pools up, the new ones have theirs, and what requests had is
computed again, as after a rebuild. So whatever fails before costs no request anything, and what fails after leaves the
old ranks, which still have their weights, to go on.

The pool keeps its number of pages, and with it every limit that requests were admitted by.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # ships no types
from ray.util.placement_group import PlacementGroup

from cluster.engine.coordinator import Channel, Coordinator
from cluster.ranks.rank_group import GroupMemory, RankGroup, node_cores
from configs.errors import ConfigError, EngineError, LockstepError
from configs.kv_pages import WindowPool, dtype_bytes, pool_bytes
from configs.model_config import ModelConfig
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from worker.cgroup import available_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30


@dataclass(frozen=True)
class Resized:
    """What came of a resize."""

    size: int
    """Ranks now."""
    pause_s: float
    """How long the requests waited."""


class Resizer:
    """Resizes one engine.

    Args:
        given: the configuration before anything in it was resolved.
        config: what it was resolved to.
        placement_group: of the replica.
        make: the ranks of a resolved configuration, not started.
    """

    def __init__(
        self,
        given: EngineConfig,
        config: EngineConfig,
        model: ModelConfig,
        placement_group: PlacementGroup,
        make: Callable[[EngineConfig], RankGroup],
    ) -> None:
        self._given = given
        self._config = config
        self._model = model
        self._num_bundles = placement_group.bundle_count - 1
        self._make = make
        self._busy = threading.Lock()

    def resize(
        self, size: int, group: RankGroup, coordinator: Coordinator, use: Callable[[RankGroup], None]
    ) -> Resized:
        """Has `size` new ranks take the place of `group`'s.

        Args:
            use: told of the new group, which runs, while no step does.

        Raises:
            ConfigError: it cannot be had. The ranks there are go on.
            EngineError: it failed. They go on as well, unless the engine ends.
        """
        if not self._busy.acquire(blocking=False):
            raise ConfigError("another resize is under way; try again after it")
        try:
            if size == group.size:
                return Resized(size, 0.0)
            config = self._resolved(size, group)
            began = time.monotonic()
            new = self._make(config)
            try:
                self._load(new, group)
                return self._exchange(new, group, coordinator, use, began)
            except LockstepError:
                new.close("the resize failed")
                raise
        finally:
            self._busy.release()

    def _resolved(self, size: int, group: RankGroup) -> EngineConfig:
        """The configuration for `size` ranks; raises ConfigError where there cannot be so many."""
        if self._config.device == "cuda":
            raise ConfigError("ranks on GPUs cannot be resized yet: their GPUs are of the replica's placement group")
        if not group.one_node:
            raise ConfigError("ranks on several nodes cannot be resized")
        if size > self._num_bundles and self._given.placement.cpus_per_rank is not None:
            raise ConfigError(
                f"placement.cpus_per_rank={self._given.placement.cpus_per_rank:g} is reserved for {self._num_bundles} "
                f"ranks; leave it out, or start with tensor_parallel_size={size}"
            )
        # What `auto` has become stays: streams go on in the numerics that they began in.
        changed = self._given.model_copy(update={"tensor_parallel_size": size, "numerics": self._config.numerics})
        return resolve(changed, self._model, HostFacts(num_cores=node_cores(), num_gpus=0)).config

    def _load(self, new: RankGroup, old: RankGroup) -> None:
        """Starts and loads `new`; raises ConfigError where the node has no memory for them."""
        node, container = int(psutil.virtual_memory().available), available_bytes()
        free = node if container is None else min(node, container)
        plan = _plan(self._model, new.config)
        needed = sum(map(plan.weight_elements, range(new.size))) * dtype_bytes(self._config.dtype)
        if needed > free:
            raise ConfigError(
                f"the weights of {new.size} ranks take {needed / _GIB:.2f} GiB beside those that serve, and "
                f"{free / _GIB:.2f} GiB are free"
            )
        locations = new.start()
        if self._config.load_format != "dummy" and not self._config.is_local_model:
            new.fetch(locations)
        memory = new.load(locations)
        if not new.one_node:
            raise EngineError("the new ranks are on another node")
        self._check_pool(memory, new, old)

    def _check_pool(self, memory: GroupMemory, new: RankGroup, old: RankGroup) -> None:
        """Raises ConfigError where the new ranks cannot hold the pages that the old ones do."""
        num_pages, _, num_window_pages, _ = old.run_args
        window_pool = None if num_window_pages is None else WindowPool.of(self._config, self._model)
        takes = [pool_bytes(num_pages, page, window_pool) for page in memory.bytes_per_page]
        most = self._config.kv_cache.memory_bytes
        if most is not None and max(takes) > most:
            raise ConfigError(
                f"the KV pool of {num_pages} pages takes {max(takes)} bytes on a rank of {new.size}, more than "
                f"kv_cache.memory_bytes={most}"
            )
        plan, kv_cache = _plan(self._model, old.config), self._config.kv_cache
        pages = [plan.kv_page_bytes(rank, kv_cache.page_size, self._config.kv_dtype) for rank in range(old.size)]
        more = sum(takes) - sum(pool_bytes(num_pages, page, window_pool) for page in pages)
        if more > (free := sum(memory.free_bytes)):
            raise ConfigError(
                f"the KV pool of {num_pages} pages takes {more / _GIB:.2f} GiB more on {new.size} ranks, and "
                f"{free / _GIB:.2f} GiB are free"
            )

    def _exchange(
        self, new: RankGroup, old: RankGroup, coordinator: Coordinator, use: Callable[[RankGroup], None], began: float
    ) -> Resized:
        loaded = time.monotonic()
        failures: list[LockstepError] = []

        def ranks(generation: int, dismiss: Callable[[], None]) -> tuple[Channel, StepCost]:
            old.leave(dismiss)
            try:
                channel = new.run(*old.run_args)
            except LockstepError as error:
                logger.exception("the new ranks do not run; those of before go on")
                failures.append(error)
                new.close(str(error))
                return old.rebuild(generation, error), step_cost(self._model, old.config)
            use(new)
            old.close()
            return channel, step_cost(self._model, new.config)

        pause_s = coordinator.exchange(ranks).result()
        if failures:
            raise EngineError(f"tensor_parallel_size stays {old.size}, requests waited {pause_s:.2f} s: {failures[0]}")
        logger.warning(
            "tensor_parallel_size is %d, it was %d: start and weights %.2f s beside the steps, requests waited %.2f s",
            new.size,
            old.size,
            loaded - began,
            pause_s,
        )
        return Resized(new.size, pause_s)


def _plan(model: ModelConfig, config: EngineConfig) -> ShardPlan:
    return ShardPlan.create(model, config.tensor_parallel_size, exact=config.is_exact)


def step_cost(model: ModelConfig, config: EngineConfig) -> StepCost:
    """Of the steps of ranks with `config`, all together."""
    return StepCost.of(_plan(model, config), dtype_bytes(config.dtype), kv_element_bytes=dtype_bytes(config.kv_dtype))
