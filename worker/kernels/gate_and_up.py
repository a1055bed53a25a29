"""The first product of experts: the rows of its weight, and the activation that follows it."""

from __future__ import annotations

import triton
import triton.language as tl

from parallel.numerics.kernels.fp8_groups import first_scales


@triton.jit
def silu_and_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def relu2(x):
    """The square of the positive part."""
    positive = tl.maximum(x, 0.0)
    return positive * positive


@triton.jit
def activated(
    gate, up, bias_ptr, expert, columns, width, HAS_GATE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr
):
    """The activation of `Biases` for gate and up [..., columns]. Without biases silu(gate) * up; without a gate
    relu2(up)."""
    if not HAS_GATE:
        hidden = relu2(up)
    elif LIMIT is None:
        hidden = silu_and_mul(gate, up)
    else:
        bias = bias_ptr + expert * (2 * width) + tl.minimum(columns, width - 1)
        gate = tl.minimum(gate + tl.load(bias).to(tl.float32), LIMIT)
        up = tl.minimum(tl.maximum(up + tl.load(bias + width).to(tl.float32), -LIMIT), LIMIT)
        hidden = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    return hidden


@triton.jit
def gate_and_up(
    w13_ptr, scales_ptr, blocks_ptr, expert, first, width, size, num_blocks, expert_scales, ONE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Pointers for `sum_groups`: to BLOCK_N gate rows from `first` on, alternating with their up rows [2 * BLOCK_N, 1],
    and to the scales of gate and of up. Also returns whether a row belongs to up [1, 2 * BLOCK_N]. Without a gate there
    are only the up rows [BLOCK_N, 1] and their scales, twice."""
    NUM_PARTS: tl.constexpr = 2 if HAS_GATE else 1
    turns = tl.arange(0, NUM_PARTS * BLOCK_N)
    rows_of_part, is_up = tl.minimum(first + turns // NUM_PARTS, width - 1), turns % NUM_PARTS == 1
    rows = rows_of_part + tl.where(is_up, width, 0)
    w_rows = w13_ptr + expert * (NUM_PARTS * width * size) + rows.to(tl.int64)[:, None] * size
    of_scales = first if ONE_BLOCK else rows_of_part[None, :]
    scales_ptr += expert * expert_scales
    gate_scales = first_scales(scales_ptr, blocks_ptr, of_scales, num_blocks)
    up_scales = first_scales(scales_ptr, blocks_ptr, of_scales + (NUM_PARTS - 1) * width, num_blocks)
    return w_rows, gate_scales, up_scales, is_up[None, :]
