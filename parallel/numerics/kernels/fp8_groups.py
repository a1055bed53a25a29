"""Parts of products with FP8 weights in fast numerics, for dense weights and experts.

A row of activations is cut at the weight's column blocks, into groups of at most 128 columns. A group's scale is its
largest element divided by 448, in fp32. Its elements are divided by the scale and rounded to e4m3. Tensor cores
multiply the e4m3 values. The product over a group is multiplied by the scales of the group and of the weight's block in
fp32, and added to the sum in fp32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside
from parallel.numerics.fp8 import FP8, LARGEST, Fp8Matrix, Fp8Rows

GROUP_COLUMNS = 128
"""Largest number of columns per group."""
MOST_TILES = 256
"""Number of tiles for which Fp8Rows has a counter of finished programs."""
_LEAST_STEP = 32
"""Columns of an FP8 MMA."""
_LARGEST = tl.constexpr(LARGEST)
_ROWS = 8
_GROUPS = 4
"""Number of groups, of several rows, that a program quantises."""
_SCALED_ROWS = 4
"""The number of rows of scales is a multiple of this, as cuBLAS requires."""


class Groups(NamedTuple):
    """Constants by which a kernel finds the groups of activations and the weight's scales for them."""

    first: int
    """Index of the first column within its group."""
    width: int
    """Columns per group."""
    skipped: int
    """Number of groups of the first column block that lie before the first column."""
    per_block: int
    """Groups per column block."""

    def count(self, num_columns: int) -> int:
        """Number of groups over all columns."""
        return triton.cdiv(self.first + num_columns, self.width)

    @property
    def step(self) -> int:
        """Columns of a tile that holds one group."""
        return max(triton.next_power_of_2(self.width), _LEAST_STEP)

    def is_even(self, num_columns: int) -> bool:
        """Whether every group fills its tile, and the columns fill their groups."""
        return self.first == 0 and self.width == self.step and num_columns % self.width == 0


@functools.lru_cache(maxsize=256)
def _groups(first: int, width: int) -> Groups:
    columns = next(it for it in range(min(width, GROUP_COLUMNS), 0, -1) if width % it == 0)
    return Groups(first % columns, columns, first // columns, width // columns)


def groups_of(weight: Fp8Matrix) -> Groups:
    """The groups of columns in which a row of activations is quantised: as wide as possible, each within one column
    block of the weight's scales."""
    return _groups(weight.first, weight.width) if weight.scales.shape[-1] > 1 else Groups(0, GROUP_COLUMNS, 0, 1 << 30)


@triton.jit
def in_fp8(x):
    """Quantises x [..., columns]: e4m3 values, and their scales [...]."""
    x = x.to(tl.float32)
    # A group of zeros gets a scale with a finite inverse.
    scale = tl.maximum(tl.max(tl.abs(x), len(x.shape) - 1), 1e-10) * (1 / _LARGEST)
    return (x * tl.expand_dims(1.0 / scale, len(x.shape) - 1)).to(tl.float8e4nv), scale


@triton.jit
def nothing_finished(finished_ptr, is_first, TILES: tl.constexpr):
    """Writes the zeros of Fp8Rows, in one program."""
    tl.store(finished_ptr + tl.arange(0, TILES), tl.zeros([TILES], tl.int32), mask=is_first)


@triton.jit
def store_in_fp8(
    x, q_ptr, scales_ptr, finished_ptr, scale_stride, row, first_column, size, WIDTH: tl.constexpr, TILES: tl.constexpr
):
    """Quantises x [columns], part of a row of `size` columns, into Fp8Rows from `first_column`, in groups of WIDTH."""
    groups = tl.arange(0, x.shape[0] // WIDTH)
    q, scale = in_fp8(tl.reshape(x, [x.shape[0] // WIDTH, WIDTH]))
    columns = first_column + groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(q_ptr + row * size + columns, q, mask=columns < size)
    groups += first_column // WIDTH
    tl.store(scales_ptr + groups.to(tl.int64) * scale_stride + row, scale, mask=groups < size // WIDTH)
    nothing_finished(finished_ptr, (row == 0) & (first_column == 0), TILES)


@triton.jit
def first_scales(scales_ptr, blocks_ptr, rows, num_blocks):
    """Pointers to the scales of the first column blocks of the given weight rows."""
    return scales_ptr + tl.load(blocks_ptr + rows).to(tl.int64) * num_blocks


@triton.jit
def _scales_at(scales, others, is_other, groups, GROUPS: tl.constexpr):
    place = (groups + GROUPS[2]) // GROUPS[3]
    scale = tl.load(scales + place)
    if others is not None:
        scale = tl.where(is_other, tl.load(others + place), scale)
    return scale


@triton.jit
def sum_groups(
    acc, x_rows, x_scales, is_row, w_rows, w_scales, other_scales, is_other, first, stop, K, scale_stride,
    GROUPS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the products of x and w over the groups from `first` to `stop` to acc [rows, columns].

    Args:
        x_rows: [rows, 1] pointers to rows of x, in FP8.
        x_scales: [rows] pointers to the scales of the first group.
        is_row: [rows] whether a row is needed. Other rows are not read.
        w_rows: [columns, 1] pointers to rows of the weight.
        w_scales: `first_scales` of the columns [1, columns], or one for all of them.
        other_scales: used instead for columns in `is_other` [1, columns], or None.
        K: columns of x and w.
        scale_stride: distance between the scales of a row's groups.
    """
    places = tl.arange(0, BLOCK_K)[None, :]
    for group in tl.range(first, stop, num_stages=STAGES):
        k = group * GROUPS[1] - GROUPS[0] + places
        if EVEN:
            x, w = tl.load(x_rows + k, mask=is_row[:, None], other=0.0), tl.load(w_rows + k)
        else:
            inside = (places < GROUPS[1]) & (k >= 0) & (k < K)
            x = tl.load(x_rows + k, mask=inside & is_row[:, None], other=0.0)
            w = tl.load(w_rows + k, mask=inside, other=0.0)
        x_scale = tl.load(x_scales + group * scale_stride, mask=is_row, other=0.0)
        scale = x_scale[:, None] * _scales_at(w_scales, other_scales, is_other, group, GROUPS)
        acc += tl.dot(x, w.T) * scale
    return acc


@triton.jit
def sum_side_by_side(
    x_rows, x_scales, is_row, w_rows, w_scales, other_scales, is_other, is_side, num_groups, K, scale_stride,
    GROUPS: tl.constexpr, SIDE: tl.constexpr, ALONG: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Computes SIDE products of a few rows [SIDE, rows, columns] in parallel, each in its own warps.

    Args as for `sum_groups`, with a leading dimension of SIDE or 1. Without scales, x is quantised here. ALONG: each
    product is over every SIDEth group; otherwise over all groups. is_side: [SIDE, 1, 1] which products exist. EVEN: all
    groups are full and, with ALONG, their number is a multiple of SIDE.
    """
    sides, places = tl.arange(0, SIDE)[:, None], tl.arange(0, BLOCK_K)[None, None, :]
    acc = tl.zeros([SIDE, x_rows.shape[1], w_rows.shape[1]], tl.float32)
    for step in tl.range(0, tl.cdiv(num_groups, SIDE) if ALONG else num_groups, num_stages=STAGES):
        groups = step * SIDE + sides if ALONG else step + sides * 0
        k = (groups * GROUPS[1] - GROUPS[0])[:, :, None] + places
        inside = is_side
        if not EVEN:
            # Groups after the last one are zeros, with the last one's scales.
            inside = inside & (places < GROUPS[1]) & (k >= 0) & (k < K)
            groups = tl.minimum(groups, num_groups - 1)
        # A weight is read once, so it should leave the L2 cache first.
        w = tl.load(w_rows + k, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_rows + k, mask=inside & is_row[:, :, None], other=0.0)
        if x_scales is None:
            x, x_scale = in_fp8(x)
        else:
            x_scale = tl.load(x_scales + groups * scale_stride, mask=is_row, other=0.0)
        w_scale = _scales_at(w_scales, other_scales, is_other, groups, GROUPS)
        acc += tl.dot(x, tl.permute(w, (0, 2, 1))) * (x_scale[:, :, None] * w_scale[:, None, :])
    return acc


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _quantise_kernel(
    q_ptr, q_scales_ptr, finished_ptr, x_ptr, num_rows, K, num_groups, x_stride, scale_stride, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    places = tl.arange(0, BLOCK_K)[None, None, :]
    k = (groups * GROUPS[1] - GROUPS[0])[None, :, None] + places
    present = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    inside = present[:, :, None]
    if not EVEN:
        inside = inside & (places < GROUPS[1]) & (k >= 0) & (k < K)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    q, scale = in_fp8(tl.load(x_ptr + rows[:, None, None] * x_stride + k, mask=inside, other=0.0))
    let_next_start(DEPENDENT)
    tl.store(q_ptr + rows[:, None, None] * K + k, q, mask=inside)
    tl.store(q_scales_ptr + groups[None, :] * scale_stride + rows[:, None], scale, mask=present)
    nothing_finished(finished_ptr, (tl.program_id(0) == 0) & (tl.program_id(1) == 0), TILES)


def empty_rows(num_rows: int, num_columns: int, groups: Groups, like: torch.Tensor) -> Fp8Rows:
    """Allocates FP8 rows that a kernel will fill, on the device of `like` and with its dtype as the original one."""
    room, device = triton.cdiv(num_rows, _SCALED_ROWS) * _SCALED_ROWS, like.device
    return Fp8Rows(
        torch.empty(room, num_columns, dtype=FP8, device=device),
        torch.empty(groups.count(num_columns), room, device=device),
        torch.empty(MOST_TILES, dtype=torch.int32, device=device),
        num_rows,
        like.dtype,
    )


def quantised(x: torch.Tensor, groups: Groups) -> Fp8Rows:
    """Quantises x [num_rows, num_columns]; the elements of a row are contiguous, the row stride is free."""
    num_rows, num_columns = x.shape
    q = empty_rows(num_rows, num_columns, groups, x)
    num_groups, room = q.scales.shape
    rows = min(triton.next_power_of_2(num_rows), _ROWS)
    dependent = is_dependent(x.device, num_rows)
    _quantise_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_groups, _GROUPS))](
        q.values, q.scales, q.finished, x, num_rows, num_columns, num_groups, x.stride(0), room, GROUPS=groups,
        ROWS=rows, SIDE=_GROUPS, BLOCK_K=groups.step, EVEN=groups.is_even(num_columns), TILES=MOST_TILES,
        DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return q
