"""Merges two partial outputs of the same queries over different keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16  # columns per program of 4 warps (not measured)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, out_ptr, lse_ptr, num_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    a = tl.load(lse_a + rows, mask=is_row, other=float("-inf"))
    b = tl.load(lse_b + rows, mask=is_row, other=float("-inf"))
    largest = tl.maximum(a, b)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight_a = tl.exp2((a - largest) * LOG2_E)
    weight_b = tl.exp2((b - largest) * LOG2_E)
    total = weight_a + weight_b
    divisor = tl.where(total > 0, total, 1.0)
    cells = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    inside = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    # A part without a key has no weight, whatever it contains.
    part_a = tl.load(out_a + cells, mask=inside & (weight_a > 0)[:, None], other=0.0).to(tl.float32)
    part_b = tl.load(out_b + cells, mask=inside & (weight_b > 0)[:, None], other=0.0).to(tl.float32)
    merged = (part_a * weight_a[:, None] + part_b * weight_b[:, None]) / divisor[:, None]
    tl.debug_barrier()  # If `out` is `out_a`, all threads have loaded what is overwritten now.
    tl.store(out_ptr + cells, merged.to(out_ptr.dtype.element_ty), mask=inside)
    lse = tl.where(total > 0, largest + tl.log2(divisor) / LOG2_E, float("-inf"))
    tl.store(lse_ptr + rows, lse, mask=is_row)


def merge_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> torch.Tensor:
    """Merges two parts into the output of attention over the keys of both. One kernel without a host sync.

    A layer's sinks must be part of only one of the two.

    Args:
        out_a: [num_tokens, num_heads, head_dim], contiguous, of any floating-point dtype; so is `out_b`. fp32 parts are
            rounded once, at the end.
        lse_a: [num_tokens, num_heads] fp32, contiguous: natural logarithms of the sums of exponentials; so is `lse_b`.
            -inf for a part without a key; its output is not read.
        out: as `out_a`, written; it may be `out_a` itself. Zeros where neither part has a key.
        lse: as `lse_a`, written; it may be `lse_a` itself.

    Returns:
        `out`.
    """
    head_dim = out.shape[-1]
    num_rows = lse.numel()
    _merge_kernel[(triton.cdiv(num_rows, _ROWS),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_D=1 << (head_dim - 1).bit_length(),
        ROWS=_ROWS,
    )
    return out
