"""A kernel that writes one bit for every pair of a new token and a key of its row: whether the token sees the key.
FlashInfer reads masks in this form."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.forward_batch import NewTokenMask, PagedMetadata
from attention.kernels.pages import first_key

_BLOCK = 256  # bytes that a program writes (not measured)
_ROWS = 256  # number of row lengths that a program reads at a time


@triton.jit
def _num_bytes(cache_seqlens, cu_seqlens_q, rows, is_row):
    """Bytes of each row's bits. A row's bits start at a byte boundary."""
    seq_lens = tl.load(cache_seqlens + rows, mask=is_row, other=0).to(tl.int64)
    starts = tl.load(cu_seqlens_q + rows, mask=is_row, other=0)
    num_tokens = tl.load(cu_seqlens_q + rows + 1, mask=is_row, other=0) - starts
    return (seq_lens * num_tokens + 7) // 8


@triton.jit(do_not_specialize_on_alignment=["visible", "starts", "positions"])
def _pack_mask(
    cache_seqlens, cu_seqlens_q, visible, starts, positions, packed, begins, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    before = tl.zeros((ROWS,), tl.int64)
    for first in range(0, row, ROWS):
        rows = first + tl.arange(0, ROWS)
        before += _num_bytes(cache_seqlens, cu_seqlens_q, rows, rows < row)
    begin = tl.sum(before, axis=0)
    tl.store(begins + row, begin.to(tl.int32))
    seq_len = tl.load(cache_seqlens + row)
    q_start = tl.load(cu_seqlens_q + row)
    num_tokens = tl.load(cu_seqlens_q + row + 1) - q_start
    prefix_len = seq_len - num_tokens
    num_pairs = seq_len.to(tl.int64) * num_tokens

    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)[None, :]
    pair = byte[:, None] * 8 + bit
    is_pair = pair < num_pairs
    token = pair // tl.maximum(seq_len, 1)
    key = (pair - token * seq_len).to(tl.int32)
    part = tl.load(starts + row).to(tl.int64)
    has_part = part >= 0
    position = (prefix_len + token).to(tl.int32)
    at = tl.load(positions + q_start + token, mask=is_pair & has_part, other=0).to(tl.int32)
    position = tl.where(has_part, at, position)
    seen = (key <= position) & (key >= first_key(position, WINDOW, CHUNK))
    is_new = has_part & (key >= prefix_len)
    among_new = tl.load(visible + (part + token * num_tokens + key - prefix_len), mask=is_pair & is_new, other=0)
    seen = tl.where(is_new, among_new != 0, seen) & is_pair
    bits = tl.sum(seen.to(tl.int32) << bit, axis=1)
    tl.store(packed + begin + byte, bits.to(tl.uint8), mask=byte * 8 < num_pairs)


def pack_mask(
    paged: PagedMetadata,
    mask: NewTokenMask,
    window: int | None,
    chunk: int | None,
    *,
    most_bytes: int,
    packed: torch.Tensor,
    begins: torch.Tensor,
) -> None:
    """Writes the bits [extend_len, seq_len] of each row, lowest bit of a byte first, and the start of each row.

    The bits combine `mask` (rows without a part are causal) with window and chunk. One kernel without a host sync.

    Args:
        most_bytes: largest size of a row: (extend_len * seq_len + 7) // 8.
        packed: uint8, contiguous, with room for the bytes of all rows.
        begins: [num_rows] int32, written: first byte of each row in `packed`.
    """
    _pack_mask[(triton.cdiv(most_bytes, _BLOCK), len(paged.cache_seqlens))](
        paged.cache_seqlens,
        paged.cu_seqlens_q,
        mask.visible.view(torch.uint8),
        mask.starts,
        mask.positions,
        packed,
        begins,
        WINDOW=window or 0,
        CHUNK=chunk or 0,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
    )
