"""One request as the scheduler keeps it, from `add` to its finish. Per-step numbers live in the row table instead."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cluster.engine.messages import GenerateRequest, SamplingParams
from cluster.scheduling.guide import Guide
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.request_adjustments import Adjustments
from worker.protocol import MAX_ITEMS, Int32Array, StepFrame, UInt32Array


@dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request."""

    id: int
    tokens: Int32Array
    """Prompt and tokens emitted before the last preemption. While it runs, the row table is ahead of this."""
    num_prompt_tokens: int
    max_total_tokens: int
    """It ends with LENGTH when prompt and answer are this long."""
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    priority: int = 0
    client: str = ""
    cache_salt: bytes = b""
    adjustments: Adjustments | None = None
    guide: Guide | None = None
    mask: UInt32Array | None = None
    """What the first token after its admission may be; of a request with a guide, there before it is queued."""
    deadline_s: float = 0.0
    arrival_s: float = 0.0
    """On the scheduler's clock."""
    admission_s: float | None = None
    """The first one; None: it has only waited so far."""
    row: int = 0
    """0: waiting."""
    num_cached_tokens: int = 0
    """Tokens the prefix cache gave it since it was last admitted."""
    has_emitted: bool = False
    next_prompt_logprob: int = 0
    """Position of the first prompt token whose log probability is wanted and was not sent; past the prompt: none."""
    item_lens: tuple[int, ...] = ()
    """As in SamplingParams."""
    num_item_tokens: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Requests behind it that were admitted while it lacked pages."""

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
            priority=request.priority,
            client=request.client,
            cache_salt=request.cache_salt,
            deadline_s=request.deadline_s,
            arrival_s=now,
            next_prompt_logprob=1 if request.sampling.prompt_logprobs >= 0 else len(prompt),
            item_lens=request.sampling.item_lens,
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
            num_bytes += StepFrame.section_bytes(bias=len(own.biases), asked=len(own.asked), count=num_counts)
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
        if (items := self.item_lens) and not (
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
