"""Products of exact numerics whose columns no rank cuts: every element is one ascending chain of MMAs in fp32.

What a row's answer is, to the last bit, follows from the row and the weight: not from other rows, tiles, or how many
rows of the weight a rank has. A row alone goes through MMAs as well. cuBLASLt that does not split K computes the same
chain: of 10 weights of 8B models with 1 to 8192 rows on an H200 every element was equal, but for one row of 1536x4096.
"""

from __future__ import annotations

import torch

from parallel.numerics.kernels.fp8_tile import AnyWeight
from parallel.numerics.kernels.node_gemm import FEW_ROWS, Tile, tree_gemm
from parallel.plan import Span

# Best of 12 tiles on an H200 for 1 and 16 rows: the first is the fastest of 3072 and 6144 outputs with 4096 inputs (11
# and 15 us), the second within 1 % of it for 12288, 24576 and 151936 (27, 51 and 280 us; the first took 39, 61 and
# 320).
_FEW = Tile(16, 16, 128, 2, 6)
_FEW_WIDE = Tile(16, 32, 128, 2, 6)
_SOME = Tile(64, 32, 64, 4, 6)
_MANY = Tile(128, 128, 64, 8, 4)
_SOME_ROWS = 256
_WIDE = 8192
_NARROW = 2048


def use_chain_cublas() -> None:
    """Makes every bf16 and fp16 product of this process that torch leaves to cuBLAS one ascending chain.

    cuBLAS may cut a product's columns among programs where it has few rows, and add the parts in an order that depends
    on how many there are: 0.2 to 0.9 % of an 8B model's elements then differ. cuBLASLt is told not to, by torch's
    switches for reductions: no reduced precision, no split of K. They are of the whole process and cost a few
    microseconds where few rows meet a narrow weight, which `cublas_is_faster` leaves to `chain_gemm`.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def cublas_is_chain(x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether torch leaves this product to cuBLAS in one piece: not in fp32, where there is no such switch, and with a
    bias only where nothing but it is added to what is rounded."""
    return x.dtype is not torch.float32 and (bias is None or out_dtype is x.dtype)


def cublas_is_faster(num_rows: int, out_features: int) -> bool:
    """Whether, after `use_chain_cublas`, torch's product of this size has the chain's bits and takes less time.

    Never a row alone, for which cuBLAS has kernels that add in another order, nor few: on an H200 16 rows took 51.6 us
    against 50.8 with 24576x4096, and 303 against 288 with 151936. A narrow weight and some rows neither: 1536x4096 took
    100 us with 64 rows where a split of K takes 13.
    """
    return num_rows > FEW_ROWS and (out_features > _NARROW or num_rows > _SOME_ROWS)


def chain_gemm(
    x: torch.Tensor, weight: AnyWeight, bias: torch.Tensor | None, *, out: torch.Tensor, tile: Tile | None = None
) -> torch.Tensor:
    """x @ weight.T as ascending chains in fp32, to which `bias` is added in fp32, rounded once. One kernel.

    Args:
        x: [num_rows, in_features] bf16 or fp16, elements of a row side by side, rows any distance apart.
        weight: [out_features, in_features] of x's dtype, contiguous; or in FP8.
        bias: [out_features] or None.
        out: [num_rows, out_features], contiguous, any float dtype; written.
        tile: for measurements; chosen by the number of rows by default.

    Returns:
        `out`.
    """
    num_rows, in_features = x.shape
    if tile is None:
        few = _FEW if len(weight) <= _WIDE else _FEW_WIDE
        tile = few if num_rows <= FEW_ROWS else _SOME if num_rows <= _SOME_ROWS else _MANY
    tree_gemm(x, weight, bias, leaf=in_features, parts=(Span(0, 1),), out=out, tile=tile)
    return out
