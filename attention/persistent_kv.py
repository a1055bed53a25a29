"""Takes KV and states from persistent memory that a group with another number of ranks left: the heads that this rank
has now."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from attention.kv_pool import TokenToKVPool, kv_tensors
from attention.layer import LatentLayer
from attention.state_pool import StatePool, slot_tensors
from configs.layers import Axis, StateTensor
from parallel.persistent_memory import PersistentMemory, kv_block, state_block
from parallel.plan import LayerShard, ShardPlan, Span


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


def take_states(
    pool: StatePool,
    layer_id: int,
    slots: torch.Tensor,
    plan: ShardPlan,
    rank: int,
    others: ShardPlan,
    left: Sequence[PersistentMemory],
) -> None:
    """Copies a recurrent layer's states in `slots` [num_slots] int64 into the pool of `rank`, which has its heads by
    `plan`.

    Args:
        others: the plan of the ranks that computed the states. Their pools have the same number of slots.
        left: persistent memory of each of those ranks.

    Raises:
        EngineError: the memory of those ranks has no such layer.
    """
    specs = [it for it in plan.model.all_layers[layer_id].mixer.state if not it.num_recent]
    own, tensors = plan.shard(layer_id, rank), pool.slots(layer_id)
    for other, memory in enumerate(left):
        theirs = others.shard(layer_id, other)
        entries = [(theirs.amount(spec.elements), into.dtype) for spec, into in zip(specs, tensors, strict=True)]
        find = functools.partial(memory.existing, state_block(layer_id))
        for spec, into, out_of in zip(specs, tensors, slot_tensors(pool.num_slots, entries, find), strict=True):
            _take_parts(spec, slots, into, own, out_of, theirs)


def _take_parts(
    spec: StateTensor,
    slots: torch.Tensor,
    into: torch.Tensor,
    own: LayerShard,
    out_of: torch.Tensor,
    theirs: LayerShard,
) -> None:
    """Copies the indices that both shards have of all parts of `spec`, from `out_of` into `into`, [num_slots + 1,
    elements of the shard] each."""
    into, out_of = (it.view(len(it), spec.num_tokens, -1) for it in (into, out_of))
    to = at = 0  # the part's first element in each of them
    for axis, each in spec.parts:
        first, last = max(own[axis].start, theirs[axis].start), min(own[axis].stop, theirs[axis].stop)
        if first < last:
            begin, source = to + (first - own[axis].start) * each, at + (first - theirs[axis].start) * each
            count = (last - first) * each
            into[slots, :, begin : begin + count] = out_of[slots, :, source : source + count]
        to, at = to + own[axis].size * each, at + theirs[axis].size * each


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """A layer's tensor in the pool as [num_pages + 1, page_size, num_heads, bytes of a head]."""
    return tensor.view(*tensor.shape[:2], -1, tensor.shape[-1]).view(torch.uint8)


def _heads(plan: ShardPlan, layer_id: int, rank: int) -> Span:
    """The range of a layer's KV heads that a rank stores. Latents count as one head."""
    spans = plan.shard(layer_id, rank).spans
    return spans.get(Axis.KV_HEADS) or spans[Axis.LATENT]
