"""Kimi Delta Attention for GPUs (`configs.kimi_delta.KimiDeltaAttention`).

Three kernels run one after the other. The first prepares each token alone: it normalises q and k and computes the
decays. In the second, a program computes some columns of one row's value head. It goes through chunks of 64 positions,
and in each chunk through blocks of 16, both counted from the request's beginning. Matrix products have what a block's
tokens read from the stored state, from earlier blocks and from their own block. The third norms the outputs and stores
what later steps need of the keys and decays.

A token reads the rounded values of the tokens before it in its block. So a block's new values are computed from
themselves, once for each new token: each time the product with the block's values makes one more of them final. A
decode computes that product once, by the same instructions. So a token's bits do not depend on how its row is cut into
steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.state_pool import RowStates
from worker.kernels.cpu_delta import DeltaArgs
from worker.kernels.recurrent import product, softplus

_BLOCK = 16
_CHUNK = 64  # configs/recurrent.py: STATE_CHUNK
_COLUMNS = 32
_HEADS = 4


@triton.jit
def _normalise(ptrs, mask, length):
    """Scales lines of [n, size] to this length, in place."""
    x = tl.load(ptrs, mask, 0.0).to(tl.float32)
    x *= (tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6) * length)[:, None]
    tl.store(ptrs, x.to(ptrs.dtype.element_ty), mask)


@triton.jit
def _prepare_kernel(
    qkv_ptr, new_decays_ptr, a_ptr, a_log_ptr, dt_bias_ptr, a_stride, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, OF_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    ptrs = qkv_ptr + token * OF_TOKEN + (head * KEY_DIM)[:, None] + tl.arange(0, KEY_DIM)[None, :]
    mask = (head < KEY_HEADS)[:, None]
    _normalise(ptrs, mask, KEY_DIM**-0.5)
    _normalise(ptrs + KEY_HEADS * KEY_DIM, mask, 1.0)
    OF_PROGRAM: tl.constexpr = HEADS * (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    i = tl.arange(0, BLOCK)
    channel = tl.program_id(1) * OF_PROGRAM + i
    mask = (i < OF_PROGRAM) & (channel < VALUE_HEADS * KEY_DIM)
    step = tl.load(a_ptr + token * a_stride + channel, mask, 0.0).to(tl.float32)
    step += tl.load(dt_bias_ptr + channel, mask, 0.0)
    step = softplus(step)
    decay = -tl.exp(tl.load(a_log_ptr + channel // KEY_DIM, mask, 0.0)) * step
    tl.store(new_decays_ptr + token * (VALUE_HEADS * KEY_DIM) + channel, decay, mask)


@triton.jit
def _lines(lines, first, SIZE: tl.constexpr):
    """[SIZE, n]: the lines of `lines` from `first` on."""
    line = first + tl.arange(0, SIZE)
    index = tl.minimum(tl.maximum(line, 0), lines.shape[0] - 1)
    return tl.gather(lines, tl.broadcast_to(index[:, None], (SIZE, lines.shape[1])), 0)


@triton.jit
def _channel_products(x, keys, left, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    """The products of `x` and the lines of `keys` before its own, decayed in each channel; 0 for other lines.

    All are [SIZE, size] fp32; `left` are the sums of decays up to each line. The decay between two lines is that to a
    line between them, times that from there, so that no factor overflows. Groups of lines are halved until every pair
    is separated.
    """
    line = tl.arange(0, SIZE)
    out = tl.zeros((SIZE, SIZE), tl.float32)
    for level in tl.static_range(4):
        half = 1 << level
        between = line // (2 * half) * (2 * half) + half - 1  # the last line of the first half
        between = tl.gather(left, tl.broadcast_to(between[:, None], left.shape), 0)
        decay = tl.exp(-tl.abs(left - between))
        is_second = (line % (2 * half) >= half)[:, None]
        of_x, of_keys = tl.where(is_second, x * decay, 0.0), tl.where(is_second, 0.0, keys * decay)
        is_pair = line[:, None] // (2 * half) == line[None, :] // (2 * half)
        out += tl.where(is_pair, tl.dot(of_x, tl.trans(of_keys), input_precision=PRECISION), 0.0)
    return out


@triton.jit
def _solved(own_values, by, given, beta, is_new, num_new):
    """The new lines of the block's values [n, columns]: beta (given - by values), rounded. `by` [n, n] is 0 except for
    lines before a line's own."""
    # A line that is not final may be too large, and zero times infinity would spoil the final ones.
    MOST: tl.constexpr = 65504.0 if own_values.dtype == tl.float16 else 3e38
    for _ in range(num_new):  # each makes one more line final
        values = beta[:, None] * (given - product(by, own_values))
        values = tl.minimum(tl.maximum(values, -MOST), MOST).to(own_values.dtype)
        own_values = tl.where(is_new[:, None], values, own_values)
    return own_values


@triton.jit
def _delta_kernel(
    out_ptr, qkv_ptr, new_decays_ptr, b_ptr, slots_ptr, keys_ptr, values_ptr, decays_ptr, rows_ptr, cu_ptr, ends_ptr,
    before_ptr, after_ptr, b_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, RECENT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = VALUE_DIM // COLUMNS
    head, part, index = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    row, first, end = tl.load(rows_ptr + index).to(tl.int64), tl.load(cu_ptr + index), tl.load(ends_ptr + index)
    start = end - (tl.load(cu_ptr + index + 1) - first)
    before, after = tl.load(before_ptr + index), tl.load(after_ptr + index)
    if row == 0:  # padding
        return
    OF_KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    OF_VALUES: tl.constexpr = VALUE_HEADS * VALUE_DIM
    OF_DECAYS: tl.constexpr = VALUE_HEADS * KEY_DIM
    OF_TOKEN: tl.constexpr = 2 * OF_KEYS + OF_VALUES
    entry, line, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK), tl.arange(0, KEY_DIM)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    of_key = (head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key)[None, :]
    of_value, of_decay = (head * VALUE_DIM + column)[None, :], (head * KEY_DIM + key)[None, :]
    state_ptrs = slots_ptr + (row * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    state_ptrs += key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(state_ptrs, before > 0, 0.0)
    base = before
    while base < end:
        position, stop = base + entry, tl.minimum(base + CHUNK, end)
        is_entry, is_new = (position < stop)[:, None], ((position >= start) & (position < stop))[:, None]
        old, new = row * RECENT + base % RECENT, (first + base - start).to(tl.int64)  # the chunk's first entry
        new_keys, old_keys = qkv_ptr + new * OF_TOKEN + OF_KEYS, keys_ptr + old * OF_KEYS
        ptrs = tl.where(is_new, new_keys + entry[:, None] * OF_TOKEN, old_keys + entry[:, None] * OF_KEYS)
        keys = tl.load(ptrs + of_key, is_entry, 0.0)
        old_values = values_ptr + old * OF_VALUES
        values = tl.load(old_values + entry[:, None] * OF_VALUES + of_value, is_entry & ~is_new, 0.0)
        ptrs = tl.where(is_new, new_decays_ptr + new * OF_DECAYS, decays_ptr + old * OF_DECAYS)
        decays = tl.load(ptrs + entry[:, None] * OF_DECAYS + of_decay, is_entry, 0.0)
        left = tl.cumsum(decays, 0)  # the sums of decays up to each entry
        block = (tl.maximum(base, start) - base) // BLOCK
        while base + block * BLOCK < stop:
            i = block * BLOCK + line
            is_here = (base + i >= start) & (base + i < stop)
            of_line = qkv_ptr + new * OF_TOKEN + i[:, None] * OF_TOKEN
            q = tl.load(of_line + of_key, is_here[:, None], 0.0)
            v = tl.load(of_line + 2 * OF_KEYS + of_value, is_here[:, None], 0.0).to(tl.float32)
            beta = tl.load(b_ptr + new * b_stride + i * b_stride + head, is_here, 0.0).to(tl.float32)
            beta = 1.0 / (1.0 + tl.exp(-beta))
            k, own_values = _lines(keys, block * BLOCK, BLOCK), _lines(values, block * BLOCK, BLOCK)
            own_left = _lines(left, block * BLOCK, BLOCK)
            is_earlier, is_own = entry[None, :] < block * BLOCK, line[:, None] == line[None, :]
            # What each token reads of the state, and how much of the values of earlier blocks and of its own block.
            k, q = k.to(tl.float32), q.to(tl.float32)
            read = tl.dot(k * tl.exp(own_left), state, input_precision=PRECISION)
            out = tl.dot(q * tl.exp(own_left), state, input_precision=PRECISION)
            # The decay from an earlier block is that to the end of the block before this, times that from there.
            between = tl.where(block > 0, _lines(left, block * BLOCK - 1, 1), 0.0)
            since, until = tl.exp(own_left - between), tl.exp(tl.minimum(between - left, 0.0))
            until = tl.trans(keys.to(tl.float32) * until)
            by_k = tl.dot(k * since, until, input_precision=PRECISION)
            by_q = tl.dot(q * since, until, input_precision=PRECISION)
            own_k = _channel_products(k, k, own_left, PRECISION, BLOCK)
            own_q = _channel_products(q, k, own_left, PRECISION, BLOCK)
            own_q += tl.where(is_own, tl.sum(q * k, 1)[:, None], 0.0)
            read += product(tl.where(is_earlier, by_k, 0.0), values)
            out += product(tl.where(is_earlier, by_q, 0.0), values)
            num_new = tl.minimum(stop - base - block * BLOCK, BLOCK)
            num_new -= tl.maximum(start - base - block * BLOCK, 0)
            own_values = _solved(own_values, own_k, v - read, beta, is_here, num_new)
            out += product(own_q, own_values)
            tl.store(
                out_ptr + (new + i)[:, None] * OF_VALUES + of_value, out.to(out_ptr.dtype.element_ty), is_here[:, None]
            )
            is_kept = (is_here & (base + i >= after))[:, None]
            tl.store(old_values + i[:, None] * OF_VALUES + of_value, own_values, is_kept)
            spread = _lines(own_values, -block * BLOCK, CHUNK)
            values = tl.where((entry // BLOCK == block)[:, None], spread, values)
            block += 1
        base += CHUNK
        if (base <= stop) & ((base < end) | (base == after)):
            all_left = _lines(left, CHUNK - 1, 1)
            since = tl.exp(all_left - left)
            added = product(tl.trans(keys.to(tl.float32) * since), values)
            state = state * tl.exp(tl.trans(all_left)) + added
            if base == after:
                tl.store(state_ptrs, state)


@triton.jit
def _finish_kernel(
    x_ptr, z_ptr, weight_ptr, qkv_ptr, new_decays_ptr, keys_ptr, decays_ptr, rows_ptr, cu_ptr, ends_ptr, after_ptr,
    row_of_ptr, num_heads, in_stride, eps, SIZE: tl.constexpr, HEADS: tl.constexpr, OF_TOKEN: tl.constexpr,
    OF_KEYS: tl.constexpr, OF_DECAYS: tl.constexpr, RECENT: tl.constexpr, NUM_KEYS: tl.constexpr,
    NUM_DECAYS: tl.constexpr,
):  # fmt: skip
    """x = norm(x) * sigmoid(z), in place. Also stores a token's keys and decays if it comes after the state. They may
    overwrite entries that several programs of the kernel before this one read."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, element = part * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    at, mask = head[:, None] * SIZE + element[None, :], (head < num_heads)[:, None]
    x = tl.load(x_ptr + token * num_heads * SIZE + at, mask, 0.0).to(tl.float32)
    z = tl.load(z_ptr + token * in_stride + at, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    y = x * scale[:, None] * tl.load(weight_ptr + element)[None, :] / (1.0 + tl.exp(-z))
    tl.store(x_ptr + token * num_heads * SIZE + at, y.to(x_ptr.dtype.element_ty), mask)
    index = tl.load(row_of_ptr + token)
    row = tl.load(rows_ptr + index).to(tl.int64)
    position = tl.load(ends_ptr + index) - tl.load(cu_ptr + index + 1) + tl.program_id(0)
    is_recent, place = (row > 0) & (position >= tl.load(after_ptr + index)), row * RECENT + position % RECENT
    i = part * NUM_KEYS + tl.arange(0, NUM_KEYS)
    mask = is_recent & (i < OF_KEYS)
    tl.store(keys_ptr + place * OF_KEYS + i, tl.load(qkv_ptr + token * OF_TOKEN + OF_KEYS + i, mask), mask)
    i = part * NUM_DECAYS + tl.arange(0, NUM_DECAYS)
    mask = is_recent & (i < OF_DECAYS)
    tl.store(decays_ptr + place * OF_DECAYS + i, tl.load(new_decays_ptr + token * OF_DECAYS + i, mask), mask)


def delta_net(
    qkv: torch.Tensor,
    zba: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layer: DeltaArgs,
    states: RowStates,
    slots: torch.Tensor,
    recent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Like `worker.kernels.cpu_delta.delta_net`, for sizes of heads that are powers of two. Changes q and k. The recent
    decays are those of single tokens."""
    (z, b, a), (recent_keys, recent_values, recent_decays), num_tokens = zba, recent, len(qkv)
    assert (layer.decay_dim, layer.sigmoid_gate) == (layer.key_dim, True), "these kernels are Kimi Delta Attention's"
    assert qkv.is_contiguous(), "q, k and v of a token lie side by side"
    assert z.stride(1) == b.stride(1) == a.stride(1) == 1, "the elements of a token lie side by side"
    keys, values, decays = recent_keys.shape[2], recent_values.shape[2], recent_decays.shape[2]
    # Zeros for padding, because other layers must not read NaNs.
    out, new_decays = qkv.new_zeros(num_tokens, values), recent_decays.new_empty(num_tokens, decays)
    columns, rows = min(_COLUMNS, layer.value_dim), (states.rows, states.cu_seqlens_q, states.ends)
    sizes = {"KEY_HEADS": layer.key_heads, "VALUE_HEADS": layer.value_heads, "KEY_DIM": layer.key_dim}
    heads = min(_HEADS, triton.next_power_of_2(layer.key_heads))
    num_decays = heads * (layer.value_heads // layer.key_heads) * layer.key_dim
    _prepare_kernel[(num_tokens, triton.cdiv(layer.key_heads, heads))](
        qkv, new_decays, a, layer.a_log, layer.dt_bias, a.stride(0), **sizes, OF_TOKEN=qkv.shape[1], HEADS=heads,
        BLOCK=triton.next_power_of_2(num_decays),
    )  # fmt: skip
    _delta_kernel[(layer.value_heads * layer.value_dim // columns, len(states.rows))](
        out, qkv, new_decays, b, slots, *recent, *rows, states.before, states.after, b.stride(0), **sizes,
        VALUE_DIM=layer.value_dim, RECENT=recent_keys.shape[1], CHUNK=_CHUNK, BLOCK=_BLOCK, COLUMNS=columns,
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32", num_warps=8,
    )  # fmt: skip
    heads = min(_HEADS, triton.next_power_of_2(layer.value_heads))
    parts = triton.cdiv(layer.value_heads, heads)
    _finish_kernel[(num_tokens, parts)](
        out, z, layer.norm, qkv, new_decays, recent_keys, recent_decays, *rows, states.after, states.row_of_token,
        layer.value_heads, z.stride(0), layer.eps, SIZE=layer.value_dim, HEADS=heads,
        OF_TOKEN=qkv.shape[1], OF_KEYS=keys, OF_DECAYS=decays, RECENT=recent_keys.shape[1],
        NUM_KEYS=triton.next_power_of_2(triton.cdiv(keys, parts)),
        NUM_DECAYS=triton.next_power_of_2(triton.cdiv(decays, parts)),
    )  # fmt: skip
    return out
