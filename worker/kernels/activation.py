"""Gated activations: act(gate) * up, from a matrix that holds both.

The product is computed in fp32 and rounded once. transformers rounds act(gate) to the activations' dtype first, so the
two differ by at most that rounding, and this one is more accurate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside
from parallel.numerics.fp8 import Fp8Rows
from parallel.numerics.kernels.fp8_groups import MOST_TILES, Groups, empty_rows, store_in_fp8

_BLOCK = 1024
_NUM_WARPS = 4  # 8 elements a thread: one 16-byte load each of gate and up in bf16


@triton.jit
def _act_and_mul_kernel(
    out_ptr, scales_ptr, finished_ptr, x_ptr, size, x_stride, scale_stride, ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """If WIDTH > 0, the rounded output is then quantised to FP8 in groups of WIDTH columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate_ptrs = x_ptr + row * x_stride + columns
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(u)) / 2 is the logistic function of 2u; 2 * sqrt(2 / pi) = 1.5957691216057308.
        twice_u = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
        activated = gate / (1.0 + tl.exp(-twice_u))
    let_next_start(DEPENDENT)
    answer = (activated * up).to(x_ptr.dtype.element_ty)
    if WIDTH > 0:
        first = tl.program_id(1) * BLOCK
        store_in_fp8(answer, out_ptr, scales_ptr, finished_ptr, scale_stride, row, first, size, WIDTH, TILES)
    else:
        tl.store(out_ptr + row * size + columns, answer, mask=inside)


@triton.jit
def _mul_sigmoid_kernel(x_ptr, gate_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x, gate = tl.load(x_ptr + at, at < size).to(tl.float32), tl.load(gate_ptr + at, at < size).to(tl.float32)
    tl.store(x_ptr + at, (x / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty), at < size)


def mul_sigmoid_(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Like `worker.kernels.cpu_pointwise.mul_sigmoid_`."""
    assert x.is_contiguous(), "x must be contiguous"
    assert gate.is_contiguous(), "the gate must be contiguous"
    _mul_sigmoid_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, gate, x.numel(), BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return x


def act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up.

    Args:
        x: [num_tokens, 2 * size], gate then up, contiguous within a row, with any row stride.
        activation: silu, gelu (with the error function) or gelu_tanh.

    Returns:
        [num_tokens, size], contiguous, of x's dtype.
    """
    out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype, device=x.device)
    _act_and_mul(out, None, x, activation, 0)
    return out


def act_and_mul_in_fp8(x: torch.Tensor, activation: str, groups: Groups) -> Fp8Rows:
    """Like `act_and_mul`, with the output quantised to FP8 in whole `groups`."""
    q = empty_rows(len(x), x.shape[1] // 2, groups, x)
    _act_and_mul(q.values, q, x, activation, groups.width)
    return q


def _act_and_mul(out: torch.Tensor, q: Fp8Rows | None, x: torch.Tensor, activation: str, width: int) -> None:
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.shape[1] == 2 * size, f"{x.shape[1]} columns are not a gate and an up of the same width"
    assert x.stride(1) == 1, f"the elements of a row must be contiguous, not {x.stride(1)} apart"
    scales, finished, stride = (None, None, 0) if q is None else (q.scales, q.finished, q.scales.stride(0))
    dependent = is_dependent(x.device, num_tokens)
    _act_and_mul_kernel[(num_tokens, -(-size // _BLOCK))](
        out, scales, finished, x, size, x.stride(0), stride, ACTIVATION=activation, WIDTH=width, TILES=MOST_TILES,
        BLOCK=_BLOCK, DEPENDENT=dependent, num_warps=_NUM_WARPS, launch_pdl=dependent,
    )  # fmt: skip
