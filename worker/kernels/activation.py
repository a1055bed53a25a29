"""Gated activations: act(gate) * up, of a matrix that holds both.

The product is computed in fp32 and rounded once. transformers rounds act(gate) to the activations' dtype first, so the
two differ by at most that rounding; this is the more accurate one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside

_BLOCK = 1024
_NUM_WARPS = 4  # 8 elements a thread: one 16-byte load each of gate and up in bf16


@triton.jit
def _act_and_mul_kernel(
    out_ptr, x_ptr, size, x_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
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
    tl.store(out_ptr + row * size + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        x: [num_tokens, 2 * size], gate then up; elements of a row side by side, rows any distance apart.

    Returns:
        [num_tokens, size], contiguous, of x's dtype.
    """
    return _act_and_mul(x, "silu")


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the error function; shapes as in `silu_and_mul`."""
    return _act_and_mul(x, "gelu")


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the tanh approximation; shapes as in `silu_and_mul`."""
    return _act_and_mul(x, "gelu_tanh")


def _act_and_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    num_tokens, size = x.shape[0], x.shape[1] // 2
    assert x.shape[1] == 2 * size, f"{x.shape[1]} columns are not a gate and an up of the same width"
    assert x.stride(1) == 1, f"the elements of a row lie side by side, not {x.stride(1)} apart"
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    grid = (num_tokens, -(-size // _BLOCK))
    dependent = is_dependent(x.device, num_tokens)
    _act_and_mul_kernel[grid](
        out, x, size, x.stride(0), ACTIVATION=activation, BLOCK=_BLOCK, DEPENDENT=dependent, num_warps=_NUM_WARPS,
        launch_pdl=dependent,
    )  # fmt: skip
    return out
