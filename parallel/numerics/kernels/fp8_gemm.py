"""Products with FP8 weights in fast numerics. fp8_groups.py defines them.

A single row that is not FP8 yet is quantised by each program that multiplies with it, which saves a kernel. More rows
are quantised by a separate kernel. If a product has too few tiles to keep a GPU busy, several programs share the groups
of a tile, and the last one to finish adds their parts in order. So a row's bits depend on the number of rows, but on
nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start
from parallel.numerics.fp8 import Fp8Matrix, Fp8Rows
from parallel.numerics.kernels.fp8_groups import (
    Groups,
    first_scales,
    groups_of,
    quantised,
    sum_groups,
    sum_side_by_side,
)
from parallel.numerics.kernels.node_gemm import block_of


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is divided among programs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    side: int = 1
    """Number of groups that a loop iteration multiplies in parallel. It may be above 1 only for up to `block_m`
    rows."""
    quantises: bool = False
    """Whether programs quantise the rows themselves. Only if `side` is above 1."""
    programs: int = 256
    """Programs share the groups of tiles until there are this many programs, up to twice `MOST_TILES`: at most
    `_MAX_SPLITS` per tile, with `_LEAST_GROUPS` groups or more each."""


# Tiles by the largest number of rows: for weights with up to `_WIDE` rows, and for larger ones. Each is the fastest of
# up to 144 on an H200 for the products of Qwen3-8B, or within 5 % of it (`--sweep`,
# benchmarks/results/fp8_tiles_h200_2026-11-26.txt).
TILES = (
    (1, Tile(1, 16, 4, 3, 8, True), Tile(1, 16, 4, 3, 4, True)),
    (4, Tile(4, 16, 4, 3, 8), Tile(4, 16, 4, 3, 4)),
    (16, Tile(16, 16, 4, 4, 4), Tile(64, 64, 4, 4)),
    (64, Tile(64, 64, 4, 6, programs=128), Tile(64, 64, 4, 4)),
    (256, Tile(64, 64, 4, 5), Tile(128, 64, 4, 4)),
    (1 << 62, Tile(128, 64, 4, 3), Tile(128, 64, 4, 3)),
)
_WIDE = 8192
_CUBLAS_ROWS, _CUBLAS_WIDE_ROWS = 129, 65
_MAX_SPLITS = 8
_LEAST_GROUPS = 8


@triton.jit(do_not_specialize=["M", "scale_stride", "num_splits"])
def _fp8_gemm_kernel(
    out_ptr, parts_ptr, finished_ptr, x_ptr, x_scales_ptr, w_ptr, scales_ptr, blocks_ptr, bias_ptr, M, N, K, num_groups,
    num_blocks, x_stride, scale_stride, num_splits, GROUPS: tl.constexpr, ONE_BLOCK: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x is in FP8 if it has scales. With several `num_splits`, each program sums a part of the groups."""
    tile, split = tl.program_id(0), tl.program_id(1)
    block_m, block_n = block_of(tile, M, N, BLOCK_M, BLOCK_N)
    rows, columns = block_m * BLOCK_M + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, w_columns = rows < M, tl.minimum(columns, N - 1)
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    w_rows = w_ptr + w_columns.to(tl.int64)[:, None] * K
    of_scales = block_n * BLOCK_N if ONE_BLOCK else w_columns[None, :]
    w_scales = first_scales(scales_ptr, blocks_ptr, of_scales, num_blocks)
    follow(DEPENDENT)
    if SIDE > 1:
        acc = sum_side_by_side(
            x_rows[None, :, :], None if x_scales_ptr is None else (x_scales_ptr + rows)[None, :], is_row[None, :],
            w_rows[None, :, :], w_scales, None, None, tl.full([SIDE, 1, 1], True, tl.int1), num_groups, K,
            scale_stride, GROUPS, SIDE, True, BLOCK_K, EVEN, STAGES,
        )  # fmt: skip
        acc = tl.sum(acc, 0)
    else:
        acc = sum_groups(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32), x_rows, x_scales_ptr + rows, is_row, w_rows, w_scales, None,
            None, split * num_groups // num_splits, (split + 1) * num_groups // num_splits, K, scale_stride, GROUPS,
            BLOCK_K, EVEN, STAGES,
        )  # fmt: skip
    let_next_start(DEPENDENT)
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    stored = is_row[:, None] & (columns < N)[None, :]
    is_last = True
    if parts_ptr is not None:
        tl.store(parts_ptr + split.to(tl.int64) * M * N + place, acc, mask=stored)
        tl.debug_barrier()  # all threads have stored before one of them signals it
        is_last = tl.atomic_add(finished_ptr + tile, 1, sem="acq_rel") == num_splits - 1
        if is_last:
            acc = tl.zeros_like(acc)
            for other in tl.range(num_splits):
                part = parts_ptr + tl.cast(other, tl.int64) * M * N + place
                acc += tl.load(part, mask=stored, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + w_columns).to(tl.float32)[None, :]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=stored)


def cublas_is_faster(num_rows: int, out_features: int) -> bool:
    """Whether torch's `scaled_mm` is faster than `fp8_gemm`. It does not split sums over inputs, so a weight with few
    outputs needs more rows before there are enough tiles."""
    return num_rows >= (_CUBLAS_WIDE_ROWS if out_features > _WIDE else _CUBLAS_ROWS)


def row_groups(weight: Fp8Matrix) -> Groups | None:
    """The groups in which the producer of rows may quantise them for a weight. None if only the product can."""
    groups = groups_of(weight)
    return groups if groups.is_even(weight.shape[1]) else None


def fp8_gemm(
    x: torch.Tensor | Fp8Rows,
    weight: Fp8Matrix,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, rounded once. One or two kernels, no host sync.

    Args:
        x: [num_rows, in_features] bf16, fp16 or fp32; the elements of a row are contiguous, the row stride is free. Or
            rows that are already quantised in the weight's groups.
        weight: [out_features, in_features].
        bias: [out_features] or None.
        out: [num_rows, out_features], contiguous, any float dtype, written.
        tile: for measurements. If None, it follows from the shape.

    Returns:
        `out`.
    """
    num_rows, out_features, in_features = len(x), *weight.shape
    if out.numel() == 0:
        return out
    if tile is None:
        narrow, wide = next((narrow, wide) for most, narrow, wide in TILES if num_rows <= most)
        tile = narrow if out_features <= _WIDE else wide
    groups, splits, parts = groups_of(weight), 1, None
    q = x if isinstance(x, Fp8Rows) or tile.quantises else quantised(x, groups)
    rows, scales, finished = (q.values, q.scales, q.finished) if isinstance(q, Fp8Rows) else (q, None, None)
    num_groups = groups.count(in_features)
    num_tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, tile.block_n)
    if finished is not None and tile.side == 1:
        splits = max(min(tile.programs // num_tiles, num_groups // _LEAST_GROUPS, _MAX_SPLITS), 1)
    if splits > 1:
        parts = torch.empty(splits, num_rows, out_features, device=out.device)
    dependent = is_dependent(out.device, num_rows)
    scale_stride, is_even = 0 if scales is None else scales.stride(0), groups.is_even(in_features)
    _fp8_gemm_kernel[(num_tiles, splits)](
        out, parts, finished, rows, scales, weight.values, weight.scales, weight.blocks, bias, num_rows, out_features,
        in_features, num_groups, weight.scales.shape[-1], rows.stride(0), scale_stride, splits, GROUPS=groups,
        ONE_BLOCK=tile.block_n <= weight.even_rows, SIDE=tile.side, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=groups.step, EVEN=is_even and num_groups % tile.side == 0, STAGES=tile.num_stages,
        DEPENDENT=dependent, num_warps=tile.num_warps, num_stages=tile.num_stages, launch_pdl=dependent,
    )  # fmt: skip
    return out


def scaled_mm(x: torch.Tensor | Fp8Rows, weight: Fp8Matrix) -> torch.Tensor:
    """x @ weight.T [num_rows, out_features] by cuBLAS. It has such bf16 products on Hopper, for weights of whole 128 x
    128 blocks and a multiple of 512 columns."""
    q = quantised(x, groups_of(weight)) if isinstance(x, torch.Tensor) else x
    of_rows, of_blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    y = F.scaled_mm(
        q.values, weight.values.t(), q.scales.t(), of_rows, weight.scales.t(), of_blocks, output_dtype=q.dtype
    )
    return y[: len(q)]
