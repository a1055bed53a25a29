"""A kernel that takes Triton seconds to compile, each time."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl


@triton.jit
def _slow_kernel(out_ptr, SEED: tl.constexpr, LENGTH: tl.constexpr):
    value = tl.load(out_ptr)
    for _ in tl.static_range(LENGTH):
        value = tl.sin(value + SEED)
    tl.store(out_ptr, value)


def compile_slowly() -> float:
    """Compiles and launches it on the GPU; returns the seconds that took, some five."""
    began = time.monotonic()
    # Triton keeps what it has compiled on disk: another constant is another kernel.
    _slow_kernel[(1,)](torch.zeros(1, device="cuda"), SEED=time.monotonic_ns() % 1_000_003, LENGTH=300)
    return time.monotonic() - began
