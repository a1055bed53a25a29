"""Changes the number of ranks of a running engine, its `tensor_parallel_size`.

The new ranks start and load their shards while the old ones serve. Only then do requests wait: the steps in flight
retire, the old ranks release their KV pools, and the new ranks allocate theirs and take over KV and states in use. If
they cannot take these over, they are computed again, as after a rebuild. A failure before that pause costs the requests
nothing. After a failure during the pause, the old ranks, which still have their weights, continue.

The pool keeps its number of pages and all limits by which requests were admitted.

On GPUs, the old ranks' KV pools may fill the memory. The new ranks start beside the old ones, load the kernels, and
read their shards into the GPU's memory if they fit there. Otherwise the shards wait in the host's memory until the old
pools are released. A new rank shares the GPU of the old rank with its index until that rank ends; further ranks use
free GPUs of the node. If the old number of pages does not fit, the pool gets fewer, but `max_model_len` always fits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # ships no types

from cluster.engine.changes import OtherRanks
from cluster.engine.coordinator import Coordinator
from cluster.engine.engine_spec import EngineSpec
from cluster.ranks.group_memory import GroupMemory
from cluster.ranks.held_gpus import HeldGPU, hold, release
from cluster.ranks.rank import CUDA_ENVIRONMENT
from cluster.ranks.rank_group import RankGroup
from configs.errors import ConfigError, EngineError, LockstepError
from configs.kv_pages import PoolRule, pool_bytes
from configs.resolve import resolve
from configs.schema import EngineConfig
from worker.device.cgroup import available_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# Share of a node's memory that may be pinned for waiting weights. Pinning them takes more memory than their size.
_HOST_SHARE = 0.5


@dataclass(frozen=True)
class Resized:
    """The result of a resize."""

    size: int
    """Number of ranks after the resize."""
    pause_s: float
    """Seconds for which requests waited."""


def resize(size: int, spec: EngineSpec, coordinator: Coordinator) -> Resized:
    """Replaces the ranks by `size` new ones. Only one resize may run at a time.

    Args:
        spec: with which the engine started.

    Raises:
        ConfigError: this size is impossible. The old ranks continue.
        EngineError: the resize failed. The old ranks continue, unless the engine ends.
    """
    old = coordinator.ranks
    if size == old.size:
        return Resized(size, 0.0)
    began = time.monotonic()
    config = _resolved(size, spec, old)
    new = old.resized(config, _held(size, old))
    try:
        _load(new, old)
        loaded = time.monotonic()
        pause_s = coordinator.change(OtherRanks(new)).result()
    except LockstepError:
        new.close("the resize failed")
        release(new.starter.held[len(old.starter.held) :])
        raise
    release(old.starter.held[len(new.starter.held) :])
    logger.warning(
        "changed tensor_parallel_size to %d from %d: prepared in %.2f s while steps ran, then requests waited %.2f s",
        new.size,
        old.size,
        loaded - began,
        pause_s,
    )
    return Resized(new.size, pause_s)


def fewer(spec: EngineSpec, old: RankGroup) -> RankGroup | None:
    """A group of the ranks that are left when ranks of `old` are lost with their devices, not started. None if no
    smaller size is allowed or possible.

    Args:
        spec: with which the engine started.
    """
    size, least = old.size - len(old.lost), old.config.recovery.min_ranks
    if size == old.size or least is None or size < least:
        return None
    try:
        return old.resized(_resolved(size, spec, old), old.starter.held)
    except ConfigError as error:
        logger.error("the group cannot go on with %d ranks: %s", size, error)
        return None


def _resolved(size: int, spec: EngineSpec, old: RankGroup) -> EngineConfig:
    """The resolved configuration for `size` ranks. Raises ConfigError if the group cannot have this size."""
    on_gpus, given = old.config.device == "cuda", spec.given
    if old.starter.is_in_memory:
        raise ConfigError("new ranks cannot read weights that came from memory; change to weights at a path first")
    if not old.one_node:
        raise ConfigError("ranks on several nodes cannot be resized; start the app with the new tensor_parallel_size")
    num_bundles = old.starter.num_bundles
    if not on_gpus and size > num_bundles and given.placement.cpus_per_rank is not None:
        raise ConfigError(
            f"placement.cpus_per_rank={given.placement.cpus_per_rank:g} is reserved for {num_bundles} ranks; leave "
            f"it out, or start with tensor_parallel_size={size}"
        )
    # The numerics that were chosen at the start stay, so that running streams continue with them.
    now = old.config
    # The weights may have been changed since the start
    kept = {"numerics": now.numerics, "model": now.model, "revision": now.revision}
    changed = given.model_copy(update={"tensor_parallel_size": size, **kept})
    return resolve(changed, old.model, spec.host).config


def _held(size: int, old: RankGroup) -> tuple[HeldGPU, ...]:
    """Reserved GPUs for the ranks of a group of `size` that have no bundle in the placement group, first the ones that
    `old` has. Raises ConfigError if too few are free."""
    count = max(0, size - old.starter.num_bundles) if old.config.device == "cuda" else 0
    held = old.starter.held[:count]
    return held + (hold(old.bundle, count - len(held), CUDA_ENVIRONMENT) if count > len(held) else ())


def _load(new: RankGroup, old: RankGroup) -> None:
    """Starts `new` and loads its shards (on GPUs with `RankGroup.prepare`). Raises ConfigError if they do not fit."""
    on_gpus = new.config.device == "cuda"
    if on_gpus:
        check_devices(new, old)
    node, container = int(psutil.virtual_memory().available), available_bytes()
    free = node if container is None else min(node, container)
    needed = sum(new.plan.weight_bytes(rank, new.config) for rank in range(new.size))
    if needed > free and not on_gpus:
        raise ConfigError(
            f"the weights of {new.size} ranks take {needed / _GIB:.2f} GiB in addition to those in use, and "
            f"{free / _GIB:.2f} GiB are free"
        )
    new.start()
    if new.fetches:
        new.fetch()
    if on_gpus:
        if old.is_persistent and needed < _HOST_SHARE * free:
            new.prepare()
        return
    memory = new.load()
    if not new.one_node:
        raise EngineError("the new ranks are on another node; free devices on the replica's node")
    _check_pool(memory, new, old)


def check_devices(new: RankGroup, old: RankGroup) -> None:
    """Raises ConfigError if a GPU lacks memory for the weights of its old and its new rank together, plus the new
    rank's KV of one sequence of `max_model_len`."""
    config, max_model_len = new.config, old.pool.max_model_len
    num_pages, rule = -(-max_model_len // config.kv_cache.page_size), PoolRule.of(config, old.model)
    for rank, room in zip(range(new.size), old.room_bytes, strict=False):
        weights = old.plan.weight_bytes(rank, config) + new.plan.weight_bytes(rank, config)
        pool = pool_bytes(num_pages, new.plan.kv_page_bytes(rank, config), rule) + new.plan.state_bytes(rank, config)
        if (needed := weights + pool) > room:
            raise ConfigError(
                f"{old.devices[rank]} has {room / _GIB:.2f} GiB, and holds the weights of rank {rank} of {old.size} "
                f"and of {new.size} until those of before have gone; with max_model_len={max_model_len} that takes "
                f"{needed / _GIB:.2f} GiB"
            )


def _check_pool(memory: GroupMemory, new: RankGroup, old: RankGroup) -> None:
    """Raises ConfigError if the KV pool with the old number of pages does not fit in the new ranks' memory."""
    num_pages, config = old.pool.num_pages, old.config
    rule = PoolRule.of(config, old.model)
    takes = [pool_bytes(num_pages, page, rule) for page in memory.bytes_per_page]
    most = config.kv_cache.memory_bytes
    if most is not None and max(takes) > most:
        raise ConfigError(
            f"the KV pool of {num_pages} pages takes {max(takes)} bytes on a rank of {new.size}, more than "
            f"kv_cache.memory_bytes={most}; raise it, or use more ranks"
        )
    plan = old.plan
    pages = [plan.kv_page_bytes(rank, config) for rank in range(old.size)]
    more = sum(takes) - sum(pool_bytes(num_pages, page, rule) for page in pages)
    if more > (free := sum(memory.free_bytes)):
        raise ConfigError(
            f"the KV pool of {num_pages} pages takes {more / _GIB:.2f} GiB more on {new.size} ranks, and "
            f"{free / _GIB:.2f} GiB are free"
        )
