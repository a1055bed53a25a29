"""Scores of an indexer (sparse attention, DSA) over a paged pool of index keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pages import block_of
from attention.sparse import IndexInputs, SparseStep

_BLOCK = 64
"""Keys of a program. Not measured."""


@triton.jit
def _scores_kernel(
    q_ptr, weights_ptr, keys_ptr, page_table, rows, positions, scores_ptr, table_stride, num_keys,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token and block of keys. Every element of a product has the same order of sums, wherever its key
    is in the block."""
    token = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = keys <= tl.load(positions + token)
    scores = tl.full([BLOCK], float("-inf"), tl.float32)
    if tl.program_id(1) * BLOCK <= tl.load(positions + token):
        table = page_table + tl.load(rows + token) * table_stride
        pages = tl.load(table + keys // PAGE_SIZE, mask=seen, other=0)
        slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        dims, heads = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_H)
        k = tl.load(
            keys_ptr + slots[:, None] * HEAD_DIM + dims, mask=seen[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
        )
        q = tl.load(
            q_ptr + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims,
            mask=(heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        weights = tl.load(weights_ptr + token * NUM_HEADS + heads, mask=heads < NUM_HEADS, other=0.0)
        by_head = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0) * weights[:, None]
        scores = tl.where(seen, tl.sum(by_head, 0), scores)
    tl.store(scores_ptr + token * num_keys + keys, scores, mask=keys < num_keys)


def index_scores(
    index: IndexInputs, keys: torch.Tensor, step: SparseStep, tokens: slice, num_keys: int
) -> torch.Tensor:
    """The scores of the first `num_keys` positions of each token's row. No host sync.

    Args:
        index: of the range `tokens` of the step's tokens. Its queries [num_tokens, index_heads, index_dim] are
            contiguous, in the dtype of `keys`.
        keys: [num_pages, page_size, index_dim], contiguous.

    Returns:
        [num_tokens, num_keys] fp32: -inf for positions after the token's.
    """
    num_tokens, num_heads, head_dim = index.q.shape
    assert index.q.is_contiguous(), "index queries are contiguous"
    scores = torch.empty(num_tokens, num_keys, dtype=torch.float32, device=keys.device)
    _scores_kernel[(num_tokens, -(-num_keys // _BLOCK))](
        index.q,
        index.weights,
        keys,
        step.page_table,
        step.rows[tokens],
        step.positions[tokens],
        scores,
        step.page_table.stride(0),
        num_keys,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=keys.shape[1],
        BLOCK_H=max(block_of(num_heads), 16),
        BLOCK_D=max(block_of(head_dim), 16),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return scores
