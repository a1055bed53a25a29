"""The rows of a step, as the C kernels of recurrent layers read them. The structure has the memory layout of rows.h."""

from __future__ import annotations

import ctypes

import torch

from attention.state_pool import RowStates

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64


class Rows(ctypes.Structure):
    """`RowStates` of a step."""

    _fields_ = (
        *((name, POINTER) for name in ("rows", "cu_seqlens", "ends", "before", "after")),
        ("num_rows", INTEGER),
    )

    @classmethod
    def of(cls, states: RowStates) -> Rows:
        """The rows of `states`, whose tensors must outlive the result."""
        tensors = states.rows, states.cu_seqlens_q, states.ends, states.before, states.after
        assert all(it.dtype is torch.int32 and it.is_contiguous() for it in tensors), "rows are contiguous int32"
        return cls(*(it.data_ptr() for it in tensors), len(states.rows))
