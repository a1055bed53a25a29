"""Products of fast numerics with weights in FP8: activations go to FP8 too, and tensor cores multiply the two.

A row of activations is cut as the blocks of the weight's columns are, into groups of at most 128 columns. A group's
scale is its largest element over 448, in fp32; its elements are divided by that and rounded to e4m3. A product over a
group is multiplied by the group's and the weight block's scales in fp32 and added to those before in fp32.

Few rows are quantised by each program that multiplies with them, which saves a kernel; more by a kernel of their own.
Where a product has too few tiles to keep a GPU busy, several programs share the groups of one: the last to be done adds
their parts, in order. So the bits of a row depend on how many rows there are, and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType

from parallel.numerics.fp8 import FP8, Fp8Matrix
from parallel.numerics.kernels.fp8_tile import Groups, groups_of, in_fp8, scales_of
from parallel.numerics.kernels.node_gemm import block_of


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs. Without `side` the rows are quantised before."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    side: int = 1
    """Groups that a step multiplies side by side, each by warps of its own, which a few rows leave nothing else to
    share."""
    quantises: bool = False
    """Whether programs quantise the rows."""


# Up to so many rows: tiles for weights of up to `_WIDE` rows, and of more. Chosen by reckoning;
# `python -m benchmarks.fp8_gemm --sweep` tries others.
TILES = (
    (1, Tile(1, 16, 4, 5, 4, True), Tile(1, 32, 4, 4, 4, True)),
    (4, Tile(4, 16, 4, 5, 4, True), Tile(4, 32, 4, 4, 4, True)),
    (16, Tile(16, 32, 4, 4, 4), Tile(16, 32, 4, 4, 4)),
    (64, Tile(64, 64, 4, 5), Tile(64, 128, 4, 4)),
    (128, Tile(128, 64, 8, 4), Tile(128, 128, 8, 4)),
    (1 << 62, Tile(128, 128, 8, 4), Tile(128, 128, 8, 4)),
)
_WIDE = 8192
# The groups of a tile are shared until there are so many programs, but by no more than some, each of which has a few.
_ENOUGH_PROGRAMS = 256
_MAX_SPLITS = 8
_LEAST_GROUPS = 8
_QUANTISED_ROWS = 8
_QUANTISED_GROUPS = 4
_SCALED_ROWS = 4
"""Rows of scales are multiples of these, as cuBLAS wants them."""


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def _quantise_kernel(
    q_ptr, q_scales_ptr, arrived_ptr, x_ptr, num_rows, K, num_groups, x_stride, scale_stride,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    places = tl.arange(0, BLOCK_K)[None, None, :]
    k = (groups * GROUPS[1] - GROUPS[0])[None, :, None] + places
    present = (rows < num_rows)[:, None] & (groups < num_groups)[None, :]
    inside = present[:, :, None]
    if not EVEN:
        inside = inside & (places < GROUPS[1]) & (k >= 0) & (k < K)
    q, scale = in_fp8(tl.load(x_ptr + rows[:, None, None] * x_stride + k, mask=inside, other=0.0))
    tl.store(q_ptr + rows[:, None, None] * K + k, q, mask=inside)
    tl.store(q_scales_ptr + groups[None, :] * scale_stride + rows[:, None], scale, mask=present)
    if arrived_ptr is not None:
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        tl.store(arrived_ptr + tl.arange(0, TILES), tl.zeros([TILES], tl.int32), mask=is_first)


@triton.jit(do_not_specialize=["M", "scale_stride"])
def _side_by_side_kernel(
    out_ptr, x_ptr, x_scales_ptr, w_ptr, scales_ptr, blocks_ptr, bias_ptr, M, N, K, num_groups, x_stride, scale_stride,
    GROUPS: tl.constexpr, ONE_BLOCK: tl.constexpr, SIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows. x [M, K] is in FP8 if it has scales."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_columns = tl.minimum(columns, N - 1)
    w_rows = w_ptr + w_columns.to(tl.int64)[None, :, None] * K
    w_scales = scales_of(
        scales_ptr, blocks_ptr, tl.program_id(0) * BLOCK_N if ONE_BLOCK else w_columns[None, :], GROUPS
    )
    rows = tl.arange(0, BLOCK_M)
    is_row = rows < M
    x_rows = x_ptr + rows.to(tl.int64)[None, :, None] * x_stride
    places = tl.arange(0, BLOCK_K)[None, None, :]
    acc = tl.zeros([SIDE, BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, tl.cdiv(num_groups, SIDE), num_stages=STAGES):
        groups = step * SIDE + tl.arange(0, SIDE)
        k = (groups * GROUPS[1] - GROUPS[0])[:, None, None] + places
        # A weight is read once, so it is the first to leave the L2 cache.
        if EVEN:
            w = tl.load(w_rows + k, eviction_policy="evict_first")
            x = tl.load(x_rows + k, mask=is_row[None, :, None], other=0.0)
        else:
            inside = (places < GROUPS[1]) & (k >= 0) & (k < K)
            w = tl.load(w_rows + k, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_rows + k, mask=inside & is_row[None, :, None], other=0.0)
        # Groups past the last one, which are zeros, have its scales.
        last = tl.minimum(groups, num_groups - 1)
        w_scale = tl.load(w_scales + ((last if ONE_BLOCK else last[:, None]) + GROUPS[4]) // GROUPS[5])
        if x_scales_ptr is None:
            x, x_scale = in_fp8(x)
        else:
            x_scale = tl.load(
                x_scales_ptr + last[:, None] * scale_stride + rows[None, :], mask=is_row[None, :], other=0.0
            )
        if ONE_BLOCK:
            scale = (x_scale * w_scale[:, None])[:, :, None]
        else:
            scale = x_scale[:, :, None] * w_scale[:, None, :]
        acc += tl.dot(x, tl.permute(w, (0, 2, 1))) * scale
    y = tl.sum(acc, 0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + w_columns).to(tl.float32)[None, :]
    stored = is_row[:, None] & (columns < N)[None, :]
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["M", "scale_stride"])
def _tile_kernel(
    out_ptr, parts_ptr, arrived_ptr, x_ptr, x_scales_ptr, w_ptr, scales_ptr, blocks_ptr, bias_ptr, M, N, K, num_groups,
    scale_stride, GROUPS: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Any rows, x [M, K] in FP8."""
    tile, split = tl.program_id(0), tl.program_id(1)
    block_m, block_n = block_of(tile, M, N, BLOCK_M, BLOCK_N)
    rows, columns = block_m * BLOCK_M + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, w_columns = rows < M, tl.minimum(columns, N - 1)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * K
    w_rows = w_ptr + w_columns.to(tl.int64)[:, None] * K
    w_scales = scales_of(scales_ptr, blocks_ptr, block_n * BLOCK_N if ONE_BLOCK else w_columns[None, :], GROUPS)
    places = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in tl.range(split * num_groups // SPLITS, (split + 1) * num_groups // SPLITS, num_stages=STAGES):
        k = group * GROUPS[1] - GROUPS[0] + places
        if EVEN:
            x, w = tl.load(x_rows + k, mask=is_row[:, None], other=0.0), tl.load(w_rows + k)
        else:
            inside = (places < GROUPS[1]) & (k >= 0) & (k < K)
            x = tl.load(x_rows + k, mask=inside & is_row[:, None], other=0.0)
            w = tl.load(w_rows + k, mask=inside, other=0.0)
        x_scale = tl.load(x_scales_ptr + group * scale_stride + rows, mask=is_row, other=0.0)
        w_scale = tl.load(w_scales + (group + GROUPS[4]) // GROUPS[5])
        acc += tl.dot(x, w.T) * (x_scale[:, None] * w_scale)
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    stored = is_row[:, None] & (columns < N)[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(parts_ptr + split.to(tl.int64) * M * N + place, acc, mask=stored)
        tl.debug_barrier()  # all threads have stored
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            acc = tl.zeros_like(acc)
            for other in tl.range(SPLITS):
                part = parts_ptr + tl.cast(other, tl.int64) * M * N + place
                acc += tl.load(part, mask=stored, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + w_columns).to(tl.float32)[None, :]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=stored)


def quantised(
    x: torch.Tensor, groups: Groups, arrived: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8 and the scales of its rows' groups.

    Args:
        x: [num_rows, num_columns], elements of a row side by side, rows any distance apart.
        arrived: [_ENOUGH_PROGRAMS] int32, set to 0 by the way.

    Returns:
        [num_rows, num_columns] e4m3, and [num_groups, num_rows] fp32. Both have rows up to a multiple of 4, undefined.
    """
    num_rows, num_columns = x.shape
    num_groups, block_k = groups.count(num_columns), groups.step
    room = triton.cdiv(num_rows, _SCALED_ROWS) * _SCALED_ROWS
    q = torch.empty(room, num_columns, dtype=FP8, device=x.device)
    scales = torch.empty(num_groups, room, device=x.device)
    rows = min(triton.next_power_of_2(num_rows), _QUANTISED_ROWS)
    _quantise_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_groups, _QUANTISED_GROUPS))](
        q,
        scales,
        arrived,
        x,
        num_rows,
        num_columns,
        num_groups,
        x.stride(0),
        room,
        GROUPS=groups,
        ROWS=rows,
        SIDE=_QUANTISED_GROUPS,
        BLOCK_K=block_k,
        EVEN=groups.is_even(num_columns),
        TILES=_ENOUGH_PROGRAMS,
        num_warps=4,
    )
    return q, scales


def fp8_gemm(
    x: torch.Tensor, weight: Fp8Matrix, bias: torch.Tensor | None, *, out: torch.Tensor, tile: Tile | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, as the module says, rounded once. One or two kernels, no host sync.

    Args:
        x: [num_rows, in_features] bf16, fp16 or fp32, elements of a row side by side, rows any distance apart.
        weight: [out_features, in_features].
        bias: [out_features] or None.
        out: [num_rows, out_features], contiguous, any float dtype; written.
        tile: for measurements; chosen by shape by default.

    Returns:
        `out`.
    """
    (num_rows, in_features), out_features = x.shape, len(weight)
    if out.numel() == 0:
        return out
    tile = tile or choose_tile(num_rows, out_features)
    groups = groups_of(weight)
    num_groups, blocks_n = groups.count(in_features), triton.cdiv(out_features, tile.block_n)
    of_weight = weight.values, weight.scales, weight.blocks, bias
    sizes = num_rows, out_features, in_features, num_groups
    constants = {"GROUPS": groups, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": groups.step}
    constants["ONE_BLOCK"] = tile.block_n <= weight.even_rows
    options = {"STAGES": tile.num_stages, "num_stages": tile.num_stages, "num_warps": tile.num_warps}
    is_even = groups.is_even(in_features)
    if tile.side > 1:
        scales = None
        if not tile.quantises:
            x, scales = quantised(x, groups)
        scale_stride = 0 if scales is None else scales.stride(0)
        is_even = is_even and num_groups % tile.side == 0
        _side_by_side_kernel[(blocks_n,)](
            out, x, scales, *of_weight, *sizes, x.stride(0), scale_stride, SIDE=tile.side, EVEN=is_even, **constants,
            **options,
        )  # fmt: skip
        return out
    num_tiles = triton.cdiv(num_rows, tile.block_m) * blocks_n
    splits = max(min(_ENOUGH_PROGRAMS // num_tiles, num_groups // _LEAST_GROUPS, _MAX_SPLITS), 1)
    parts = arrived = None
    if splits > 1:
        parts = torch.empty(splits, num_rows, out_features, device=x.device)
        arrived = torch.empty(_ENOUGH_PROGRAMS, dtype=torch.int32, device=x.device)
    q, scales = quantised(x, groups, arrived)
    _tile_kernel[(num_tiles, splits)](
        out, parts, arrived, q, scales, *of_weight, *sizes, scales.stride(0), EVEN=is_even, SPLITS=splits, **constants,
        **options,
    )  # fmt: skip
    return out


def scaled_mm(x: torch.Tensor, weight: Fp8Matrix) -> torch.Tensor:
    """x @ weight.T [num_rows, out_features] by cuBLAS, which has such products of bf16 on Hopper, with weights of whole
    blocks of 128 x 128 and a multiple of 512 columns."""
    q, scales = quantised(x, groups_of(weight))
    of_rows, of_blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    y = F.scaled_mm(q, weight.values.t(), scales.t(), of_rows, weight.scales.t(), of_blocks, output_dtype=x.dtype)
    return y[: len(x)]


def choose_tile(num_rows: int, out_features: int) -> Tile:
    """The table's tile."""
    narrow, wide = next((narrow, wide) for most, narrow, wide in TILES if num_rows <= most)
    return narrow if out_features <= _WIDE else wide
