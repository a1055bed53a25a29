"""Index scores of sparse attention (DSA) over a paged pool of index keys, and the choice of the largest ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.pages import block_of
from attention.sparse import IndexInputs, SparseStep

_BLOCK = 64
"""Keys of a block of scores. Not measured."""
_PROGRAMS = 1024
"""Programs that share the blocks of scores of all tokens, if there are fewer tokens. Not measured."""
_CHOSEN_BLOCK = 2048
"""Scores that a program which chooses looks at together. Not measured."""


# Lengths change with every step, and steps in parts pass views. Triton would compile a kernel for each kind of number
# and alignment when it first appears, while serving.
@triton.jit(
    do_not_specialize=["table_stride", "num_keys"], do_not_specialize_on_alignment=["page_table", "rows", "positions"]
)
def _scores_kernel(
    q_ptr, weights_ptr, keys_ptr, page_table, rows, positions, scores_ptr, q_stride, table_stride, num_keys,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Several programs per token, each with some blocks of its keys. A score's bits do not depend on where its key lies
    in a block."""
    token = tl.program_id(0).to(tl.int64)
    last = tl.load(positions + token)
    table = page_table + tl.load(rows + token) * table_stride
    dims, heads = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_H)
    is_head, is_dim = heads < NUM_HEADS, dims < HEAD_DIM
    q_ptrs = q_ptr + token * q_stride + heads[:, None] * HEAD_DIM + dims
    q = tl.load(q_ptrs, mask=is_head[:, None] & is_dim, other=0.0)
    weights = tl.load(weights_ptr + token * NUM_HEADS + heads, mask=is_head, other=0.0)
    for block in range(tl.program_id(1), tl.cdiv(last + 1, BLOCK), tl.num_programs(1)):
        keys = block * BLOCK + tl.arange(0, BLOCK)
        seen = keys <= last
        pages = tl.load(table + keys // PAGE_SIZE, mask=seen, other=0)
        slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        k = tl.load(keys_ptr + slots[:, None] * HEAD_DIM + dims, mask=seen[:, None] & is_dim, other=0.0)
        by_head = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0) * weights[:, None]
        tl.store(scores_ptr + token * num_keys + keys, tl.sum(by_head, 0), mask=seen)


@triton.jit
def _ordered(scores_ptr, places, seen):
    """[BLOCK] uint32 that are ordered like the scores."""
    scores = tl.load(scores_ptr + places, mask=seen, other=0.0)
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.uint32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000)


@triton.jit(
    do_not_specialize=["table_stride", "num_keys"], do_not_specialize_on_alignment=["page_table", "rows", "positions"]
)
def _choose_kernel(
    scores_ptr, page_table, rows, positions, slots_ptr, table_stride, num_keys,
    TOP_K: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token. It finds the score of rank TOP_K, eight bits at a time from the highest ones, and then
    writes the slots of all larger scores and of the first equal ones, in the order of positions."""
    token = tl.program_id(0).to(tl.int64)
    num_seen = tl.load(positions + token).to(tl.int32) + 1
    scores_ptr += token * num_keys
    table = page_table + tl.load(rows + token) * table_stride
    places, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    lowest = tl.zeros([], tl.uint32)  # the highest bits of the score of rank TOP_K, as far as they are found
    missing = tl.full([], TOP_K, tl.int32)  # the rank of that score among scores with these bits
    if num_seen > TOP_K:
        for digit in tl.static_range(4):
            counts = tl.zeros([256], tl.int32)
            for start in range(0, num_seen, BLOCK):
                seen = start + places < num_seen
                high = _ordered(scores_ptr, start + places, seen) >> (24 - 8 * digit)
                counts += tl.histogram((high & 255).to(tl.int32), 256, mask=seen & ((high >> 8) == lowest))
            larger = tl.sum(counts) - tl.cumsum(counts)  # number of scores with a larger digit
            is_next = (larger < missing) & (larger + counts >= missing)
            lowest = (lowest << 8) | tl.sum(tl.where(is_next, digits, 0)).to(tl.uint32)
            missing -= tl.sum(tl.where(is_next, larger, 0))
    num_chosen, num_equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, num_seen, BLOCK):
        key = start + places
        seen = key < num_seen
        order = _ordered(scores_ptr, key, seen)
        is_equal = (seen & (order == lowest)).to(tl.int32)
        rank = num_equal + tl.cumsum(is_equal)
        is_chosen = (seen & ((order > lowest) | ((is_equal == 1) & (rank <= missing)))).to(tl.int32)
        place = num_chosen + tl.cumsum(is_chosen) - 1
        pages = tl.load(table + key // PAGE_SIZE, mask=is_chosen == 1, other=0)
        tl.store(slots_ptr + token * TOP_K + place, pages * PAGE_SIZE + key % PAGE_SIZE, mask=is_chosen == 1)
        num_chosen += tl.sum(is_chosen)
        num_equal += tl.sum(is_equal)


def choose_keys(index: IndexInputs, keys: torch.Tensor, step: SparseStep, top_k: int) -> torch.Tensor:
    """The slots of the keys with the largest index scores, in ascending order of positions. Runs two kernels. Their
    time grows with the number of keys that the tokens see. No host sync, so a CUDA graph can capture them.

    Args:
        index: of the step's tokens, in the dtype of `keys`.
        keys: [num_pages, page_size, index_dim], contiguous.

    Returns:
        [num_tokens, top_k] int32. Slots at the end of tokens that see fewer keys are undefined.
    """
    num_tokens, num_heads, head_dim = index.q.shape
    assert index.q.stride()[1:] == (head_dim, 1), "the heads of a token are contiguous"
    scores = torch.empty(num_tokens, step.most_keys, dtype=torch.float32, device=keys.device)
    programs = max(min(-(-step.most_keys // _BLOCK), _PROGRAMS // num_tokens), 1)
    _scores_kernel[(num_tokens, programs)](
        index.q,
        index.weights,
        keys,
        step.page_table,
        step.rows,
        step.positions,
        scores,
        index.q.stride(0),
        step.page_table.stride(0),
        step.most_keys,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=keys.shape[1],
        BLOCK_H=max(block_of(num_heads), 16),
        BLOCK_D=max(block_of(head_dim), 16),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    slots = torch.empty(num_tokens, top_k, dtype=torch.int32, device=keys.device)
    _choose_kernel[(num_tokens,)](
        scores,
        step.page_table,
        step.rows,
        step.positions,
        slots,
        step.page_table.stride(0),
        step.most_keys,
        TOP_K=top_k,
        PAGE_SIZE=keys.shape[1],
        BLOCK=_CHOSEN_BLOCK,
        num_warps=8,
    )
    return slots
