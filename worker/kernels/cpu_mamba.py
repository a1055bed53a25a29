"""Calls the C kernel of Mamba2. The structure has the memory layout of cpu_mamba.c."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from attention.state_pool import RowStates
from parallel.numerics.kernels.c_library import TYPES, load
from worker.kernels.cpu_rows import INTEGER, POINTER, Rows


class MambaArgs(NamedTuple):
    """What `mamba` needs to know about a layer on this rank."""

    heads: int
    groups: int
    head_dim: int
    """A multiple of 16, as `state_size`."""
    state_size: int
    a_log: torch.Tensor
    """[heads] fp32, as `dt_bias` and `d`."""
    dt_bias: torch.Tensor
    d: torch.Tensor
    numbers: tuple[float, ...]
    """Factors of z and of dt, and the smallest and largest dt."""


class _Mamba(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("xbc", "z", "dt", "a_log", "dt_bias", "d")),
        *((name, POINTER) for name in ("slots", "recent", "steps", "out", "squares")),
        *((name, INTEGER) for name in ("in_stride", "heads", "groups", "head_dim", "state_size")),
        *((name, INTEGER) for name in ("num_recent", "type")),
        *((name, ctypes.c_float) for name in ("z_factor", "dt_factor", "least", "most")),
    )


def mamba(
    xbc: torch.Tensor,
    z_dt: tuple[torch.Tensor, torch.Tensor],
    layer: MambaArgs,
    states: RowStates,
    slots: torch.Tensor,
    recent: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba2 (`configs.mamba.Mamba2`) from the convolution's output to y * silu(z).

    Args:
        xbc: [num_tokens, heads * head_dim + 2 * groups * state_size], contiguous: x heads, B groups, C groups.
        z_dt: z [num_tokens, heads * head_dim] and dt [num_tokens, heads], with the same row stride.
        slots: [num_slots + 1, heads * state_size * head_dim] fp32: h.
        recent: of recent tokens [num_rows + 1, num_recent, elements]: x and B, of xbc's dtype; and dt, fp32.

    Returns:
        [num_tokens, heads * head_dim] fp32, and the sum of squares of each head [num_tokens, heads] fp32.
    """
    z, dt = z_dt
    assert xbc.is_contiguous(), "x, B and C of a token lie side by side"
    assert z.stride() == dt.stride() == (z.stride(0), 1), "z and dt are columns of one product"
    assert xbc.dtype is z.dtype is recent[0].dtype, "all activations have one dtype"
    out, squares = torch.empty(len(xbc), layer.heads * layer.head_dim), torch.empty(len(xbc), layer.heads)
    tensors = xbc, z, dt, layer.a_log, layer.dt_bias, layer.d, slots, *recent, out, squares
    args = _Mamba(
        *(it.data_ptr() for it in tensors),
        z.stride(0),
        *layer[:4],
        recent[0].shape[1],
        TYPES[xbc.dtype],
        *layer.numbers,
    )
    library, threads = _library(), torch.get_num_threads()
    scratch = torch.empty(threads * library.mamba_scratch(ctypes.byref(args)))
    library.mamba(ctypes.byref(Rows.of(states)), ctypes.byref(args), scratch.data_ptr(), threads)
    return out, squares


def grouped_norm(
    y: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    num_groups: int,
    size: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """y / sqrt(mean of its group's squares + eps) * weight.

    Args:
        y: [num_tokens, columns] fp32, contiguous: equal parts of `num_groups` groups.
        squares: [num_tokens, heads of these groups] fp32: sums of squares, those of all ranks included. Each group's
            are added in one order, so the bits do not depend on the number of ranks.
        weight: [columns] fp32.
        size: number of elements of a group on all ranks.
        dtype: of the result.

    Returns:
        [num_tokens, columns], contiguous.
    """
    # cumsum adds in order. The order of torch's sum depends on the number of rows.
    sums = squares.unflatten(1, (num_groups, -1)).cumsum(2)[..., -1:]
    root = (sums / size + eps).sqrt()
    return (y.unflatten(1, (num_groups, -1)) / root).flatten(1).mul_(weight).to(dtype)


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_suffix(".c"))
    library.mamba_scratch.argtypes = [ctypes.POINTER(_Mamba)]
    library.mamba_scratch.restype = INTEGER
    library.mamba.argtypes = [ctypes.POINTER(Rows), ctypes.POINTER(_Mamba), POINTER, ctypes.c_int]
    library.mamba.restype = None
    return library
