"""Products of a few rows with a large weight, at the speed at which the weight comes from memory.

A program reads a run of a few weight rows' columns. Where a weight has too few rows to fill the device, its columns are
cut into splits: each program leaves its sums in fp32, and the one that comes last to its rows adds them up, in the
order of the splits. What a row's answer is, to the last bit, follows from that row, the weight and `GemmTuning`: never
from the other rows, nor from their number, nor from which program came last.

Weights never change, so a program may ask for its first ones before the kernel ahead of it is done (`early`). All else,
reads and writes, comes after `gdc_wait`: x is the earlier kernel's to write, and the memory of y may be what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 32

# A thread's share of what is to come into the L2 cache: $2 bytes, none for most threads; both multiples of 16.
_PREFETCH: tl.constexpr = tl.constexpr("""
{
    .reg .pred some;
    setp.gt.s32 some, $2, 0;
    @some cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.b32 $0, 0;
}
""")


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTuning:
    """How the work is laid out. The last bits of the answer depend on it."""

    block_n: int
    """Weight rows of a program: a power of two, at least 16 with `tensor_cores`."""
    block_k: int
    """Weight columns of a step: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Steps on their way from memory at a time, and one; 1: into registers."""
    num_splits: int = 1
    prefetch: int = 0
    """Columns that a program asks for at its start, for the L2 cache; 0: none. At most a row for each thread then."""
    tensor_cores: bool = True
    """False: sums in the threads' registers, for one row."""

    def num_counters(self, num_columns: int) -> int:
        """How many counters `skinny_gemm` needs for so many columns of its output; 0 without splits."""
        return triton.cdiv(num_columns, self.block_n) if self.num_splits > 1 else 0


@triton.jit
def _prefetch(first_ptr, num_rows, num_columns, K, BLOCK_N: tl.constexpr):
    """Asks for `num_columns` columns of `num_rows` weight rows, to lie in the L2 cache. No row is asked for twice."""
    threads_per_row: tl.constexpr = tl.extra.cuda.num_threads() // BLOCK_N
    tl.static_assert(threads_per_row > 0, "a program prefetches at most a row for each of its threads")
    # Triton takes it for a scalar. The threads of a warp take turns at this instruction, so all warps take part.
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    row = thread // threads_per_row
    asks = (thread % threads_per_row == 0) & (row < num_rows)
    num_bytes = tl.where(asks, num_columns * first_ptr.dtype.element_ty.primitive_bitwidth // 8, 0)
    address = (first_ptr + row.to(tl.int64) * K).to(tl.int64)
    tl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [address, num_bytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _multiply(acc, x, rows, k, K, EVEN_K: tl.constexpr):
    """acc + x @ the weight's rows, columns k; fp32. A weight is read once, so it is the first to leave the L2 cache."""
    if EVEN_K:
        w = tl.load(rows[:, None] + k[None, :], eviction_policy="evict_first")
    else:
        w = tl.load(rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if len(x.shape) == 1:
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _sum_of_splits(partial_ptr, offsets, stored, M, width, SPLITS: tl.constexpr):
    """The splits' sums, added in their order."""
    total = tl.load(partial_ptr + offsets, mask=stored, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        # Past the L1 cache, which hears of no other multiprocessor's writes.
        total += tl.load(partial_ptr + split * M * width + offsets, mask=stored, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["M"])
def _skinny_gemm_kernel(
    y_ptr,
    x_ptr,
    w_ptr,
    bias_ptr,
    partial_ptr,
    arrived_ptr,
    M,
    N,
    K,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    num_steps = tl.cdiv(K, BLOCK_K)
    steps_of_split = tl.cdiv(num_steps, SPLITS)
    begin = split * steps_of_split
    end = tl.minimum(begin + steps_of_split, num_steps)

    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last are the last again: no mask on the weight's loads, and nobody stores what comes of them.
    w_rows = w_ptr + tl.minimum(columns, N - 1).to(tl.int64) * K
    up_rows = w_rows + N.to(tl.int64) * K
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0:
        num_rows = tl.minimum(N - block * BLOCK_N, BLOCK_N)
        num_columns = tl.minimum(tl.minimum(end * BLOCK_K, K) - begin * BLOCK_K, PREFETCH)
        first_ptr = w_ptr + block.to(tl.int64) * BLOCK_N * K + begin * BLOCK_K
        _prefetch(first_ptr, num_rows, num_columns, K, BLOCK_N)
        if GATED:
            _prefetch(first_ptr + N.to(tl.int64) * K, num_rows, num_columns, K, BLOCK_N)
    if EARLY:
        tl.extra.cuda.gdc_wait()

    rows = tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    if BLOCK_M == 1:
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    for step in tl.range(begin, end, num_stages=STAGES):
        k = step * BLOCK_K + ks
        if BLOCK_M == 1:
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        else:
            present = (rows < M)[:, None]
            if not EVEN_K:
                present = present & (k < K)[None, :]
            x = tl.load(x_ptr + rows[:, None].to(tl.int64) * x_stride + k[None, :], mask=present, other=0.0)
        acc = _multiply(acc, x, w_rows, k, K, EVEN_K)
        if GATED:
            acc_up = _multiply(acc_up, x, up_rows, k, K, EVEN_K)
    if BLOCK_M == 1:
        acc = tl.sum(acc, 1)[None, :]
        acc_up = tl.sum(acc_up, 1)[None, :]

    stored = (rows < M)[:, None] & (columns < N)[None, :]
    if SPLITS > 1:
        width = N * 2 if GATED else N
        offsets = rows[:, None] * width + columns[None, :]
        own_ptr = partial_ptr + split * M * width
        tl.store(own_ptr + offsets, acc, mask=stored)
        if GATED:
            tl.store(own_ptr + N + offsets, acc_up, mask=stored)
        # The barrier puts all threads' stores before the one thread's atomic, whose release is cumulative: a program
        # that acquires the count sees them, its other threads by the barrier that hands them what the one has read.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLITS - 1:
            return
        tl.store(arrived_ptr + block, 0)  # for the next launch, which adds only once this one is done
        acc = _sum_of_splits(partial_ptr, offsets, stored, M, width, SPLITS)
        if GATED:
            acc_up = _sum_of_splits(partial_ptr + N, offsets, stored, M, width, SPLITS)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias_ptr is not None:
            acc_up += tl.load(bias_ptr + N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    tl.store(y_ptr + rows[:, None] * N + columns[None, :], acc.to(y_ptr.dtype.element_ty), mask=stored)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor,
    tuning: GemmTuning,
    arrived: torch.Tensor | None,
    gated: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """x @ weight.T + bias, summed in fp32 and rounded once; with `gated`, silu(its first half) * its second half.

    One kernel; no host sync, so it can be captured in a CUDA graph.

    Args:
        x: [num_rows, in_features], at most `MAX_ROWS` rows (one without `tuning.tensor_cores`); elements of a row side
            by side, rows any distance apart.
        weight: [out_features, in_features] of x's dtype, contiguous; in_features is a multiple of 8.
        bias: [out_features] or None.
        out: [num_rows, out_features], or half as many columns with `gated`; contiguous, any float dtype; written.
        tuning: the layout of the work.
        arrived: `tuning.num_counters(out.shape[1])` int32 zeros, zeros again when the kernel is done: kernels that do
            not run at the same time may share them. None where there are no splits.
        gated: as said.
        early: start while the kernel before this one on the stream still runs, and let the next one start likewise.

    Returns:
        `out`.
    """
    num_rows, in_features = x.shape
    num_columns = out.shape[1]
    partial = None
    if tuning.num_splits > 1:
        width = len(weight)
        partial = torch.empty(tuning.num_splits * num_rows * width, dtype=torch.float32, device=x.device)
    block_m = (16 if num_rows <= 16 else 32) if tuning.tensor_cores else 1
    _skinny_gemm_kernel[(triton.cdiv(num_columns, tuning.block_n) * tuning.num_splits,)](
        out,
        x,
        weight,
        bias,
        partial,
        arrived,
        num_rows,
        num_columns,
        in_features,
        x.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        SPLITS=tuning.num_splits,
        EVEN_K=in_features % tuning.block_k == 0,
        GATED=gated,
        PREFETCH=tuning.prefetch,
        EARLY=early,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=early,
    )
    return out
