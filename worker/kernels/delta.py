"""Gated DeltaNet for GPUs (`configs.delta_net.GatedDeltaNet`).

Tokens are computed in chunks of 64 positions, and in each chunk in blocks of 16, both counted from the request's
beginning. The first kernel computes, for each block by itself, how much its tokens read of each entry of their chunk.
The second one has a program for some columns of a row's value head, and goes through the row's blocks. Matrix products
have what a block's tokens read of the stored state and of earlier blocks. What a token reads of its own block needs the
tokens before it, so the lines of a block are computed one after the other.

A decode computes one line of a block, by the same instructions as a prompt. The order of a product's sums depends
neither on its other lines nor on the place of the line. So a token's bits do not depend on how its row is cut into
steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.state_pool import RowStates
from worker.kernels.cpu_delta import DeltaArgs
from worker.kernels.recurrent import softplus

_BLOCK = 16
_CHUNK = 64  # configs/recurrent.py: STATE_CHUNK
_COLUMNS = 32
# The most registers of a thread, in a decode and in a prompt: the fastest of 128, 168 and 255 on an H200
# (benchmarks/results/recurrent_h200_2026-11-28.txt).
_DECODE_REGISTERS, _PROMPT_REGISTERS = 168, 128
_HEADS = 4


@triton.jit
def _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, token, is_new, a_stride, head):
    """The logarithms of the decays at new tokens; 0 for others."""
    step = tl.load(a_ptr + token * a_stride + head, is_new, 0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    step = softplus(step)
    return tl.where(is_new, -tl.exp(tl.load(a_log_ptr + head)) * step, 0.0)


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
    """Returns the state after the chunk at `base`. All values of the chunk must be stored. `decays` [CHUNK] are sums
    from the chunk's start."""
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
def _block_of(program, rows_ptr, cu_ptr, ends_ptr, num_rows, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The index of a step's row, and the block of its positions, for which this program computes products. After the
    last block the index is `num_rows`."""
    index = tl.arange(0, ROWS)
    is_row = index < num_rows
    end = tl.load(ends_ptr + index, is_row, 0)
    start = end - tl.load(cu_ptr + index + 1, is_row, 0) + tl.load(cu_ptr + index, is_row, 0)
    is_used = (start < end) & (tl.load(rows_ptr + index, is_row, 0) > 0)
    blocks = tl.where(is_used, (end - 1) // BLOCK - start // BLOCK + 1, 0)
    ends = tl.cumsum(blocks, 0)
    found = tl.minimum(tl.sum((ends <= program).to(tl.int32)), num_rows)
    is_found = index == found
    return found, tl.sum(tl.where(is_found, start // BLOCK + program - ends + blocks, 0))


@triton.jit(do_not_specialize=["num_rows"])
def _products_kernel(
    by_ptr, left_ptr, qkv_ptr, a_ptr, a_log_ptr, dt_bias_ptr, keys_ptr, decays_ptr, rows_ptr, cu_ptr, ends_ptr,
    num_rows, a_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    OF_TOKEN: tl.constexpr, RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """Computes how much a token reads of each entry of its chunk: with its key by[token, head, 0], with its query
    by[token, head, 1]. Also computes the sum of decays up to the token. In a decode, stores its key and its decays."""
    if IS_DECODE:
        index = tl.program_id(0)
        block = (tl.load(ends_ptr + index) - 1) // BLOCK
    else:
        index, block = _block_of(tl.program_id(0), rows_ptr, cu_ptr, ends_ptr, num_rows, BLOCK, ROWS)
        if index == num_rows:
            return
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    if row == 0:  # padding
        return
    start, key_head = end - (tl.load(cu_ptr + index + 1) - first), tl.program_id(1)
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    entry, line = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    key = (key_head * KEY_DIM + tl.arange(0, KEY_DIM))[None, :]
    position, of_line = block * BLOCK // CHUNK * CHUNK + entry, block * BLOCK + line
    is_old, is_new, is_live = position < start, (position >= start) & (position < end), of_line < end
    is_live = is_live & (of_line >= start)
    of_zero, old_key = qkv_ptr + (first - start).to(tl.int64) * OF_TOKEN, keys_ptr + row * RECENT * OF_KEYS + key
    keys = _keys_of(old_key, of_zero + OF_KEYS + key, position, start, end, RECENT, OF_KEYS, OF_TOKEN)
    of_token = of_zero + of_line.to(tl.int64)[:, None] * OF_TOKEN + key
    q, k = tl.load(of_token, is_live[:, None], 0.0), tl.load(of_token + OF_KEYS, is_live[:, None], 0.0)
    by_key = tl.dot(k, tl.trans(keys), input_precision=PRECISION)
    by_query = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    token, here = (first + of_line - start).to(tl.int64), position[:, None] == of_line[None, :]
    for i in tl.static_range(SHARED):
        head = key_head * SHARED + i
        new = (first + position - start).to(tl.int64)
        passed = _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, new, is_new, a_stride, head)
        old_decay = decays_ptr + (row * RECENT + position % RECENT) * VALUE_HEADS + head
        passed += tl.load(old_decay, is_old, 0.0)
        decays = tl.cumsum(passed, axis=0)
        left = tl.sum(tl.where(here, decays[:, None], 0.0), axis=0)  # one entry each
        tl.store(left_ptr + token * VALUE_HEADS + head, left, is_live)
        since = tl.exp(tl.minimum(left[:, None] - decays[None, :], 0.0))
        to = by_ptr + ((token * VALUE_HEADS + head) * 2 * CHUNK)[:, None] + entry[None, :]
        tl.store(to, tl.where(position[None, :] < of_line[:, None], by_key * since, 0.0), is_live[:, None])
        by = tl.where(position[None, :] <= of_line[:, None], by_query * since, 0.0)
        tl.store(to + CHUNK, by, is_live[:, None])
        if IS_DECODE:
            tl.store(old_decay, passed, is_new)
    if IS_DECODE:
        tl.store(old_key + (of_line % RECENT)[:, None] * OF_KEYS, k, is_live[:, None])


@triton.jit
def _delta_kernel(
    out_ptr, by_ptr, left_ptr, qkv_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, slots_ptr, keys_ptr, values_ptr,
    decays_ptr, rows_ptr, cu_ptr, ends_ptr, before_ptr, after_ptr, a_stride, b_stride, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, RECENT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head = tl.program_id(0), tl.program_id(1)
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    start = end - (tl.load(cu_ptr + index + 1) - first)
    before, after = tl.load(before_ptr + index), tl.load(after_ptr + index)
    OF_TOKEN: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    OF_VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    key = tl.arange(0, KEY_DIM)
    of_key = (head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key)[None, :]
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
    of_zero, zero = qkv_ptr + (first - start).to(tl.int64) * OF_TOKEN, (first - start).to(tl.int64)
    old_value = values_ptr + row * RECENT * OF_VALUES + column[None, :]
    state_ptrs = slots_ptr + (row * OF_VALUES + head * VALUE_DIM) * KEY_DIM + key[:, None] * VALUE_DIM
    state_ptrs += (column - head * VALUE_DIM)[None, :]
    state = tl.load(state_ptrs, mask=before > 0, other=0.0)
    base = before
    while base < end:
        stop = tl.minimum(base + CHUNK, end)
        block = (tl.maximum(base, start) - base) // BLOCK
        while base + block * BLOCK < stop:
            of_line = base + block * BLOCK + line
            is_live, token = ((of_line >= start) & (of_line < stop))[:, None], zero + of_line
            of_token = of_zero + of_line.to(tl.int64)[:, None] * OF_TOKEN
            q = tl.load(of_token + of_key, is_live, 0.0).to(tl.float32)
            k = tl.load(of_token + OF_KEYS + of_key, is_live, 0.0).to(tl.float32)
            v = tl.load(of_token + 2 * OF_KEYS + column[None, :], is_live, 0.0).to(tl.float32)
            beta = tl.load(b_ptr + token[:, None] * b_stride + head, is_live, 0.0).to(tl.float32)
            beta = 1.0 / (1.0 + tl.exp(-beta))
            left = tl.exp(tl.load(left_ptr + token[:, None] * VALUE_HEADS + head, is_live, 0.0))
            by = by_ptr + (token * VALUE_HEADS + head)[:, None] * 2 * CHUNK
            of_earlier, of_own = by + entry[None, :], by + (block * BLOCK + line)[None, :]
            is_earlier = entry < block * BLOCK
            by_key = tl.load(of_earlier, is_live & is_earlier[None, :], 0.0)
            by_query = tl.load(of_earlier + CHUNK, is_live & is_earlier[None, :], 0.0)
            own_by_key, own_by_query = tl.load(of_own, is_live, 0.0), tl.load(of_own + CHUNK, is_live, 0.0)
            added = tl.load(old_value + ((base + entry) % RECENT)[:, None] * OF_VALUES, is_earlier[:, None], 0.0)
            to_value = old_value + (of_line % RECENT)[:, None] * OF_VALUES
            own = tl.load(to_value, (of_line < start)[:, None], 0.0)
            # Each token reads the state and what earlier blocks of the chunk added.
            read = tl.dot(k, state, input_precision=PRECISION) * left
            read = tl.dot(by_key, added.to(tl.float32), acc=read, input_precision=PRECISION)
            out = tl.dot(q, state, input_precision=PRECISION) * left
            out = tl.dot(by_query, added.to(tl.float32), acc=out, input_precision=PRECISION)
            # In its own block, each new token reads what the tokens before it added.
            i = tl.maximum(start - base - block * BLOCK, 0)
            while i < tl.minimum(stop - base - block * BLOCK, BLOCK):
                change = beta * (v - tl.dot(own_by_key, own.to(tl.float32), acc=read, input_precision=PRECISION))
                own = tl.where((line == i)[:, None], change.to(own.dtype), own)
                i += 1
            out = tl.dot(own_by_query, own.to(tl.float32), acc=out, input_precision=PRECISION) * KEY_DIM**-0.5
            tl.store(to_value, own, is_live)
            to = out_ptr + token[:, None] * OF_VALUES + column[None, :]
            tl.store(to, out.to(out_ptr.dtype.element_ty), is_live)
            tl.debug_barrier()  # other threads read these values
            block += 1
        base += CHUNK
        if (base <= stop) & ((base < end) | (base == after)):
            position = base - CHUNK + entry
            passed = _log_decay(a_ptr, a_log_ptr, dt_bias_ptr, zero + position, position >= start, a_stride, head)
            old_decay = decays_ptr + (row * RECENT + position % RECENT) * VALUE_HEADS + head
            decays = tl.cumsum(passed + tl.load(old_decay, position < start, 0.0), axis=0)
            state = _advanced(
                state, decays, base - CHUNK, start, keys_ptr + row * RECENT * OF_KEYS + of_key,
                of_zero + OF_KEYS + of_key, old_value, RECENT, OF_KEYS, OF_TOKEN, OF_VALUES, CHUNK, BLOCK, PRECISION,
            )  # fmt: skip
            if base == after:
                tl.store(state_ptrs, state)


@triton.jit
def _store_kernel(
    qkv_ptr, a_ptr, a_log_ptr, dt_bias_ptr, keys_ptr, decays_ptr, rows_ptr, cu_ptr, ends_ptr, after_ptr, a_stride,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, OF_TOKEN: tl.constexpr,
    RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores keys and decays of a prompt's last tokens for later steps. The kernels before it must not, because other
    programs of theirs might still have to read the same places."""
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
    (num_rows, num_tokens), is_decode = (len(states.rows), len(qkv)), states.is_decode
    heads, columns = layer.value_heads, min(_COLUMNS, layer.value_dim)
    out = torch.empty(num_tokens, heads * layer.value_dim, dtype=qkv.dtype, device=qkv.device)
    by, left = (torch.empty(num_tokens, heads, size, device=qkv.device) for size in (2 * _CHUNK, 1))
    sizes = {"KEY_HEADS": layer.key_heads, "VALUE_HEADS": heads, "KEY_DIM": layer.key_dim, "RECENT": keys.shape[1]}
    of_token, precision = {"OF_TOKEN": qkv.shape[1]}, "ieee" if qkv.dtype is torch.float32 else "tf32"
    chunks = {"CHUNK": _CHUNK, "BLOCK": _BLOCK, "PRECISION": precision}
    decay, rows = (layer.a_log, layer.dt_bias), (states.rows, states.cu_seqlens_q, states.ends)
    # A row's first and last block may be incomplete.
    blocks = num_rows if is_decode else triton.cdiv(num_tokens, _BLOCK) + 2 * num_rows
    _products_kernel[(blocks, layer.key_heads)](
        by, left, qkv, a, *decay, keys, decays, *rows, num_rows, a.stride(0), **sizes, **of_token, **chunks,
        ROWS=triton.next_power_of_2(states.pool.num_rows + 1), IS_DECODE=is_decode,
    )  # fmt: skip
    _delta_kernel[(num_rows, heads, layer.value_dim // columns)](
        out, by, left, qkv, a, b, *decay, slots, *recent, *rows, states.before, states.after, a.stride(0), b.stride(0),
        **sizes, **chunks, VALUE_DIM=layer.value_dim, COLUMNS=columns,
        maxnreg=_DECODE_REGISTERS if is_decode else _PROMPT_REGISTERS,
    )  # fmt: skip
    if not is_decode:
        _store_kernel[(num_rows, heads)](
            qkv, a, *decay, keys, decays, *rows, states.after, a.stride(0), **sizes, **of_token, BLOCK=_BLOCK
        )  # fmt: skip
    of_norm = min(_HEADS, triton.next_power_of_2(heads))
    _gated_norm_kernel[(num_tokens, triton.cdiv(heads, of_norm))](
        out, z, layer.norm, heads, z.stride(0), layer.eps, SIZE=layer.value_dim, HEADS=of_norm
    )  # fmt: skip
    return out
