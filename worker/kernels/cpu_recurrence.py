"""Calls the C kernels of recurrent layers. The structures here have the memory layout of cpu_recurrence.c."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from attention.state_pool import RowStates
from parallel.numerics.kernels.c_library import TYPES, load

_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("rows", "cu_seqlens", "ends", "before", "after")),
        ("num_rows", _INTEGER),
    )

    @classmethod
    def of(cls, states: RowStates) -> _Rows:
        tensors = states.rows, states.cu_seqlens_q, states.ends, states.before, states.after
        assert all(it.dtype is torch.int32 and it.is_contiguous() for it in tensors), "rows are contiguous int32"
        return cls(*(it.data_ptr() for it in tensors), len(states.rows))


class _Conv(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "bias", "slots", "recent", "out")),
        *((name, _INTEGER) for name in ("x_stride", "channels", "width", "num_recent", "type", "silu")),
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
    _library().causal_conv(ctypes.byref(_Rows.of(states)), ctypes.byref(conv), torch.get_num_threads())
    return out


class DeltaArgs(NamedTuple):
    """What `delta_net` needs to know about a layer on this rank."""

    key_heads: int
    value_heads: int
    key_dim: int
    """A multiple of 16, as `value_dim`."""
    value_dim: int
    eps: float
    a_log: torch.Tensor
    """[value_heads] fp32, as `dt_bias`."""
    dt_bias: torch.Tensor
    norm: torch.Tensor
    """[value_dim] fp32."""


class _Delta(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "z", "b", "a", "a_log", "dt_bias", "norm")),
        *((name, _POINTER) for name in ("slots", "keys", "values", "decays", "out")),
        *((name, _INTEGER) for name in ("in_stride", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, _INTEGER) for name in ("num_recent", "type")),
        ("eps", ctypes.c_float),
    )


def delta_net(
    qkv: torch.Tensor,
    zba: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: DeltaArgs,
    states: RowStates,
    slots: torch.Tensor,
    recent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Gated DeltaNet (`configs.delta_net.GatedDeltaNet`) from the convolution's output to the projection's input.

    Args:
        qkv: [num_tokens, 2 * key_heads * key_dim + value_heads * value_dim], contiguous: q heads, k heads, v heads.
        zba: z [num_tokens, value_heads * value_dim], b and a [num_tokens, value_heads], all with the same row stride.
        slots: [num_slots + 1, value_heads * key_dim * value_dim] fp32: S.
        recent: keys, values and decays [num_rows + 1, num_recent, elements] fp32 of recent tokens.

    Returns:
        [num_tokens, value_heads * value_dim], contiguous, of qkv's dtype.
    """
    z, b, a = zba
    assert qkv.is_contiguous(), "q, k and v of a token lie side by side"
    assert z.stride() == b.stride() == a.stride() == (z.stride(0), 1), "z, b and a are columns of one product"
    assert qkv.dtype is z.dtype, "all activations have one dtype"
    out = torch.empty(len(qkv), layer.value_heads * layer.value_dim, dtype=qkv.dtype)
    delta = _Delta(
        *(it.data_ptr() for it in (qkv, z, b, a, layer.a_log, layer.dt_bias, layer.norm, slots, *recent, out)),
        z.stride(0),
        *layer[:4],
        recent[0].shape[1],
        TYPES[qkv.dtype],
        layer.eps,
    )
    library, threads = _library(), torch.get_num_threads()
    scratch = torch.empty(threads * library.delta_scratch(ctypes.byref(delta)))
    library.delta_net(ctypes.byref(_Rows.of(states)), ctypes.byref(delta), scratch.data_ptr(), threads)
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_suffix(".c"))
    library.causal_conv.argtypes = [ctypes.POINTER(_Rows), ctypes.POINTER(_Conv), ctypes.c_int]
    library.causal_conv.restype = None
    library.delta_scratch.argtypes = [ctypes.POINTER(_Delta)]
    library.delta_scratch.restype = _INTEGER
    library.delta_net.argtypes = [ctypes.POINTER(_Rows), ctypes.POINTER(_Delta), _POINTER, ctypes.c_int]
    library.delta_net.restype = None
    return library
