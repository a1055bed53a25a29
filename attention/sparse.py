"""Sparse attention (DSA): a query sees at most `top_k` keys, those with the largest index scores.

An indexer gives each key that a query might see a score: the sum over index heads of weight * relu(query @ key). Index
keys are in the KV pool, beside the latents. Every rank computes all scores, and so chooses the same keys. Among equal
scores, keys with smaller positions are chosen.

Attention over the chosen keys is attention of rows with one token each, over pages of one slot: the slots of the keys,
in ascending order of positions. So the kernels for decode steps compute it, for prompts too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.forward_batch import ForwardBatch, PagedMetadata

_MOST_SCORES = 1 << 23
"""Largest number of scores that are computed at once: 32 MiB. Not measured."""
_MOST_TOKENS = 512
"""Largest number of tokens that attend to chosen keys at once. Their absorbed queries and outputs take about as much
memory as the expanded keys and values of a prompt, which the profile run measures. Not measured."""


class IndexInputs(NamedTuple):
    """Index queries, index keys and weights of index heads of new tokens, after norm and rotary embedding."""

    q: torch.Tensor
    """[num_tokens, index_heads, index_dim]. The heads of a token are contiguous; the token stride may be larger."""
    k: torch.Tensor
    """[num_tokens, index_dim]."""
    weights: torch.Tensor
    """[num_tokens, index_heads] fp32, contiguous: factors of the heads' scores."""


@dataclass(frozen=True, slots=True)
class SparseStep:
    """New tokens and the keys that they may see."""

    rows: torch.Tensor
    """[num_tokens] int64, device: row of each token."""
    positions: torch.Tensor
    """[num_tokens] int64, device. A token may see the positions up to its own."""
    page_table: torch.Tensor
    """[num_rows, max_pages] int32, device."""
    most_keys: int
    """No token may see more keys."""

    @classmethod
    def of(cls, batch: ForwardBatch, most_keys: int) -> SparseStep:
        """Queues kernels, and does not wait for the device."""
        return cls(*rows_of(batch), batch.paged.page_table, most_keys)

    def parts(self) -> Iterator[tuple[slice, SparseStep]]:
        """Ranges of the tokens that are computed together, and the step of each range."""
        num_tokens, size = len(self.rows), max(min(_MOST_SCORES // self.most_keys, _MOST_TOKENS), 1)
        for first in range(0, num_tokens, size):
            tokens = slice(first, min(first + size, num_tokens))
            yield tokens, SparseStep(self.rows[tokens], self.positions[tokens], self.page_table, self.most_keys)

    def choose(self, scores: torch.Tensor, top_k: int, page_size: int) -> torch.Tensor:
        """The slots of the keys with the largest scores, in ascending order of positions.

        Args:
            scores: [num_tokens, most_keys] fp32. Those of positions that a token does not see are not read.

        Returns:
            [num_tokens, top_k] int32. Tokens that see fewer keys have copies of their first slot at the end, which
            attention must not read (`paged` has the lengths).
        """
        # A whole number orders keys by score, then by position. No two are equal, so any algorithm finds the same keys.
        key = torch.arange(self.most_keys, device=scores.device)
        bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
        order = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (self.most_keys - 1 - key)
        order.masked_fill_(key > self.positions[:, None], -1 << 63)
        chosen = order.topk(top_k, dim=1).indices.sort(dim=1).values
        seen = chosen <= self.positions[:, None]
        chosen = torch.where(seen, chosen, chosen[:, :1])
        pages = self.page_table[self.rows[:, None], chosen // page_size]
        return pages * page_size + (chosen % page_size).int()

    def paged(self, slots: torch.Tensor) -> PagedMetadata:
        """The metadata of rows with one token each. The keys of the tokens are in `slots` [num_tokens, top_k] int32."""
        return PagedMetadata.of_single_tokens((self.positions + 1).clamp(max=slots.shape[1]).int(), slots)


def rows_of(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the position of each new token, [num_tokens] int64 each, on the device. A graph's padding may belong
    to no row: it counts as the last row's token at position 0. Queues kernels, and does not wait for the device."""
    starts, positions = batch.paged.cu_seqlens_q, batch.positions
    index = torch.arange(len(positions), dtype=torch.int32, device=starts.device)
    rows = torch.searchsorted(starts[1:], index, right=True).clamp_(max=len(starts) - 2)
    return rows, positions.masked_fill(index >= starts[-1], 0)
