"""Uniform values from a hash of row and column, on a CPU. uniform_kernel.py computes the same bits on a GPU."""

from __future__ import annotations

import torch

from parallel.plan import Span

_CHUNK_ELEMENTS = 1 << 17
"""Elements that a CPU computes at once, in two buffers of 4 bytes per element that fit the second-level cache."""

ROW_STEP = 0x9E3779B1
COLUMN_STEP = 0x85EBCA77
"""Multipliers of row and column indices. They are odd, so that two rows (or columns) of a tensor never share a key."""
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))
"""Shifts and factors of MurmurHash3's 32-bit finaliser. Its last shift is omitted, as it changes only unused bits."""
USED_BITS = 24
"""Number of a hash's bits that make a value. fp32 holds 24 bits exactly."""


def fill(
    out: torch.Tensor, seeds: tuple[int, int], scale: float, mean: float, rows: Span, columns: Span, dtype: torch.dtype
) -> None:
    """Like `fill` of uniform_kernel.py, for tensors on a CPU."""
    row_keys = _keys(rows, ROW_STEP, seeds[0]).unsqueeze(1)
    column_keys = _keys(columns, COLUMN_STEP, seeds[1])
    num_rows = max(1, _CHUNK_ELEMENTS // columns.size)
    hashes = torch.empty(min(num_rows, rows.size), columns.size, dtype=torch.int32)
    scratch = torch.empty_like(hashes)
    for start in range(0, rows.size, num_rows):
        count = min(num_rows, rows.size - start)
        h, t = hashes[:count], scratch[:count]
        torch.bitwise_xor(row_keys[start : start + count], column_keys, out=h)
        _mix(h, t)
        h >>= 32 - USED_BITS
        values = t.view(torch.float32).copy_(h)
        values *= scale
        if mean != 0.0:
            values += mean
        part = out[start : start + count]
        part.copy_(values if dtype in (torch.float32, part.dtype) else values.to(dtype))


def _keys(span: Span, step: int, seed: int) -> torch.Tensor:
    """[span.size] int32 keys of the indices in `span`; distinct indices have distinct keys."""
    keys = torch.arange(span.start, span.stop, dtype=torch.int64) * step + seed
    keys = (keys & 0xFFFFFFFF).sub_((keys & 0x80000000) << 1).to(torch.int32)
    _mix(keys, torch.empty_like(keys))
    return keys


def _mix(h: torch.Tensor, scratch: torch.Tensor) -> None:
    """Replaces each int32 of `h` by a one-to-one hash of it. `scratch` has the same shape."""
    for shift, factor in MIX:
        torch.bitwise_right_shift(h, shift, out=scratch)
        scratch &= (1 << (32 - shift)) - 1  # the shift copies the sign
        h ^= scratch
        h *= factor - (1 << 32)
