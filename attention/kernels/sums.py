"""How a tile of queries adds up its keys: blocks in ascending order, or spans under the contract of exact.py.

Scores are in units of `factor`, which makes them logarithms to base 2. Sums are fp32. Multiply-adds are fused
explicitly, because otherwise the compiler could choose.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.pages import LOWEST

_TOTAL_COLUMNS = tl.constexpr(16)
"""Columns of the product that sums the weights: the smallest number that a product accepts. All columns get the sum."""


@triton.jit
def cap(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), computed with the hardware's only exponential."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 * LOG2_E / CAP)) + 1.0)


@triton.jit
def add_block(scores, v, m, total, acc, factor):
    """Adds a block of keys to the sums."""
    new_m = tl.maximum(m, tl.max(scores, 1) * factor)
    decay = tl.exp2(m - new_m)
    # One instruction with and without a mask, so that a query's bits do not depend on its block.
    p = tl.exp2(tl.fma(scores, factor, -new_m[:, None]))
    total = tl.fma(total, decay, tl.sum(p, 1))
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_m, total, acc


@triton.jit
def exact_cap(scores, CAP: tl.constexpr):
    """Like `cap`, with a division that the compiler does not fuse with later steps."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    powers = tl.exp2(scores * (2.0 * LOG2_E / CAP)) + 1.0
    return CAP - tl.div_rn(tl.full(powers.shape, 2.0 * CAP, tl.float32), powers)


@triton.jit
def scaled_sink(sink):
    """The sink in units of the scores times log2(e), rounded here so that the compiler cannot fuse the product."""
    return tl.fma(sink, 1.4426950408889634, 0.0)


@triton.jit
def empty_span(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums of an empty span: largest score, total weight in several equal columns, weighted values."""
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    return m, tl.zeros([BLOCK_M, _TOTAL_COLUMNS], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def first_sums(sink, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr):
    """The sums before any key. With SPAN, those of a span and of all spans, and the sink is added last. Otherwise they
    include the sink."""
    m, columns, acc = empty_span(BLOCK_M, BLOCK_D)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SPAN > 0:
        return m, columns, acc, m, total, acc
    else:
        if sink is not None:
            m = tl.maximum(m, sink)
            total = tl.exp2(sink - m)
        return m, total, acc


@triton.jit
def add_tile(scores, v, m, new_m, total, acc, factor):
    """Adds a tile of keys to the sums of a span. `new_m` is the span's largest score, with the tile's."""
    decay = tl.exp2(m - new_m)[:, None]
    p = tl.exp2(tl.fma(scores, factor, -new_m[:, None])).to(v.dtype)
    ones = tl.full([v.shape[0], _TOTAL_COLUMNS], 1.0, v.dtype)
    # In fp32, a product with one is an addition, and the compiler would fuse it with a plain multiplication.
    decayed = tl.fma(total, tl.broadcast_to(decay, total.shape), 0.0)
    total = tl.dot(p, ones, decayed, input_precision="ieee")
    acc = tl.dot(p, v, acc * decay, input_precision="ieee")
    return new_m, total, acc


@triton.jit
def merge_span(m, total, acc, span_m, span_total, span_acc):
    """Merges the sums of the next span into those of all spans before it. An empty span changes no bit."""
    new_m = tl.maximum(m, span_m)
    decay = tl.exp2(m - new_m)
    added = tl.exp2(span_m - new_m)
    return new_m, tl.fma(span_total, added, total * decay), tl.fma(span_acc, added[:, None], acc * decay[:, None])


@triton.jit
def exact_answer(m, total, acc, sink, v_scale):
    """The output from the sums of all spans. `sink` is in units of the scores times log2(e), or None."""
    if sink is not None:
        new_m = tl.maximum(m, sink)
        decay = tl.exp2(m - new_m)
        total = tl.fma(total, decay, tl.exp2(sink - new_m))
        acc *= decay[:, None]
    # The sign of a zero sum would depend on added values with weight zero.
    return tl.fma(tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape)), v_scale, 0.0)


@triton.jit
def leave_span(m, total, acc, parts, is_pair, sums_ptr, parts_ptr, HEAD_DIM: tl.constexpr):
    """Writes the sums of a span to memory, as part number `parts` of each pair."""
    dims = tl.arange(0, acc.shape[1])
    tl.store(sums_ptr + 2 * parts, m, mask=is_pair)
    tl.store(sums_ptr + 2 * parts + 1, tl.max(total, 1), mask=is_pair)
    is_stored = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_stored)
