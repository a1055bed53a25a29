"""RMSNorm kernels: alone, and after adding to the residual stream.

One program computes each row. Block size and warps depend only on the row length, and the compiler's layout only on
these, so a row's bits do not depend on the other rows. (Triton also compiles separately for pointers or row strides
that are not multiples of 16. Whole tensors and slices at such multiples, the only ones in this engine, share one.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside
from parallel.kernels.tree_sum import block_of_row
from parallel.numerics.fp8 import Fp8Rows
from parallel.numerics.kernels.fp8_groups import MOST_TILES, Groups, empty_rows, store_in_fp8


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, weight_ptr, x_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    # Loaded before the sum, because the row's threads wait for each other there, and this load need not wait with them.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    let_next_start(DEPENDENT)
    tl.store(out_ptr + row * SIZE + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(
    out_ptr, scales_ptr, finished_ptr, x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, scale_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """If WIDTH > 0, the rounded norm is then quantised to FP8 in groups of WIDTH columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    residual_ptrs = residual_ptr + row * residual_stride + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=inside, other=0.0).to(tl.float32)
    rounded = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    let_next_start(DEPENDENT)
    normed = (total * scale * weight).to(residual_ptr.dtype.element_ty)
    if WIDTH > 0:
        store_in_fp8(normed, out_ptr, scales_ptr, finished_ptr, scale_stride, row, 0, SIZE, WIDTH, TILES)
    else:
        tl.store(out_ptr + row * SIZE + columns, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight of each row, computed in fp32 and rounded once to x's dtype.

    Args:
        x: [num_rows, size], contiguous within a row, with any row stride.
        weight: [size], of x's dtype or fp32.

    Returns:
        [num_rows, size], contiguous, of x's dtype.
    """
    num_rows, size = x.shape
    assert x.stride(1) == 1, f"the elements of a row must be contiguous, not {x.stride(1)} apart"
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block, num_warps = block_of_row(size)
    dependent = is_dependent(x.device, num_rows)
    _rms_norm_kernel[(num_rows,)](
        out, x, weight, x.stride(0), eps, SIZE=size, BLOCK=block, DEPENDENT=dependent, num_warps=num_warps,
        launch_pdl=dependent,
    )  # fmt: skip
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `residual` in place and returns `rms_norm` of the sum.

    The sum is rounded to the residual's dtype before the norm, as if a separate kernel had added. So the norm reads the
    same values to which the next layer adds, and which transformers norms.

    Args:
        x: [num_rows, size], with any row stride. May have a wider dtype than the residual.
        residual: [num_rows, size], with any row stride. Must not overlap x.
        weight: [size], of the residual's dtype or fp32.

    Returns:
        [num_rows, size], contiguous, of the residual's dtype.
    """
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    _add_rms_norm(out, None, x, residual, weight, eps, 0)
    return out


def add_rms_norm_in_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, groups: Groups
) -> Fp8Rows:
    """Like `add_rms_norm`, with the norm quantised to FP8 in whole `groups`."""
    num_rows, size = residual.shape
    q = empty_rows(num_rows, size, groups, residual)
    _add_rms_norm(q.values, q, x, residual, weight, eps, groups.width)
    return q


def _add_rms_norm(
    out: torch.Tensor, q: Fp8Rows | None, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
    width: int,
) -> None:  # fmt: skip
    num_rows, size = residual.shape
    assert x.shape == residual.shape, f"cannot add {tuple(x.shape)} to {tuple(residual.shape)}"
    assert x.stride(1) == 1, f"the elements of a row must be contiguous, not {x.stride(1)} apart"
    assert residual.stride(1) == 1, f"the elements of a row must be contiguous, not {residual.stride(1)} apart"
    scales, finished, stride = (None, None, 0) if q is None else (q.scales, q.finished, q.scales.stride(0))
    block, num_warps = block_of_row(size)
    dependent = is_dependent(x.device, num_rows)
    _add_rms_norm_kernel[(num_rows,)](
        out, scales, finished, x, residual, weight, x.stride(0), residual.stride(0), stride, eps, SIZE=size,
        BLOCK=block, WIDTH=width, TILES=MOST_TILES, DEPENDENT=dependent, num_warps=num_warps, launch_pdl=dependent,
    )  # fmt: skip
