"""What a request changes of its row's logits, besides PARAMS_DTYPE: biases, a mask, counts for penalties, asked tokens.

Worked out once, when the request arrives; it becomes frame records whenever the request is given a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.engine.messages import SamplingParams
from cluster.scheduling.limits import SchedulerLimits
from configs.errors import GuideError, RequestError
from worker.protocol import (
    ALWAYS,
    ASKED_DTYPE,
    BIAS_DTYPE,
    MAX_ROW_ASKED,
    MAX_ROW_BIASES,
    UInt32Array,
    mask_words,
)


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """One request's. Records have no row yet."""

    biases: npt.NDArray[np.void]
    """BIAS_DTYPE."""
    asked: npt.NDArray[np.void]
    """ASKED_DTYPE."""
    allowed: UInt32Array | None
    """Mask of `allowed_token_ids`."""
    counts_prompt: bool
    """A repetition penalty, which counts the prompt's tokens too."""
    counts_answer: bool
    """Any penalty."""

    @classmethod
    def create(cls, sampling: SamplingParams, num_prompt_tokens: int, limits: SchedulerLimits) -> Adjustments | None:
        """None for a request that has none.

        Raises:
            RequestError: a token id is outside the vocabulary, or there are more than a row holds.
            GuideError: nothing is left to sample.
        """
        bans = _bans(sampling, num_prompt_tokens, limits)
        counts_prompt = sampling.repetition_penalty != 1.0
        counts_answer = counts_prompt or bool(sampling.frequency_penalty or sampling.presence_penalty)
        if not (
            bans or counts_answer or sampling.logit_bias or sampling.logprob_token_ids or sampling.allowed_token_ids
        ):
            return None
        biases = [(0, token_id, value, ALWAYS) for token_id, value in sampling.logit_bias]
        biases += [(0, token_id, -np.inf, until) for token_id, until in bans.items()]
        asked = [(0, token_id) for token_id in sampling.logprob_token_ids]
        for name, ids, most in (
            ("logit_bias", [bias[1] for bias in biases], MAX_ROW_BIASES),
            ("logprob_token_ids", sampling.logprob_token_ids, MAX_ROW_ASKED),
            ("allowed_token_ids", sampling.allowed_token_ids, limits.vocab_size),
        ):
            if len(ids) > most:
                raise RequestError(f"{name} has {len(ids)} entries; at most {most}", code="engine_error")
            if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
                raise RequestError(f"{name} has an id outside 0 to {limits.vocab_size - 1}", code="engine_error")
        adjustments = cls(
            biases=np.array(biases, BIAS_DTYPE),
            asked=np.array(asked, ASKED_DTYPE),
            allowed=_mask_of(sampling.allowed_token_ids, limits.vocab_size) if sampling.allowed_token_ids else None,
            counts_prompt=counts_prompt,
            counts_answer=counts_answer,
        )
        if adjustments.allowed is not None:
            adjustments.check(adjustments.allowed, num_prompt_tokens)
        return adjustments

    def restricted(self, mask: UInt32Array, position: int) -> UInt32Array:
        """`mask` without what `allowed_token_ids` leaves out.

        Args:
            position: of the token to be sampled.

        Raises:
            GuideError: nothing is left to sample.
        """
        if self.allowed is not None:
            mask = mask & self.allowed
        self.check(mask, position)
        return mask

    def check(self, mask: UInt32Array, position: int) -> None:
        """Raises GuideError unless `mask` and the biases allow a token at `position`."""
        banned = np.isneginf(self.biases["value"]) & (position < self.biases["until"])
        ids = self.biases["token_id"][banned]
        if len(ids):
            mask = mask.copy()
            np.bitwise_and.at(mask, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
        check_allows_a_token(mask)


def check_allows_a_token(mask: UInt32Array) -> None:
    """Raises GuideError for a mask without a bit."""
    if not mask.any():
        raise GuideError("the grammar, with the other parameters of the request, allows no further token")


def _bans(sampling: SamplingParams, num_prompt_tokens: int, limits: SchedulerLimits) -> dict[int, int]:
    """Token ids that must not be sampled -> the first position at which they may be."""
    bans: dict[int, int] = {}
    if sampling.min_tokens > 0:
        ends = {*limits.eos_token_ids, *sampling.stop_token_ids}
        # A stop id outside the vocabulary stops nothing.
        bans = dict.fromkeys((i for i in ends if 0 <= i < limits.vocab_size), num_prompt_tokens + sampling.min_tokens)
    bans |= {word[0]: ALWAYS for word in sampling.bad_words if len(word) == 1}
    return bans


def _mask_of(ids: Sequence[int], vocab_size: int) -> UInt32Array:
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[np.array(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
