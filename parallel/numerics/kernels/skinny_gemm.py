"""Products of a few rows with a large weight, at nearly the speed at which the weight can be read.

A program reads all columns of a few weight rows, several blocks ahead. A row's bits depend on that row, the weight, and
whether the row is alone: a single row is summed in the threads' registers, several rows by tensor cores, both in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start

MAX_ROWS = 16
"""At 32 rows cuBLAS is faster (H200; benchmarks/results/skinny_gemm_h200_*.txt)."""

_MAX_OUT_FEATURES = 8192
"""With several rows, larger weights keep cuBLAS busy enough. A single row is faster here for any weight."""

# block_n, block_k, num_warps, num_stages: the fastest, or within 3 % of it, for nearly every weight of the shapes in
# benchmarks/models over 1, 2 and 4 GPUs. The last bits of the output depend on the first two.
_VECTOR = (8, 512, 4, 4)
_TILE = (16, 256, 2, 4)


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    y_ptr, x_ptr, w_ptr, bias_ptr, M, N, K, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows after the last one repeat it, so the weight's loads need no mask. Their results are not stored.
    w_rows = w_ptr + tl.minimum(columns, N - 1).to(tl.int64) * K
    follow(DEPENDENT)
    rows = tl.arange(0, BLOCK_M)
    present = (rows < M)[:, None]
    ks = tl.arange(0, BLOCK_K)
    if BLOCK_M == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        k = step * BLOCK_K + ks
        # A weight is read once, so it should leave the L2 cache first.
        if EVEN_K:
            w = tl.load(w_rows[:, None] + k[None, :], eviction_policy="evict_first")
        else:
            w = tl.load(w_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
        if BLOCK_M == 1:
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
            acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
        else:
            x_ptrs = x_ptr + rows[:, None].to(tl.int64) * x_stride + k[None, :]
            x = tl.load(x_ptrs, mask=present & (k < K)[None, :], other=0.0)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    let_next_start(DEPENDENT)
    if BLOCK_M == 1:
        acc = tl.sum(acc, 1)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    stored = present & (columns < N)[None, :]
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=stored)


def is_faster(num_rows: int, out_features: int, in_features: int) -> bool:
    """Whether `skinny_gemm` supports a product of this size, and is faster than cuBLAS on an H200."""
    if not 0 < num_rows <= MAX_ROWS or in_features % 8:
        return False
    return num_rows == 1 or out_features <= _MAX_OUT_FEATURES


def skinny_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, out: torch.Tensor) -> torch.Tensor:
    """x @ weight.T + bias, summed in fp32 and rounded once. One kernel, no host sync.

    Args:
        x: [num_rows, in_features] with 1 to `MAX_ROWS` rows; contiguous within a row, with any row stride.
        weight: [out_features, in_features] in x's dtype, contiguous; in_features is a multiple of 8.
        bias: [out_features] or None.
        out: [num_rows, out_features], contiguous, any float dtype, written.

    Returns:
        `out`.
    """
    num_rows, in_features = x.shape
    out_features = len(weight)
    block_n, block_k, num_warps, num_stages = _VECTOR if num_rows == 1 else _TILE
    dependent = has_dependent_launch(x.device)
    _skinny_gemm_kernel[(triton.cdiv(out_features, block_n),)](
        out,
        x,
        weight,
        bias,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        BLOCK_M=1 if num_rows == 1 else 16,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=in_features % block_k == 0,
        STAGES=num_stages,
        DEPENDENT=dependent,
        num_warps=num_warps,
        num_stages=num_stages,
        launch_pdl=dependent,
    )
    return out
