"""Arithmetic of recurrent layers on GPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def product(x, y):
    """x @ y in fp32. One of them is fp32, the other has the activations' dtype. With bf16, the fp32 numbers are sums of
    two numbers in bf16, which have more bits than tf32 at the same cost."""
    if x.dtype == tl.bfloat16:
        rounded = y.to(tl.bfloat16)
        return tl.dot(x, rounded, tl.dot(x, (y - rounded.to(tl.float32)).to(tl.bfloat16)))
    elif y.dtype == tl.bfloat16:
        rounded = x.to(tl.bfloat16)
        return tl.dot(rounded, y, tl.dot((x - rounded.to(tl.float32)).to(tl.bfloat16), y))
    else:
        PRECISION: tl.constexpr = "ieee" if x.dtype == y.dtype else "tf32"
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)
