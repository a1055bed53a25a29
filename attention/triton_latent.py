"""Latent attention (MLA) by the Triton kernels.

Decodes use the absorbed form. In other steps, new tokens attend to each other with expanded heads. They attend to the
cached tokens in the form that takes fewer operations for the row: absorbed, or with keys and values expanded from
latents a chunk at a time. The parts are merged by the logarithms of their sums. In exact numerics all steps use the
absorbed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from attention.forward_batch import ForwardBatch, NewTokenMask, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import LatentLayer

_Attention = Callable[..., torch.Tensor]
"""`paged_decode` or `paged_exact`."""
_CHUNK_ELEMENTS = 1 << 25
"""Largest number of key and value elements expanded from cached latents at once: 64 MiB of 16-bit values. Not
measured."""


@dataclass(frozen=True, slots=True)
class _Cached:
    """A part of the cached tokens of consecutive rows."""

    tokens: slice
    """Range of the rows' new tokens in the batch."""
    paged: PagedMetadata
    """The rows' metadata as if only this part were cached."""
    slots: torch.Tensor | None
    """[num_keys] int64: slots of the part, row after row, if keys and values are expanded from them. Each row then has
    one page in `paged`, the index of its first key. None if the part is absorbed."""


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The plan of a step that is not a decode, for all layers."""

    out_cache_loc: torch.Tensor
    """[num_tokens] int64: slots of the new tokens."""
    own: PagedMetadata
    """The rows' metadata as if nothing were cached. Each row has one page, the index of its first new token."""
    mask: NewTokenMask | None
    cached: tuple[_Cached, ...]


def plan_of_any(batch: ForwardBatch) -> LatentPlan:
    """The plan of a step that is captured, for which only the shape is known: all cached tokens are absorbed."""
    paged, starts = batch.paged, batch.paged.cu_seqlens_q
    own = replace(paged, cache_seqlens=starts.diff(), page_table=starts[:-1, None])
    return LatentPlan(batch.out_cache_loc, own, batch.mask, (_Cached(slice(None), paged, None),))


def plan_of(batch: ForwardBatch, layer: LatentLayer, page_size: int) -> LatentPlan:
    """The plan of `batch`, for layers like `layer`. Queues kernels and does not wait for the device."""
    absorbs, has_cached = layer.absorbs(batch.extend_lens, batch.prefix_lens), batch.prefix_lens > 0
    cached: list[_Cached] = []
    if (chosen := has_cached & absorbs).any():
        tokens, paged, num_keys = _part_of(batch, layer, chosen, absorbed=True)
        cached.append(_Cached(tokens, replace(paged, cache_seqlens=paged.cu_seqlens_q.diff() + num_keys), None))
    if (chosen := has_cached & ~absorbs).any():
        cached += _chunks(batch, layer, chosen, page_size)
    return replace(plan_of_any(batch), cached=tuple(cached))


def _chunks(batch: ForwardBatch, layer: LatentLayer, chosen: npt.NDArray[np.bool_], page_size: int) -> list[_Cached]:
    """The cached tokens of the `chosen` rows, in chunks. The keys and values of a chunk are expanded together."""
    tokens, paged, num_keys = _part_of(batch, layer, chosen, absorbed=False)
    num_new, bounds = paged.cu_seqlens_q.diff(), F.pad(num_keys.cumsum(0, dtype=torch.int32), (1, 0))
    slots = _slots(paged.page_table, bounds, int(batch.prefix_lens[chosen].sum()), page_size)
    size = max(_CHUNK_ELEMENTS // (layer.tp_q_head_num * (layer.qk_dim + layer.v_dim)), 1)
    chunks = []
    for first in range(0, len(slots), size):
        inside = bounds.clamp(first, first + size) - first
        of_chunk = replace(paged, cache_seqlens=num_new + inside.diff(), page_table=inside[:-1, None])
        chunks.append(_Cached(tokens, of_chunk, slots[first : first + size]))
    return chunks


def _part_of(
    batch: ForwardBatch, layer: LatentLayer, chosen: npt.NDArray[np.bool_], *, absorbed: bool
) -> tuple[slice, PagedMetadata, torch.Tensor]:
    """The rows from the first to the last `chosen` one.

    Returns:
        Their tokens; their paged metadata; and [num_rows] int32, device: the number of cached tokens of each chosen
        row, 0 for other rows.
    """
    first, last = np.flatnonzero(chosen)[[0, -1]].tolist()
    tokens, rows = slice(*batch.cu_seqlens_q[[first, last + 1]].tolist()), slice(first, last + 1)
    starts = batch.paged.cu_seqlens_q[first : last + 2] - tokens.start
    lens, table = batch.paged.cache_seqlens[rows], batch.paged.page_table[rows]
    paged = replace(batch.paged, cache_seqlens=lens, cu_seqlens_q=starts, page_table=table)
    num_new = starts.diff()
    num_cached = paged.cache_seqlens - num_new
    others = layer.absorbs(num_new.long(), num_cached.long()) != absorbed
    return tokens, paged, num_cached.masked_fill(others, 0)


def _slots(page_table: torch.Tensor, bounds: torch.Tensor, num_keys: int, page_size: int) -> torch.Tensor:
    """[num_keys] int64: KV slots of the first tokens of each row. Row i has bounds[i + 1] - bounds[i] of them."""
    index = torch.arange(num_keys, dtype=torch.int32, device=bounds.device)
    row = torch.searchsorted(bounds, index, right=True) - 1
    position = index - bounds[row]
    return page_table[row, position // page_size].long() * page_size + position % page_size


class TritonLatent:
    """Attends by `paged_decode` and `paged_extend`, over a pool that holds the new tokens' latents."""

    def __init__(self, token_to_kv_pool: TokenToKVPool) -> None:
        from attention.kernels.decode import paged_decode
        from attention.kernels.extend import paged_extend
        from attention.kernels.merge import merge_states

        self._paged_decode, self._paged_extend, self._merge_states = paged_decode, paged_extend, merge_states
        self._pool = token_to_kv_pool

    def decode(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, paged: PagedMetadata) -> torch.Tensor:
        """Implements `AttentionBackend.attend_latent` for steps in which every row has one token."""
        return self.absorbed(self._paged_decode, q, layer, heads, paged)

    def absorbed(
        self, kernel: _Attention, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, paged: PagedMetadata
    ) -> torch.Tensor:
        """Implements `AttentionBackend.attend_latent` in the absorbed form, by `kernel`, for steps that it serves."""
        return heads.values(self._attend(kernel, heads.absorb(q), layer, self._pages(layer), paged))

    def chosen(self, kernel: _Attention, q: torch.Tensor, layer: LatentLayer, paged: PagedMetadata) -> torch.Tensor:
        """Implements `AttentionBackend.attend_chosen` by `kernel`."""
        return self._attend(kernel, q, layer, self._pages(layer).view(-1, 1, 1, layer.head_dim), paged)

    def extend(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, plan: LatentPlan) -> torch.Tensor:
        """Implements `AttentionBackend.attend_latent` for all other steps."""
        k, v = self._keys_values(layer, heads, plan.out_cache_loc)
        if not plan.cached:
            out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_dim)
            return self._paged_extend(q, k, v, plan.own, layer, out=out, mask=plan.mask).flatten(1)
        out, lse = _part(q, layer.v_dim, torch.float32)
        self._paged_extend(q, k, v, plan.own, layer, out=out, lse=lse, mask=plan.mask)
        del k, v
        for cached in plan.cached:
            whole = out[cached.tokens], lse[cached.tokens]
            part = self._attend_cached(q[cached.tokens], layer, heads, cached)
            self._merge_states(*whole, *part, out=whole[0], lse=whole[1])
        return out.to(q.dtype).flatten(1)

    def _attend(
        self, kernel: _Attention, q: torch.Tensor, layer: LatentLayer, pages: torch.Tensor, paged: PagedMetadata
    ) -> torch.Tensor:
        """Attention of absorbed queries q [num_tokens, tp_q_head_num * head_dim] over `pages`: [num_tokens,
        tp_q_head_num * latent_dim]."""
        latents = q.new_empty(len(q), layer.tp_q_head_num, layer.latent_dim)
        kernel(q.view(len(q), layer.tp_q_head_num, -1), pages, None, paged, layer, out=latents)
        return latents.flatten(1)

    def _attend_cached(
        self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, cached: _Cached
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention's output [num_tokens, tp_q_head_num, v_dim] over one part, and the logarithms of its sums."""
        if cached.slots is None:
            latents, lse = _part(q, layer.latent_dim, q.dtype)
            wide, pages = self._absorbed(q, layer, heads), self._pages(layer)
            self._paged_extend(wide, pages, None, cached.paged, layer, out=latents, lse=lse, prefix_only=True)
            return heads.values(latents.flatten(1)).view(len(q), layer.tp_q_head_num, -1), lse
        k, v = self._keys_values(layer, heads, cached.slots)
        out, lse = _part(q, layer.v_dim, torch.float32)
        return self._paged_extend(q, k, v, cached.paged, layer, out=out, lse=lse, prefix_only=True), lse

    def _keys_values(
        self, layer: LatentLayer, heads: LatentHeads, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expanded keys and values of the tokens in `slots` [num_keys] int64. If the pool is FP8, they are still
        divided by the layer's factor."""
        [latents] = self._pool.read(layer.layer_id, slots)
        k, v = heads.keys_values(latents)
        return k, v.contiguous()

    def _absorbed(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        return heads.absorb(q).view(len(q), layer.tp_q_head_num, layer.head_dim)

    def _pages(self, layer: LatentLayer) -> torch.Tensor:
        """The layer's pages, [num_pages, page_size, 1, head_dim]: all heads share one key head."""
        pages, *_ = self._pool.pages(layer.layer_id)
        return pages.unsqueeze(2)


def _part(q: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for attention's output [num_tokens, tp_q_head_num, width] in `dtype` to queries `q`, and for the fp32
    logarithms of its sums."""
    out = torch.empty((*q.shape[:2], width), dtype=dtype, device=q.device)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
