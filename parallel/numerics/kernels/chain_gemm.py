"""Exact products whose columns no rank cuts: every element is one ascending chain of MMAs in fp32.

A row's bits depend on the row and the weight, not on other rows, tiles, or the number of the weight's rows on the rank.
A single row uses MMAs too. cuBLASLt without split-K computes the same chain: for 10 weights of 8B models with 1 to 8192
rows on an H200, all elements were equal, except for one row of 1536x4096.
"""

from __future__ import annotations

import torch

from parallel.numerics.kernels.fp8_tile import AnyWeight
from parallel.numerics.kernels.node_gemm import FEW_ROWS, Tile, tree_gemm
from parallel.plan import Span

# The best of 12 tiles on an H200 for 1 and 16 rows. The first is fastest for 3072 and 6144 outputs with 4096 inputs (11
# and 15 us). The second is within 1 % of the best for 12288, 24576 and 151936 (27, 51 and 280 us; the first took 39, 61
# and 320).
_FEW = Tile(16, 16, 128, 2, 6)
_FEW_WIDE = Tile(16, 32, 128, 2, 6)
_SOME = Tile(64, 32, 64, 4, 6)
_MANY = Tile(128, 128, 64, 8, 4)
_SOME_ROWS = 256
_WIDE = 8192
_NARROW = 2048


def use_chain_cublas() -> None:
    """Makes every bf16 and fp16 product that torch passes to cuBLAS one ascending chain, in the whole process.

    With few rows, cuBLAS may split a product's columns among programs and add the parts in an order that depends on
    their number; 0.2 to 0.9 % of an 8B model's elements then differ. torch's switches for reductions forbid this: no
    reduced precision, no split-K. They cost a few microseconds for few rows and a narrow weight, which
    `cublas_is_faster` leaves to `chain_gemm`.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def cublas_is_chain(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether torch passes this product to cuBLAS without a split: not for fp32, which has no such switch. With a bias,
    only if the bias is the only thing added before rounding."""
    return x.dtype is not torch.float32 and (bias is None or out_dtype is x.dtype)


def cublas_is_faster(num_rows: int, out_features: int) -> bool:
    """Whether torch's product of this size is faster, with the same bits (after `use_chain_cublas`).

    Not for a single row, for which cuBLAS has kernels with another order. Not for few rows: on an H200, 16 rows took
    51.6 us against 50.8 with 24576x4096, and 303 against 288 with 151936. Not for a narrow weight with some rows:
    1536x4096 took 100 us with 64 rows, where split-K takes 13.
    """
    return num_rows > FEW_ROWS and (out_features > _NARROW or num_rows > _SOME_ROWS)


def chain_gemm(
    x: torch.Tensor, weight: AnyWeight, bias: torch.Tensor | None, *, out: torch.Tensor, tile: Tile | None = None
) -> torch.Tensor:
    """x @ weight.T as ascending chains in fp32, plus `bias` in fp32, rounded once. One kernel.

    Args:
        x: [num_rows, in_features] bf16 or fp16; the elements of a row are contiguous, the row stride is free.
        weight: [out_features, in_features] in x's dtype, contiguous; or in FP8.
        bias: [out_features] or None.
        out: [num_rows, out_features], contiguous, any float dtype, written.
        tile: for measurements. If None, it follows from the number of rows.

    Returns:
        `out`.
    """
    num_rows, in_features = x.shape
    if tile is None:
        few = _FEW if len(weight) <= _WIDE else _FEW_WIDE
        tile = few if num_rows <= FEW_ROWS else _SOME if num_rows <= _SOME_ROWS else _MANY
    tree_gemm(x, weight, bias, leaf=in_features, parts=(Span(0, 1),), out=out, tile=tile)
    return out
