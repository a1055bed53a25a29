"""Dependent launches: kernels that start before the kernel before them is done, on compute capability 9.0 and later.

A kernel launched this way (`launch_pdl`) waits in `follow` before it reads results of the kernel before it, and before
it writes anything. Every program waits, so when one kernel is done, all kernels before it are done too. A kernel lets
the next one start only after its own wait. So when a kernel starts, all kernels except the one directly before it are
done: their results, and weights, may be read before the wait.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_FROM = (9, 0)
_MOST_ROWS = 64
"""With dependent launches for every kernel, two H200s took 1.3 % longer for 256 rows of an 8B model, but not for 64."""
_FEW_PROGRAMS = tl.constexpr(8)
"""A short kernel lets the next one start beside it only if it has at most this many programs: beside more, the next
kernel's programs would be placed unevenly. With a limit of 16, products of 16 rows of an 8B model took an H200 2 %
longer."""


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether `device` supports dependent launches."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FROM


def is_dependent(device: torch.device, num_rows: int) -> bool:
    """Whether a step's kernels for this number of rows use dependent launches. With many rows, kernels that start early
    slow others down."""
    return num_rows <= _MOST_ROWS and has_dependent_launch(device)


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Waits until all writes of the kernels before this one are visible, if this one may have started before they were
    done."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Lets the next kernel start once every program of this one has called this.

    A program that keeps its SM busy for long should call this late: programs of the next kernel that start beside it
    are placed where there is room, which is uneven, and stay there. Before the second product of one token's experts,
    it then took 20 us instead of 10 on an H200.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_start_beside(DEPENDENT: tl.constexpr):
    """Lets the next kernel start beside this short one, directly after its wait, if this one has few programs. Beside
    more programs, the next kernel's would be placed unevenly. A kernel that calls this must also call `let_next_start`
    at its end."""
    if DEPENDENT:  # noqa: SIM102 -- Triton drops the inner branch, but not the right side of an `and`
        if tl.num_programs(0) * tl.num_programs(1) <= _FEW_PROGRAMS:
            tl.extra.cuda.gdc_launch_dependents()
