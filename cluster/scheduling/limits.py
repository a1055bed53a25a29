"""Limits of what the scheduler may use. Plain numbers, decided before the first step."""

from __future__ import annotations

from dataclasses import dataclass

from configs.attention import BACKENDS, Feature
from configs.errors import ConfigError
from configs.model_config import ModelConfig
from configs.resolve import attention_needs
from configs.schema import NO_SPECULATION, EngineConfig, SpeculationConfig, resolved
from worker.protocol import MAX_ITEMS, MAX_PROMPT_LOGPROBS, MAX_ROW_BIASES, MAX_ROW_REQUESTED, StepFrame, mask_words

MAX_PREFIX_DELTAS = 4096
"""Page deltas of one frame above which no further prefix is taken from the cache: it bounds the size of a frame."""

_MASKS_BYTES = 4 << 20
"""Masks that one frame brings to rows that decode."""
_ADJUSTMENT_BYTES = 1 << 20
"""Adjustments that one frame brings to rows that are given to requests, unless one request needs more."""


_MAX_MASKED_TOKENS = 2048
"""Inputs of a row with items: their mask has a byte for each pair."""


def max_item_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """`SchedulerLimits.max_item_tokens` of a group with this resolved `config`: 0 where nothing serves masks.

    Half of what decodes leave of a step, since short prompts may go first with the other. New tokens of a row with
    items are hidden from each other by no window, so they have to fit into the smallest; chunks are no less, and begin
    in the middle of items.
    """
    mixers = [layer.mixer for layer in model.layers]
    backends = (resolved(config.attention.prefill_backend), resolved(config.attention.decode_backend))
    needs = attention_needs(config, model).with_feature(Feature.MASK)
    if all(BACKENDS[name].refusal(needs) for name in backends):
        return 0
    if any(Feature.CHUNK in mixer.features for mixer in mixers):
        return 0
    scheduler = config.scheduler
    room = (resolved(scheduler.max_num_batched_tokens) - resolved(scheduler.max_num_seqs)) // 2
    windows = [mixer.window for mixer in mixers if mixer.window is not None]
    return min(_MAX_MASKED_TOKENS, resolved(scheduler.prefill_chunk_size), room, *windows)


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Sizes the scheduler works within, each at least 1. Raises ConfigError where they allow no step at all."""

    num_pages: int
    """Usable pages, ids 1 to `num_pages`. Page 0 is padding and never handed out."""
    page_size: int
    max_num_seqs: int
    """Rows 1 to `max_num_seqs`."""
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    vocab_size: int
    """Token ids are below it; masks have a bit for each."""
    max_num_queued_requests: int
    max_num_queued_tokens: int
    steps_in_flight: int
    enable_prefix_caching: bool
    eos_token_ids: tuple[int, ...]
    max_prompt_logprobs: int = MAX_PROMPT_LOGPROBS
    """Prompt tokens of which one step finds the log probability."""
    max_item_tokens: int = 0
    """Most inputs that a row may have in the step with its items, these included; 0: no row has items."""
    speculation: SpeculationConfig = NO_SPECULATION
    """How drafts are made, and the most of one row."""
    num_window_pages: int | None = None
    """Usable pages of the window pool, ids from 1; None: there is none."""
    window: int = 1
    """Tokens that a query of the layers in the window pool sees, itself among them."""

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
        """Most tokens that a row may bring in one step. Such a row has as many inputs: its last token, and drafts."""
        return 1 + self.speculation.num_drafts

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @property
    def max_pages_per_row(self) -> int:
        """Width of a row's page table. The last token of a full context is never fed back, so it needs no place."""
        return self.num_pages_for(self.max_model_len - 1)

    @property
    def max_window_pages_per_row(self) -> int:
        """Most pages that one row may hold in the window pool: its window, and what a step adds to it."""
        # The right drafts are known after the next step is planned, and the window moves on as if none were.
        # Ranks that draft go on behind those of the step as well.
        longest = max(self.prefill_chunk_size, (2 + self.speculation.is_by_ranks) * self.max_row_tokens)
        return min(self.num_pages_for(self.window - 1 + longest) + 1, self.num_pages, self.max_pages_per_row)

    @property
    def max_num_running(self) -> int:
        """Requests that may run at once: each must get what it decodes in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_num_masks(self) -> int:
        """Masks that one step may bring to rows that decode, one for each token that is drawn."""
        mask_bytes = StepFrame.section_bytes(mask=1, mask_word=mask_words(self.vocab_size))
        return max(1, min(self.speculation.max_sampled(self.max_num_seqs), _MASKS_BYTES // mask_bytes))

    @property
    def max_adjustment_bytes(self) -> int:
        """Bytes of biases, masks, counts and asked tokens for rows that one frame gives to requests."""
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
        """Upper bound of an encoded StepFrame; a slot of the step channel must hold it."""
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
            param=self.max_num_seqs,
            mask=self.max_num_masks,
            mask_word=mask_words(self.vocab_size),
            prompt_run=self.max_num_seqs,
            prompt_target=self.max_prompt_logprobs,
            item=MAX_ITEMS,
        )
        return decided + self.max_adjustment_bytes
