"""Norms, gated activations, soft caps and softmaxes on CPU.

The bits of an element depend only on its own row. torch's loops compute the remainder after the last full vector
differently, so a row's bits would depend on where it ends.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from parallel.numerics.kernels.c_library import TYPES, load

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_CLAMPED = 3


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once to x's dtype.

    Args:
        x: [..., size] of one to three dimensions, contiguous in the last one, with any strides in the others.
        weight: [size], of x's dtype or fp32.

    Returns:
        [..., size], contiguous, of x's dtype.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    _norm(x, None, weight, eps, out)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `residual` in place, rounded to the residual's dtype, and returns `rms_norm` of the rounded sum.

    Args:
        x: [num_rows, size], with any row stride. May have a wider dtype than the residual.
        residual: [num_rows, size], with any row stride. Must not overlap x.
        weight: [size], of the residual's dtype or fp32.

    Returns:
        [num_rows, size], contiguous, of the residual's dtype.
    """
    assert x.shape == residual.shape, f"cannot add {tuple(x.shape)} to {tuple(residual.shape)}"
    assert residual.stride(1) == 1, f"the elements of a row must be contiguous, not {residual.stride(1)} apart"
    out = torch.empty(residual.shape, dtype=residual.dtype)
    _norm(x, residual, weight, eps, out)
    return out


def act_and_mul(x: torch.Tensor, activation: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """act(gate) * up in fp32, rounded once.

    Args:
        x: [num_rows, 2 * size], gate then up, with any row stride.
        activation: "silu", "gelu" or "gelu_tanh".
        out: filled and returned if given.

    Returns:
        [num_rows, size], contiguous, of x's dtype.
    """
    return _act_and_mul(x, _ACTIVATIONS[activation], 0.0, 0.0, out)


def clamped_act_and_mul(x: torch.Tensor, limit: float, alpha: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Like `act_and_mul`, for (up + 1) * gate * sigmoid(alpha * gate), up clamped to +-limit, gate to at most limit."""
    return _act_and_mul(x, _CLAMPED, limit, alpha, out)


def softmax(x: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
    """e^x / the sum of e^over of that row, where x has some elements of `over`. With all of them, it is the softmax.

    Args:
        x: [num_rows, size] fp32, contiguous within a row, with any row stride.
        over: [num_rows, any size from 1] fp32, contiguous within a row, with any row stride.

    Returns:
        [num_rows, size], contiguous, fp32.
    """
    out = torch.empty(x.shape)
    for tensor in (x, over):
        assert tensor.dtype is torch.float32, f"logits are fp32, not {tensor.dtype}"
        assert tensor.stride(1) == 1 or tensor.shape[1] == 1, "the elements of a row must be contiguous"
    (num_rows, size), over_size = x.shape, over.shape[1]
    _library().softmax(
        x.data_ptr(), x.stride(0), size, over.data_ptr(), over.stride(0), over_size, out.data_ptr(), num_rows
    )
    return out


def softcap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x = cap * tanh(x / cap) in place, within a few ulp of cap. x is fp32, contiguous, of any shape. Returns x."""
    assert x.dtype is torch.float32, f"x is {x.dtype}"
    assert x.is_contiguous(), "x must be contiguous"
    _library().softcap(x.data_ptr(), x.numel(), cap, torch.get_num_threads())
    return x


def mul_sigmoid_(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x *= sigmoid(gate) in fp32, in place, rounded once. Both are contiguous, of one shape and dtype. Returns x."""
    assert (x.shape, x.dtype) == (gate.shape, gate.dtype), f"a gate {tuple(gate.shape)} of {tuple(x.shape)}"
    assert x.is_contiguous(), "x must be contiguous"
    assert gate.is_contiguous(), "the gate must be contiguous"
    _library().mul_sigmoid(x.data_ptr(), gate.data_ptr(), x.numel(), TYPES[x.dtype], torch.get_num_threads())
    return x


def _act_and_mul(
    x: torch.Tensor, activation: int, limit: float, alpha: float, out: torch.Tensor | None
) -> torch.Tensor:
    num_rows, width = x.shape
    assert x.stride(1) == 1, f"the elements of a row must be contiguous, not {x.stride(1)} apart"
    size = width // 2
    if out is None:
        out = torch.empty((num_rows, size), dtype=x.dtype)
    assert out.shape == (num_rows, size), f"{tuple(out.shape)} are not {num_rows} rows of {size}"
    assert out.is_contiguous(), "the output must be contiguous"
    _library().act_and_mul(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        num_rows,
        size,
        TYPES[x.dtype],
        activation,
        limit,
        alpha,
        torch.get_num_threads(),
    )
    return out


class _Norm(ctypes.Structure):
    """The struct `Norm` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "residual", "out")),
        *((name, ctypes.c_size_t) for name in ("num_rows", "inner", "size")),
        *((name, ctypes.c_size_t) for name in ("outer_stride", "inner_stride", "residual_stride")),
        *((name, ctypes.c_int) for name in ("x_type", "weight_type", "out_type")),
        ("eps", ctypes.c_float),
    ]


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    shape, strides = x.shape, x.stride()
    size = shape[-1]
    assert strides[-1] == 1, f"the elements of a row must be contiguous, not {strides[-1]} apart"
    assert weight.shape == (size,), f"weights {tuple(weight.shape)} are not {size}"
    assert weight.is_contiguous(), "the weights must be contiguous"
    assert len(shape) <= 3, f"rows of {len(shape)} dimensions"
    inner = shape[1] if len(shape) == 3 else 1
    norm = _Norm(
        x.data_ptr(),
        weight.data_ptr(),
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        inner * (shape[0] if len(shape) > 1 else 1),
        inner,
        size,
        strides[0],
        strides[1] if len(shape) == 3 else 0,
        0 if residual is None else residual.stride(0),
        TYPES[x.dtype],
        TYPES[weight.dtype],
        TYPES[out.dtype],
        eps,
    )
    _library().rms_norms(ctypes.byref(norm), torch.get_num_threads())


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_suffix(".c"))
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.rms_norms.argtypes = [ctypes.POINTER(_Norm), integer]
    number = ctypes.c_float
    library.act_and_mul.argtypes = [pointer, size, pointer, size, size, integer, integer, number, number, integer]
    library.softcap.argtypes = [pointer, size, number, integer]
    library.mul_sigmoid.argtypes = [pointer, pointer, size, integer, integer]
    library.softmax.argtypes = [pointer, size, size, pointer, size, size, pointer, size]
    for function in (library.rms_norms, library.act_and_mul, library.softcap, library.mul_sigmoid, library.softmax):
        function.restype = None
    return library
