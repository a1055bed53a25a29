"""Kernels that are started before the one in front of them is done, on GPUs from compute capability 9.0 on.

A kernel that is launched so (`launch_pdl`) waits in `follow` before it reads what the kernel in front of it writes, or
writes anything. Every program waits, so when one kernel is done, all in front of it are, and the next, started as
usual, finds them so. It lets the next start after that alone, so that when a kernel starts, all but the one in front of
it are done: what comes from them, and weights, may be read before the wait, and costs nothing there.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_FROM = (9, 0)
_MOST_ROWS = 64
"""Two H200s took 1.3 % longer for 256 rows of an 8B model when all was launched so, and for 64 no longer."""
_FEW_PROGRAMS = tl.constexpr(8)
"""Programs of a short kernel beside which the next one's find even room: with 16 of them, products of 16 rows of an 8B
model took 2 % longer on an H200."""


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel on `device` can be started before the one in front of it is done, and wait for it there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FROM


def is_dependent(device: torch.device, num_rows: int) -> bool:
    """Whether a step's kernel for so many rows is launched so: with many, kernels that start early are in the way."""
    return num_rows <= _MOST_ROWS and has_dependent_launch(device)


@triton.jit
def follow(DEPENDENT: tl.constexpr):
    """Waits until all that the kernels in front wrote can be seen, where this one may have been started before."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Lets the next kernel's programs take what room there is, once every program of this one has come here.

    A program that keeps its multiprocessor busy for long comes here late: programs that start beside it are placed
    where there is room, not evenly, and as they lie they run afterwards. In front of the second product of one token's
    experts that made 20 us of 10 on an H200.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_start_beside(DEPENDENT: tl.constexpr):
    """Lets it start beside a short kernel that has just waited, if that has few programs: beside more of them, the next
    kernel's would lie unevenly. A kernel that calls this says so at its end as well."""
    if DEPENDENT:  # noqa: SIM102 -- Triton leaves out what stands below, but not behind an `and`
        if tl.num_programs(0) * tl.num_programs(1) <= _FEW_PROGRAMS:
            tl.extra.cuda.gdc_launch_dependents()
