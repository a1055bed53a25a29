"""Calls the C kernel of attention on CPUs. The structures here have the memory layout of cpu_attention.c."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from attention.kv_pool import FP8
from parallel.numerics.kernels import c_library

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, FP8: 3}


class LayerArgs(ctypes.Structure):
    """A layer's arguments that are the same in every step."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("kv_type", ctypes.c_int64),
        ("type", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("v_scale", ctypes.c_float),
    )


class StepArgs(ctypes.Structure):
    """A step's arguments that layers with the same visible keys share."""

    _fields_ = (
        ("page_table", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("marks", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("most_tokens", ctypes.c_int64),
        ("most_lines", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel. Raises ConfigError if there is no compiler for it."""
    lib = c_library.load(Path(__file__).with_suffix(".c"))
    lib.attend.argtypes = (*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_void_p)
    lib.attend.restype = None
    lib.index_scores.argtypes = (*[ctypes.c_void_p] * 3, ctypes.c_int64, *[ctypes.c_void_p] * 2, ctypes.c_int64)
    lib.index_scores.restype = None
    lib.scratch_floats.argtypes = (ctypes.c_int64,) * 2
    lib.scratch_floats.restype = ctypes.c_int64
    return lib
