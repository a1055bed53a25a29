"""The torch versions of the sampling kernels for tensors on the CPU, with the same names and signatures.

Rows are processed one by one, so that a row costs only what its own parameters require. Scores and noise are fp64, as
in worker/sampling/kernels/sampling.py and worker/sampling/kernels/adjustments.py, so both sample the same tokens.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

from parallel.collectives.group import TensorParallelGroup
from worker.protocol import PARAMS_DTYPE
from worker.sampling.adjustments import RowAdjustments, adjusted
from worker.sampling.logprobs import LogprobTensors

_MASK64 = (1 << 64) - 1
_MIX_SHIFTS = (30, 27, 31)
_MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_NO_ID = float(1 << 30)  # above every id; exact as a float
_NAN_ID = -1.0  # below every id
MAX_LISTED_TOP_K = 0
"""0: no row is sampled from a list. A list saves nothing here, as a row costs only what its filters require."""
_TOP_P_WIDTH = 8.0
"""Top-p first sorts only scores within this distance of the best. If they hold too little mass, it sorts all scores."""


def best_candidates(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    first_id: int,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like the kernel, but all ids form one block: returns [1, num_rows, 2] fp64 (value, id)."""
    num_rows, num_ids = logits.shape
    out = torch.empty((1, num_rows, 2), dtype=torch.float64)
    if num_ids == 0:
        out[..., 0], out[..., 1] = -torch.inf, _NO_ID
        return out
    values, ids = out[0].unbind(1)
    best, best_ids = logits.max(dim=-1)  # the first of equal values
    values.copy_(best)
    ids.copy_(best_ids)
    has_nan = best.isnan()  # the maximum of a row with a NaN is NaN
    for i, params in _sampled(records, rows):
        if has_nan[i]:
            continue
        scores = logits[i].double() / float(params["temperature"])
        hashes = _id_hashes(first_id, num_ids)
        key = _row_key(int(params["seed"]), int(positions[i]))
        threshold = -math.inf if thresholds is None else float(thresholds[i])
        if threshold == -math.inf:
            noisy = scores + _gumbel(hashes, key)
            winner = noisy.argmax()
            values[i], ids[i] = noisy[winner], winner
        else:
            # The ids are ascending, so argmax still resolves ties to the smallest.
            allowed = (scores >= threshold).nonzero().squeeze(1)
            noisy = scores.index_select(0, allowed) + _gumbel(hashes.index_select(0, allowed), key)
            winner = noisy.argmax()
            values[i], ids[i] = noisy[winner], allowed[winner]
    ids += first_id
    values.masked_fill_(has_nan, torch.inf)
    ids.masked_fill_(has_nan, _NAN_ID)
    return out


def reduce_tokens(candidates: torch.Tensor) -> torch.Tensor:
    """Like the kernel: [num_parts, num_rows, 2] fp64 (value, id) -> [num_rows] int64."""
    values, ids = candidates.unbind(2)
    return torch.where(values == values.amax(dim=0), ids, _NO_ID).amin(dim=0).long()


def plain_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    first_id: int,
    group: TensorParallelGroup,
) -> torch.Tensor:
    """Like the kernel, but samples no row from a list."""
    return reduce_tokens(group.all_gather(best_candidates(logits, rows, positions, records, first_id)[0]))


def filter_thresholds(logits: torch.Tensor, rows: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Like the kernel: [num_rows] fp64, the smallest allowed score of each row; -inf without a filter."""
    out = torch.full((len(logits),), -torch.inf, dtype=torch.float64)
    for i, params in _sampled(records, rows):
        scores = logits[i].double() / float(params["temperature"])
        threshold = _threshold(scores, int(params["top_k"]), float(params["top_p"]), float(params["min_p"]))
        if threshold is not None:
            out[i] = threshold
    return out


def adjust_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    records: torch.Tensor,
    adjustments: RowAdjustments,
) -> None:
    """Like the kernel: changes `logits` in place, and no bit of rows without adjustments."""
    params = _params(records)
    for i, row in enumerate(rows.tolist()):
        if bool(adjustments.heads[row].any()):
            logits[i] = adjusted(logits[i], adjustments, row, int(positions[i]), params[row])


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, requested: torch.Tensor) -> LogprobTensors:
    """Like the kernel, but with sums in fp32."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    # A stable sort instead of topk: equal log probabilities are in the order of their ids.
    top = _likeliest(logprobs, k)
    own = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return LogprobTensors(own, top, logprobs.gather(1, top), logprobs.gather(1, requested))


def _params(records: torch.Tensor) -> npt.NDArray[np.void]:
    """The records as [table_size] PARAMS_DTYPE, without a copy."""
    params: npt.NDArray[np.void] = records.numpy().view(PARAMS_DTYPE)
    return params[:, 0]


def _sampled(records: torch.Tensor, rows: torch.Tensor) -> list[tuple[int, np.void]]:
    """Index and parameters of the rows with a temperature above 0."""
    params, of_table = _params(records), rows.numpy()
    return [(i, params[of_table[i]]) for i in np.flatnonzero(params["temperature"][of_table] > 0).tolist()]


def _threshold(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """The smallest allowed score, a scalar. None if all scores are allowed. Scores equal to it are allowed.

    Top-k is applied first, then top-p to the remaining tokens, then min-p relative to the likeliest token.
    """
    vocab_size = scores.shape[0]
    threshold: torch.Tensor | None = None
    if bool(scores.max().isnan()):
        return None  # a row with a NaN gets no token
    if 0 < top_k < vocab_size:
        threshold = scores.topk(top_k, sorted=False).values.min()
    if top_p < 1.0:
        threshold = _top_p_threshold(scores, threshold, top_p)
    if min_p > 0.0:
        floor = scores.max() + math.log(min_p)
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    return threshold


def _top_p_threshold(scores: torch.Tensor, at_least: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """The smallest score that top-p allows, a scalar. It allows the fewest likeliest tokens that hold `top_p` of the
    mass of all scores >= `at_least`."""
    best = scores.max()
    weights = (scores - best).exp()
    if at_least is not None:
        weights = weights.masked_fill(scores < at_least, 0.0)
    # numpy adds in one thread: torch's order would depend on `parallel.threads_per_rank`.
    wanted = top_p * float(weights.numpy().sum())
    for width in (_TOP_P_WIDTH, math.inf):
        likeliest = scores[scores >= best - width].sort(descending=True).values
        # The sums are in descending order, so the first ones do not depend on how many tokens are sorted.
        mass = (likeliest - best).exp().cumsum(0)
        reached = mass >= wanted
        if bool(reached[-1]):
            break
    # The first position that reaches the mass. Because of rounding, even the last one may not reach it.
    last_kept = likeliest[reached.int().argmax() if bool(reached[-1]) else -1]
    return last_kept if at_least is None else torch.maximum(last_kept, at_least)


def _likeliest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [num_rows, k] int64 of the largest of `values` [num_rows, n], descending, ties by index."""
    if k == 0:
        return torch.empty(values.shape[0], 0, dtype=torch.int64, device=values.device)
    indices = [
        # All values equal to the k-th are candidates. These are few, so the stable sort is cheap.
        candidates[row[candidates].sort(descending=True, stable=True).indices[:k]]
        for row in values
        # A row of NaN is taken whole, since NaN is not less than anything.
        for candidates in [(~(row < row.topk(k).values[-1])).nonzero().squeeze(1)]
    ]
    return torch.stack(indices)


@functools.lru_cache(maxsize=16)
def _id_hashes(first_id: int, num_ids: int) -> torch.Tensor:
    """[num_ids] int64. The hash of an id is constant, and a step only mixes in its row's key."""
    return _mix(torch.arange(first_id, first_id + num_ids, dtype=torch.int64) * _signed(_GOLDEN))


def _gumbel(id_hashes: torch.Tensor, key: int) -> torch.Tensor:
    """Standard Gumbel noise in fp64, one value for each hash, from 53 uniform bits that are never 0 or 1."""
    bits = _mix(id_hashes ^ key)
    # An arithmetic shift, then a mask for the sign bits, because torch has no unsigned 64-bit shift.
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    # 1 - 2**-54 rounds to 1.0 in fp64, which would make the noise infinite.
    uniform.clamp_(max=1.0 - 2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _row_key(seed: int, position: int) -> int:
    """64 bits, as int64, that depend on seed and position. Two rounds make neighbouring positions independent."""
    return _signed(_mix_int((_mix_int(seed & _MASK64) + (position + 1) * _GOLDEN) & _MASK64))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64, which wraps like uint64. Returns a new tensor."""
    x = x.clone()
    for shift, factor in zip(_MIX_SHIFTS, (*_MIX_FACTORS, 1), strict=True):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            x *= _signed(factor)
    return x


def _mix_int(x: int) -> int:
    """Like `_mix`, for one Python integer below 2**64."""
    for shift, factor in zip(_MIX_SHIFTS, (*_MIX_FACTORS, 1), strict=True):
        x ^= x >> shift
        x = x * factor & _MASK64
    return x


def _signed(x: int) -> int:
    """The int64 with the bits of a uint64."""
    return x - (1 << 64) if x >> 63 else x
