"""Mamba2 for GPUs (`configs.mamba.Mamba2`).

A program computes some columns of one row's head. It goes through chunks of 64 positions, and in each chunk through
blocks of 16, both counted from the request's beginning. A block's outputs are three matrix products: of its C with the
state before the chunk, of its C with the chunk's B, and of that with the chunk's x. A decode computes one line of its
block, by the same instructions in the same order as a prompt does. Lines of a product do not depend on each other, and
later tokens add zeros. So a token's bits do not depend on how its row is cut into steps.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from attention.state_pool import RowStates
from worker.kernels.cpu_mamba import MambaArgs
from worker.kernels.recurrent import product, softplus

_BLOCK = 16
_CHUNK = 64  # configs/recurrent.py: STATE_CHUNK
_COLUMNS = 32
_STATE_BYTES = 16384  # A program's columns have at most these bytes, which fit in the shared memory of all GPUs.
_COPIED = 1024
_NORMED = 1024


@triton.jit
def _add_first(x, y, other_x, other_y):
    return x + other_x, other_y


@triton.jit
def _mamba_kernel(
    out_ptr, squares_ptr, new_steps_ptr, xbc_ptr, z_ptr, dt_ptr, a_log_ptr, dt_bias_ptr, d_ptr, slots_ptr, recent_ptr,
    steps_ptr, rows_ptr, cu_ptr, ends_ptr, before_ptr, after_ptr, in_stride, z_factor, dt_factor, least, most,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
    RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    head, part, index = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    start = end - (tl.load(cu_ptr + index + 1) - first)
    before, after = tl.load(before_ptr + index), tl.load(after_ptr + index)
    if row == 0:  # padding
        return
    OF_ENTRY: tl.constexpr = HEADS * HEAD_DIM + GROUPS * STATE_SIZE
    OF_TOKEN: tl.constexpr = OF_ENTRY + GROUPS * STATE_SIZE
    element, column = tl.arange(0, STATE_SIZE), part * COLUMNS + tl.arange(0, COLUMNS)
    entry, line, is_column = tl.arange(0, CHUNK), tl.arange(0, BLOCK), (column < HEAD_DIM)[None, :]
    of_x = (head * HEAD_DIM + column)[None, :]
    of_key = (HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE_SIZE + element)[None, :]
    rate, bias, d = tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    state_ptrs = slots_ptr + (row * HEADS + head) * STATE_SIZE * HEAD_DIM
    state_ptrs += element[:, None] * HEAD_DIM + column[None, :]
    state = tl.load(state_ptrs, (before > 0) & is_column, 0.0)
    base = before
    while base < end:
        position, stop = base + entry, tl.minimum(base + CHUNK, end)
        is_entry, is_new = position < stop, (position >= start) & (position < stop)
        old, new = row * RECENT + base % RECENT, (first + base - start).to(tl.int64)  # the chunk's first entry
        xbc = xbc_ptr + new * OF_TOKEN + entry * OF_TOKEN
        entries = tl.where(is_new, xbc, recent_ptr + old * OF_ENTRY + entry * OF_ENTRY)[:, None]
        keys = tl.load(entries + of_key, is_entry[:, None], 0.0)
        x = tl.load(entries + of_x, is_entry[:, None] & is_column, 0.0)
        step = tl.load(dt_ptr + new * in_stride + entry * in_stride + head, is_new, 0.0).to(tl.float32)
        step = softplus(step * dt_factor + bias)
        step = tl.where(is_new, tl.minimum(tl.maximum(step, least), most), 0.0)
        tl.store(new_steps_ptr + new * HEADS + entry * HEADS + head, step, is_new & (part == 0))
        step += tl.load(steps_ptr + old * HEADS + entry * HEADS + head, is_entry & ~is_new, 0.0)
        left, step = tl.associative_scan((-rate * step, step), 0, _add_first)  # sums of decays up to each entry
        block = (tl.maximum(base, start) - base) // BLOCK
        while base + block * BLOCK < stop:
            i = block * BLOCK + line
            is_here = (base + i >= start) & (base + i < stop)
            of_line = xbc_ptr + new * OF_TOKEN + i[:, None] * OF_TOKEN
            query = tl.load(of_line + GROUPS * STATE_SIZE + of_key, is_here[:, None], 0.0)
            own = tl.sum(tl.where(entry[:, None] == i[None, :], left[:, None], 0.0), axis=0)
            weights = tl.dot(query, tl.trans(keys), input_precision="ieee")
            weights *= tl.exp(tl.minimum(own[:, None] - left[None, :], 0.0)) * step[None, :]
            weights = tl.where(entry[None, :] <= i[:, None], weights, 0.0)
            y = product(query, state) * tl.exp(own)[:, None]
            y += product(weights, x)
            mask = is_here[:, None] & is_column
            y += d * tl.load(of_line + of_x, mask, 0.0).to(tl.float32)
            gate = tl.load(z_ptr + new * in_stride + i[:, None] * in_stride + of_x, mask, 0.0)
            gate = gate.to(tl.float32) * z_factor
            y *= gate / (1.0 + tl.exp(-gate))
            tl.store(out_ptr + new * HEADS * HEAD_DIM + i[:, None] * (HEADS * HEAD_DIM) + of_x, y, mask)
            squares = tl.sum(tl.where(is_column, y * y, 0.0), axis=1)
            tl.store(squares_ptr + new * PARTS * HEADS + (i * PARTS + part) * HEADS + head, squares, is_here)
            block += 1
        base += CHUNK
        if (base <= stop) & ((base < end) | (base == after)):
            all_left = tl.sum(tl.where(entry == CHUNK - 1, left, 0.0))
            values = x.to(tl.float32) * (tl.exp(all_left - left) * step)[:, None]
            state = state * tl.exp(all_left) + product(tl.trans(keys), values)
            if base == after:
                tl.store(state_ptrs, state, is_column)


@triton.jit
def _store_kernel(
    xbc_ptr, new_steps_ptr, recent_ptr, steps_ptr, rows_ptr, cu_ptr, ends_ptr, after_ptr, row_of_ptr,
    HEADS: tl.constexpr, OF_ENTRY: tl.constexpr, OF_TOKEN: tl.constexpr, RECENT: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Stores a token that comes after the state. It may overwrite an entry that all heads of a group read in this step,
    so it is a kernel of its own."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(row_of_ptr + token)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(ends_ptr + index) - tl.load(cu_ptr + index + 1) + tl.program_id(0)
    is_recent, place = (row > 0) & (position >= tl.load(after_ptr + index)), row * RECENT + position % RECENT
    element, head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_HEADS)
    mask = is_recent & (element < OF_ENTRY)
    tl.store(recent_ptr + place * OF_ENTRY + element, tl.load(xbc_ptr + token * OF_TOKEN + element, mask), mask)
    mask = is_recent & (tl.program_id(1) == 0) & (head < HEADS)
    tl.store(steps_ptr + place * HEADS + head, tl.load(new_steps_ptr + token * HEADS + head, mask), mask)


@triton.jit
def _grouped_norm_kernel(
    out_ptr, y_ptr, squares_ptr, weight_ptr, squares_stride, heads, columns, size, eps, BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token, group, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_HEADS)
    squares = tl.load(squares_ptr + token * squares_stride + group * heads + head, head < heads, 0.0)
    scale = tl.rsqrt(tl.sum(squares) / size + eps)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at, mask = group * columns + column, column < columns
    of_token = token * columns * tl.num_programs(1)
    y = tl.load(y_ptr + of_token + at, mask) * scale * tl.load(weight_ptr + at, mask)
    tl.store(out_ptr + of_token + at, y.to(out_ptr.dtype.element_ty), mask)


def mamba(
    xbc: torch.Tensor,
    z_dt: tuple[torch.Tensor, torch.Tensor],
    layer: MambaArgs,
    states: RowStates,
    slots: torch.Tensor,
    recent: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `worker.kernels.cpu_mamba.mamba`, for a `state_size` that is a power of two."""
    (z, dt), (entries, steps), num_tokens = z_dt, recent, len(xbc)
    assert xbc.is_contiguous(), "x, B and C of a token lie side by side"
    assert z.stride() == dt.stride() == (z.stride(0), 1), "z and dt are columns of one product"
    columns = min(_COLUMNS, layer.head_dim, _STATE_BYTES // (layer.state_size * xbc.itemsize))
    parts = triton.cdiv(layer.head_dim, columns)
    # Zeros for padding, because other layers must not read NaNs.
    out = xbc.new_zeros(num_tokens, layer.heads * layer.head_dim, dtype=torch.float32)
    squares = out.new_zeros(num_tokens, parts, layer.heads)
    new_steps = out.new_empty(num_tokens, layer.heads)
    rows = states.rows, states.cu_seqlens_q, states.ends
    _mamba_kernel[(layer.heads * parts, len(states.rows))](
        out, squares, new_steps, xbc, z, dt, layer.a_log, layer.dt_bias, layer.d, slots, entries, steps, *rows,
        states.before, states.after, z.stride(0), *layer.numbers, HEADS=layer.heads, GROUPS=layer.groups,
        HEAD_DIM=layer.head_dim, STATE_SIZE=layer.state_size, RECENT=entries.shape[1], CHUNK=_CHUNK, BLOCK=_BLOCK,
        COLUMNS=columns, PARTS=parts, num_warps=4 if layer.state_size <= 128 else 8,
    )  # fmt: skip
    _store_kernel[(num_tokens, triton.cdiv(entries.shape[2], _COPIED))](
        xbc, new_steps, entries, steps, *rows, states.after, states.row_of_token, HEADS=layer.heads,
        OF_ENTRY=entries.shape[2], OF_TOKEN=xbc.shape[1], RECENT=entries.shape[1], BLOCK=_COPIED,
        BLOCK_HEADS=triton.next_power_of_2(layer.heads),
    )  # fmt: skip
    return out, functools.reduce(torch.add, squares.unbind(1))


def grouped_norm(
    y: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    num_groups: int,
    size: int,
    eps: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Like `worker.kernels.cpu_mamba.grouped_norm`."""
    heads, columns = squares.shape[1] // num_groups, y.shape[1] // num_groups
    assert squares.stride(1) == 1, "the heads of a token lie side by side"
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    _grouped_norm_kernel[(len(y), num_groups, triton.cdiv(columns, _NORMED))](
        out, y, squares, weight, squares.stride(0), heads, columns, size, eps,
        BLOCK_HEADS=triton.next_power_of_2(heads), BLOCK=_NORMED,
    )  # fmt: skip
    return out
