"""Parts of products of fast numerics with experts' weights in four bits, which become bf16 in registers.

A word's four codes are of four blocks of inputs, so that each block is a tile of its own, whose rows have one power of
two each. Eight weights take 15 instructions to become numbers of bf16, exactly; compiled for an H200, products of few
tokens take 24 and 29 for each eight with all that is in their loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parallel.numerics.mxfp4 import BLOCK, GROUP

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)
_COPIES = tl.constexpr(8)
"""Rows of the smallest MMA that has weights on its other side."""

_UNPACK = tl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $4, 0x81C081C0;
mul.bf16x2 $0, a, $5;
shl.b32 a, $4, 3;
and.b32 a, a, 0x81C081C0;
mul.bf16x2 $1, a, $7;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81C081C0;
mul.bf16x2 $2, a, $9;
shl.b32 a, $4, 1;
and.b32 a, a, 0x80008000;
shr.b32 b, $4, 3;
lop3.b32 a, b, 0x01800180, a, 0xEA;
shr.b32 b, $4, 7;
lop3.b32 a, b, 0x00400040, a, 0xEA;
mul.bf16x2 $3, a, $11;
}""")
"""Two words at a time. Of the factors, which are of rows, the second register is the first one's equal."""


@triton.jit
def _factor(exponents, BITS: tl.constexpr):
    # Twice the number of bf16 with this exponent: in both halves.
    return (exponents >> BITS & 255) * 0x00800080


@triton.jit
def _tile(bits, factor, dtype: tl.constexpr):
    bits = (bits << 16).to(tl.float32, bitcast=True)
    return (bits * (factor << 16).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def block_tiles(words, exponents, dtype: tl.constexpr, IS_COMPILED: tl.constexpr):
    """The tiles [..., rows, BLOCK] of a group's four blocks in `dtype`.

    Args:
        words: [..., rows, BLOCK] of Mxfp4Matrix's codes.
        exponents: [..., rows, 1].
        IS_COMPILED: otherwise this is interpreted.
    """
    f0, f1, f2, f3 = _factor(exponents, 0), _factor(exponents, 8), _factor(exponents, 16), _factor(exponents, 24)
    if IS_COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [words, f0, f1, f2, f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = words.to(tl.int32)
        last = (words << 1 & 0x8000) | (words >> 3 & 0x0180) | (words >> 7 & 0x0040)
        return (
            _tile(words & 0x81C0, f0, dtype),
            _tile(words << 3 & 0x81C0, f1, dtype),
            _tile(words << 6 & 0x81C0, f2, dtype),
            _tile(last, f3, dtype),
        )


@triton.jit
def rows_of(codes_ptr, exponents_ptr, matrices, rows, num_rows, num_columns):
    """Pointers to the first words of `rows` of int64 `matrices`, which broadcast to their shape, and to the exponents
    of the first group."""
    num_groups = tl.cdiv(num_columns, _GROUP)
    codes = codes_ptr + (matrices * num_rows + rows) * (num_groups * _BLOCK)
    return codes, exponents_ptr + matrices * num_groups * num_rows + rows


@triton.jit
def sum_blocks(x_rows, is_row, w_rows, exponents, num_rows, K, IS_COMPILED: tl.constexpr, STAGES: tl.constexpr):
    """The products [rows of x, rows of the weight] of x and w.

    Args:
        x_rows: [rows, 1] pointers to rows of x.
        is_row: [rows, 1] whether a row is wanted. Others are not read.
        w_rows, exponents: [rows] as `rows_of` has them.
        num_rows: all of the weight's.
        K: columns of x and w.
    """
    places = tl.arange(0, _BLOCK)[None, :]
    acc = tl.zeros([x_rows.shape[0], w_rows.shape[0]], tl.float32)
    for group in tl.range(0, tl.cdiv(K, _GROUP), num_stages=STAGES):
        k = group * _GROUP + places
        words = tl.load(w_rows[:, None] + group * _BLOCK + places)
        factors = tl.load(exponents + group * num_rows)[:, None]
        x0 = tl.load(x_rows + k, mask=is_row & (k < K), other=0.0)
        x1 = tl.load(x_rows + k + _BLOCK, mask=is_row & (k < K - _BLOCK), other=0.0)
        x2 = tl.load(x_rows + k + 2 * _BLOCK, mask=is_row & (k < K - 2 * _BLOCK), other=0.0)
        x3 = tl.load(x_rows + k + 3 * _BLOCK, mask=is_row & (k < K - 3 * _BLOCK), other=0.0)
        w0, w1, w2, w3 = block_tiles(words, factors, x0.dtype, IS_COMPILED)
        acc = tl.dot(x0, w0.T, acc, input_precision="ieee")
        acc = tl.dot(x1, w1.T, acc, input_precision="ieee")
        acc = tl.dot(x2, w2.T, acc, input_precision="ieee")
        acc = tl.dot(x3, w3.T, acc, input_precision="ieee")
    return acc


@triton.jit
def sum_blocks_side_by_side(
    x_rows, is_side, w_rows, exponents, num_groups, num_rows, K, SIDE: tl.constexpr, ALONG: tl.constexpr,
    IS_COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SIDE products of one row of x each [SIDE, rows of the weight] side by side, by warps of their own.

    Args as of `sum_blocks`, with a dimension of SIDE or 1 before the others.
        x_rows: [SIDE, 1, 1].
        is_side: [SIDE, 1, 1] which there are.
        num_groups: those of K, or 0 for none.
        ALONG: each product is over every SIDEth group. Otherwise over all.
    """
    sides, places = tl.arange(0, SIDE)[:, None], tl.arange(0, _BLOCK)[None, None, :]
    # One row of an MMA's is x's. The others are zeros, and not read.
    is_row = is_side & (tl.arange(0, _COPIES) == 0)[None, :, None]
    x_rows += tl.zeros([1, _COPIES, 1], tl.int32)
    acc = tl.zeros([SIDE, w_rows.shape[1], _COPIES], tl.float32)
    for step in tl.range(0, tl.cdiv(num_groups, SIDE) if ALONG else num_groups, num_stages=STAGES):
        groups = step * SIDE + sides if ALONG else step + sides * 0
        k = groups[:, :, None] * _GROUP + places
        if ALONG:
            groups = tl.minimum(groups, num_groups - 1)  # for groups past the last one, of which x is zeros
        # A weight is read once, so it is the first to leave the L2 cache.
        w = w_rows[:, :, None] + groups[:, :, None] * _BLOCK + places
        words = tl.load(w, eviction_policy="evict_first")
        factors = tl.load(exponents + groups * num_rows)[:, :, None]
        x0 = tl.load(x_rows + k, mask=is_row & (k < K), other=0.0)
        x1 = tl.load(x_rows + k + _BLOCK, mask=is_row & (k < K - _BLOCK), other=0.0)
        x2 = tl.load(x_rows + k + 2 * _BLOCK, mask=is_row & (k < K - 2 * _BLOCK), other=0.0)
        x3 = tl.load(x_rows + k + 3 * _BLOCK, mask=is_row & (k < K - 3 * _BLOCK), other=0.0)
        w0, w1, w2, w3 = block_tiles(words, factors, x0.dtype, IS_COMPILED)
        acc = tl.dot(w0, tl.permute(x0, (0, 2, 1)), acc, input_precision="ieee")
        acc = tl.dot(w1, tl.permute(x1, (0, 2, 1)), acc, input_precision="ieee")
        acc = tl.dot(w2, tl.permute(x2, (0, 2, 1)), acc, input_precision="ieee")
        acc = tl.dot(w3, tl.permute(x3, (0, 2, 1)), acc, input_precision="ieee")
    return tl.sum(acc, 2)
