"""Gated DeltaNet for GPUs (`configs.delta_net.GatedDeltaNet`).

A program computes some columns of one row's value head. It goes through chunks of 64 positions, and in each chunk
through blocks of 16, both counted from the request's beginning. Matrix products have what a block's tokens read from
the stored state and from earlier blocks. What a token reads from its own block needs the tokens before it, so the lines
of a block are computed one after the other.

A decode computes one line of its block, by products of the same shapes in the same order. The order of a product's sums
depends neither on its other lines nor on the place of the line. So a token's bits do not depend on how its row is cut
into steps. Before the kernel of a decode runs one that has the products of keys, which all columns of some heads share.
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
def _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, token, is_new, a_stride, head):
    """The logarithms of the decays at new tokens; 0 for others."""
    step = tl.load(a_ptr + token * a_stride + head, is_new, 0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
    return tl.where(is_new, -tl.exp(tl.load(a_log_ptr + head)) * step, 0.0)


@triton.jit
def _products(x, keys, left, of_keys, mask, PRECISION: tl.constexpr):
    """The products of `x` [n, size] and `keys` [m, size], decayed between their tokens; 0 outside `mask` [n, m]. `left`
    [n] and `of_keys` [m] are the sums of decays up to each token."""
    since = tl.exp(tl.minimum(left[:, None] - of_keys[None, :], 0.0))
    return tl.where(mask, tl.dot(x, tl.trans(keys), input_precision=PRECISION) * since, 0.0)


@triton.jit
def _keys_of(
    old_ptr, new_ptr, position, start, end, RECENT: tl.constexpr, OLD_STRIDE: tl.constexpr, STRIDE: tl.constexpr
):
    """Keys at `position` [n]: recent ones before `start`, those of this step up to `end`, and zeros after them.
    `old_ptr` and `new_ptr` [1, size] are those of position 0."""
    is_old, is_new = (position < start)[:, None], ((position >= start) & (position < end))[:, None]
    old = tl.load(old_ptr + (position % RECENT)[:, None] * OLD_STRIDE, is_old, 0.0)
    return tl.where(is_new, tl.load(new_ptr + position.to(tl.int64)[:, None] * STRIDE, is_new, 0.0), old)


@triton.jit
def _advanced(
    state, decays, base, start, old_ptr, new_ptr, value_ptr, RECENT: tl.constexpr, OLD_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state after the chunk at `base`, whose values are all stored. `decays` [CHUNK] are sums from its start."""
    entry, line = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    all_left = tl.sum(tl.where(entry == CHUNK - 1, decays, 0.0))
    state = state * tl.exp(all_left)
    for block in tl.static_range(CHUNK // BLOCK):
        position = base + block * BLOCK + line
        left = tl.sum(tl.where(entry[:, None] == block * BLOCK + line[None, :], decays[:, None], 0.0), axis=0)
        keys = _keys_of(old_ptr, new_ptr, position, start, base + CHUNK, RECENT, OLD_STRIDE, STRIDE)
        keys = keys.to(tl.float32) * tl.exp(all_left - left)[:, None]
        values = tl.load(value_ptr + (position % RECENT)[:, None] * VALUE_STRIDE).to(tl.float32)
        state = tl.dot(tl.trans(keys), values, acc=state, input_precision=PRECISION)
    return state


@triton.jit
def _prompt_kernel(
    out_ptr, qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, keys_ptr, values_ptr, decays_ptr, rows_ptr,
    cu_ptr, ends_ptr, before_ptr, after_ptr, a_stride, b_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    start = end - (tl.load(cu_ptr + index + 1) - first)
    before, after = tl.load(before_ptr + index), tl.load(after_ptr + index)
    OF_TOKEN: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    OF_VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    key_head, key = head // (VALUE_HEADS // KEY_HEADS), tl.arange(0, KEY_DIM)
    column = head * VALUE_DIM + tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    entry, line = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    if row == 0:  # padding: zeros, because other layers must not read NaNs
        unused, stop = first, first + end - start
        while unused < stop:
            to = out_ptr + (unused + line).to(tl.int64)[:, None] * OF_VALUES + column[None, :]
            tl.store(to, tl.zeros((BLOCK, COLUMNS), out_ptr.dtype.element_ty), (unused + line < stop)[:, None])
            unused += BLOCK
        return
    # The first new token is `first` of the step and `start` of the row.
    of_zero = qkv_ptr + (first - start).to(tl.int64) * OF_TOKEN
    of_query, of_key = (
        of_zero + (key_head * KEY_DIM + key)[None, :],
        of_zero + (OF_KEYS + key_head * KEY_DIM + key)[None, :],
    )
    old_key = keys_ptr + row * RECENT * OF_KEYS + (key_head * KEY_DIM + key)[None, :]
    of_value, old_value = (
        of_zero + 2 * OF_KEYS + column[None, :],
        values_ptr + row * RECENT * OF_VALUES + column[None, :],
    )
    state_ptrs = slots_ptr + (row * OF_VALUES + head * VALUE_DIM) * KEY_DIM + key[:, None] * VALUE_DIM
    state_ptrs += (column - head * VALUE_DIM)[None, :]
    state = tl.load(state_ptrs, mask=before > 0, other=0.0)
    base = before
    while base < end:
        stop, position = tl.minimum(base + CHUNK, end), base + entry
        is_new, token = (position >= start) & (position < stop), (first + position - start).to(tl.int64)
        keys = _keys_of(old_key, of_key, position, start, stop, RECENT, OF_KEYS, OF_TOKEN)
        passed = _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, token, is_new, a_stride, head)
        old_decay = decays_ptr + (row * RECENT + position % RECENT) * VALUE_HEADS + head
        decays = tl.cumsum(passed + tl.load(old_decay, position < start, 0.0), axis=0)
        block = (tl.maximum(base, start) - base) // BLOCK
        while base + block * BLOCK < stop:
            of_line = base + block * BLOCK + line
            is_live, at = (of_line >= start) & (of_line < stop), of_line.to(tl.int64)[:, None] * OF_TOKEN
            q = tl.load(of_query + at, is_live[:, None], 0.0)
            k = _keys_of(old_key, of_key, of_line, start, stop, RECENT, OF_KEYS, OF_TOKEN)
            v = tl.load(of_value + at, is_live[:, None], 0.0).to(tl.float32)
            to_value = old_value + (of_line % RECENT)[:, None] * OF_VALUES
            own = tl.load(to_value, (of_line < start)[:, None], 0.0)
            of_line = (first + of_line - start).to(tl.int64)
            beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + of_line * b_stride + head, is_live, 0.0).to(tl.float32)))
            is_earlier = entry < block * BLOCK
            added = tl.load(old_value + (position % RECENT)[:, None] * OF_VALUES, is_earlier[:, None], 0.0)
            added = added.to(tl.float32)
            here = entry[:, None] == block * BLOCK + line[None, :]
            left = tl.sum(tl.where(here, decays[:, None], 0.0), axis=0)  # one entry each
            # Each token reads the state and what earlier blocks of the chunk added.
            read = tl.dot(k.to(tl.float32), state, input_precision=PRECISION) * tl.exp(left)[:, None]
            out = tl.dot(q.to(tl.float32), state, input_precision=PRECISION) * tl.exp(left)[:, None]
            by = _products(k, keys, left, decays, is_earlier[None, :], PRECISION)
            read = tl.dot(by, added, acc=read, input_precision=PRECISION)
            by = _products(q, keys, left, decays, is_earlier[None, :], PRECISION)
            out = tl.dot(by, added, acc=out, input_precision=PRECISION)
            # In its own block, each new token reads what the tokens before it added.
            by = _products(k, k, left, left, line[:, None] > line[None, :], PRECISION)
            i = tl.maximum(start - base - block * BLOCK, 0)
            while i < tl.minimum(stop - base - block * BLOCK, BLOCK):
                change = beta[:, None] * (v - tl.dot(by, own.to(tl.float32), acc=read, input_precision=PRECISION))
                own = tl.where((line == i)[:, None], change.to(own.dtype), own)
                i += 1
            by = _products(q, k, left, left, line[:, None] >= line[None, :], PRECISION)
            out = tl.dot(by, own.to(tl.float32), acc=out, input_precision=PRECISION) * KEY_DIM**-0.5
            tl.store(to_value, own, is_live[:, None])
            to = out_ptr + of_line[:, None] * OF_VALUES + column[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), is_live[:, None])
            tl.debug_barrier()  # other threads read these values
            block += 1
        base += CHUNK
        if (base <= stop) & ((base < end) | (base == after)):
            state = _advanced(
                state, decays, base - CHUNK, start, old_key, of_key, old_value, RECENT, OF_KEYS, OF_TOKEN, OF_VALUES,
                CHUNK, BLOCK, PRECISION,
            )  # fmt: skip
            if base == after:
                tl.store(state_ptrs, state)


@triton.jit
def _store_kernel(
    qkv_ptr, a_ptr, a_log_ptr, dt_bias_ptr, keys_ptr, decays_ptr, rows_ptr, cu_ptr, ends_ptr, after_ptr, a_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, OF_TOKEN: tl.constexpr,
    RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores keys and decays of a row's last tokens for later steps. `_prompt_kernel` must not, because its other
    programs might still have to read the same places."""
    index, head = tl.program_id(0), tl.program_id(1)
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    start = end - (tl.load(cu_ptr + index + 1) - first)
    key_head, key = head // (VALUE_HEADS // KEY_HEADS), tl.arange(0, KEY_DIM)
    base = tl.maximum(start, tl.load(after_ptr + index))
    while (base < end) & (row > 0):
        position = base + tl.arange(0, BLOCK)
        token, is_new, place = (first + position - start).to(tl.int64), position < end, row * RECENT + position % RECENT
        passed = _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, token, is_new, a_stride, head)
        tl.store(decays_ptr + place * VALUE_HEADS + head, passed, is_new)
        if head % (VALUE_HEADS // KEY_HEADS) == 0:
            of_key = qkv_ptr + token[:, None] * OF_TOKEN + (KEY_HEADS + key_head) * KEY_DIM + key[None, :]
            to = keys_ptr + (place * KEY_HEADS + key_head)[:, None] * KEY_DIM + key[None, :]
            tl.store(to, tl.load(of_key, is_new[:, None], 0.0), is_new[:, None])
        base += BLOCK


@triton.jit
def _decode_products_kernel(
    by_ptr, left_ptr, qkv_ptr, a_ptr, a_log_ptr, dt_bias_ptr, keys_ptr, decays_ptr, rows_ptr, ends_ptr, before_ptr,
    a_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, OF_TOKEN: tl.constexpr,
    RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes how much a token reads of each entry of its chunk: with its key by[row, head, 0], with its query
    by[row, head, 1]. Computes the sum of decays up to the token, and stores its key and its decays."""
    index, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, position = tl.load(rows_ptr + index).to(tl.int64), tl.load(ends_ptr + index) - 1
    before = tl.load(before_ptr + index)
    if row == 0:  # padding
        return
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    base = before + (position - before) // CHUNK * CHUNK
    entry, line, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK), tl.arange(0, KEY_DIM)
    of_token = qkv_ptr + index * OF_TOKEN + key_head * KEY_DIM + key[None, :]
    old_key = keys_ptr + row * RECENT * KEY_HEADS * KEY_DIM + (key_head * KEY_DIM + key)[None, :]
    x = tl.load(of_token + (1 - line)[:, None] * KEY_HEADS * KEY_DIM, (line < 2)[:, None], 0.0)
    of_zero = of_token + KEY_HEADS * KEY_DIM - position.to(tl.int64) * OF_TOKEN
    keys = _keys_of(
        old_key, of_zero, base + entry, position, position + 1, RECENT, KEY_HEADS * KEY_DIM, OF_TOKEN
    )  # fmt: skip
    products = tl.dot(x, tl.trans(keys), input_precision=PRECISION)
    is_own = (line < 2)[:, None] & (base + entry[None, :] < position + line[:, None])
    for i in tl.static_range(SHARED):
        head = key_head * SHARED + i
        place, is_new = (row * RECENT + (base + entry) % RECENT) * VALUE_HEADS + head, base + entry == position
        passed = _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, index + 0 * entry, is_new, a_stride, head)
        passed += tl.load(decays_ptr + place, base + entry < position, 0.0)
        decays = tl.cumsum(passed, axis=0)
        left = tl.sum(tl.where(is_new, decays, 0.0))
        tl.store(left_ptr + index * VALUE_HEADS + head, left)
        tl.store(decays_ptr + place, passed, is_new)
        by = tl.where(is_own, products * tl.exp(tl.minimum(left - decays, 0.0))[None, :], 0.0)
        to = by_ptr + ((index * VALUE_HEADS + head) * 2 + line)[:, None] * CHUNK + entry[None, :]
        tl.store(to, by, (line < 2)[:, None])
    k = tl.load(of_token + KEY_HEADS * KEY_DIM)
    tl.store(old_key + position % RECENT * KEY_HEADS * KEY_DIM, k)


@triton.jit
def _catch_up_kernel(
    slots_ptr, keys_ptr, values_ptr, decays_ptr, rows_ptr, ends_ptr, before_ptr, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RECENT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Moves a state forward that lies a whole chunk before a decode's token, because the tokens between were drafts."""
    index, head = tl.program_id(0), tl.program_id(1)
    row, before = tl.load(rows_ptr + index).to(tl.int64), tl.load(before_ptr + index)
    if (row == 0) | (tl.load(ends_ptr + index) - 1 - before < CHUNK):
        return
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    OF_VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    key_head, key = head // (VALUE_HEADS // KEY_HEADS), tl.arange(0, KEY_DIM)
    column = head * VALUE_DIM + tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    old_key = keys_ptr + row * RECENT * OF_KEYS + (key_head * KEY_DIM + key)[None, :]
    old_value = values_ptr + row * RECENT * OF_VALUES + column[None, :]
    place = row * RECENT + (before + tl.arange(0, CHUNK)) % RECENT
    decays = tl.cumsum(tl.load(decays_ptr + place * VALUE_HEADS + head), axis=0)
    state_ptrs = slots_ptr + (row * OF_VALUES + head * VALUE_DIM) * KEY_DIM + key[:, None] * VALUE_DIM
    state_ptrs += (column - head * VALUE_DIM)[None, :]
    state = tl.load(state_ptrs, mask=before > 0, other=0.0)
    state = _advanced(
        state, decays, before, before + CHUNK, old_key, old_key, old_value, RECENT, OF_KEYS, OF_KEYS, OF_VALUES, CHUNK,
        BLOCK, PRECISION,
    )  # fmt: skip
    tl.store(state_ptrs, state)


@triton.jit
def _decode_kernel(
    out_ptr, by_ptr, left_ptr, qkv_ptr, b_ptr, slots_ptr, keys_ptr, values_ptr, decays_ptr, rows_ptr, ends_ptr,
    before_ptr, b_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, position = tl.load(rows_ptr + index).to(tl.int64), tl.load(ends_ptr + index) - 1
    before = tl.load(before_ptr + index)
    OF_TOKEN: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    OF_VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    key_head, key = head // (VALUE_HEADS // KEY_HEADS), tl.arange(0, KEY_DIM)
    column = head * VALUE_DIM + tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    entry, line = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    if row == 0:  # padding: zeros, because other layers must not read NaNs
        tl.store(out_ptr + index * OF_VALUES + column, tl.zeros((COLUMNS,), out_ptr.dtype.element_ty))
        return
    base = before + (position - before) // CHUNK * CHUNK
    first = base + (position - base) // BLOCK * BLOCK  # of the block
    of_token = qkv_ptr + index * OF_TOKEN
    old_key = keys_ptr + row * RECENT * OF_KEYS + (key_head * KEY_DIM + key)[None, :]
    old_value = values_ptr + row * RECENT * OF_VALUES + column[None, :]
    old_decay = decays_ptr + row * RECENT * VALUE_HEADS + head
    state_ptrs = slots_ptr + (row * OF_VALUES + head * VALUE_DIM) * KEY_DIM + key[:, None] * VALUE_DIM
    state_ptrs += (column - head * VALUE_DIM)[None, :]
    # Only the token's line counts.
    is_token = (line == position - first)[:, None]
    of_head = of_token + (key_head * KEY_DIM + key)[None, :] + 0 * line[:, None]
    q, k = tl.load(of_head, is_token, 0.0).to(tl.float32), tl.load(of_head + OF_KEYS, is_token, 0.0).to(tl.float32)
    by_key = by_ptr + (index * VALUE_HEADS + head) * 2 * CHUNK + 0 * line[:, None]
    of_earlier, of_own = entry[None, :], (first - base + line)[None, :]
    by_key_earlier = tl.load(by_key + of_earlier, is_token & (base + of_earlier < first), 0.0)
    by_query_earlier = tl.load(by_key + CHUNK + of_earlier, is_token & (base + of_earlier < first), 0.0)
    by_key_own, by_query_own = tl.load(by_key + of_own, is_token, 0.0), tl.load(by_key + CHUNK + of_own, is_token, 0.0)
    is_earlier, is_old = (base + entry < first)[:, None], (first + line < position)[:, None]
    added = tl.load(old_value + ((base + entry) % RECENT)[:, None] * OF_VALUES, is_earlier, 0.0).to(tl.float32)
    to_value = old_value + ((first + line) % RECENT)[:, None] * OF_VALUES
    own = tl.load(to_value, is_old, 0.0)
    v = tl.load(of_token + 2 * OF_KEYS + column).to(tl.float32)[None, :]
    beta = 1.0 / (1.0 + tl.exp(-tl.load(b_ptr + index * b_stride + head).to(tl.float32)))
    left = tl.exp(tl.load(left_ptr + index * VALUE_HEADS + head))
    state = tl.load(state_ptrs, mask=base > 0, other=0.0)
    read = tl.dot(k, state, input_precision=PRECISION) * left
    read = tl.dot(by_key_earlier, added, acc=read, input_precision=PRECISION)
    out = tl.dot(q, state, input_precision=PRECISION) * left
    out = tl.dot(by_query_earlier, added, acc=out, input_precision=PRECISION)
    # One turn, in a loop as a prompt has: the compiler orders the sums of products by where their factors come from.
    i = position - first
    while i < position - first + 1:
        change = beta * (v - tl.dot(by_key_own, own.to(tl.float32), acc=read, input_precision=PRECISION))
        own = tl.where(is_token, change.to(own.dtype), own)
        i += 1
    out = tl.dot(by_query_own, own.to(tl.float32), acc=out, input_precision=PRECISION) * KEY_DIM**-0.5
    to = out_ptr + index * OF_VALUES + column[None, :] + 0 * line[:, None]
    tl.store(to, out.to(out_ptr.dtype.element_ty), is_token)
    tl.store(to_value, own, is_token)
    if position + 1 == base + CHUNK:
        tl.debug_barrier()  # other threads read this value
        decays = tl.cumsum(tl.load(old_decay + (base + entry) % RECENT * VALUE_HEADS), axis=0)
        state = _advanced(
            state, decays, base, base + CHUNK, old_key, old_key, old_value, RECENT, OF_KEYS, OF_KEYS, OF_VALUES,
            CHUNK, BLOCK, PRECISION,
        )  # fmt: skip
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
    """Like `worker.kernels.cpu_delta.delta_net`, but q and k of `qkv` have length 1, and recent decays are those of
    single tokens."""
    (z, b, a), (keys, _, decays) = zba, recent
    assert (layer.decay_dim, layer.sigmoid_gate) == (1, False), "these kernels are Gated DeltaNet's"
    assert qkv.is_contiguous(), "q, k and v of a token lie side by side"
    num_rows, heads, columns = len(states.rows), layer.value_heads, min(_COLUMNS, layer.value_dim)
    out = torch.empty(len(qkv), heads * layer.value_dim, dtype=qkv.dtype, device=qkv.device)
    sizes = {"KEY_HEADS": layer.key_heads, "VALUE_HEADS": heads, "KEY_DIM": layer.key_dim, "RECENT": keys.shape[1]}
    of_token, precision = {"OF_TOKEN": qkv.shape[1]}, "ieee" if qkv.dtype is torch.float32 else "tf32"
    chunks = {"CHUNK": _CHUNK, "BLOCK": _BLOCK, "PRECISION": precision}
    of_columns, grid = {"VALUE_DIM": layer.value_dim, "COLUMNS": columns}, (num_rows, heads, layer.value_dim // columns)
    decay, rows = (a, layer.a_log, layer.dt_bias), (states.rows, states.cu_seqlens_q, states.ends)
    if states.is_decode:
        by = torch.empty(num_rows, heads, 2, _CHUNK, device=qkv.device)
        left = torch.empty(num_rows, heads, device=qkv.device)
        _decode_products_kernel[(num_rows, layer.key_heads)](
            by, left, qkv, *decay, keys, decays, states.rows, states.ends, states.before, a.stride(0), **sizes,
            **of_token, **chunks,
        )  # fmt: skip
        if states.pool.has_drafts:
            _catch_up_kernel[grid](
                slots, *recent, states.rows, states.ends, states.before, **sizes, **of_columns, **chunks
            )  # fmt: skip
        _decode_kernel[grid](
            out, by, left, qkv, b, slots, *recent, states.rows, states.ends, states.before, b.stride(0), **sizes,
            **of_columns, **chunks, maxnreg=128,
        )  # fmt: skip
    else:
        _prompt_kernel[grid](
            out, qkv, a, b, layer.a_log, layer.dt_bias, slots, *recent, *rows, states.before,
            states.after, a.stride(0), b.stride(0),
            **sizes, **of_columns, **chunks,
        )  # fmt: skip
        _store_kernel[(num_rows, heads)](
            qkv, *decay, keys, decays, *rows, states.after, a.stride(0), **sizes, **of_token, BLOCK=_BLOCK
        )  # fmt: skip
    of_norm = min(_HEADS, triton.next_power_of_2(heads))
    _gated_norm_kernel[(len(qkv), triton.cdiv(heads, of_norm))](
        out, z, layer.norm, heads, z.stride(0), layer.eps, SIZE=layer.value_dim, HEADS=of_norm
    )  # fmt: skip
    return out
