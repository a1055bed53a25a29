"""Random weights on a GPU, in one launch for each tensor. The bits equal those of `worker.weights.uniform` on a CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.plan import Span
from worker.weights.uniform import COLUMN_STEP, MIX, ROW_STEP, USED_BITS

_BLOCK = 1024


@triton.jit
def _mix(h, SHIFT: tl.constexpr, FACTOR: tl.constexpr, LAST_SHIFT: tl.constexpr, LAST_FACTOR: tl.constexpr):
    h = (h ^ (h >> SHIFT)) * FACTOR
    return (h ^ (h >> LAST_SHIFT)) * LAST_FACTOR


@triton.jit(do_not_specialize=["first_row", "first_column", "row_seed", "column_seed"])
def _uniform_kernel(
    out_ptr, size, width, out_stride, first_row, first_column, row_seed, column_seed, scale, mean, STORED: tl.constexpr,
    ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr, SHIFT: tl.constexpr, FACTOR: tl.constexpr,
    LAST_SHIFT: tl.constexpr, LAST_FACTOR: tl.constexpr, UNUSED_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = index // width, index % width
    row_key = (row + first_row).to(tl.uint32) * ROW_STEP + row_seed.to(tl.uint32)
    column_key = (column + first_column).to(tl.uint32) * COLUMN_STEP + column_seed.to(tl.uint32)
    row_key = _mix(row_key, SHIFT, FACTOR, LAST_SHIFT, LAST_FACTOR)
    column_key = _mix(column_key, SHIFT, FACTOR, LAST_SHIFT, LAST_FACTOR)
    h = _mix(row_key ^ column_key, SHIFT, FACTOR, LAST_SHIFT, LAST_FACTOR)
    value = (h.to(tl.int32, bitcast=True) >> UNUSED_BITS).to(tl.float32) * scale + mean
    out_ptrs = out_ptr + row * out_stride + column
    tl.store(out_ptrs, value.to(STORED).to(out_ptr.dtype.element_ty), mask=index < size)


def fill(
    out: torch.Tensor, seeds: tuple[int, int], scale: float, mean: float, rows: Span, columns: Span, dtype: torch.dtype
) -> None:
    """Fills out [rows.size, columns.size] with those rows and columns of a matrix of random values.

    Args:
        out: tensor on a GPU, contiguous within a row.
        seeds: seeds of rows and columns, as signed 32-bit integers.
        scale: factor of the hash's highest USED_BITS, taken as a signed integer.
        mean: added after scaling.
        dtype: dtype to which values are rounded before they are cast to the dtype of `out`.
    """
    ((shift, factor), (last_shift, last_factor)) = MIX
    stored = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    # A fused product and sum would be rounded once, but the CPU's are rounded twice.
    _uniform_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        out, out.numel(), columns.size, out.stride(0), rows.start, columns.start, *seeds, scale, mean, STORED=stored,
        ROW_STEP=ROW_STEP, COLUMN_STEP=COLUMN_STEP, SHIFT=shift, FACTOR=factor, LAST_SHIFT=last_shift,
        LAST_FACTOR=last_factor, UNUSED_BITS=32 - USED_BITS, BLOCK=_BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
