"""The causal convolution of recurrent layers, for GPUs.

An output is the sum of the last inputs of its row and channel, in their order. So its bits depend neither on the batch
nor on how a row is cut into steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.state_pool import RowStates

_TOKENS = 16
_CHANNELS = 128


@triton.jit
def _input(
    x_ptr, slots_ptr, recent_ptr, position, row, first, start, before, channel, mask, x_stride, channels,
    WIDTH: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """The inputs at `position` of `row`: of this step, recent ones, or those before the end of the stored state. Zeros
    before the first token."""
    row, in_step, is_recent = row.to(tl.int64), position >= start, position >= before
    x = tl.load(x_ptr + (first + position - start).to(tl.int64) * x_stride + channel, mask & in_step, 0.0)
    at = (row * RECENT + position % RECENT) * channels + channel
    recent = tl.load(recent_ptr + at, mask & (position >= 0) & is_recent & ~in_step, 0.0)
    at = (row * (WIDTH - 1) + position - before + WIDTH - 1) * channels + channel
    return (
        x.to(tl.float32)
        + recent.to(tl.float32)
        + tl.load(slots_ptr + at, mask & (position >= 0) & ~is_recent, 0.0).to(tl.float32)
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, slots_ptr, recent_ptr, rows_ptr, cu_ptr, ends_ptr, before_ptr, after_ptr,
    row_of_ptr, num_tokens, channels, x_stride, num_normed, WIDTH: tl.constexpr, RECENT: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, IS_DECODE: tl.constexpr,
):  # fmt: skip
    """In a decode this kernel also stores what `_store_kernel` does, because no other program reads it."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token, is_channel = token < num_tokens, channel < channels
    if IS_DECODE:
        row_in_step, first = token, token
        start = tl.load(ends_ptr + token, is_token, 1) - 1
    else:
        row_in_step = tl.load(row_of_ptr + token, is_token, 0)
        first = tl.load(cu_ptr + row_in_step)
        start = tl.load(ends_ptr + row_in_step) - (tl.load(cu_ptr + row_in_step + 1) - first)
    row = tl.load(rows_ptr + row_in_step, is_token, 0)
    before, position = tl.load(before_ptr + row_in_step, is_token, 0), start + token - first
    y = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, is_channel, 0.0)[None, :]
    mask = is_token[:, None] & is_channel[None, :]
    for i in tl.static_range(WIDTH):
        x = _input(
            x_ptr, slots_ptr, recent_ptr, (position - (WIDTH - 1 - i))[:, None], row[:, None], first[:, None],
            start[:, None], before[:, None], channel[None, :], mask, x_stride, channels, WIDTH, RECENT,
        )  # fmt: skip
        y = tl.fma(tl.load(weight_ptr + i * channels + channel, is_channel, 0.0)[None, :] + tl.zeros_like(y), x, y)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    if tl.program_id(1) < num_normed:
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
    tl.store(out_ptr + token.to(tl.int64)[:, None] * channels + channel[None, :], y.to(out_ptr.dtype.element_ty), mask)
    if IS_DECODE:
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * x_stride + channel[None, :], mask)
        tl.debug_barrier()  # other threads have read what these stores overwrite
        place = row.to(tl.int64)
        tl.store(recent_ptr + (place * RECENT + start % RECENT)[:, None] * channels + channel[None, :], x, mask)
        after = tl.load(after_ptr + token, is_token, 0)
        moves = mask & (after > before)[:, None]
        for i in tl.static_range(WIDTH - 1):
            kept = _input(
                x_ptr, slots_ptr, recent_ptr, (after - (WIDTH - 1 - i))[:, None], row[:, None], first[:, None],
                start[:, None], before[:, None], channel[None, :], moves, x_stride, channels, WIDTH, RECENT,
            )  # fmt: skip
            at = (place * (WIDTH - 1) + i)[:, None] * channels + channel[None, :]
            tl.store(slots_ptr + at, kept.to(slots_ptr.dtype.element_ty), moves)


@triton.jit
def _store_kernel(
    x_ptr, slots_ptr, recent_ptr, rows_ptr, cu_ptr, ends_ptr, before_ptr, after_ptr, channels, x_stride,
    WIDTH: tl.constexpr, BEFORE: tl.constexpr, RECENT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Stores the inputs that later steps need: those before the end of the new state, and recent ones."""
    i = tl.program_id(0)
    row, first, end = tl.load(rows_ptr + i), tl.load(cu_ptr + i), tl.load(ends_ptr + i)
    start, before, after = end - (tl.load(cu_ptr + i + 1) - first), tl.load(before_ptr + i), tl.load(after_ptr + i)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel, last = (channel < channels)[None, :], tl.arange(0, BEFORE)
    mask, place = is_channel & (last < WIDTH - 1)[:, None] & (after > before), row.to(tl.int64) * (WIDTH - 1)
    kept = _input(
        x_ptr, slots_ptr, recent_ptr, (after - (WIDTH - 1) + last)[:, None], row, first, start, before,
        channel[None, :], mask, x_stride, channels, WIDTH, RECENT,
    )  # fmt: skip
    tl.debug_barrier()  # other threads read what these stores overwrite
    tl.store(
        slots_ptr + (place + last)[:, None] * channels + channel[None, :], kept.to(slots_ptr.dtype.element_ty), mask
    )
    position = tl.maximum(start, end - RECENT)
    while position < end:
        x = tl.load(x_ptr + (first + position - start).to(tl.int64) * x_stride + channel, channel < channels)
        at = row.to(tl.int64) * RECENT + position % RECENT
        tl.store(recent_ptr + at * channels + channel, x, channel < channels)
        position += 1


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: RowStates,
    slots: torch.Tensor,
    recent: torch.Tensor,
    *,
    silu: bool = False,
    normed: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Like `worker.kernels.cpu_conv.causal_conv`.

    Args:
        normed: the number of the first heads, and their size. The outputs of each of them are scaled to length 1.
    """
    (width, channels), num_tokens = weight.shape, len(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert x.stride(1) == 1, "the channels of a token lie side by side"
    size = normed[1] or min(_CHANNELS, triton.next_power_of_2(channels))
    blocks = triton.cdiv(channels, size)
    rows = states.rows, states.cu_seqlens_q, states.ends, states.before, states.after
    sizes = {"WIDTH": width, "RECENT": recent.shape[1], "CHANNELS": size}
    row_of_token = None if states.is_decode else states.row_of_token
    _conv_kernel[(triton.cdiv(num_tokens, _TOKENS), blocks)](
        out, x, weight, bias, slots, recent, *rows, row_of_token, num_tokens, channels, x.stride(0), normed[0],
        **sizes, HAS_BIAS=bias is not None, SILU=silu, TOKENS=_TOKENS, IS_DECODE=states.is_decode,
    )  # fmt: skip
    if not states.is_decode:
        _store_kernel[(len(states.rows), blocks)](
            x, slots, recent, *rows, channels, x.stride(0), **sizes, BEFORE=triton.next_power_of_2(width - 1)
        )  # fmt: skip
    return out
