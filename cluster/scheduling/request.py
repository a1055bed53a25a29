"""One request in the scheduler, from arrival to end. Numbers that change per step are in the row table instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import GenerateRequest, Miss, SamplingParams, Terms
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
    """Makes one request's answer follow a grammar: it receives the sampled tokens and returns masks. One thread calls
    all methods, and no method blocks.

    Implementations compute masks on their own threads, and wake the coordinator when a mask is done
    (`Coordinator.wake`). The scheduler polls each guide before a step, and runs other requests while a mask is missing.
    """

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Receives the tokens sampled since the last call. After a preemption, they are the whole answer so far.

        Args:
            drafts: drafts of the tokens after `tokens`. The guide computes masks for them too (`ahead`).
        """

    def poll(self) -> UInt32Array | None:
        """Returns the mask of the next token [mask_words(vocab_size)], or None if the mask is not computed yet.
        Repeated calls return the same mask.

        Raises:
            GuideError: the request must end with this error.
            OverloadedError: the request must end, and its client may retry.
        """

    @property
    def ahead(self) -> Sequence[UInt32Array]:
        """Masks after the first draft, after the first two drafts and so on, once `poll` has returned a mask. The list
        ends before the first draft that the grammar forbids or after which no token may follow."""

    @property
    def is_finished(self) -> bool:
        """Whether the accepted tokens complete the answer, so that only end of sequence may follow."""

    def close(self) -> None:
        """Releases the guide, because the request has ended. Called once, possibly while a mask is computed."""


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """What a row needs for sampling besides its PARAMS_DTYPE record: changes to its logits, and the tokens with
    requested log probabilities. The records are made when the request arrives, without a row. Whenever the request gets
    a row, they are copied to the frame with that row."""

    biases: npt.NDArray[np.void]
    """BIAS_DTYPE records."""
    requested: npt.NDArray[np.void]
    """REQUESTED_DTYPE records."""
    allowed: UInt32Array | None
    """Mask of `allowed_token_ids`. None if the request allows every token."""
    counts_prompt: bool
    """Whether the ranks count the prompt's tokens, which a repetition penalty needs."""
    counts_answer: bool
    """Whether the ranks count the answer's tokens, which every penalty needs."""

    @classmethod
    def create(cls, sampling: SamplingParams, num_prompt_tokens: int, limits: SchedulerLimits) -> Adjustments | None:
        """The adjustments that `sampling` needs, or None if it needs none.

        Raises:
            RequestError: a token id is outside the vocabulary, or a list has more entries than a row can have.
            GuideError: the request's ids leave no token that may be sampled.
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
        """`mask` restricted to `allowed_token_ids`.

        Args:
            position: position in the sequence of the token that the mask is for.

        Raises:
            GuideError: no token may be sampled.
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
    """The prompt, followed after a preemption by the tokens emitted before it. The row table has the newer tokens."""
    num_prompt_tokens: int
    max_total_tokens: int
    """The request ends with LENGTH when prompt and answer have this many tokens."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    terms: Terms
    place: int = 0
    """Sort key among the waiting requests of its client, level and priority, lowest first. FairQueue writes it."""
    adjustments: Adjustments | None = None
    guide: Guide | None = None
    history: NgramHistory | DraftHistory | None = None
    """What predicts the request's drafts and measures how many are right. None if it has no drafts."""
    mask: UInt32Array | None = None
    """Mask for the first token after admission. A request with a guide gets this mask before it is queued."""
    arrival_s: float = 0.0
    """Time of arrival, on the scheduler's clock."""
    waits_since_s: float = 0.0
    """Time when the request arrived or was last preempted, on the scheduler's clock."""
    admission_s: float | None = None
    """Time of the first admission. None while the request has never run."""
    row: int = 0
    """0 while the request waits."""
    num_cached_tokens: int = 0
    """Number of tokens that the request took from the prefix cache since its last admission."""
    missed: dict[Miss, int] = field(default_factory=dict)
    """Number of tokens that the last admission did not take from the prefix cache, for each reason."""
    has_emitted: bool = False
    next_prompt_logprob: int = 0
    """Position of the next prompt token that needs a log probability. `num_prompt_tokens` or more if no such token is
    left."""
    num_item_tokens: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Number of later requests that were admitted while this one lacked pages."""

    @property
    def has_timed_biases(self) -> bool:
        """Whether some bias of the request ends at a position, such as the ban on EOS before `min_tokens`."""
        return self.adjustments is not None and bool((self.adjustments.biases["until"] < ALWAYS).any())

    @classmethod
    def create(cls, request: GenerateRequest, limits: SchedulerLimits, now: float = 0.0) -> Request:
        """Creates a request from the message. Raises RequestError for sampling parameters that are out of range."""
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
        """Whether log probabilities of the prompt are still missing. The ranks must then compute these tokens even if
        the prefix cache has their pages."""
        return self.next_prompt_logprob < self.num_prompt_tokens

    @property
    def num_adjustment_bytes(self) -> int:
        """Upper bound of the bytes that the request's mask and adjustments take in the frame that gives it a row."""
        num_bytes = 0
        if self.mask is not None:
            num_bytes += StepFrame.section_bytes(mask=1, mask_word=len(self.mask))
        if (own := self.adjustments) is not None:
            num_counts = len(self.tokens) if own.counts_answer else 0
            num_bytes += StepFrame.section_bytes(bias=len(own.biases), requested=len(own.requested), count=num_counts)
        return num_bytes

    def reason_never_fits(self, limits: SchedulerLimits) -> str | None:
        """The reason why the request could not run even if no other request ran. None if it could."""
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
    """Raises GuideError if no bit of `mask` is set."""
    if not mask.any():
        raise GuideError(
            "the grammar, with the other parameters of the request, allows no further token; relax one of them"
        )


def _bans(sampling: SamplingParams, num_prompt_tokens: int, limits: SchedulerLimits) -> dict[int, int]:
    """Banned token ids, each with the first position at which it may be sampled."""
    bans: dict[int, int] = {}
    if sampling.min_tokens > 0:
        ends = {*limits.eos_token_ids, *sampling.stop_token_ids}
        # A stop id outside the vocabulary has no effect.
        bans = dict.fromkeys((i for i in ends if 0 <= i < limits.vocab_size), num_prompt_tokens + sampling.min_tokens)
    bans |= {word[0]: ALWAYS for word in sampling.bad_words if len(word) == 1}
    return bans


def mask_of(ids: Sequence[int], vocab_size: int) -> UInt32Array:
    """Returns a mask [mask_words(vocab_size)] in which only the bits of `ids` are set."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[np.array(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
