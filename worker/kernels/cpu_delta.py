"""Calls the C kernel of Gated DeltaNet and Kimi Delta Attention. The structure has the memory layout of cpu_delta.c."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from attention.state_pool import RowStates
from parallel.numerics.kernels.c_library import TYPES, load
from worker.kernels.cpu_rows import INTEGER, POINTER, Rows


class DeltaArgs(NamedTuple):
    """What `delta_net` needs to know about a layer on this rank."""

    key_heads: int
    value_heads: int
    key_dim: int
    """A multiple of 16, as `value_dim`."""
    value_dim: int
    decay_dim: int
    """Decays of a value head: 1, or `key_dim`."""
    sigmoid_gate: bool
    """Whether the output is multiplied by sigmoid(z). If false, by silu(z)."""
    eps: float
    a_log: torch.Tensor
    """[value_heads] fp32."""
    dt_bias: torch.Tensor
    """[value_heads * decay_dim] fp32."""
    norm: torch.Tensor
    """[value_dim] fp32."""


class _Delta(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("qkv", "z", "b", "a", "a_log", "dt_bias", "norm")),
        *((name, POINTER) for name in ("slots", "decays", "keys", "values", "out")),
        *((name, INTEGER) for name in ("z_stride", "b_stride", "a_stride", "key_heads", "value_heads", "key_dim")),
        *((name, INTEGER) for name in ("value_dim", "decay_dim", "sigmoid_gate", "num_recent", "type")),
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
    """Gated DeltaNet or Kimi Delta Attention (configs/delta_net.py, configs/kimi_delta.py), from the convolution's
    output to the projection's input.

    Args:
        qkv: [num_tokens, 2 * key_heads * key_dim + value_heads * value_dim], contiguous: q heads, k heads, v heads.
        zba: z [num_tokens, value_heads * value_dim], b [num_tokens, value_heads] and a [num_tokens, value_heads *
            decay_dim], with any row strides.
        slots: [num_slots + 1, value_heads * key_dim * value_dim] fp32: S.
        recent: keys and values, of qkv's dtype, and decays, fp32, of recent tokens: [num_rows + 1, num_recent,
            elements] each.

    Returns:
        [num_tokens, value_heads * value_dim], contiguous, of qkv's dtype.
    """
    (z, b, a), (keys, values, decays) = zba, recent
    assert keys.dtype is values.dtype is qkv.dtype, "recent keys and values have the activations' dtype"
    assert qkv.is_contiguous(), "q, k and v of a token lie side by side"
    assert z.stride(1) == b.stride(1) == a.stride(1) == 1, "the elements of a token lie side by side"
    assert qkv.dtype is z.dtype, "all activations have one dtype"
    out = torch.empty(len(qkv), layer.value_heads * layer.value_dim, dtype=qkv.dtype)
    delta = _Delta(
        *(it.data_ptr() for it in (qkv, z, b, a, layer.a_log, layer.dt_bias, layer.norm)),
        *(it.data_ptr() for it in (slots, decays, keys, values, out)),
        *(it.stride(0) for it in zba),
        *layer[:6],
        keys.shape[1],
        TYPES[qkv.dtype],
        layer.eps,
    )
    library, threads = _library(), torch.get_num_threads()
    scratch = torch.empty(threads * library.delta_scratch(ctypes.byref(delta)))
    library.delta_net(ctypes.byref(Rows.of(states)), ctypes.byref(delta), scratch.data_ptr(), threads)
    return out


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_suffix(".c"))
    library.delta_scratch.argtypes = [ctypes.POINTER(_Delta)]
    library.delta_scratch.restype = INTEGER
    library.delta_net.argtypes = [ctypes.POINTER(Rows), ctypes.POINTER(_Delta), POINTER, ctypes.c_int]
    library.delta_net.restype = None
    return library
