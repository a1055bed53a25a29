"""Computes the number of pages in a rank's KV pool, and what comes with them.

Layers with a sliding window have their own pool, the window pool, if it saves enough memory: a page outside all windows
needs no window page. The size of the window pool is estimated from typical sequences. If it is too small, requests wait
or are preempted, as with too few pages.

Recurrent layers have states. Those of running requests are allocated before the pool. The states in the prefix cache
belong to the pool: one for each `STATE_INTERVAL` tokens of pages. So one budget pays for pages and cached states, in a
fixed proportion: a cached page without a state after it is of no use, and neither is a state without its pages.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from configs.errors import ConfigError
from configs.model_config import ModelConfig
from configs.recurrent import STATE_INTERVAL
from configs.schema import EngineConfig, KVCacheConfig, resolved

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1}
_WORTHWHILE_SHARE = Fraction(3, 4)


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of a resolved `dtype` or `kv_dtype`."""
    return _DTYPE_BYTES[dtype]


class PageBytes(NamedTuple):
    """Bytes of the parts of one rank's pool, from `ShardPlan.kv_page_bytes`."""

    full: int
    """Bytes per page of the layers without a window."""
    windowed: int = 0
    """Bytes per page of the layers with a window."""
    state: int = 0
    """Bytes of one state of all recurrent layers in the prefix cache."""


@dataclass(frozen=True)
class WindowPool:
    """Computes the number of window pages."""

    window: int
    """The longest window, in tokens."""
    share: Fraction
    """The estimated share of all pages that is inside some row's window."""
    extra: int
    """Pages that one step can add before any page leaves a window, plus the pages of one window."""

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> WindowPool | None:
        """None if the model has no window layers, or if a separate pool would save too little. `config` is resolved."""
        windows = [layer.mixer.window for layer in model.layers if layer.mixer.window is not None]
        if not windows:
            return None
        page_size, window = config.kv_cache.page_size, max(windows)
        # With short sequences, most pages stay inside the window.
        num_tokens = min(config.max_model_len or model.max_context, config.kv_cache.typical_tokens)
        share = Fraction(window + 2 * page_size, num_tokens)
        if share >= _WORTHWHILE_SHARE:
            return None
        step = resolved(config.scheduler.max_num_batched_tokens)
        return cls(window, share, ceil(step / page_size) + ceil(window / page_size) + 1)

    def num_pages(self, num_pages: int) -> int:
        """Number of window pages for `num_pages` pages."""
        return min(num_pages, ceil(self.share * num_pages) + self.extra)


@dataclass(frozen=True)
class PoolRule:
    """What comes with a number of pages. The same on every rank."""

    window: WindowPool | None = None
    """The window pool. None if all layers use the same pages."""
    pages_per_state: int | None = None
    """Pages for which the prefix cache has one state. 0: it has none. None: the model has no recurrent layers."""

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> PoolRule:
        """The rule for a resolved `config`."""
        kv_cache = config.kv_cache
        pages_per_state = STATE_INTERVAL // kv_cache.page_size * kv_cache.enable_prefix_caching
        return cls(WindowPool.of(config, model), pages_per_state if model.has_states else None)

    def num_window_pages(self, num_pages: int) -> int | None:
        """Number of window pages for `num_pages` pages. None without a window pool."""
        return None if self.window is None else self.window.num_pages(num_pages)

    def num_states(self, num_pages: int) -> int | None:
        """Number of states in the prefix cache for `num_pages` pages. None if the model has no recurrent layers."""
        return -(-num_pages // self.pages_per_state) if self.pages_per_state else self.pages_per_state


def pool_bytes(num_pages: int, page: PageBytes, rule: PoolRule) -> int:
    """Bytes of both pools for `num_pages`, padding pages included, and of the cached states."""
    num_windowed = num_pages if rule.window is None else rule.window.num_pages(num_pages)
    states = (rule.num_states(num_pages) or 0) * page.state
    return (num_pages + 1) * page.full + (num_windowed + 1) * page.windowed + states


def bytes_per_token(page: PageBytes, page_size: int, rule: PoolRule) -> float:
    """Bytes per additional token in a large pool, cached states included."""
    share = 1 if rule.window is None else rule.window.share
    states = page.state / rule.pages_per_state if rule.pages_per_state else 0.0
    return (float(page.full + page.windowed * share) + states) / page_size


def pages_within(budget: float, page: PageBytes, rule: PoolRule) -> int:
    """The largest number of pages that fit in `budget` bytes. Below 1 if not even one fits."""
    most = max(0, int(budget / bytes_per_token(page, 1, rule)))
    return bisect.bisect_right(range(most + 2), budget, key=lambda count: pool_bytes(count, page, rule)) - 1


def num_kv_pages(
    kv_cache: KVCacheConfig,
    bytes_per_page: Sequence[PageBytes],
    free_bytes: Sequence[int],
    rule: PoolRule = PoolRule(),
) -> int:
    """The number of pages in the KV pool, equal on all ranks: what the rank with the least memory can hold. The padding
    page of each pool is not counted, but its bytes are.

    Args:
        bytes_per_page: for each rank.
        free_bytes: free memory of each rank, in the same order. Ranks that share memory each get their part. Both lists
            may be empty if `kv_cache.num_tokens` is set and the memory is not known yet.

    Raises:
        ConfigError: the pool does not fit in the memory, or has no page.
    """
    page_size = kv_cache.page_size
    if kv_cache.num_tokens is not None:
        num_pages = -(-kv_cache.num_tokens // page_size)
        for rank, (page, free) in enumerate(zip(bytes_per_page, free_bytes, strict=True)):
            if (taken := pool_bytes(num_pages, page, rule)) > free:
                most = max(pages_within(free, page, rule), 0) * page_size
                raise ConfigError(
                    f"kv_cache.num_tokens={kv_cache.num_tokens} takes {taken} bytes on rank {rank}, which has {free} "
                    f"left; choose at most {most} or use more ranks"
                )
        return num_pages
    if kv_cache.memory_bytes is not None:
        budgets = [kv_cache.memory_bytes] * len(bytes_per_page)
        source = f"kv_cache.memory_bytes={kv_cache.memory_bytes}"
    else:
        budgets = [int(free * resolved(kv_cache.memory_fraction)) for free in free_bytes]
        source = f"kv_cache.memory_fraction={kv_cache.memory_fraction} of {min(free_bytes)} free bytes"
    num_pages = min(pages_within(budget, page, rule) for budget, page in zip(budgets, bytes_per_page, strict=True))
    if num_pages < 1:
        raise ConfigError(
            f"{source} holds no KV page: one of {page_size} tokens takes {max(map(sum, bytes_per_page))} bytes on a "
            "rank, and one more is padding; give the KV pool more memory or use more ranks"
        )
    return num_pages


def cut_max_model_len(config: EngineConfig, model: ModelConfig, num_pages: int) -> int:
    """The longest sequence (prompt and answer) for a pool of `num_pages`.

    Raises:
        ConfigError: `max_model_len` is set, and the pool cannot hold one such sequence.
    """
    capacity = num_pages * config.kv_cache.page_size
    if config.max_model_len is None:
        return min(model.max_context, capacity)
    if config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {capacity} tokens that the KV pool holds; choose at "
            f"most {capacity}, or raise kv_cache.num_tokens or kv_cache.memory_fraction"
        )
    return config.max_model_len
