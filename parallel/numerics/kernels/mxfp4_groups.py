"""Parts of products with MXFP4 experts in fast numerics. The weights become bf16 in registers.

A word's four codes belong to four blocks of inputs, so that each block is a separate tile, whose rows have one power of
two each. Converting eight weights to bf16 exactly takes 15 instructions. Compiled for an H200, products of few tokens
take 24 and 29 instructions per eight weights, with everything in their loops.
"""

from __future__ import annotations

import triton
import triton.language as tl

from parallel.numerics.mxfp4 import BLOCK, GROUP

_BLOCK = tl.constexpr(BLOCK)
_GROUP = tl.constexpr(GROUP)
_COPIES = tl.constexpr(8)
"""Rows of the smallest MMA that has weights as its other operand."""
# Converts two words at a time. Of each block's factors, which belong to rows, both registers are equal. GPUs before
# Hopper have only fused multiply-adds for bf16, so -0 is added here.
_UNPACK = tl.constexpr("""{ .reg .b32 a, b, z;  mov.b32 z, 0x80008000;
and.b32 a, $4, 0x81C081C0;  fma.rn.bf16x2 $0, a, $5, z;
shl.b32 a, $4, 3;  and.b32 a, a, 0x81C081C0;  fma.rn.bf16x2 $1, a, $7, z;
shl.b32 a, $4, 6;  and.b32 a, a, 0x81C081C0;  fma.rn.bf16x2 $2, a, $9, z;
shl.b32 a, $4, 1;  and.b32 a, a, 0x80008000;
shr.b32 b, $4, 3;  lop3.b32 a, b, 0x01800180, a, 0xEA;
shr.b32 b, $4, 7;  lop3.b32 a, b, 0x00400040, a, 0xEA;  fma.rn.bf16x2 $3, a, $11, z; }""")


@triton.jit
def _tile(bits, factor, dtype: tl.constexpr):
    factor = (factor << 16).to(tl.float32, bitcast=True)
    return ((bits << 16).to(tl.float32, bitcast=True) * factor).to(dtype)


@triton.jit
def block_tiles(words, exponents, dtype: tl.constexpr, IS_COMPILED: tl.constexpr):
    """The tiles [..., rows, BLOCK] of a group's four blocks in `dtype`.

    Args:
        words: [..., rows, BLOCK] of Mxfp4Matrix's codes.
        exponents: [..., rows, 1].
        IS_COMPILED: False in the interpreter.
    """
    # bf16 numbers with these exponents, in both halves of a register
    f0, f1 = (exponents & 255) * 0x00800080, (exponents >> 8 & 255) * 0x00800080
    f2, f3 = (exponents >> 16 & 255) * 0x00800080, (exponents >> 24 & 255) * 0x00800080
    if IS_COMPILED and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [words, f0, f1, f2, f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = words.to(tl.int32)
        last = (words << 1 & 0x8000) | (words >> 3 & 0x0180) | (words >> 7 & 0x0040)
        w0, w1 = _tile(words & 0x81C0, f0, dtype), _tile(words << 3 & 0x81C0, f1, dtype)
        return w0, w1, _tile(words << 6 & 0x81C0, f2, dtype), _tile(last, f3, dtype)


@triton.jit
def sum_blocks(
    x_rows, is_row, codes_ptr, exponents_ptr, matrix, rows, num_rows, K, IS_COMPILED: tl.constexpr, STAGES: tl.constexpr
):
    """The products [rows of x, rows of the weight] of x and w.

    Args:
        x_rows: [rows, 1] pointers to rows of x.
        is_row: [rows, 1] whether a row is needed. Other rows are not read.
        codes_ptr, exponents_ptr: start of a Mxfp4Matrix.
        matrix: index of the matrix, int64.
        rows: [rows] rows of the weight, out of `num_rows`.
        K: columns of x and w.
    """
    num_groups, places = tl.cdiv(K, _GROUP), tl.arange(0, _BLOCK)[None, :]
    w_rows = codes_ptr + (matrix * num_rows + rows)[:, None] * (num_groups * _BLOCK)
    exponents = exponents_ptr + matrix * num_groups * num_rows + rows
    acc = tl.zeros([x_rows.shape[0], rows.shape[0]], tl.float32)
    for group in tl.range(0, num_groups, num_stages=STAGES):
        words = tl.load(w_rows + group * _BLOCK + places)
        factors = tl.load(exponents + group * num_rows)[:, None]
        tiles = block_tiles(words, factors, x_rows.dtype.element_ty, IS_COMPILED)
        k = group * _GROUP + places
        for block in tl.static_range(4):
            x = tl.load(x_rows + k + block * _BLOCK, mask=is_row & (k < K - block * _BLOCK), other=0.0)
            acc = tl.dot(x, tiles[block].T, acc, input_precision="ieee")
    return acc


@triton.jit
def sum_blocks_side_by_side(
    x_rows, num_sides, codes_ptr, exponents_ptr, matrices, rows, num_rows, K, SIDE: tl.constexpr, ALONG: tl.constexpr,
    IS_COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes SIDE products of one row of x each [SIDE, rows of the weight] in parallel, each in its own warps.

    Args as for `sum_blocks`, with a leading dimension of SIDE or 1. x_rows: [SIDE, 1, 1]. num_sides: number of
    products; if 0, nothing is read. ALONG: each product is over every SIDEth group; otherwise over all groups.
    """
    num_groups, places = tl.cdiv(K, _GROUP), tl.arange(0, _BLOCK)[None, None, :]
    w_rows = codes_ptr + (matrices * num_rows + rows)[:, :, None] * (num_groups * _BLOCK)
    exponents = exponents_ptr + (matrices * num_groups * num_rows + rows)[:, :, None]
    # One row of the MMA is x's. The other rows are zeros and not read.
    sides = tl.arange(0, SIDE)[:, None, None]
    is_row = (sides < num_sides) & (tl.arange(0, _COPIES) == 0)[None, :, None]
    x_rows += tl.zeros([1, _COPIES, 1], tl.int32)
    acc = tl.zeros([SIDE, rows.shape[1], _COPIES], tl.float32)
    num_steps = tl.cdiv(num_groups, SIDE) if ALONG else num_groups * (num_sides > 0)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        groups = step * SIDE + sides if ALONG else step + sides * 0
        k = groups * _GROUP + places
        if ALONG:
            groups = tl.minimum(groups, num_groups - 1)  # for groups after the last one, where x is zeros
        # A weight is read once, so it should leave the L2 cache first.
        words = tl.load(w_rows + groups * _BLOCK + places, eviction_policy="evict_first")
        tiles = block_tiles(words, tl.load(exponents + groups * num_rows), x_rows.dtype.element_ty, IS_COMPILED)
        for block in tl.static_range(4):
            x = tl.load(x_rows + k + block * _BLOCK, mask=is_row & (k < K - block * _BLOCK), other=0.0)
            acc = tl.dot(tiles[block], tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
    return tl.sum(acc, 2)
