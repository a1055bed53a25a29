"""Gated DeltaNet for GPUs (`configs.delta_net.GatedDeltaNet`).

A program computes some columns of one row's value head. It goes through chunks of 64 positions, and in each chunk
through blocks of 16, both counted from the request's beginning. A matrix product per block has what the block's tokens
read from the stored state and from earlier blocks. What a token reads from its own block is added token by token. A
decode computes one line of its block, by the same instructions in the same order as a prompt does. So a token's bits do
not depend on how its row is cut into steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.state_pool import RowStates
from worker.kernels.cpu_delta import DeltaArgs

_BLOCK = 16
_CHUNK = 64  # configs/recurrent.py: STATE_CHUNK
_COLUMNS = 32
_HEADS = 4


@triton.jit
def _line(lines, i, SIZE: tl.constexpr):
    """Line i of `lines` [SIZE, n]."""
    return tl.sum(tl.where((tl.arange(0, SIZE) == i)[:, None], lines, 0.0), axis=0)


@triton.jit
def _normalised(x, length, DTYPE: tl.constexpr):
    """Lines of `x` [n, size] fp32, scaled to this length."""
    return (x * (tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6) * length)[:, None]).to(DTYPE)


@triton.jit
def _products(x, keys, left, of_keys, mask, PRECISION: tl.constexpr):
    """The products of `x` [n, size] and `keys` [m, size], decayed between their tokens; 0 outside `mask` [n, m]. `left`
    [n] and `of_keys` [m] are the sums of decays up to each token."""
    since = tl.exp(tl.minimum(left[:, None] - of_keys[None, :], 0.0))
    return tl.where(mask, tl.dot(x, tl.trans(keys), input_precision=PRECISION) * since, 0.0)


@triton.jit
def _delta_kernel(
    out_ptr, qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, keys_ptr, values_ptr, decays_ptr, rows_ptr,
    cu_ptr, ends_ptr, before_ptr, after_ptr, a_stride, b_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    start = end - (tl.load(cu_ptr + index + 1) - first)
    before, after = tl.load(before_ptr + index), tl.load(after_ptr + index)
    if row == 0:  # padding
        return
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    OF_TOKEN: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    DTYPE: tl.constexpr = keys_ptr.dtype.element_ty
    key_head = head // SHARED
    key, column = tl.arange(0, KEY_DIM), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    entry, line = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    rate, bias = tl.exp(tl.load(a_log_ptr + head)), tl.load(dt_bias_ptr + head)
    state_ptrs = slots_ptr + ((row * VALUE_HEADS + head) * KEY_DIM + key)[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(state_ptrs, mask=before > 0, other=0.0)
    base = before
    while base < end:
        stop, begin = tl.minimum(base + CHUNK, end), tl.maximum(base, start)
        position = base + entry
        place, is_old = row * RECENT + position % RECENT, position < start
        keys = tl.load(
            keys_ptr + ((place * KEY_HEADS + key_head) * KEY_DIM)[:, None] + key[None, :], is_old[:, None], 0.0
        )
        values = tl.load(
            values_ptr + ((place * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :], is_old[:, None], 0.0
        )
        decays = tl.load(decays_ptr + place * VALUE_HEADS + head, is_old, 0.0)
        decay = tl.sum(tl.where(position == begin - 1, decays, 0.0))
        block = (begin - base) // BLOCK
        while base + block * BLOCK < stop:
            of_line = base + block * BLOCK + line
            is_new, token = (of_line >= start) & (of_line < stop), (first + of_line - start).to(tl.int64)
            of_key = qkv_ptr + token[:, None] * OF_TOKEN + key_head * KEY_DIM + key[None, :]
            q = tl.load(of_key, is_new[:, None], 0.0).to(tl.float32)
            k = tl.load(of_key + KEY_HEADS * KEY_DIM, is_new[:, None], 0.0).to(tl.float32)
            q, k = _normalised(q, KEY_DIM**-0.5, DTYPE), _normalised(k, 1.0, DTYPE)
            of_value = (
                qkv_ptr + token[:, None] * OF_TOKEN + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column[None, :]
            )
            v = tl.load(of_value, is_new[:, None], 0.0).to(tl.float32)
            step = tl.load(a_ptr + token * a_stride + head, is_new, 0.0).to(tl.float32) + bias
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
            beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + token * b_stride + head, is_new, 0.0).to(tl.float32)))
            passed = tl.where(is_new, -rate * step, 0.0)
            # The block's entries among those of the chunk: old ones, and the new ones of this step.
            here = entry[:, None] == block * BLOCK + line[None, :]
            is_entry = here & is_new[None, :]
            left = tl.zeros((BLOCK,), tl.float32)
            for i in tl.static_range(BLOCK):
                decay += tl.sum(tl.where(line == i, passed, 0.0))
                left = tl.where(line == i, decay, left)
            decays += tl.sum(tl.where(is_entry, left[None, :], 0.0), axis=1)
            keys += tl.dot(is_entry.to(DTYPE), k, input_precision="ieee").to(DTYPE)
            own_keys = tl.dot(tl.trans(here.to(DTYPE)), keys, input_precision="ieee").to(DTYPE)
            own_values = tl.dot(tl.trans(here.to(DTYPE)), values, input_precision="ieee")
            left = tl.sum(tl.where(here, decays[:, None], 0.0), axis=0)
            # Each new token reads the state and what earlier blocks of the chunk added.
            read = tl.dot(k.to(tl.float32), state, input_precision=PRECISION) * tl.exp(left)[:, None]
            out = tl.dot(q.to(tl.float32), state, input_precision=PRECISION) * tl.exp(left)[:, None]
            is_earlier, added = (entry < block * BLOCK)[None, :], values.to(tl.float32)
            by = _products(k, keys, left, decays, is_earlier, PRECISION)
            read += tl.dot(by, added, input_precision=PRECISION)
            by = _products(q, keys, left, decays, is_earlier, PRECISION)
            out += tl.dot(by, added, input_precision=PRECISION)
            # In its own block, each new token reads what the tokens before it added.
            by = _products(k, own_keys, left, left, line[:, None] > line[None, :], PRECISION)
            i = tl.maximum(begin - base - block * BLOCK, 0)
            while i < tl.minimum(stop - base - block * BLOCK, BLOCK):
                before_it = _line(read, i, BLOCK) + tl.sum(_line(by, i, BLOCK)[:, None] * own_values, axis=0)
                change = tl.sum(tl.where(line == i, beta, 0.0)) * (_line(v, i, BLOCK) - before_it)
                own_values = tl.where((line == i)[:, None], change.to(DTYPE).to(tl.float32)[None, :], own_values)
                i += 1
            by = _products(q, own_keys, left, left, line[:, None] >= line[None, :], PRECISION)
            out += tl.dot(by, own_values, input_precision=PRECISION)
            values += tl.dot(is_entry.to(DTYPE), own_values.to(DTYPE), input_precision="ieee").to(DTYPE)
            to = out_ptr + (token * VALUE_HEADS + head)[:, None] * VALUE_DIM + column[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), is_new[:, None])
            block += 1
        place, is_kept = (
            row * RECENT + (base + entry) % RECENT,
            (base + entry >= tl.maximum(start, after)) & (base + entry < stop),
        )
        tl.store(
            values_ptr + ((place * VALUE_HEADS + head) * VALUE_DIM)[:, None] + column[None, :], values, is_kept[:, None]
        )
        if tl.program_id(2) == 0:
            tl.store(decays_ptr + place * VALUE_HEADS + head, decays, is_kept)
            if head % SHARED == 0:
                tl.store(
                    keys_ptr + ((place * KEY_HEADS + key_head) * KEY_DIM)[:, None] + key[None, :],
                    keys,
                    is_kept[:, None],
                )
        base += CHUNK
        if (base <= stop) & ((base < end) | (base == after)):
            all_left = tl.sum(tl.where(entry == CHUNK - 1, decays, 0.0))
            added = keys.to(tl.float32) * tl.exp(all_left - decays)[:, None]
            state = state * tl.exp(all_left) + tl.dot(tl.trans(added), values.to(tl.float32), input_precision=PRECISION)
            if base == after:
                tl.store(state_ptrs, state)


@triton.jit
def _gated_norm_kernel(
    x_ptr, z_ptr, weight_ptr, num_heads, in_stride, eps, SIZE: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """x = norm(x) * silu(z), in place."""
    token, head, element = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * HEADS + tl.arange(0, HEADS),
        tl.arange(0, SIZE),
    )
    at, mask = head[:, None] * SIZE + element[None, :], (head < num_heads)[:, None]
    x = tl.load(x_ptr + token * num_heads * SIZE + at, mask, 0.0).to(tl.float32)
    z = tl.load(z_ptr + token * in_stride + at, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    y = x * scale[:, None] * tl.load(weight_ptr + element)[None, :] * (z / (1.0 + tl.exp(-z)))
    tl.store(x_ptr + token * num_heads * SIZE + at, y.to(x_ptr.dtype.element_ty), mask)


def delta_net(
    qkv: torch.Tensor,
    zba: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: DeltaArgs,
    states: RowStates,
    slots: torch.Tensor,
    recent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Like `worker.kernels.cpu_delta.delta_net`."""
    z, b, a = zba
    assert (layer.decay_dim, layer.sigmoid_gate) == (1, False), "these kernels are Gated DeltaNet's"
    assert qkv.is_contiguous(), "q, k and v of a token lie side by side"
    out = torch.empty(len(qkv), layer.value_heads * layer.value_dim, dtype=qkv.dtype, device=qkv.device)
    columns = min(_COLUMNS, layer.value_dim)
    rows = states.rows, states.cu_seqlens_q, states.ends, states.before, states.after
    _delta_kernel[(len(states.rows), layer.value_heads, layer.value_dim // columns)](
        out, qkv, a, b, layer.a_log, layer.dt_bias, slots, *recent, *rows, a.stride(0), b.stride(0),
        KEY_HEADS=layer.key_heads, VALUE_HEADS=layer.value_heads, KEY_DIM=layer.key_dim, VALUE_DIM=layer.value_dim,
        RECENT=recent[0].shape[1], CHUNK=_CHUNK, BLOCK=_BLOCK, COLUMNS=columns,
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
    )  # fmt: skip
    heads = min(_HEADS, triton.next_power_of_2(layer.value_heads))
    _gated_norm_kernel[(len(qkv), triton.cdiv(layer.value_heads, heads))](
        out, z, layer.norm, layer.value_heads, z.stride(0), layer.eps, SIZE=layer.value_dim, HEADS=heads
    )  # fmt: skip
    return out
