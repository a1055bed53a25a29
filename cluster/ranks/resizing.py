"""Another number of ranks for an engine that serves: its `tensor_parallel_size`, while requests run.

The new ranks start and load their shards beside those that serve. Only then do requests wait: until the steps in
flight have retired, the old ranks have given their KV pools up, the new ones have theirs, and what requests had is
computed again, as after a rebuild. So whatever fails before costs no request anything, and what fails after leaves the
old ranks, which still have their weights, to go on.

The pool keeps its number of pages, and with it every limit that requests were admitted by.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # ships no types

from cluster.engine.coordinator import Coordinator
from cluster.ranks.host import host_facts
from cluster.ranks.rank_group import GroupMemory, RankGroup
from configs.errors import ConfigError, EngineError, LockstepError
from configs.kv_pages import WindowPool, dtype_bytes, pool_bytes
from configs.resolve import resolve
from configs.schema import EngineConfig
from worker.cgroup import available_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30


@dataclass(frozen=True)
class Resized:
    """The outcome of a resize."""

    size: int
    """Ranks now."""
    pause_s: float
    """How long the requests waited."""


def resize(size: int, given: EngineConfig, coordinator: Coordinator) -> Resized:
    """Has `size` new ranks take the place of those that there are; one resize at a time.

    Args:
        given: the configuration before anything in it was resolved.

    Raises:
        ConfigError: it cannot be had. The ranks there are go on.
        EngineError: it failed. They go on as well, unless the engine ends.
    """
    old = coordinator.ranks
    if size == old.size:
        return Resized(size, 0.0)
    began = time.monotonic()
    new = old.resized(_resolved(size, given, old))
    try:
        _load(new, old)
        loaded = time.monotonic()
        pause_s = coordinator.exchange(new).result()
    except LockstepError:
        new.close("the resize failed")
        raise
    logger.warning(
        "tensor_parallel_size is %d, it was %d: start and weights %.2f s beside the steps, requests waited %.2f s",
        new.size,
        old.size,
        loaded - began,
        pause_s,
    )
    return Resized(new.size, pause_s)


def _resolved(size: int, given: EngineConfig, old: RankGroup) -> EngineConfig:
    """The configuration for `size` ranks; raises ConfigError where there cannot be so many."""
    if old.config.device == "cuda":
        raise ConfigError("ranks on GPUs cannot be resized yet: their GPUs are of the replica's placement group")
    if not old.one_node:
        raise ConfigError("ranks on several nodes cannot be resized")
    if size > old.num_bundles and given.placement.cpus_per_rank is not None:
        raise ConfigError(
            f"placement.cpus_per_rank={given.placement.cpus_per_rank:g} is reserved for {old.num_bundles} ranks; leave "
            f"it out, or start with tensor_parallel_size={size}"
        )
    # The value that `auto` has become stays: streams go on in the numerics that they began in.
    now = old.config
    kept = {"numerics": now.numerics, "model": now.model, "revision": now.revision}  # other weights may have come
    changed = given.model_copy(update={"tensor_parallel_size": size, **kept})
    return resolve(changed, old.model, host_facts(gpus=False)).config


def _load(new: RankGroup, old: RankGroup) -> None:
    """Starts and loads `new`; raises ConfigError where the node has no memory for them."""
    node, container = int(psutil.virtual_memory().available), available_bytes()
    free = node if container is None else min(node, container)
    needed = sum(map(new.plan.weight_elements, range(new.size))) * dtype_bytes(new.config.dtype)
    if needed > free:
        raise ConfigError(
            f"the weights of {new.size} ranks take {needed / _GIB:.2f} GiB beside those that serve, and "
            f"{free / _GIB:.2f} GiB are free"
        )
    new.start()
    if new.fetches:
        new.fetch()
    memory = new.load()
    if not new.one_node:
        raise EngineError("the new ranks are on another node")
    _check_pool(memory, new, old)


def _check_pool(memory: GroupMemory, new: RankGroup, old: RankGroup) -> None:
    """Raises ConfigError where the new ranks cannot hold the pages that the old ones do."""
    num_pages, config = old.pool.num_pages, old.config
    window_pool = None if old.pool.num_window_pages is None else WindowPool.of(config, old.model)
    takes = [pool_bytes(num_pages, page, window_pool) for page in memory.bytes_per_page]
    most = config.kv_cache.memory_bytes
    if most is not None and max(takes) > most:
        raise ConfigError(
            f"the KV pool of {num_pages} pages takes {max(takes)} bytes on a rank of {new.size}, more than "
            f"kv_cache.memory_bytes={most}"
        )
    plan = old.plan
    pages = [plan.kv_page_bytes(rank, config.kv_cache.page_size, config.kv_dtype) for rank in range(old.size)]
    more = sum(takes) - sum(pool_bytes(num_pages, page, window_pool) for page in pages)
    if more > (free := sum(memory.free_bytes)):
        raise ConfigError(
            f"the KV pool of {num_pages} pages takes {more / _GIB:.2f} GiB more on {new.size} ranks, and "
            f"{free / _GIB:.2f} GiB are free"
        )
