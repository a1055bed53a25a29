"""Paged keys in attention kernels: the rows of a tile, the pages of a block, what may be seen.

Blocks of keys start at multiples of their size in the sequence. A kernel walks them upwards, and while it works on one,
the page ids of the next are on their way.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_PAGE = tl.constexpr(1 << 30)
"""Tokens of a page where a row's keys follow one another: they are one page, which begins at any slot."""
LOWEST = tl.constexpr(-1e30)
"""No score is below it, and it is finite: the difference of two of them is zero and not NaN."""
ROWS_AT_ONCE = 128
"""Rows of the batch among which a program looks for its own at a time."""


def block_of(size: int) -> int:
    """A block that holds so many elements, and that a matrix product takes."""
    return max(1 << (size - 1).bit_length(), 16)


@triton.jit
def first_tile(start, row, group, BLOCK_M: tl.constexpr):
    """The first tile of a row whose tokens begin at `start`: found without the other rows, for one idle tile a row."""
    return start * group // BLOCK_M + row


@triton.jit
def row_of_tile(cu_seqlens_q, num_rows, group, tile, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr):
    """The row of the batch that a tile belongs to: the last whose `first_tile` is not behind it."""
    row = -1
    for first in tl.range(0, num_rows, AT_ONCE):
        rows = first + tl.arange(0, AT_ONCE)
        starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
        begins = (rows < num_rows) & (first_tile(starts, rows, group, BLOCK_M) <= tile)
        row += tl.sum(begins.to(tl.int32), 0)
    return row


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that each query at `position` sees; WINDOW and CHUNK are 0 where there is none."""
    first = position * 0  # zeros of its shape
    if WINDOW > 0:
        first = tl.maximum(position - (WINDOW - 1), 0)
    if CHUNK > 0:
        first = tl.maximum(position // CHUNK * CHUNK, first)
    return first


@triton.jit
def pages_of(table_row, block, end, stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a block of keys, or [BLOCK_N, 1] that of each; page 0 from block `end` and from key `stop` on."""
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(table_row + block * BLOCK_N // PAGE_SIZE, mask=block < end, other=0)
    else:
        index = block * (BLOCK_N // PAGE_SIZE) + tl.arange(0, BLOCK_N) // PAGE_SIZE
        page = tl.load(table_row + index, mask=index * PAGE_SIZE < stop, other=0)[:, None]
    return page


@triton.jit
def slots_of(page, block, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots of the pool, in 64 bits, to which `slots_in_page` of a key is added; of the shape of `page`."""
    if PAGE_SIZE == ONE_PAGE:
        slot = page.to(tl.int64) + block * BLOCK_N
    else:
        slot = page.to(tl.int64) * PAGE_SIZE
        if PAGE_SIZE > BLOCK_N:
            slot += block * BLOCK_N % PAGE_SIZE
    return slot


@triton.jit
def slots_in_page(PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_N, 1]: where each key of a block lies behind `slots_of`."""
    return (tl.arange(0, BLOCK_N) % PAGE_SIZE)[:, None]


@triton.jit
def masked_load(pointers, is_there, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_there, other=0.0)


@triton.jit
def for_cache(q, CACHE: tl.constexpr):
    """Queries in the dtype of their products with keys of dtype CACHE, and of weights with values.

    For FP8 that is fp16 in place of bf16: Hopper turns two numbers of FP8 into fp16 by one instruction, into bf16 by
    four or by slow ones (seen in its machine code). Queries beyond 65504, where no model's are, count as that.
    """
    if CACHE.is_fp8() and q.dtype == tl.bfloat16:
        return tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    else:
        return q


@triton.jit
def unpaired(pairs, COMPILED: tl.constexpr):
    """The first and the second numbers, in fp16, of pairs in FP8. Not COMPILED: for the interpreter."""
    if COMPILED:
        # A register has two pairs and becomes two registers; Triton by itself would move each byte alone.
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
