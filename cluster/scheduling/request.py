"""One request as the scheduler keeps it, from arrival to finish. Per-step numbers live in the row table instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import GenerateRequest, SamplingParams, Terms
from cluster.scheduling.draft_history import DraftHistory
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.ngrams import NgramHistory
from configs.errors import GuideError, RequestError
from worker.protocol import (
    ALWAYS,
    BIAS_DTYPE,
    MAX_ITEMS,
    MAX_ROW_BIASES,
    MAX_ROW_REQUESTED,
    REQUESTED_DTYPE,
    Int32Array,
    StepFrame,
    UInt32Array,
    mask_words,
)


class Guide(Protocol):
    """Makes one request's answer follow a grammar: tokens in, masks out. Called by one thread; no method blocks.

    Implementations compute masks on threads of their own and wake the coordinator when one is there
    (`Coordinator.wake`); the scheduler asks before each step and goes on with the other requests meanwhile.
    """

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Takes the tokens sampled since the last call; of a request that is resumed, its whole answer so far.

        `drafts`: perhaps the next ones. What may follow each is wanted.
        """

    def poll(self) -> UInt32Array | None:
        """[mask_words(vocab_size)] of the tokens that may come next, as often as it is asked; None: not there yet.

        Raises:
            GuideError: the request must end with this error.
            OverloadedError: likewise, and its client may try again.
        """

    @property
    def ahead(self) -> Sequence[UInt32Array]:
        """Once `poll` has a mask: the masks behind the first draft, the first two and so on, as far as they are allowed
        and something may follow."""

    @property
    def is_finished(self) -> bool:
        """The answer, with all tokens accepted, is complete: nothing but end of sequence may follow."""

    def close(self) -> None:
        """The request has ended. Called once, also while a mask is computed."""


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Changes that a request makes to its row's logits, besides PARAMS_DTYPE: worked out once, when it arrives. Records
    have no row yet: they become parts of a frame whenever the request is given one."""

    biases: npt.NDArray[np.void]
    """BIAS_DTYPE."""
    requested: npt.NDArray[np.void]
    """REQUESTED_DTYPE."""
    allowed: UInt32Array | None
    """Mask of `allowed_token_ids`."""
    counts_prompt: bool
    """A repetition penalty, which counts the prompt's tokens too."""
    counts_answer: bool
    """Any penalty."""

    @classmethod
    def create(cls, sampling: SamplingParams, num_prompt_tokens: int, limits: SchedulerLimits) -> Adjustments | None:
        """The adjustments that `sampling` asks for, or None.

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
        requested = [(0, token_id) for token_id in sampling.logprob_token_ids]
        for name, ids, most in (
            ("logit_bias", [bias[1] for bias in biases], MAX_ROW_BIASES),
            ("logprob_token_ids", sampling.logprob_token_ids, MAX_ROW_REQUESTED),
            ("allowed_token_ids", sampling.allowed_token_ids, limits.vocab_size),
        ):
            if len(ids) > most:
                raise RequestError(f"{name} has {len(ids)} entries; at most {most}", code="engine_error")
            if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
                raise RequestError(f"{name} has an id outside 0 to {limits.vocab_size - 1}", code="engine_error")
        adjustments = cls(
            biases=np.array(biases, BIAS_DTYPE),
            requested=np.array(requested, REQUESTED_DTYPE),
            allowed=mask_of(sampling.allowed_token_ids, limits.vocab_size) if sampling.allowed_token_ids else None,
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


@dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request."""

    id: int
    tokens: Int32Array
    """Prompt and tokens emitted before the last preemption. While it runs, the row table is ahead of this."""
    num_prompt_tokens: int
    max_total_tokens: int
    """The request ends with LENGTH when prompt and answer are this long."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    terms: Terms
    place: int = 0
    """Order among the waiting requests of its client, level and priority; written by FairQueue."""
    adjustments: Adjustments | None = None
    guide: Guide | None = None
    history: NgramHistory | DraftHistory | None = None
    """The tokens that drafts are made from, from its first one on; None: they are not."""
    mask: UInt32Array | None = None
    """The first tokens that may follow its admission; a request with a guide has it before it is queued."""
    arrival_s: float = 0.0
    """Time on the scheduler's clock."""
    waits_since_s: float = 0.0
    """When it arrived, or was preempted last."""
    admission_s: float | None = None
    """The first one; None: it has only waited so far."""
    row: int = 0
    """0: waiting."""
    num_cached_tokens: int = 0
    """Tokens the prefix cache gave it since it was last admitted."""
    has_emitted: bool = False
    next_prompt_logprob: int = 0
    """Position of the first prompt token whose log probability is wanted and was not sent; past the prompt: none."""
    num_item_tokens: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Requests behind it that were admitted while it lacked pages."""

    @property
    def has_timed_biases(self) -> bool:
        """Whether a bias of it ends at some position."""
        return self.adjustments is not None and bool((self.adjustments.biases["until"] < ALWAYS).any())

    @classmethod
    def create(cls, request: GenerateRequest, limits: SchedulerLimits, now: float = 0.0) -> Request:
        """The request as received. Raises RequestError for parameters that no row can have."""
        prompt = np.frombuffer(request.prompt, np.int32)
        adjustments = Adjustments.create(request.sampling, len(prompt), limits)
        return cls(
            id=request.id,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            max_total_tokens=min(len(prompt) + request.sampling.max_tokens, limits.max_model_len),
            sampling=request.sampling,
            stop_token_ids=frozenset(request.sampling.stop_token_ids),
            terms=request.terms,
            arrival_s=now,
            waits_since_s=now,
            next_prompt_logprob=1 if request.sampling.prompt_logprobs >= 0 else len(prompt),
            num_item_tokens=sum(request.sampling.item_lens),
            adjustments=adjustments,
            mask=None if adjustments is None else adjustments.allowed,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log probabilities of its prompt are still to be found: it must compute what the prefix cache may have."""
        return self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def num_adjustment_bytes(self) -> int:
        """Upper bound of the bytes of a frame that giving it a row takes, besides its parameters."""
        num_bytes = 0
        if self.mask is not None:
            num_bytes += StepFrame.section_bytes(mask=1, mask_word=len(self.mask))
        if (own := self.adjustments) is not None:
            num_counts = len(self.tokens) if own.counts_answer else 0
            num_bytes += StepFrame.section_bytes(bias=len(own.biases), requested=len(own.requested), count=num_counts)
        return num_bytes

    def reason_never_fits(self, limits: SchedulerLimits) -> str | None:
        """Why this request could not even run alone, or None."""
        num_prompt_tokens = len(self.tokens)
        if num_prompt_tokens == 0:
            return "the prompt is empty; send at least one token"
        if self.tokens.min() < 0 or self.tokens.max() >= limits.vocab_size:
            return f"the prompt has a token outside the vocabulary of {limits.vocab_size}; send ids below it"
        if self.sampling.max_tokens < 1:
            return f"max_tokens={self.sampling.max_tokens} is below 1; ask for at least one token"
        if num_prompt_tokens >= limits.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens, max_model_len={limits.max_model_len}; "
                f"send at most {limits.max_model_len - 1}"
            )
        if (items := self.sampling.item_lens) and not (
            min(items) > 0
            and len(items) <= MAX_ITEMS
            and self.num_item_tokens < num_prompt_tokens
            and self.num_item_tokens <= limits.max_item_tokens
            and not self.wants_prompt_logprobs
        ):
            return f"{len(items)} items of {self.num_item_tokens} tokens do not fit {limits.max_item_tokens=}"
        num_pages = limits.num_pages_for(self.max_total_tokens - 1)
        if num_pages > limits.num_pages:
            return (
                f"prompt and completion of {self.max_total_tokens} tokens exceed the KV pool of "
                f"{limits.num_pages * limits.page_size} tokens; send a shorter prompt or ask for fewer tokens"
            )
        return None


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


def mask_of(ids: Sequence[int], vocab_size: int) -> UInt32Array:
    """[mask_words(vocab_size)] in which the bits of `ids` are set."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[np.array(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
