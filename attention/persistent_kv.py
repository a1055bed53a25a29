"""Takes KV from persistent memory that a group with another number of ranks left: the heads that this rank has now."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from attention.kv_pool import TokenToKVPool, kv_tensors
from attention.layer import LatentLayer
from configs.layers import Axis
from parallel.persistent_memory import PersistentMemory, kv_block
from parallel.plan import ShardPlan, Span


def take_kv(
    pool: TokenToKVPool,
    layer_id: int,
    pages: torch.Tensor,
    plan: ShardPlan,
    rank: int,
    others: ShardPlan,
    left: Sequence[PersistentMemory],
) -> None:
    """Copies `pages` [num_pages] int64 of a layer into the pool of `rank`, which has its heads by `plan`.

    Args:
        others: the plan of the ranks that wrote the pages. Their pools have the same number of pages.
        left: persistent memory of each of those ranks.

    Raises:
        EngineError: the memory of those ranks has no such layer.
    """
    own = _heads(plan, layer_id, rank)
    for other, memory in enumerate(left):
        theirs = _heads(others, layer_id, other)
        first, last = max(own.start, theirs.start), min(own.stop, theirs.stop)
        if first >= last:
            continue
        layer = pool.layer(layer_id)
        if not isinstance(layer, LatentLayer):
            layer = dataclasses.replace(layer, tp_k_head_num=theirs.size)
        find = functools.partial(memory.existing, kv_block(layer_id))
        written = kv_tensors(layer, pool.num_pages, pool.page_size, pool.dtype, find)
        for into, out_of in zip(pool.pages(layer_id), written, strict=True):
            heads = _by_head(out_of)[pages, :, first - theirs.start : last - theirs.start]
            _by_head(into)[pages, :, first - own.start : last - own.start] = heads


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """A layer's tensor in the pool as [num_pages + 1, page_size, num_heads, bytes of a head]."""
    return tensor.view(*tensor.shape[:2], -1, tensor.shape[-1]).view(torch.uint8)


def _heads(plan: ShardPlan, layer_id: int, rank: int) -> Span:
    """The range of a layer's KV heads that a rank stores. Latents count as one head."""
    spans = plan.shard(layer_id, rank).spans
    return spans.get(Axis.KV_HEADS) or spans[Axis.LATENT]
