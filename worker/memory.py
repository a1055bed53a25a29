"""How much memory a rank has left, and how many KV pages go into it."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]  # ships no types
import torch

from configs.errors import ConfigError


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; on CPU of the whole node, shared by all its ranks."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def num_pages_that_fit(
    *,
    kv_bytes_per_page: int,
    page_size: int,
    num_tokens: int | None,
    memory_bytes: int | None,
    free_bytes: int,
    memory_fraction: float,
) -> int:
    """Pages of a rank's KV pool, padding page not counted; the group uses the least of its ranks.

    Args:
        kv_bytes_per_page: all layers, K and V, on this rank.
        num_tokens: `kv_cache.num_tokens`; decides alone when set.
        memory_bytes: `kv_cache.memory_bytes`; else this.
        free_bytes: this rank's part of the free memory; else `memory_fraction` of it.

    Raises:
        ConfigError: not even one page fits.
    """
    if num_tokens is not None:
        return -(-num_tokens // page_size)
    if memory_bytes is not None:
        budget, source = memory_bytes, f"kv_cache.memory_bytes={memory_bytes}"
    else:
        budget = int(free_bytes * memory_fraction)
        source = f"kv_cache.memory_fraction={memory_fraction} of {free_bytes} free bytes"
    # The padding page takes one.
    num_pages = budget // kv_bytes_per_page - 1
    if num_pages < 1:
        raise ConfigError(
            f"{source} holds no KV page: a page of {page_size} tokens takes {kv_bytes_per_page} bytes on a rank, and "
            "one more is padding; give the KV pool more memory or use more ranks"
        )
    return num_pages
