"""Penalties, biases and masks on rows of logits, equal to worker/sampling/adjustments.py bit for bit.

All arithmetic is fp64. A product of two fp32 numbers, or of a count and one, is exact in fp64, so the result does not
change if the compiler fuses the product with a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.protocol import RECORD_WORDS
from worker.sampling.adjustments import BIAS_WORDS, MASKED, PENALISED, RowAdjustments
from worker.sampling.kernels.sampling import word_of

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_REPETITION, _FREQUENCY, _PRESENCE = map(word_of, ("repetition_penalty", "frequency_penalty", "presence_penalty"))
_PENALISED = tl.constexpr(PENALISED)
_MASKED = tl.constexpr(MASKED)
_BIAS_WORDS = tl.constexpr(BIAS_WORDS)

_BLOCK = 4096
"""Number of ids that one program processes."""
_BIASES = 256
"""Number of biases that a program adds at a time. Each program processes one row."""


@triton.jit
def _number(pointer):
    return tl.load(pointer).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _penalise_and_mask_kernel(logits, rows, records, heads, marks, masks, num_ids, num_words, BLOCK: tl.constexpr):
    i = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    flags = tl.load(heads + row * 2)
    if flags != 0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < num_ids
        x = tl.load(logits + i * num_ids + column, mask=inside, other=0.0)
        if (flags & _PENALISED) != 0:
            record = records + row * _RECORD_WORDS
            repetition = _number(record + _REPETITION)
            mark = tl.load(marks + row * num_ids + column, mask=inside, other=0).to(tl.int32)
            count = mark >> 1
            score = x.to(tl.float64)
            score = tl.where(mark != 0, tl.where(score > 0, score / repetition, score * repetition), score)
            score = score - count.to(tl.float64) * _number(record + _FREQUENCY)
            score = score - tl.where(count > 0, _number(record + _PRESENCE), 0.0)
            x = score.to(tl.float32)
        if (flags & _MASKED) != 0:
            word = tl.load(masks + row * num_words + (column >> 5), mask=inside, other=0)
            x = tl.where((((word >> (column & 31)) & 1) != 0) | (x != x), x, -float("inf"))
        tl.store(logits + i * num_ids + column, x, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions"])
def _bias_kernel(logits, rows, positions, heads, biases, num_ids, MAX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    position = tl.load(positions + i)
    num_biases = tl.load(heads + row * 2 + 1)
    logits += i * num_ids
    biases += row * MAX * _BIAS_WORDS
    start = 0
    while start < num_biases:
        slot = start + tl.arange(0, BLOCK)
        inside = slot < num_biases
        record = biases + slot * _BIAS_WORDS
        value = tl.load(record + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        until = tl.load(record + 3, mask=inside, other=0)
        # A row's finite biases are for distinct tokens, so no two lanes write the same logit.
        added = inside & (position < until) & (value > -float("inf"))
        token = tl.load(record + 1, mask=inside, other=0)
        tl.store(logits + token, tl.load(logits + token, mask=added, other=0.0) + value, mask=added)
        start += BLOCK
    tl.debug_barrier()  # a token may have a bias in one lane and a ban in another; then the ban counts
    start = 0
    while start < num_biases:
        slot = start + tl.arange(0, BLOCK)
        inside = slot < num_biases
        record = biases + slot * _BIAS_WORDS
        value = tl.load(record + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        until = tl.load(record + 3, mask=inside, other=0)
        banned = inside & (position < until) & (value == -float("inf"))
        token = tl.load(record + 1, mask=inside, other=0)
        old = tl.load(logits + token, mask=banned, other=0.0)
        tl.store(logits + token, value, mask=banned & (old == old))
        start += BLOCK


def adjust_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    adjustments: RowAdjustments,
) -> None:
    """Applies the adjustments to rows of logits in place. Rows without adjustments keep every bit, and NaN stays NaN.

    Args:
        logits: [num_rows, vocab_size] fp32, contiguous: whole rows.
        rows: [num_rows] int32: rows of the request table.
        positions: [num_rows] int32: positions of the tokens to be sampled.
        records: [table_size, RECORD_WORDS] int32: PARAMS_DTYPE records.
    """
    num_rows, num_ids = logits.shape
    assert logits.is_contiguous(), "the logits must be contiguous"
    _penalise_and_mask_kernel[(triton.cdiv(num_ids, _BLOCK), num_rows)](
        logits,
        rows,
        records,
        adjustments.heads,
        adjustments.marks,
        adjustments.masks,
        num_ids,
        adjustments.masks.shape[1],
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _bias_kernel[(num_rows,)](
        logits,
        rows,
        positions,
        adjustments.heads,
        adjustments.biases,
        num_ids,
        MAX=adjustments.biases.shape[1],
        BLOCK=_BIASES,
        num_warps=4,
    )
