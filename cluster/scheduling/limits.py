"""Limits of the scheduler, as plain numbers that are fixed before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from configs.attention import BACKENDS, Feature
from configs.errors import ConfigError
from configs.model_config import ModelConfig
from configs.resolve import attention_needs
from configs.schema import NO_SPECULATION, EngineConfig, SpeculationConfig, resolved
from worker.protocol import MAX_ITEMS, MAX_PROMPT_LOGPROBS, MAX_ROW_BIASES, MAX_ROW_REQUESTED, StepFrame, mask_words

MAX_PREFIX_DELTAS = 4096
"""Number of page deltas in a frame at which prompts stop taking pages from the cache. Bounds a frame's size."""
MAX_STATE_COPIES_PER_ROW = 8
"""Number of copies of states per row after which a frame has no room for more."""

_MASKS_BYTES = 4 << 20
"""Maximum bytes of masks that one frame contains for decoding rows."""
_ADJUSTMENT_BYTES = 1 << 20
"""Bytes that one frame's adjustments for newly admitted rows may take. A single request may exceed it."""


_MAX_MASKED_TOKENS = 2048
"""Maximum number of inputs of a row with scored items, because the item mask has a byte for each pair of inputs."""


def max_item_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Maximum number of inputs of a row in the step with its scored items, for a resolved `config`. 0: the model cannot
    score items, because no backend supports masks, local-attention chunks may begin inside an item, or recurrent layers
    read all tokens before.

    Otherwise the smallest of: _MAX_MASKED_TOKENS; one chunk of a prompt; half of the tokens that decodes leave in a
    step, because short prompts may take the other half first; the model's smallest window, because the item mask does
    not apply windows.
    """
    mixers = [layer.mixer for layer in model.layers]
    backends = (resolved(config.attention.prefill_backend), resolved(config.attention.decode_backend))
    needs = attention_needs(config, model).with_feature(Feature.MASK)
    if all(BACKENDS[name].refusal(needs) for name in backends):
        return 0
    if model.has_states or any(Feature.CHUNK in mixer.features for mixer in mixers):
        return 0
    scheduler = config.scheduler
    room = (resolved(scheduler.max_num_batched_tokens) - resolved(scheduler.max_num_seqs)) // 2
    windows = [mixer.window for mixer in mixers if mixer.window is not None]
    return min(_MAX_MASKED_TOKENS, resolved(scheduler.prefill_chunk_size), room, *windows)


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Sizes within which the scheduler works, each at least 1. Raises ConfigError if they do not allow any step."""

    num_pages: int
    """Number of usable pages, with ids 1 to `num_pages`. Page 0 is padding and never allocated."""
    page_size: int
    max_num_seqs: int
    """Number of rows, with ids 1 to `max_num_seqs`."""
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    vocab_size: int
    """Token ids are below `vocab_size`, and a mask has one bit for each id."""
    max_num_queued_requests: int
    max_num_queued_tokens: int
    steps_in_flight: int
    enable_prefix_caching: bool
    eos_token_ids: tuple[int, ...]
    max_prompt_logprobs: int = MAX_PROMPT_LOGPROBS
    """Maximum number of prompt log probabilities that one step computes."""
    max_item_tokens: int = 0
    """Maximum number of inputs of a row in the step with its scored items, including them. 0: items are refused."""
    speculation: SpeculationConfig = NO_SPECULATION
    """How drafts are made, and how many at most for one row."""
    num_window_pages: int | None = None
    """Number of usable pages of the window pool, with ids from 1. None without a window pool."""
    num_states: int | None = None
    """Number of states of recurrent layers in the prefix cache. None if the model has no such layers."""
    window: int = 1
    """Number of tokens that a query sees in the layers of the window pool, including the query's own token."""

    def __post_init__(self) -> None:
        if self.num_window_pages is not None and self.num_window_pages < self.max_window_pages_per_row:
            raise ConfigError(
                f"num_window_pages={self.num_window_pages} are too few for the window and the longest chunk of one "
                f"row; choose at least {self.max_window_pages_per_row}"
            )
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} leaves no room for an answer; choose 2 or more")

    @property
    def max_row_tokens(self) -> int:
        """Maximum number of tokens that a row samples in one step, and of its inputs: the last token, and drafts."""
        return 1 + self.speculation.num_drafts

    def num_pages_for(self, num_tokens: int) -> int:
        """Number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @property
    def max_pages_per_row(self) -> int:
        """Width of a row's page table. The last token of a full context is never an input, so no page stores its KV."""
        return self.num_pages_for(self.max_model_len - 1)

    @property
    def max_window_pages_per_row(self) -> int:
        """Maximum number of window pages of one row: those of its window, and those of the tokens that a step adds."""
        # A row may hold new tokens of two steps: the next step is planned before the last one's drafts are accepted or
        # rejected. Drafts that the ranks make come after those of the step and need slots too, a third part.
        longest = max(self.prefill_chunk_size, (2 + self.speculation.is_by_ranks) * self.max_row_tokens)
        return min(self.num_pages_for(self.window - 1 + longest) + 1, self.num_pages, self.max_pages_per_row)

    @property
    def max_num_running(self) -> int:
        """Maximum number of running requests. Every step must be able to decode all of them, one token each."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_num_masks(self) -> int:
        """Maximum number of masks that one step may contain for decoding rows, one for each sampled token."""
        mask_bytes = StepFrame.section_bytes(mask=1, mask_word=mask_words(self.vocab_size))
        return max(1, min(self.speculation.max_sampled(self.max_num_seqs), _MASKS_BYTES // mask_bytes))

    @property
    def max_adjustment_bytes(self) -> int:
        """Maximum bytes of biases, masks, counts and requested tokens in one frame, for newly admitted rows."""
        largest = StepFrame.section_bytes(
            mask=1,
            mask_word=mask_words(self.vocab_size),
            bias=MAX_ROW_BIASES,
            count=self.max_model_len,
            requested=MAX_ROW_REQUESTED,
        )
        return max(_ADJUSTMENT_BYTES, largest)

    @property
    def max_frame_bytes(self) -> int:
        """Upper bound of the bytes of an encoded StepFrame. A slot of the step channel must hold it."""
        num_deltas = (
            MAX_PREFIX_DELTAS
            + self.max_pages_per_row
            + (1 + self.num_pages_for(self.max_row_tokens)) * self.max_num_seqs
            + self.num_pages_for(self.max_num_batched_tokens)
        )
        decided = StepFrame.num_bytes(
            row=self.max_num_seqs,
            sampled_row=self.max_num_seqs,
            drafting_row=self.max_num_seqs,
            token=self.max_num_batched_tokens,
            delta=num_deltas,
            window_page=self.num_window_pages or 0,
            state_copy=0 if self.num_states is None else MAX_STATE_COPIES_PER_ROW * self.max_num_seqs,
            param=self.max_num_seqs,
            mask=self.max_num_masks,
            mask_word=mask_words(self.vocab_size),
            prompt_run=self.max_num_seqs,
            prompt_target=self.max_prompt_logprobs,
            item=MAX_ITEMS,
        )
        return decided + self.max_adjustment_bytes
