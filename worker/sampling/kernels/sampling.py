"""Sampling kernels, which apply the rule of worker/sampling/sampler.py to rows of logits. None waits for the device.

The CPU versions are in worker/sampling/torch_sampling.py.

    plain_tokens                      argmax of logit / temperature + noise, over few tokens if top-k is small
    best_candidates, reduce_tokens    argmax in each block of ids, then over blocks, among scores that reach a threshold
    filter_thresholds                 smallest score that top-k, top-p and min-p allow
    token_logprobs                    log probabilities, also of the likeliest, with a fixed order of ties

A row's result depends only on its own logits, parameters and position: blocks have one size and sums one order for any
number of rows. Scores and noise are fp64, as in the CPU versions, so both sample the same tokens. For a row with a NaN
the candidate is (+inf, -1), which wins every comparison: no value is larger, and of equal values the smallest id wins.
The row's thresholds are meaningless, and its log probabilities are NaN.

A row with a small top-k is sampled from lists: each rank lists its likeliest tokens, including all that top-k allows.
Top-p adds weights as integers, so the sum does not depend on how the ranks divide the tokens. A list contains all
tokens as likely as the k-th. If these do not fit, it contains the ones with the smallest ids.

Thresholds are searched on keys: the bits of an fp32 value as an int32 that sorts like the value. An fp64 quotient keeps
distinct fp32 logits distinct, so the order of logits is the order of scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.collectives.group import TensorParallelGroup
from worker.protocol import PARAMS_DTYPE, RECORD_WORDS
from worker.sampling.logprobs import LogprobTensors


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
"""Number of ids that a program processes if many programs share a row."""
_SLICE = 1024
"""Number of a block's ids for which noise is computed at a time. The noise of more would not fit in registers."""
_GROUP = 128
"""Number of ids that share one stored maximum. The k largest maxima bound the k-th largest logit from below."""
_SEARCH_BLOCK = 8192
"""Number of ids read at a time if one program processes a whole row."""
_SEARCH_WARPS = 16

MAX_LISTED_TOP_K = 64
"""Rows with a top-k up to this are sampled from a list of their candidates, not from the whole vocabulary."""
_MAX_K = tl.constexpr(MAX_LISTED_TOP_K)
_LIST = tl.constexpr(128)  # entries of a list: key << 32 | id
_MOST_GROUPS = tl.constexpr(128)  # if more groups reach the k-th largest maximum, the whole row is read
_NO_ENTRY = tl.constexpr(-(1 << 63) + (1 << 30))  # below every key, and without an id
_ONE = tl.constexpr(float(1 << 52))  # the integer for a weight of 1; the sum of a list fits in int64


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
    # The finaliser of SplitMix64 on uint64, where a right shift inserts zeros.
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
    # A plain Python float would be converted to fp32, where this value is 1.0.
    uniform = tl.where(uniform < 1.0, uniform, tl.full([], 1.0 - _UNIT, tl.float64))
    return -tl.log(-tl.log(uniform))


@triton.jit
def _is_listed(record):
    # Whether a row with these parameters is sampled from a list.
    k = tl.load(record + _TOP_K)
    return (tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True) > 0) & (k > 0) & (k <= _MAX_K)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "positions"])
def _candidates_kernel(
    logits, row_stride, rows, positions, records, thresholds, maxima, out, num_rows, first_id, num_ids, num_groups,
    RESTRICTED: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    i = tl.program_id(1)
    first = part * BLOCK
    logits += i.to(tl.int64) * row_stride
    # Reads the whole block before the row's parameters: a greedy row needs no more, and memory stays busy.
    column = first + tl.arange(0, BLOCK)
    x, is_nan = _load_or_top(logits + column, column < num_ids)
    record = records + tl.load(rows + i) * _RECORD_WORDS
    temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True)
    is_listed = False
    if LISTED:
        is_listed = _is_listed(record)
        if is_listed:
            group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
            peaks = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
            tl.store(maxima + i.to(tl.int64) * num_groups + group, peaks, mask=group < num_groups)
    if (temperature > 0) & (not is_listed):
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
            # Most slices of a row with a threshold have no allowed id, and need no noise.
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
        # A new name, because a branch may not change the shape of `token`
        ids = tl.where(is_nan, _NAN_ID, first_id + column)
        winner = tl.min(tl.where((x == top) & (column < num_ids), ids, _NO_ID), 0)
    candidate = out + (part * num_rows + i) * 2
    tl.store(candidate, value)
    tl.store(candidate + 1, winner.to(tl.float64))


@triton.jit(do_not_specialize=["num_rows"])
def _reduce_kernel(candidates, out, out_stride, num_parts, num_rows, TOKENS: tl.constexpr, PARTS: tl.constexpr):
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
        tl.store(out + i * out_stride, best)
        tl.store(out + i * out_stride + 1, token)


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
    # The number of values with at least this key or, if weighed, their sum of exp((value - top) / temperature).
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
    # The largest key in [low, high] for which the values with at least this key weigh `wanted` or more, else `low`.
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        weight = _weight(values, num_values, middle.to(tl.int32), top, inverse_temperature, WEIGHED, BLOCK)
        enough = weight >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _kth_key(keys, inside, k, low, high):
    # The largest key in [low, high] that at least k of `keys` reach. `low` if there is none.
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum((inside & (keys >= middle.to(tl.int32))).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _list_some(keys, ids, inside, kth, room, entries, num_kept, num_ties):
    # Appends entries above the k-th key and at most `room` equal ones. Returns the new numbers of entries and ties.
    ties = (inside & (keys == kth)).to(tl.int32)
    kept = inside & ((keys > kth) | ((ties > 0) & (num_ties + tl.cumsum(ties, 0) <= room)))
    ones = kept.to(tl.int32)
    entry = (keys.to(tl.int64) << 32) | ids.to(tl.int64)
    tl.store(entries + num_kept + tl.cumsum(ones, 0) - 1, entry, mask=kept)
    return num_kept + tl.sum(ones, 0), num_ties + tl.sum(ties, 0)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _shortlist_kernel(
    logits, row_stride, maxima, chosen, rows, records, lists, list_stride, first_id, num_ids, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    record = records + tl.load(rows + i) * _RECORD_WORDS
    if _is_listed(record):
        k = tl.load(record + _TOP_K)
        logits += i * row_stride
        chosen += i * num_groups
        entries = lists + i * list_stride
        group = tl.arange(0, GROUPS)
        inside = group < num_groups
        peaks = _key(_load_logits(maxima + i * num_groups + group, inside))
        highest = tl.max(peaks, 0).to(tl.int64)
        bound = _kth_key(peaks, inside, k, tl.full([], _LOWEST_KEY, tl.int64), highest)
        taken = (inside & (peaks >= bound)).to(tl.int32)
        num_taken = tl.sum(taken, 0)
        num_kept = tl.full([], 0, tl.int32)
        num_ties = tl.full([], 0, tl.int32)
        if num_taken <= _MOST_GROUPS:
            tl.store(chosen + tl.cumsum(taken, 0) - 1, group, mask=taken > 0)
            tl.debug_barrier()  # other threads of this program read the stored values
            lane = tl.arange(0, _MOST_GROUPS * GROUP)
            place = lane // GROUP
            column = tl.load(chosen + place, mask=place < num_taken, other=0) * GROUP + lane % GROUP
            near = (place < num_taken) & (column < num_ids)
            keys = _key(_load_logits(logits + column, near))
            kth = _kth_key(keys, near, k, bound.to(tl.int64), highest)
            room = _LIST - tl.sum((near & (keys > kth)).to(tl.int32), 0)
            num_kept, num_ties = _list_some(keys, first_id + column, near, kth, room, entries, num_kept, num_ties)
        else:  # many maxima are equal
            zero = tl.full([], 0.0, tl.float64)
            kth = _largest_key(logits, num_ids, k, bound.to(tl.int64), highest, zero, zero, False, BLOCK).to(tl.int32)
            above = _weight(logits, num_ids, kth.to(tl.int64) + 1, zero, zero, False, BLOCK)
            start = 0
            while start < num_ids:
                column = start + tl.arange(0, BLOCK)
                near = column < num_ids
                keys = _key(_load_logits(logits + column, near))
                num_kept, num_ties = _list_some(
                    keys, first_id + column, near, kth, _LIST - above.to(tl.int32), entries, num_kept, num_ties
                )
                start += BLOCK
        place = tl.arange(0, _LIST)
        tl.store(entries + place, tl.full([_LIST], _NO_ENTRY, tl.int64), mask=place >= num_kept)


@triton.jit
def _allowed_score(keys, kept, record, temperature):
    # The smallest score that top-p and then min-p allow, among the values that top-k allows.
    p = tl.load(record + _TOP_P).to(tl.float32, bitcast=True).to(tl.float64)
    min_p = tl.load(record + _MIN_P).to(tl.float32, bitcast=True).to(tl.float64)
    low = tl.full([], _LOWEST_KEY, tl.int64)
    high = tl.max(tl.where(kept, keys, _LOWEST_KEY), 0).to(tl.int64)
    largest = _value(high.to(tl.int32)).to(tl.float64)
    if p < 1.0:
        values = _value(keys).to(tl.float64)
        is_top = values == largest  # the difference of two infinities is NaN
        below = tl.where(is_top, 0.0, values) - tl.where(is_top, 0.0, largest)
        weights = tl.where(kept, tl.exp(below / temperature) * _ONE, 0.0).to(tl.int64)
        wanted = tl.sum(weights, 0).to(tl.float64) * p
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            weight = tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0), 0)
            enough = weight.to(tl.float64) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    threshold = _value(low.to(tl.int32)).to(tl.float64) / temperature
    if min_p > 0.0:
        threshold = tl.maximum(threshold, largest / temperature + tl.minimum(tl.log(min_p), 0.0))
    return threshold


@triton.jit(
    do_not_specialize=["num_parts", "part_stride", "list_stride"], do_not_specialize_on_alignment=["rows", "positions"]
)
def _draw_kernel(
    candidates, part_stride, row_stride, lists, list_stride, list_row_stride, rows, positions, records, out,
    num_parts, num_lists, PARTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    record = records + tl.load(rows + i) * _RECORD_WORDS
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    candidate = candidates + part * part_stride + i * row_stride
    value = tl.load(candidate, mask=inside, other=-float("inf"))
    token = tl.load(candidate + 1, mask=inside, other=_NO_ID)
    best = tl.max(value, 0)
    winner = tl.min(tl.where(value == best, token, _NO_ID), 0).to(tl.int64)
    if _is_listed(record) & (winner != _NAN_ID):
        k = tl.load(record + _TOP_K)
        temperature = tl.load(record + _TEMPERATURE).to(tl.float32, bitcast=True).to(tl.float64)
        lane = tl.arange(0, LANES)
        source = lane // _LIST
        at = lists + source * list_stride + i * list_row_stride + lane % _LIST
        entry = tl.load(at, mask=source < num_lists, other=_NO_ENTRY)
        keys = (entry >> 32).to(tl.int32)
        ids = (entry & 0xFFFFFFFF).to(tl.int32)
        listed = ids != _NO_ID
        highest = tl.max(keys, 0).to(tl.int64)
        kth = _kth_key(keys, listed, k, tl.full([], _LOWEST_KEY, tl.int64), highest)
        above = listed & (keys > kth)
        ties = (listed & (keys == kth)).to(tl.int32)
        room = _LIST - tl.sum(above.to(tl.int32), 0)
        kept = above | ((ties > 0) & (tl.cumsum(ties, 0) <= room))
        scores = _value(keys).to(tl.float64) / temperature
        allowed = kept & (scores >= _allowed_score(keys, kept, record, temperature))
        noisy = scores + _gumbel(ids, _row_key(record, tl.load(positions + i)))
        best = tl.max(tl.where(allowed, noisy, -float("inf")), 0)
        winner = tl.min(tl.where(allowed & (noisy == best), ids, _NO_ID), 0).to(tl.int64)
    tl.store(out + i, winner)


@triton.jit
def _collect(values, num_values, key, found, BLOCK: tl.constexpr):
    # Copies the values with at least this key to `found`. Returns their number.
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
    tl.debug_barrier()  # other threads of this program read the stored values
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
            # First finds a bound below the threshold that leaves few values to search.
            if takes_k:
                bound = _largest_key(peaks, num_groups, k, lowest, highest, top, inverse, False, BLOCK)
            else:
                mass = tl.maximum(_weight(x, num_ids, _LOWEST_KEY, top, inverse, True, BLOCK), 1.0)
                # All values that weigh less than (1 - p) * mass / num_ids may be dropped: together they weigh less than
                # 1 - p of the mass. The bound allows for rounding: one more than the logarithm, and one key less.
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
    # If the maximum is +inf, which also stands for NaN, differences are NaN or -inf. If it is -inf, all must be -inf.
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


def plain_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    first_id: int,
    group: TensorParallelGroup,
) -> torch.Tensor:
    """Samples a token for every row by temperature, noise and a top-k of up to MAX_LISTED_TOP_K, combined with top-p
    and min-p. Other filters are ignored. Ranks exchange a list for each row.

    Args:
        logits: [num_rows, num_ids] fp32, contiguous within a row, of the ids from `first_id` on.
        rows, positions, records: as in `best_candidates`.

    Returns:
        [num_rows] int64; -1 for a row with a NaN on any rank.
    """
    num_rows, num_ids = logits.shape
    num_groups = max(triton.cdiv(num_ids, _GROUP), 1)
    maxima = torch.empty((num_rows, num_groups), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
    candidates = _candidates(logits, rows, positions, records, first_id, None, maxima)
    # For each row, a rank's best token (a value and an id) and its list.
    words = torch.empty((num_rows, 2 + _LIST.value), dtype=torch.float64, device=logits.device)
    lists = words.view(torch.int64)[:, 2:]
    _shortlist_kernel[(num_rows,)](
        logits, logits.stride(0), maxima, chosen, rows, records, lists, lists.stride(0), first_id, num_ids, num_groups,
        GROUP=_GROUP, GROUPS=triton.next_power_of_2(num_groups), BLOCK=_SEARCH_BLOCK, num_warps=_SEARCH_WARPS,
    )  # fmt: skip
    if group.size > 1:
        _reduce(candidates, words, tokens=False)
        words = group.all_gather(words)
        candidates = words
    else:
        words = words.unsqueeze(0)
    lists = words.view(torch.int64)[:, :, 2:]
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lanes = triton.next_power_of_2(group.size * _LIST.value)
    _draw_kernel[(num_rows,)](
        candidates, candidates.stride(0), candidates.stride(1), lists, lists.stride(0), lists.stride(1), rows,
        positions, records, tokens, len(candidates), group.size, PARTS=triton.next_power_of_2(len(candidates)),
        LANES=lanes, num_warps=max(lanes // 256, 1),
    )  # fmt: skip
    return tokens


def best_candidates(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    first_id: int,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best token of every block of ids by logit / temperature + noise, or by the logit alone at temperature 0.

    Args:
        logits: [num_rows, num_ids] floating, contiguous within a row, of the ids from `first_id` on.
        rows: [num_rows] int32: index of each row's parameters in `records`.
        positions: [num_rows] int32: index of the token to be sampled in its whole sequence.
        records: [table_size, RECORD_WORDS] int32: PARAMS_DTYPE records.
        thresholds: [num_rows] fp64: smallest allowed score, for a positive temperature. If None, all are allowed.

    Returns:
        [num_blocks, num_rows, 2] fp64: (value, id). A block without an allowed id has -inf and 2**30, one with a NaN
        +inf and -1.
    """
    return _candidates(logits, rows, positions, records, first_id, thresholds, None)


def _candidates(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    first_id: int,
    thresholds: torch.Tensor | None,
    maxima: torch.Tensor | None,
) -> torch.Tensor:
    # `maxima` [num_rows, num_groups] receives the group maxima of listed rows, which get no noise. None: lists no row.
    num_rows, num_ids = logits.shape
    num_parts = max(triton.cdiv(num_ids, _BLOCK), 1)
    out = torch.empty((num_parts, num_rows, 2), dtype=torch.float64, device=logits.device)
    _candidates_kernel[(num_parts, num_rows)](
        logits, logits.stride(0), rows, positions, records, thresholds, maxima, out, num_rows, first_id, num_ids,
        0 if maxima is None else maxima.shape[1], RESTRICTED=thresholds is not None, LISTED=maxima is not None,
        BLOCK=_BLOCK, SLICE=_SLICE, GROUP=_GROUP, num_warps=4,
    )  # fmt: skip
    return out


def reduce_tokens(candidates: torch.Tensor) -> torch.Tensor:
    """[num_parts, num_rows, 2] fp64 (value, id) -> [num_rows] int64: the smallest id of the largest value."""
    out = torch.empty(candidates.shape[1], dtype=torch.int64, device=candidates.device)
    _reduce(candidates, out, tokens=True)
    return out


def _reduce(candidates: torch.Tensor, out: torch.Tensor, *, tokens: bool) -> None:
    num_parts, num_rows, _ = candidates.shape
    parts = triton.next_power_of_2(num_parts)
    _reduce_kernel[(num_rows,)](
        candidates, out, out.stride(0), num_parts, num_rows, TOKENS=tokens, PARTS=parts, num_warps=1
    )


def filter_thresholds(logits: torch.Tensor, rows: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """The smallest score (logit / temperature) that a row's top-k, top-p and min-p allow; -inf without a filter.

    Top-k is applied first, then top-p to the remaining tokens, then min-p. Scores equal to a threshold are allowed.
    Masses are sums in fp64 over blocks of ids in ascending order.

    Args:
        logits: [num_rows, vocab_size] fp32, contiguous: whole rows.
        rows: [num_rows] int32: index of each row's parameters in `records`.
        records: as in `best_candidates`.

    Returns:
        [num_rows] fp64. Allocates temporary memory of the size of `logits`.
    """
    num_rows, num_ids = logits.shape
    assert logits.is_contiguous(), "the logits must be contiguous"
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


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, requested: torch.Tensor) -> LogprobTensors:
    """Log probabilities, before temperature and filters, of each row's given, likeliest and requested tokens.

    Args:
        logits: [num_rows, vocab_size] floating, contiguous within a row: whole rows.
        tokens: [num_rows] int64: the given token of each row.
        k: number of likeliest tokens.
        requested: [num_rows, m] int64: ids of further tokens.
    """
    ranked, logprobs = rank_logprobs(logits, tokens)
    top = ranked.topk(k).values if k else ranked[:, :0]
    return LogprobTensors(logprobs, ranked_ids(top), ranked_logprobs(top), ranked_logprobs(ranked.gather(1, requested)))


def rank_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities before temperature and filters: of all ids, as integers that sort by rank, and of `tokens`.

    Args:
        logits: [num_rows, vocab_size] floating, contiguous within a row: whole rows.
        tokens: [num_rows] int64: the one token of each row.

    Returns:
        [num_rows, vocab_size] int64, read by `ranked_ids` and `ranked_logprobs`. A larger value is likelier; of equally
        likely ids the smaller one has the larger value. And [num_rows] fp32: log probabilities of `tokens`.
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
    """The token ids, int64, that values returned by `rank_logprobs` stand for."""
    return 0x7FFFFFFF - (ranked & 0xFFFFFFFF)


def ranked_logprobs(ranked: torch.Tensor) -> torch.Tensor:
    """The log probabilities, fp32, that values returned by `rank_logprobs` stand for."""
    keys = (ranked >> 32).to(torch.int32)
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)
