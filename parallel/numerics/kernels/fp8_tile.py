"""Tiles of weights in FP8 as products of exact numerics take them, in kernels that take plain weights as well; and
whole such weights.

A kernel gets a weight's `FORMAT`, which is None for a plain one: `scales_of` its rows once, and then each tile's
`plain_tile`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel.numerics.fp8 import Fp8Matrix

AnyWeight = torch.Tensor | Fp8Matrix

_LEAST_STEP = 16
"""Columns of an MMA."""
_PLAIN_BLOCK = (32, 128)


class Format(NamedTuple):
    """The constants by which a kernel finds the scales of a weight in FP8."""

    first: int
    """The place of the first column in its block."""
    width: int
    """Columns of a block."""
    num_blocks: int
    """Blocks of columns."""
    group_scales: int
    """Scales of a group of matrices."""
    is_even: bool
    """Whether all columns of a step are in one block."""
    is_compiled: bool
    """Otherwise it is interpreted."""


@triton.jit
def scales_of(scales_ptr, blocks_ptr, rows, FORMAT: tl.constexpr):
    """Pointers to the first scales of `rows` of the first group; what a plain weight has there is of no use."""
    if FORMAT is None:
        return rows
    else:
        return scales_ptr + tl.load(blocks_ptr + rows).to(tl.int64) * FORMAT[2]


@triton.jit
def plain_tile(w, scale_rows, group, first_k, k, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """A tile [rows, columns] of a weight in `dtype`, as Fp8Matrix's contract has it; a plain one as it is.

    Args:
        scale_rows: [rows] `scales_of` its rows.
        group: the one that it is of.
        first_k: its first column.
        k: [1, columns] all of its columns.
    """
    if FORMAT is None:
        return w
    else:
        scale_rows += group * FORMAT[3]
        if FORMAT[4]:
            # Loaded as a vector: as a matrix of one column the compiler may lay the whole tile out by it, in bytes.
            scale = tl.load(scale_rows + (FORMAT[0] + first_k) // FORMAT[1])[:, None]
        else:
            # Columns past the last one, which are zeros, have its scale.
            scale = tl.load(scale_rows[:, None] + tl.minimum((FORMAT[0] + k) // FORMAT[1], FORMAT[2] - 1))
        if FORMAT[5] and dtype != tl.float32:
            # The compiler would deal bytes to MMAs in an order of their own, and sums would have other bits than those
            # of plain weights. It does not look behind what it must not move, and takes the order of 16-bit values; on
            # an H200 that is as many instructions.
            w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=4)
        # The way is by fp32, for from e4m3 to bf16 in one step the compiler has slow instructions.
        return (w.to(tl.float32) * scale).to(dtype)


@triton.jit
def _plain_kernel(
    out_ptr, w_ptr, scales_ptr, blocks_ptr, N, K, FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    place = rows[:, None].to(tl.int64) * K + k
    inside = (rows < N)[:, None] & (k < K)
    scale_rows = scales_of(scales_ptr, blocks_ptr, tl.minimum(rows, N - 1), FORMAT)
    w = tl.load(w_ptr + place, mask=inside, other=0.0)
    w = plain_tile(w, scale_rows, 0, tl.program_id(1) * BLOCK_K, k, out_ptr.dtype.element_ty, FORMAT)
    tl.store(out_ptr + place, w, mask=inside)


def pieces_of(
    weight: AnyWeight, block_k: int, leaf: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, Format | None]:
    """Elements, scales and blocks of a weight as kernels take them, the columns of a step, and the format.

    Args:
        block_k: the most columns of a step. There are fewer where some would be of two blocks, and no MMA's would.
        leaf: columns after which steps begin anew; 0: they do not.
    """
    if isinstance(weight, torch.Tensor):
        return weight, None, None, block_k, None
    group_scales, num_blocks = weight.scales.shape[-2:].numel(), weight.scales.shape[-1]
    common = block_k if num_blocks == 1 else math.gcd(weight.first, weight.width, leaf, block_k)
    is_even = common >= _LEAST_STEP
    form = Format(weight.first, weight.width, num_blocks, group_scales, is_even, not triton.knobs.runtime.interpret)
    return weight.values, weight.scales, weight.blocks, common if is_even else block_k, form


def plain(weight: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, num_columns] of `dtype`: what the only group stands for, in memory of its own."""
    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.device)
    block_n, most_k = _PLAIN_BLOCK
    values, scales, blocks, block_k, form = pieces_of(weight, most_k)
    _plain_kernel[(triton.cdiv(num_rows, block_n), triton.cdiv(num_columns, block_k))](
        out, values, scales, blocks, num_rows, num_columns, FORMAT=form, BLOCK_N=block_n, BLOCK_K=block_k
    )
    return out
