"""Dequantises FP8 weights for products of exact numerics: tile by tile inside kernels, or whole weights.

A kernel receives a weight's `FORMAT`, which is None for a plain weight. It calls `scales_of` once for its rows, and
`plain_tile` for each tile.
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
    """Constants by which a kernel finds the scales of an FP8 weight."""

    first: int
    """Index of the first column within its block."""
    width: int
    """Columns per block."""
    num_blocks: int
    """Number of column blocks."""
    group_scales: int
    """Number of scales of a group of matrices."""
    is_even: bool
    """Whether all columns of a loop iteration are in one block."""
    is_compiled: bool
    """False in the interpreter."""


@triton.jit
def scales_of(scales_ptr, blocks_ptr, rows, FORMAT: tl.constexpr):
    """Pointers to the first scales of `rows` of the first group. Meaningless for a plain weight."""
    if FORMAT is None:
        return rows
    else:
        return scales_ptr + tl.load(blocks_ptr + rows).to(tl.int64) * FORMAT[2]


@triton.jit
def plain_tile(w, scale_rows, group, first_k, k, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """A tile [rows, columns] of a weight in `dtype`, dequantised by Fp8Matrix's contract. A plain tile is returned
    unchanged.

    Args:
        scale_rows: [rows] `scales_of` the tile's rows.
        group: index of its group of matrices.
        first_k: its first column.
        k: [1, columns] its columns.
    """
    if FORMAT is None:
        return w
    else:
        scale_rows += group * FORMAT[3]
        if FORMAT[4]:
            # Loaded as a vector: for a matrix of one column, the compiler might lay out the whole tile like it, in
            # bytes.
            scale = tl.load(scale_rows + (FORMAT[0] + first_k) // FORMAT[1])[:, None]
        else:
            # Columns after the last one are zeros and have its scale.
            scale = tl.load(scale_rows[:, None] + tl.minimum((FORMAT[0] + k) // FORMAT[1], FORMAT[2] - 1))
        if FORMAT[5] and dtype != tl.float32:
            # The compiler would assign bytes to MMAs in a special order, and sums would have other bits than with plain
            # weights. It cannot look through this inline assembly, so it uses the order of 16-bit values. On an H200
            # that takes the same number of instructions.
            w = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=4)
        # The conversion goes through fp32, because the compiler's direct conversion from e4m3 to bf16 is slow.
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
    """The arguments of kernels for a weight: elements, scales, blocks, columns per loop iteration, and the format.

    Args:
        block_k: largest number of columns per iteration. There are fewer if otherwise an iteration, but no MMA, would
            span two blocks.
        leaf: number of columns after which iterations start anew, or 0.
    """
    if isinstance(weight, torch.Tensor):
        return weight, None, None, block_k, None
    group_scales, num_blocks = weight.scales.shape[-2:].numel(), weight.scales.shape[-1]
    common = block_k if num_blocks == 1 else math.gcd(weight.first, weight.width, leaf, block_k)
    is_even = common >= _LEAST_STEP
    form = Format(weight.first, weight.width, num_blocks, group_scales, is_even, not triton.knobs.runtime.interpret)
    return weight.values, weight.scales, weight.blocks, common if is_even else block_k, form


def plain(weight: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
    """[num_rows, num_columns] in `dtype`: the dequantised only group, in new memory."""
    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=weight.device)
    block_n, most_k = _PLAIN_BLOCK
    values, scales, blocks, block_k, form = pieces_of(weight, most_k)
    _plain_kernel[(triton.cdiv(num_rows, block_n), triton.cdiv(num_columns, block_k))](
        out, values, scales, blocks, num_rows, num_columns, FORMAT=form, BLOCK_N=block_n, BLOCK_K=block_k
    )
    return out
