"""Sparse attention (DSA): a query sees only the `top_k` keys with the largest index scores.

An indexer gives each key that a query might see a score: the sum over index heads of weight * relu(query @ key). Index
keys are in the KV pool, beside the latents. The scores, and so the chosen keys, have the same bits on every rank and in
every batch. Among equal scores, keys with smaller positions are chosen.

Attention over the chosen keys is attention of rows with one token each, over pages of one slot: the slots of the keys,
in ascending order of positions. So kernels of decodes compute it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.forward_batch import ForwardBatch, PagedMetadata

_MOST_SCORES = 1 << 24
"""Largest number of scores that are computed at once: 64 MiB, and 128 MiB more while keys are chosen. Not measured."""


class IndexInputs(NamedTuple):
    """What an indexer computes for a step's tokens, before the rotary embedding."""

    q: torch.Tensor
    """[num_tokens, index_heads, index_dim]."""
    k: torch.Tensor
    """[num_tokens, index_dim], after its norm."""
    weights: torch.Tensor
    """[num_tokens, index_heads] fp32, contiguous: factors of the heads' scores."""


@dataclass(frozen=True, slots=True)
class SparseStep:
    """A step's tokens and the keys that they may see."""

    rows: torch.Tensor
    """[num_tokens] int64, device: row of each token."""
    positions: torch.Tensor
    """[num_tokens] int64, device."""
    page_table: torch.Tensor
    """[num_rows, max_pages] int32, device."""
    most_keys: int
    """Largest number of keys that a token may see."""

    @classmethod
    def of(cls, batch: ForwardBatch, most_keys: int) -> SparseStep:
        """Queues kernels, and does not wait for the device."""
        starts, positions = batch.paged.cu_seqlens_q, batch.positions
        index = torch.arange(len(positions), dtype=torch.int32, device=starts.device)
        rows = torch.searchsorted(starts[1:], index, right=True).clamp_(max=len(starts) - 2)
        # A graph's padding may belong to no row. It sees the first key of the last row.
        positions = positions.masked_fill(index >= starts[-1], 0)
        return cls(rows, positions, batch.paged.page_table, most_keys)

    def parts(self) -> Iterator[slice]:
        """Ranges of tokens whose scores are computed together."""
        num_tokens, size = len(self.rows), max(_MOST_SCORES // self.most_keys, 1)
        return (slice(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size))

    def choose(self, scores: torch.Tensor, tokens: slice, top_k: int, page_size: int) -> torch.Tensor:
        """The slots of the keys with the largest scores, in ascending order of positions.

        Args:
            scores: [num_tokens, most_keys] fp32, of the range `tokens` of the step's tokens: -inf for keys that a token
                does not see.

        Returns:
            [num_tokens, top_k] int32. Tokens that see fewer keys have any valid slots at the end.
        """
        # A whole number orders keys by score, then by position. No two are equal, so any algorithm finds the same keys.
        bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
        order += torch.arange(self.most_keys - 1, -1, -1, device=scores.device)
        chosen = self.most_keys - 1 - (order.topk(top_k, dim=1, sorted=False).values & 0xFFFFFFFF)
        # Keys that are not seen come last, because their positions are largest.
        chosen = chosen.sort(dim=1).values
        pages = self.page_table[self.rows[tokens]].gather(1, chosen // page_size)
        seen = chosen <= self.positions[tokens, None]
        slots = pages * page_size + (chosen % page_size).int()
        return torch.where(seen, slots, slots[:, :1])

    def paged(self, slots: torch.Tensor) -> PagedMetadata:
        """The metadata of rows with one token each, whose keys are in `slots` [num_tokens, top_k] int32."""
        num_tokens, top_k = slots.shape
        return PagedMetadata(
            cache_seqlens=(self.positions + 1).clamp(max=top_k).int(),
            cu_seqlens_q=torch.arange(num_tokens + 1, dtype=torch.int32, device=slots.device),
            page_table=slots,
            max_seqlen_q=1,
        )
