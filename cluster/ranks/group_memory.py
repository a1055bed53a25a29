"""The memory of a group's ranks, and the KV pool that fits in it."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass

from cluster.ranks.rank_actor import PoolShape, RankLoad
from configs.errors import ConfigError
from configs.kv_pages import PageBytes, PoolRule, pages_within
from configs.model_config import ModelConfig
from configs.schema import EngineConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupMemory:
    """What the ranks report after loading, in rank order."""

    loads: tuple[RankLoad, ...]
    on_cpu: bool

    @property
    def bytes_per_page(self) -> tuple[PageBytes, ...]:
        """Bytes of a page and of a cached state on each rank."""
        return tuple(load.kv_page_bytes for load in self.loads)

    @property
    def free_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank may still use. Ranks on CPU get equal parts of their node's memory."""
        shared_by = len(self.loads) if self.on_cpu else 1
        return tuple(load.free_bytes // shared_by for load in self.loads)


def pool_within(memory: GroupMemory, pool: PoolShape, config: EngineConfig, model: ModelConfig) -> PoolShape:
    """Returns `pool`, with fewer pages if `pool` does not fit in the `memory` of the ranks of `config`.

    Raises:
        ConfigError: the pages that fit cannot hold one sequence of `max_model_len`.
    """
    kv_cache, size = config.kv_cache, config.tensor_parallel_size
    rule = PoolRule.of(config, model)
    share, limit = kv_cache.memory_fraction or 1.0, kv_cache.memory_bytes or math.inf
    room = zip(memory.free_bytes, memory.bytes_per_page, strict=True)
    most = min(pages_within(min(share * free, limit), page, rule) for free, page in room)
    if most * kv_cache.page_size < pool.max_model_len:
        raise ConfigError(
            f"the KV pool of {size} ranks has room for {max(most, 0) * kv_cache.page_size} tokens beside the weights "
            f"of those that go, fewer than max_model_len={pool.max_model_len}; use more ranks"
        )
    if most >= pool.num_pages:
        return pool
    logger.warning("the KV pool of %d ranks has %d pages instead of %d", size, most, pool.num_pages)
    return dataclasses.replace(
        pool, num_pages=most, num_window_pages=rule.num_window_pages(most), num_states=rule.num_states(most)
    )
