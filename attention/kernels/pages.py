"""Helpers of attention kernels for paged keys: the row of a tile, the pages of a block, which keys are visible.

Key blocks start at multiples of their size in the sequence. A kernel walks them upwards and loads the page ids of the
next block while it works on the current one.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_PAGE = tl.constexpr(1 << 30)
"""Page size if a row's keys follow each other. They then form one page, which may begin at any slot."""
LOWEST = tl.constexpr(-1e30)
"""Smaller than any score, and finite, so that the difference of two of them is zero and not NaN."""
ROWS_AT_ONCE = 128
"""Number of rows that a program reads at a time to find its own."""


def block_of(size: int) -> int:
    """A block size that covers this many elements and that a matrix product accepts."""
    return max(1 << (size - 1).bit_length(), 16)


@triton.jit
def first_tile(start, row, group, BLOCK_M: tl.constexpr):
    """The first tile of a row. `start` is the index of its first token, and decides alone, which costs one idle tile
    per row."""
    return start * group // BLOCK_M + row


@triton.jit
def row_of_tile(cu_seqlens_q, num_rows, group, tile, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr):
    """The row of a tile: the last row whose `first_tile` is not after the tile."""
    row = -1
    for first in tl.range(0, num_rows, AT_ONCE):
        rows = first + tl.arange(0, AT_ONCE)
        starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
        begins = (rows < num_rows) & (first_tile(starts, rows, group, BLOCK_M) <= tile)
        row += tl.sum(begins.to(tl.int32), 0)
    return row


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that each query at `position` sees. WINDOW or CHUNK is 0 if the layer has none."""
    first = position * 0  # zeros of the shape of `position`
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    if CHUNK > 0:
        first = tl.maximum(position // CHUNK * CHUNK, first)
    return first


@triton.jit
def pages_of(table_row, block, end, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a key block, or [BLOCK_N, 1] the page of each key. Page 0 from block `end` or key `stop` on."""
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(table_row + block * BLOCK_N // PAGE_SIZE, mask=block < end, other=0)
    else:
        index = block * (BLOCK_N // PAGE_SIZE) + tl.arange(0, BLOCK_N) // PAGE_SIZE
        page = tl.load(table_row + index, mask=index * PAGE_SIZE < stop, other=0)[:, None]
    return page


@triton.jit
def slots_of(page, block, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first slot in each `page` that key block `block` uses, int64 in the shape of `page`. `slots_in_page` is added
    for each key."""
    if PAGE_SIZE == ONE_PAGE:
        slot = page.to(tl.int64) + block * BLOCK_N
    else:
        slot = page.to(tl.int64) * PAGE_SIZE
        if PAGE_SIZE > BLOCK_N:
            slot += block * BLOCK_N % PAGE_SIZE
    return slot


@triton.jit
def slots_in_page(PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N, 1]: the offset of each key of a block after `slots_of`."""
    return (tl.arange(0, BLOCK_N) % PAGE_SIZE)[:, None]


@triton.jit
def masked_load(pointers, is_there, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_there, other=0.0)


@triton.jit
def for_cache(q, CACHE: tl.constexpr):
    """Casts queries to the dtype in which they are multiplied with keys of dtype CACHE.

    For FP8 the result is fp16 instead of bf16: Hopper converts two FP8 numbers to fp16 with one instruction, but to
    bf16 with four or with slow ones (seen in its machine code). Queries beyond 65504, which no model has, are clamped.
    """
    if CACHE.is_fp8() and q.dtype == tl.bfloat16:
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def unpaired(pairs, COMPILED: tl.constexpr):
    """The first and the second numbers of FP8 pairs, in fp16. Use COMPILED = False for the interpreter."""
    if COMPILED:
        # A register holds two pairs and becomes two registers. Triton alone would move each byte by itself.
        first, second = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 sorted;
                .reg .b16 firsts, seconds;
                prmt.b32 sorted, $2, 0, 0x3120;
                mov.b32 {firsts, seconds}, sorted;
                cvt.rn.f16x2.e4m3x2 $0, firsts;
                cvt.rn.f16x2.e4m3x2 $1, seconds;
            }
            """,
            constraints="=r,=r,r",
            args=[pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second
