"""From logits to tokens: one rule for every row, whatever else is in the batch.

    token = argmax over allowed v of  logit_v / temperature + gumbel(seed, position, v)

Noise is a hash of seed, position and token id; no generator has state. Temperature 0 is the same rule without noise.
Ties go to the smallest id. Each sampled row is worked on alone, so its neighbours cannot change a bit of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.protocol import PARAMS_DTYPE

_MASK64 = (1 << 64) - 1
_MIX_SHIFTS = (30, 27, 31)
_MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_TOP_P_WIDTH = 8.0
"""Scores this far below the best are looked at first for top-p; only if they hold too little mass is all sorted."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each row, and log probabilities of the rows that asked."""

    tokens: torch.Tensor
    """[num_rows] int64, device."""
    logprob_rows: npt.NDArray[np.int32]
    """[num_logprob_rows]: indices of the rows that asked."""
    logprobs: torch.Tensor
    """[num_logprob_rows] fp32: of the sampled token, before adjustments, temperature and filters."""
    top_ids: torch.Tensor
    """[num_logprob_rows, k] int64: likeliest tokens, descending; k is the largest number asked for."""
    top_logprobs: torch.Tensor
    """[num_logprob_rows, k] fp32."""
    asked_logprobs: torch.Tensor
    """[num_logprob_rows, m] fp32: of the tokens that were asked for."""


class Sampler:
    """Samples rows of logits by PARAMS_DTYPE records."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        # The hash of an id is constant; a step only mixes its row's key in.
        self._id_hashes = _mix(torch.arange(vocab_size, dtype=torch.int64, device=device) * _signed(_GOLDEN))

    def sample(
        self,
        logits: torch.Tensor,
        params: npt.NDArray[np.void],
        positions: npt.NDArray[np.int64],
        *,
        adjusted: Mapping[int, torch.Tensor] | None = None,
        asked: torch.Tensor | None = None,
    ) -> SampledTokens:
        """One token for each row.

        Args:
            logits: [num_rows, vocab_size] fp32, unchanged; -inf for what must not be chosen.
            params: [num_rows] PARAMS_DTYPE.
            positions: [num_rows]: index of the token to be sampled in its whole sequence, prompt included.
            adjusted: by index, what the token of a row is drawn from instead, [vocab_size] fp32. A row without an
                allowed token gets token 0.
            asked: [num_rows, m] int64: ids whose log probabilities rows with logprobs want too.
        """
        adjusted = adjusted or {}
        tokens = logits.argmax(dim=-1)
        for i, row in adjusted.items():
            tokens[i] = row.argmax()
        for i in np.flatnonzero(params["temperature"] > 0).tolist():
            tokens[i] = self._sample_row(adjusted.get(i, logits[i]), params[i], int(positions[i]))
        if asked is None:
            asked = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
        return _with_logprobs(logits, tokens, params["num_logprobs"], asked)

    def _sample_row(self, logits: torch.Tensor, params: np.void, position: int) -> torch.Tensor:
        scores = logits.double() / float(params["temperature"])
        threshold = _threshold(scores, int(params["top_k"]), float(params["top_p"]), float(params["min_p"]))
        key = _row_key(int(params["seed"]), position)
        if threshold is None:
            return (scores + _gumbel(self._id_hashes, key)).argmax()
        # Ascending ids, so that argmax still gives ties to the smallest.
        allowed = (scores >= threshold).nonzero().squeeze(1)
        noisy = scores.index_select(0, allowed) + _gumbel(self._id_hashes.index_select(0, allowed), key)
        return allowed[noisy.argmax()]


def default_params(num_rows: int) -> npt.NDArray[np.void]:
    """[num_rows] records of greedy sampling without logprobs."""
    params = np.zeros(num_rows, PARAMS_DTYPE)
    params["top_p"] = params["repetition_penalty"] = 1.0
    params["num_logprobs"] = -1
    return params


def _threshold(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """Smallest allowed score, a scalar; None when everything is allowed. Scores equal to it are kept.

    top-k first, then top-p of what is left, then min-p relative to the likeliest token.
    """
    vocab_size = scores.shape[0]
    threshold: torch.Tensor | None = None
    if 0 < top_k < vocab_size:
        threshold = scores.topk(top_k, sorted=False).values.min()
    if top_p < 1.0:
        threshold = _top_p_threshold(scores, threshold, top_p)
    if min_p > 0.0:
        floor = scores.max() + math.log(min_p)
        threshold = floor if threshold is None else torch.maximum(threshold, floor)
    return threshold


def _top_p_threshold(scores: torch.Tensor, at_least: torch.Tensor | None, top_p: float) -> torch.Tensor:
    """Score of the last token of the smallest set, likeliest first, that holds `top_p` of the mass >= `at_least`."""
    best = scores.max()
    weights = (scores - best).exp()
    if at_least is not None:
        weights = weights.masked_fill(scores < at_least, 0.0)
    wanted = top_p * weights.sum()
    for width in (_TOP_P_WIDTH, math.inf):
        likeliest = scores[scores >= best - width].sort(descending=True).values
        # Summed in descending order, so the first sums do not depend on how many tokens are looked at.
        mass = (likeliest - best).exp().cumsum(0)
        reached = mass >= wanted
        if bool(reached[-1]):
            break
    # The first position that reaches the mass; rounding may leave even the last one short of it.
    last_kept = likeliest[reached.int().argmax() if bool(reached[-1]) else -1]
    return last_kept if at_least is None else torch.maximum(last_kept, at_least)


def _with_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_logprobs: npt.NDArray[np.int32], asked: torch.Tensor
) -> SampledTokens:
    rows = np.flatnonzero(num_logprobs >= 0).astype(np.int32)
    if len(rows) == 0:
        empty = torch.empty(0, 0, device=logits.device)
        return SampledTokens(tokens, rows, empty[:, 0:0].reshape(0), empty.long(), empty, empty)
    chosen = torch.from_numpy(rows.astype(np.int64)).to(logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, chosen).float(), dim=-1)
    # A stable sort, not topk: equal log probabilities stand in the order of their ids.
    k = int(num_logprobs[rows].max())
    top = likeliest(logprobs, k)
    own = logprobs.gather(1, tokens.index_select(0, chosen).unsqueeze(1)).squeeze(1)
    asked_logprobs = logprobs.gather(1, asked.index_select(0, chosen))
    return SampledTokens(tokens, rows, own, top, logprobs.gather(1, top), asked_logprobs)


def likeliest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [num_rows, k] int64 of the largest of `values` [num_rows, n], descending, equal ones by index."""
    if k == 0:
        return torch.empty(values.shape[0], 0, dtype=torch.int64, device=values.device)
    indices = [
        # Everything that ties with the k-th is a candidate; few tokens, so the stable sort is cheap.
        candidates[row[candidates].sort(descending=True, stable=True).indices[:k]]
        for row in values
        for candidates in [(row >= row.topk(k).values[-1]).nonzero().squeeze(1)]
    ]
    return torch.stack(indices)


def _gumbel(id_hashes: torch.Tensor, key: int) -> torch.Tensor:
    """Standard Gumbel noise in fp64, one for each hash: 53 uniform bits, never 0 nor 1."""
    bits = _mix(id_hashes ^ key)
    # Arithmetic shift, then the sign is masked off: torch has no unsigned 64-bit shift.
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add_(0.5).mul_(2.0**-53)
    # 1 - 2**-54 rounds to 1.0 in fp64, whose noise would be infinite.
    uniform.clamp_(max=1.0 - 2.0**-53)
    return uniform.log_().neg_().log_().neg_()


def _row_key(seed: int, position: int) -> int:
    """64 bits, as int64, from seed and position: two rounds, so neighbouring positions share nothing."""
    return _signed(_mix_int((_mix_int(seed & _MASK64) + (position + 1) * _GOLDEN) & _MASK64))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64, which wraps as uint64 would; a new tensor."""
    x = x.clone()
    for shift, factor in zip(_MIX_SHIFTS, (*_MIX_FACTORS, 1), strict=True):
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)
        if factor != 1:
            x *= _signed(factor)
    return x


def _mix_int(x: int) -> int:
    """`_mix` of one Python integer below 2**64."""
    for shift, factor in zip(_MIX_SHIFTS, (*_MIX_FACTORS, 1), strict=True):
        x ^= x >> shift
        x = x * factor & _MASK64
    return x


def _signed(x: int) -> int:
    """The int64 with the bits of a uint64."""
    return x - (1 << 64) if x >> 63 else x
