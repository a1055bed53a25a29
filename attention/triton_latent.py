"""Latent attention (MLA) by the Triton kernels.

Decodes take the absorbed form. In other steps new tokens attend to one another in heads of their own, and to the cached
tokens before them in whichever form takes a row fewer operations: absorbed, or over keys and values that are made of
latents, a chunk at a time. The parts are merged by the logarithms of their sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from attention.forward_batch import ForwardBatch, NewTokenMask, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import LatentLayer

_CHUNK_ELEMENTS = 1 << 25
"""Of keys and values that are made of cached latents at once: 64 MiB of 16 bits. Not measured."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Cached tokens, of one row or of several, whose keys and values are made together."""

    slots: torch.Tensor
    """[num_keys] int64: theirs in the pool, one row's after the other's."""
    paged: PagedMetadata
    """Each row as if its keys of the chunk were all that is cached of it; its page is the first of these keys."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """What a step that is not of decodes alone does, in every layer."""

    out_cache_loc: torch.Tensor
    """[num_tokens] int64: slots of the new tokens."""
    own: PagedMetadata
    """Each row as if nothing were cached of it; its page is its first new token."""
    absorbed: PagedMetadata | None
    """Of rows that do not absorb as if nothing were cached of them; None where no row does."""
    chunks: tuple[_Chunk, ...]
    mask: NewTokenMask | None


def plan_of_any(batch: ForwardBatch) -> LatentPlan:
    """The plan of a step of which only its shape is known, while it is captured: cached tokens are all absorbed."""
    paged, starts = batch.paged, batch.paged.cu_seqlens_q
    own = replace(paged, cache_seqlens=starts.diff(), page_table=starts[:-1, None])
    return LatentPlan(batch.out_cache_loc, own, paged, (), batch.mask)


def plan_of(batch: ForwardBatch, layer: LatentLayer, page_size: int) -> LatentPlan:
    """The plan of `batch`, for layers like `layer`. What is queued does not wait for the device."""
    plan, paged = plan_of_any(batch), batch.paged
    absorbs = layer.absorbs(batch.extend_lens, batch.prefix_lens)
    num_made = int(batch.prefix_lens[~absorbs].sum())
    if not batch.prefix_lens[absorbs].any():
        plan = replace(plan, absorbed=None)
    if num_made == 0:
        return plan
    num_new = plan.own.cache_seqlens
    num_cached = paged.cache_seqlens - num_new
    num_made_of = num_cached.masked_fill(layer.absorbs(num_new.long(), num_cached.long()), 0)
    if plan.absorbed is not None:
        plan = replace(plan, absorbed=replace(paged, cache_seqlens=paged.cache_seqlens - num_made_of))
    bounds = F.pad(num_made_of.cumsum(0, dtype=torch.int32), (1, 0))
    slots = _slots(paged.page_table, bounds, num_made, page_size)
    size = max(_CHUNK_ELEMENTS // (layer.tp_q_head_num * (layer.qk_dim + layer.v_dim)), 1)
    chunks = []
    for first in range(0, num_made, size):
        inside = bounds.clamp(first, first + size) - first
        of_chunk = replace(paged, cache_seqlens=num_new + inside.diff(), page_table=inside[:-1, None])
        chunks.append(_Chunk(slots[first : first + size], of_chunk))
    return replace(plan, chunks=tuple(chunks))


def _slots(page_table: torch.Tensor, bounds: torch.Tensor, num_keys: int, page_size: int) -> torch.Tensor:
    """[num_keys] int64: KV slots of the first tokens of each row, bounds[i + 1] - bounds[i] of row i."""
    index = torch.arange(num_keys, dtype=torch.int32, device=bounds.device)
    row = torch.searchsorted(bounds, index, right=True) - 1
    position = index - bounds[row]
    return page_table[row, position // page_size].long() * page_size + position % page_size


class TritonLatent:
    """The layers' attention by `paged_decode` and `paged_extend`, over a pool that holds the new tokens' latents."""

    def __init__(self, token_to_kv_pool: TokenToKVPool) -> None:
        from attention.kernels.decode import paged_decode  # a CPU install has no Triton
        from attention.kernels.extend import paged_extend
        from attention.kernels.merge import merge_states

        self._paged_decode, self._paged_extend, self._merge_states = paged_decode, paged_extend, merge_states
        self._pool = token_to_kv_pool

    def decode(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, paged: PagedMetadata) -> torch.Tensor:
        """As AttentionBackend.attend_latent, of a step in which every row has one token."""
        latents = q.new_empty(len(q), layer.tp_q_head_num, layer.latent_dim)
        self._paged_decode(self._absorbed(q, layer, heads), self._pages(layer), None, paged, layer, out=latents)
        return heads.values(latents.flatten(1))

    def extend(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, plan: LatentPlan) -> torch.Tensor:
        """As AttentionBackend.attend_latent, of any other step."""
        shape = (len(q), layer.tp_q_head_num, layer.v_dim)
        k, v = self._keys_values(layer, heads, plan.out_cache_loc)
        if plan.absorbed is None and not plan.chunks:
            return self._paged_extend(q, k, v, plan.own, layer, out=q.new_empty(shape), mask=plan.mask).flatten(1)
        out, lse = _part(shape, q.device)
        self._paged_extend(q, k, v, plan.own, layer, out=out, lse=lse, mask=plan.mask)
        del k, v
        for part, part_lse in self._cached(q, layer, heads, plan):
            merged, merged_lse = _part(shape, q.device)
            self._merge_states(out, lse, part, part_lse, out=merged, lse=merged_lse)
            out, lse = merged, merged_lse
        return out.to(q.dtype).flatten(1)

    def _cached(
        self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, plan: LatentPlan
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Answers [num_tokens, tp_q_head_num, v_dim] over parts of what is cached, and logarithms of their sums."""
        num_tokens, num_heads = len(q), layer.tp_q_head_num
        if plan.absorbed is not None:
            latents = q.new_empty(num_tokens, num_heads, layer.latent_dim)
            lse = torch.empty(latents.shape[:2], dtype=torch.float32, device=q.device)
            wide, pages = self._absorbed(q, layer, heads), self._pages(layer)
            self._paged_extend(wide, pages, None, plan.absorbed, layer, out=latents, lse=lse, prefix_only=True)
            yield heads.values(latents.flatten(1)).view(num_tokens, num_heads, -1), lse
        for chunk in plan.chunks:
            k, v = self._keys_values(layer, heads, chunk.slots)
            part, lse = _part((num_tokens, num_heads, layer.v_dim), q.device)
            yield self._paged_extend(q, k, v, chunk.paged, layer, out=part, lse=lse, prefix_only=True), lse

    def _keys_values(
        self, layer: LatentLayer, heads: LatentHeads, which: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads' own of the tokens in slots `which`, [num_keys] int64."""
        [slots] = self._pool.slots(layer.layer_id)
        k, v = heads.keys_values(slots.index_select(0, which))
        return k, v.contiguous()

    def _absorbed(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        return heads.absorb(q).view(len(q), layer.tp_q_head_num, layer.head_dim)

    def _pages(self, layer: LatentLayer) -> torch.Tensor:
        """[num_pages, page_size, 1, head_dim]."""
        [pages] = self._pool.pages(layer.layer_id)
        return pages.unsqueeze(2)


def _part(shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for answers of `shape` in fp32, and for logarithms of their sums."""
    out, lse = (torch.empty(it, dtype=torch.float32, device=device) for it in (shape, shape[:2]))
    return out, lse
