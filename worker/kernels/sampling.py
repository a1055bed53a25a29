"""Sampling kernels: the rule of worker/sampler.py over rows of logits, without waiting for the device.

Their twins for the CPU are in worker/torch_sampling.py.

    best_candidates, reduce_candidates, reduce_tokens   argmax of logit / temperature + noise, in parts
    filter_thresholds                                   smallest score that top-k, top-p and min-p allow
    token_logprobs                                      log probabilities, the likeliest by an order that topk keeps

A row's result depends on nothing but its own logits, parameters and position: blocks have one size and sums one order,
however many rows there are. Scores and noise are fp64, as in their twins: both draw the same tokens. Of a row with a
NaN the candidate is (+inf, -1), which every maximum keeps and which stands before any id of that value; its thresholds
mean nothing, its log probabilities are NaN.

Thresholds are searched on keys: the bits of an fp32 value as an int32 that sorts as the value does. An fp64 quotient
keeps distinct fp32 logits distinct, so the order of logits is the order of scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.logprobs import LogprobTensors
from worker.protocol import PARAMS_DTYPE, RECORD_WORDS


def word_of(field: str) -> tl.constexpr:
    """The offset of a field in a record of int32 words."""
    assert PARAMS_DTYPE.fields is not None, "PARAMS_DTYPE is a record"
    return tl.constexpr(PARAMS_DTYPE.fields[field][1] // 4)


_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_TOP_K, _TEMPERATURE, _TOP_P, _MIN_P, _SEED = map(word_of, ("top_k", "temperature", "top_p", "min_p", "seed"))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FACTOR_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_FACTOR_2 = tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-53)
_NO_ID = tl.constexpr(1 << 30)  # above every id; exact as a float
_NAN_ID = tl.constexpr(-1)  # below every id
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # the key of -inf

_BLOCK = 4096
"""Ids of one program where many programs share a row."""
_SLICE = 1024
"""Ids, among these, whose noise is worked on together, so that it fits the registers."""
_GROUP = 128
"""Ids whose maximum is kept: the k largest maxima bound the k-th largest logit from below."""
_SEARCH_BLOCK = 8192
"""Ids read at a time where one program has a row to itself."""
_SEARCH_WARPS = 16


@triton.jit
def _load_logits(pointers, inside):
    x = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, -float("inf"))


@triton.jit
def _load_or_top(pointers, inside):
    # NaN is loaded as +inf, and marked.
    x = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
    is_nan = x != x
    return tl.where(is_nan, float("inf"), x), is_nan


@triton.jit
def _key(x):
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 equals 0.0
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mix(x):
    # The finaliser of SplitMix64 on uint64, whose right shift brings in zeros.
    x = (x ^ (x >> 30)) * _FACTOR_1
    x = (x ^ (x >> 27)) * _FACTOR_2
    return x ^ (x >> 31)


@triton.jit
def _row_key(record, position):
    low = tl.load(record + _SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + _SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return _mix(_mix((high << 32) | low) + (position + 1).to(tl.uint64) * _GOLDEN)


@triton.jit
def _gumbel(ids, row_key):
    bits = _mix(_mix(ids.to(tl.uint64) * _GOLDEN) ^ row_key)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * _UNIT
    # A plain Python float would pass through fp32, where this is 1.0.
    uniform = tl.where(uniform < 1.0, uniform, tl.full([], 1.0 - _UNIT, tl.float64))
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "positions"])
def _candidates_kernel(
    logits, row_stride, rows, positions, records, thresholds, out, num_rows, first_id, num_ids,
    RESTRICTED: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    i = tl.program_id(1)
    first = part * BLOCK
    logits += i.to(tl.int64) * row_stride
    # Read before anything is known of the row, and as a whole: a greedy row needs no more, and memory stays busy.
    column = first + tl.arange(0, BLOCK)
    x, is_nan = _load_or_top(logits + column, column < num_ids)
    record = records + tl.load(rows + i) * _RECORD_WORDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature > 0:
        row_key = _row_key(record, tl.load(positions + i))
        threshold = tl.full([], -float("inf"), tl.float64)
        if RESTRICTED:
            threshold = tl.load(thresholds + i)
        best = tl.full([SLICE], -float("inf"), tl.float64)
        token = tl.full([SLICE], _NO_ID, tl.int32)
        for start in range(0, BLOCK, SLICE):
            near = first + start + tl.arange(0, SLICE)
            inside = near < num_ids
            near_x, near_nan = _load_or_top(logits + near, inside)
            scores = near_x.to(tl.float64) / temperature.to(tl.float64)
            allowed = inside & (scores >= threshold)
            # Most slices of a restricted row are spared the noise.
            if not RESTRICTED or tl.max(allowed.to(tl.int32), 0) > 0:
                noisy = scores + _gumbel(first_id + near, row_key)
                better = (allowed & ((noisy > best) | (token == _NO_ID))) | near_nan
                best = tl.where(better, noisy, best)
                token = tl.where(better, tl.where(near_nan, _NAN_ID, first_id + near), token)
        value = tl.max(best, 0)
        winner = tl.min(tl.where(best == value, token, _NO_ID), 0)
    else:
        top = tl.max(x, 0)
        value = top.to(tl.float64)
        ids = tl.where(is_nan, _NAN_ID, first_id + column)  # another name: a branch may not change the shape of `token`
        winner = tl.min(tl.where((x == top) & (column < num_ids), ids, _NO_ID), 0)
    candidate = out + (part * num_rows + i) * 2
    tl.store(candidate, value)
    tl.store(candidate + 1, winner.to(tl.float64))


@triton.jit(do_not_specialize=["num_rows"])
def _reduce_kernel(candidates, out, num_parts, num_rows, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    i = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    candidate = candidates + (part * num_rows + i) * 2
    value = tl.load(candidate, mask=inside, other=-float("inf"))
    token = tl.load(candidate + 1, mask=inside, other=_NO_ID)
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, token, _NO_ID), 0)
    if TOKENS:
        tl.store(out + i, token.to(tl.int64))
    else:
        tl.store(out + i * 2, best)
        tl.store(out + i * 2 + 1, token)


@triton.jit
def _group_maxima_kernel(logits, row_stride, maxima, num_ids, num_groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    i = tl.program_id(1).to(tl.int64)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load_logits(logits + i * row_stride + column, column < num_ids)
    tl.store(maxima + i * num_groups + group, tl.max(x, 1), mask=group < num_groups)


@triton.jit
def _largest(values, num_values, BLOCK: tl.constexpr):
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    start = 0
    while start < num_values:
        at = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _load_logits(values + at, at < num_values))
        start += BLOCK
    return tl.max(largest, 0)


@triton.jit
def _weight(values, num_values, key, top, inverse_temperature, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    # How many values have at least this key or, weighed, their sum of exp((value - top) / temperature).
    total = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start < num_values:
        at = start + tl.arange(0, BLOCK)
        inside = at < num_values
        x = _load_logits(values + at, inside)
        counted = inside & (_key(x) >= key)
        if WEIGHED:
            total += tl.where(counted, tl.exp((x.to(tl.float64) - top) * inverse_temperature), 0.0)
        else:
            total += tl.where(counted, 1.0, 0.0)
        start += BLOCK
    return tl.sum(total, 0)


@triton.jit
def _largest_key(
    values, num_values, wanted, low, high, top, inverse_temperature, WEIGHED: tl.constexpr, BLOCK: tl.constexpr
):
    # The largest key in [low, high] at or above which the values weigh what is wanted; `low` if there is none.
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        weight = _weight(values, num_values, middle.to(tl.int32), top, inverse_temperature, WEIGHED, BLOCK)
        enough = weight >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _collect(values, num_values, key, found, BLOCK: tl.constexpr):
    # Copies the values with at least this key to `found`; returns how many.
    count = tl.full([], 0, tl.int32)
    start = 0
    while start < num_values:
        at = start + tl.arange(0, BLOCK)
        inside = at < num_values
        x = _load_logits(values + at, inside)
        keep = inside & (_key(x) >= key)
        kept = keep.to(tl.int32)
        tl.store(found + count + tl.cumsum(kept, 0) - 1, x, mask=keep)
        count += tl.sum(kept, 0)
        start += BLOCK
    tl.debug_barrier()  # other threads of this program read what was stored
    return count


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _threshold_kernel(logits, maxima, rows, records, found, thresholds, num_ids, num_groups, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    record = records + tl.load(rows + i) * _RECORD_WORDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True).to(tl.float64)
    threshold = tl.full([], -float("inf"), tl.float64)
    if temperature > 0:
        k = tl.load(record + _TOP_K)
        p = tl.load(record + _TOP_P).to(tl.float32, bitcast=True).to(tl.float64)
        min_p = tl.load(record + _MIN_P).to(tl.float32, bitcast=True).to(tl.float64)
        takes_k = (k > 0) & (k < num_ids)
        x = logits + i * num_ids
        peaks = maxima + i * num_groups
        kept = found + i * num_ids
        largest = _largest(peaks, num_groups, BLOCK)
        top = tl.where(largest == -float("inf"), 0.0, largest).to(tl.float64)
        inverse = 1.0 / temperature
        lowest = tl.full([], _LOWEST_KEY, tl.int64)
        highest = _key(largest).to(tl.int64)
        if takes_k | (p < 1.0):
            bound = lowest
            mass = tl.full([], 0.0, tl.float64)
            # First a bound below the threshold, above which few values are left to search.
            if takes_k:
                bound = _largest_key(peaks, num_groups, k, lowest, highest, top, inverse, False, BLOCK)
            else:
                mass = tl.maximum(_weight(x, num_ids, _LOWEST_KEY, top, inverse, True, BLOCK), 1.0)
                # All that weigh less than (1 - p) * mass / num_ids may go: together they are less than 1 - p. One
                # more than the logarithm, and one key less, are for rounding.
                depth = tl.log(num_ids / ((1.0 - p) * mass)) + 1.0
                cut = tl.maximum(top - depth * temperature, -3e38).to(tl.float32)
                bound = tl.minimum(tl.maximum(_key(cut).to(tl.int64) - 1, lowest), highest)
            count = _collect(x, num_ids, bound.to(tl.int32), kept, BLOCK)
            if takes_k:
                bound = _largest_key(kept, count, k, bound, highest, top, inverse, False, BLOCK)
            if p < 1.0:
                if takes_k:
                    mass = _weight(kept, count, bound.to(tl.int32), top, inverse, True, BLOCK)
                bound = _largest_key(kept, count, p * mass, bound, highest, top, inverse, True, BLOCK)
            threshold = _value(bound.to(tl.int32)).to(tl.float64) / temperature
        if min_p > 0.0:
            floor = largest.to(tl.float64) / temperature + tl.minimum(tl.log(min_p), 0.0)
            threshold = tl.maximum(threshold, floor)
    tl.store(thresholds + i, threshold)


@triton.jit
def _normaliser_kernel(logits, row_stride, normalisers, num_ids, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    logits += i * row_stride
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    start = 0
    while start < num_ids:
        at = start + tl.arange(0, BLOCK)
        x, _ = _load_or_top(logits + at, at < num_ids)
        largest = tl.maximum(largest, x)
        start += BLOCK
    top = tl.max(largest, 0).to(tl.float64)
    # Differences from +inf, and from NaN that it stands for, are NaN or -inf; from -inf alone all are to be -inf.
    top = tl.where(top == float("inf"), float("nan"), tl.where(top == -float("inf"), 0.0, top))
    mass = _weight(logits, num_ids, _LOWEST_KEY, top, 1.0, True, BLOCK)
    tl.store(normalisers + i * 2, top)
    tl.store(normalisers + i * 2 + 1, tl.log(tl.maximum(mass, 1.0)))


@triton.jit
def _logprobs_kernel(logits, row_stride, normalisers, tokens, ranked, logprobs, num_ids, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    logits += i * row_stride
    top = tl.load(normalisers + i * 2)
    log_mass = tl.load(normalisers + i * 2 + 1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    inside = ids < num_ids
    logprob = ((_load_logits(logits + ids, inside).to(tl.float64) - top) - log_mass).to(tl.float32)
    tl.store(ranked + i * num_ids + ids, (_key(logprob).to(tl.int64) << 32) | (0x7FFFFFFF - ids), mask=inside)
    if part == 0:
        x = _load_logits(logits + tl.load(tokens + i), True)
        tl.store(logprobs + i, ((x.to(tl.float64) - top) - log_mass).to(tl.float32))


def best_candidates(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    first_id: int,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best token of every block of ids, by logit / temperature + noise; at temperature 0 by the logit alone.

    Args:
        logits: [num_rows, num_ids] floating, elements of a row side by side; of ids `first_id` and on.
        rows: [num_rows] int32: where each row's parameters are in `records`.
        positions: [num_rows] int32: index of the token to be sampled in its whole sequence.
        records: [table_size, RECORD_WORDS] int32: PARAMS_DTYPE records.
        thresholds: [num_rows] fp64: rows of positive temperature take no score below; None allows everything.

    Returns:
        [num_blocks, num_rows, 2] fp64: (value, id). A block without an allowed id has value -inf and id 2**30, one with
        a NaN +inf and -1.
    """
    num_rows, num_ids = logits.shape
    num_parts = max(triton.cdiv(num_ids, _BLOCK), 1)
    out = torch.empty((num_parts, num_rows, 2), dtype=torch.float64, device=logits.device)
    _candidates_kernel[(num_parts, num_rows)](
        logits,
        logits.stride(0),
        rows,
        positions,
        records,
        thresholds,
        out,
        num_rows,
        first_id,
        num_ids,
        RESTRICTED=thresholds is not None,
        BLOCK=_BLOCK,
        SLICE=_SLICE,
        num_warps=4,
    )
    return out


def reduce_candidates(candidates: torch.Tensor) -> torch.Tensor:
    """[num_parts, num_rows, 2] fp64 (value, id) -> [1, num_rows, 2]: the largest value, of equal ones the first id."""
    out = torch.empty((1, candidates.shape[1], 2), dtype=torch.float64, device=candidates.device)
    _reduce(candidates, out, tokens=False)
    return out


def reduce_tokens(candidates: torch.Tensor) -> torch.Tensor:
    """[num_parts, num_rows, 2] fp64 (value, id) -> [num_rows] int64: the ids that `reduce_candidates` would keep."""
    out = torch.empty(candidates.shape[1], dtype=torch.int64, device=candidates.device)
    _reduce(candidates, out, tokens=True)
    return out


def _reduce(candidates: torch.Tensor, out: torch.Tensor, *, tokens: bool) -> None:
    num_parts, num_rows, _ = candidates.shape
    parts = triton.next_power_of_2(num_parts)
    _reduce_kernel[(num_rows,)](candidates, out, num_parts, num_rows, TOKENS=tokens, PARTS=parts, num_warps=1)


def filter_thresholds(logits: torch.Tensor, rows: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """The smallest score (logit / temperature) that a row's top-k, top-p and min-p allow; -inf without a filter.

    Top-k first, then top-p of what is left, then min-p; what equals a threshold is kept. Masses are sums of fp64 over
    blocks of ids in ascending order.

    Args:
        logits: [num_rows, vocab_size] fp32, contiguous: whole rows.
        rows: [num_rows] int32: where each row's parameters are in `records`.
        records: as in `best_candidates`.

    Returns:
        [num_rows] fp64. Allocates as much as `logits` meanwhile.
    """
    num_rows, num_ids = logits.shape
    assert logits.is_contiguous(), "rows of logits follow one another"
    num_groups = triton.cdiv(num_ids, _GROUP)
    maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device)
    groups = _BLOCK // _GROUP
    _group_maxima_kernel[(triton.cdiv(num_groups, groups), num_rows)](
        logits, num_ids, maxima, num_ids, num_groups, GROUPS=groups, GROUP=_GROUP, num_warps=4
    )
    found = torch.empty((num_rows, num_ids), dtype=torch.float32, device=logits.device)
    thresholds = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    _threshold_kernel[(num_rows,)](
        logits,
        maxima,
        rows,
        records,
        found,
        thresholds,
        num_ids,
        num_groups,
        BLOCK=_SEARCH_BLOCK,
        num_warps=_SEARCH_WARPS,
    )
    return thresholds


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, asked: torch.Tensor) -> LogprobTensors:
    """Log probabilities, before temperature and filters, of one token a row, of the likeliest and of those asked for.

    Args:
        logits: [num_rows, vocab_size] floating, elements of a row side by side: whole rows.
        tokens: [num_rows] int64.
        k: how many of the likeliest tokens are wanted.
        asked: [num_rows, m] int64.
    """
    ranked, logprobs = rank_logprobs(logits, tokens)
    top = ranked.topk(k).values if k else ranked[:, :0]
    return LogprobTensors(logprobs, ranked_ids(top), ranked_logprobs(top), ranked_logprobs(ranked.gather(1, asked)))


def rank_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities before temperature and filters, as integers to rank, and of one token a row.

    Args:
        logits: [num_rows, vocab_size] floating, elements of a row side by side: whole rows.
        tokens: [num_rows] int64.

    Returns:
        [num_rows, vocab_size] int64, which `ranked_ids` and `ranked_logprobs` read: larger is likelier, of equal ones
        the smaller id. And [num_rows] fp32: of `tokens`.
    """
    num_rows, num_ids = logits.shape
    normalisers = torch.empty((num_rows, 2), dtype=torch.float64, device=logits.device)
    _normaliser_kernel[(num_rows,)](
        logits, logits.stride(0), normalisers, num_ids, BLOCK=_SEARCH_BLOCK, num_warps=_SEARCH_WARPS
    )
    ranked = torch.empty((num_rows, num_ids), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _logprobs_kernel[(triton.cdiv(num_ids, _BLOCK), num_rows)](
        logits, logits.stride(0), normalisers, tokens, ranked, logprobs, num_ids, BLOCK=_BLOCK, num_warps=4
    )
    return ranked, logprobs


def ranked_ids(ranked: torch.Tensor) -> torch.Tensor:
    """The ids, int64, in what `rank_logprobs` ranked."""
    return 0x7FFFFFFF - (ranked & 0xFFFFFFFF)


def ranked_logprobs(ranked: torch.Tensor) -> torch.Tensor:
    """The log probabilities, fp32, in what `rank_logprobs` ranked."""
    keys = (ranked >> 32).to(torch.int32)
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
