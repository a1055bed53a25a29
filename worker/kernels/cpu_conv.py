"""Calls the C kernel of causal convolutions. The structure has the memory layout of cpu_conv.c."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from attention.state_pool import RowStates
from parallel.numerics.kernels.c_library import TYPES, load
from worker.kernels.cpu_rows import INTEGER, POINTER, Rows


class _Conv(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("x", "weight", "bias", "slots", "recent", "out")),
        *((name, INTEGER) for name in ("x_stride", "channels", "width", "num_recent", "type", "silu")),
    )


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RowStates,
    slots: torch.Tensor,
    recent: torch.Tensor,
    *,
    silu: bool = False,
) -> torch.Tensor:
    """Convolves each channel over the last tokens of its row, in fp32, rounded once. Writes the inputs that later steps
    need to `slots` and `recent`.

    Args:
        x: [num_tokens, channels], with any row stride.
        weight: [width, channels] fp32, contiguous, the current token's last.
        bias: [channels] fp32, or None.
        slots: [num_slots + 1, (width - 1) * channels] of x's dtype: the inputs before the end of each slot's state.
        recent: [num_rows + 1, num_recent, channels] of x's dtype.
        silu: whether silu is applied to the result.

    Returns:
        [num_tokens, channels], contiguous, of x's dtype.
    """
    (width, channels), out = weight.shape, torch.empty(x.shape, dtype=x.dtype)
    assert x.shape[1] == channels, f"{x.shape[1]} channels, and weights of {channels}"
    assert x.stride(1) == 1, "the channels of a token lie side by side"
    assert x.dtype is slots.dtype is recent.dtype, "states have the activations' dtype"
    conv = _Conv(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        slots.data_ptr(),
        recent.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        channels,
        width,
        recent.shape[1],
        TYPES[x.dtype],
        silu,
    )
    _library().causal_conv(ctypes.byref(Rows.of(states)), ctypes.byref(conv), torch.get_num_threads())
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_suffix(".c"))
    library.causal_conv.argtypes = [ctypes.POINTER(Rows), ctypes.POINTER(_Conv), ctypes.c_int]
    library.causal_conv.restype = None
    return library
