"""The two binary messages of a step: `StepFrame` (coordinator to every rank) and `StepResult` (rank 0 back).

Each array of a message is declared once, with its dtype and its lengths; worker/sections.py turns it into bytes and
back, and worker/frame_checks.py says what may be wrong with it. A frame carries only what changed: decode rows carry no
token ids (the last token is already on the devices), pages and sampling parameters travel once.

Every rank gets the same bytes and verifies magic, generation, step order, checksum and every section: divergence is an
error in one step, not a hang, and a wrong frame never a wild write.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from worker.sections import Array, Message, Section

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
Records = npt.NDArray[np.void]

MAX_ROW_BIASES = 2048
"""Most biases of one row: what a request may ask for, and what `min_tokens` and `bad_words` ban."""
MAX_ROW_REQUESTED = 128
"""Most token ids whose log probability one row may ask for."""
MAX_PROMPT_LOGPROBS = 512
"""Most prompt tokens whose log probability one step finds: it bounds the step's memory and its result."""
MAX_DRAFTS = 7
"""Most drafts of one row."""
MAX_ITEMS = 512
"""Most items of one step, of all rows: it bounds the step's result."""
ALWAYS = 2**31 - 1
"""`until` of a bias without an end."""

PARAMS_DTYPE = np.dtype(
    [
        ("row", "<i4"),
        ("top_k", "<i4"),  # 0: off
        ("num_logprobs", "<i4"),  # -1: none; k: the sampled token's and the k likeliest
        ("temperature", "<f4"),  # 0: greedy
        ("top_p", "<f4"),  # 1: off
        ("min_p", "<f4"),  # 0: off
        ("seed", "<i8"),
        ("repetition_penalty", "<f4"),  # 1: off
        ("frequency_penalty", "<f4"),  # 0: off
        ("presence_penalty", "<f4"),  # 0: off
    ],
    align=False,
)
"""Sampling parameters of one row, sent once when the row is given to a request."""
RECORD_WORDS = PARAMS_DTYPE.itemsize // 4
"""Words (int32) of a record: devices keep it as these."""

BIAS_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4"), ("value", "<f4"), ("until", "<i4")])
"""`value`, finite or -inf, is added to a token's logit while the token to be sampled has a position below `until`.

At most MAX_ROW_BIASES a row; of one token at most one is finite.
"""

COUNT_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4"), ("num_generated", "<i4"), ("in_prompt", "<i4")])
"""How often the answer so far has a token, and whether (1 or 0) the prompt has it; distinct tokens a row."""

REQUESTED_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4")])
"""A token whose log probability a row with logprobs wants too, in the order of the answers; MAX_ROW_REQUESTED a row."""

ITEM_DTYPE = np.dtype([("row", "<i4"), ("len", "<i4")])
"""Some of a row's last inputs: they see each other and what is before all items of the row, whose last position theirs
follow. What the row asked for is wanted of the token after them."""

PROMPT_LOGPROBS_DTYPE = np.dtype([("row", "<i4"), ("start", "<i4"), ("num", "<i4"), ("k", "<i4")])
"""`num` positions of a row from `start` on, all inputs of this step, whose next token is known: its log probability
and the `k` likeliest tokens in its place are wanted. No such position is sampled."""


class FrameKind(IntEnum):
    """Kinds of frames, by what a rank does with them."""

    STEP = 1
    """Run one forward pass."""
    CLOSE = 2
    """Leave the step loop."""
    CAPTURE = 3
    """Capture one more CUDA graph, and answer how many are left. It comes while no step is in flight, and has the id of
    the last one."""
    STEP_WITHOUT_DRAFT_HEAD = 4
    """Run one forward pass, and none of the draft head, which lacks keys and values of its tokens from then on."""


class RowFlag(IntFlag):
    """Flags of what a row of a step does."""

    HAS_TOKENS = 1
    """Its `lens` input tokens are in `token_ids`; without it the ranks know them: the row's own last sampled token and,
    where several of its inputs are sampled, drafts of what follows it."""
    SAMPLE = 2
    """The logits of its last input, or of as many as `num_samples` says, are sampled; without it the row is a prefill
    chunk that is not the last."""


# Plain integers: operations of enumerations take a microsecond each.
_HAS_TOKENS = int(RowFlag.HAS_TOKENS)
_SAMPLE = int(RowFlag.SAMPLE)


def mask_words(vocab_size: int) -> int:
    """uint32 words of a mask over the vocabulary: bit v of word v // 32 says whether token v may be sampled."""
    return -(-vocab_size // 32)


class StepFrame(Message):
    """One step's work. Rows are ids from 1.

    For row i of the step: `rows[i]` is its slot in the request table (0 is the padding row and never sent),
    `starts[i]` the position of its first input token, `lens[i]` how many input tokens it has, `flags[i]` RowFlag.
    A step of plain decodes has these four sections alone, and page deltas when a row begins a page. The other sections
    are empty unless something begins or some row wants more than its next token.
    """

    rows = Section(np.int32, "row")
    starts = Section(np.int32, "row")
    lens = Section(np.int32, "row")
    flags = Section(np.int32, "row")
    num_samples = Section(np.int32, "sampled_row")
    """[num_sampled_rows]: how many of its last inputs are sampled of each row that has SAMPLE. Empty: one each."""
    num_wanted = Section(np.int32, "drafting_row")
    """[num_sampled_rows]: how many drafts of what follows its tokens the ranks make of each row that has SAMPLE. It has
    pages for as many less one, and for the inputs before. Empty: none of any."""
    token_ids = Section(np.int32, "token")
    """Input tokens of the rows with HAS_TOKENS, one after the other in row order."""
    page_deltas = Section(np.int32, "delta", 3)
    """[num_deltas, 3] of (row, index in the row's page table, page id): pages that this step's rows gained."""
    window_pages = Section(np.int32, "window_page", 2)
    """[num_window_pages, 2] of (page id, page of the window pool): where layers with a sliding window keep what this
    step writes to the page, and to a page at most once. Empty without a window pool."""
    params = Section(PARAMS_DTYPE, "param")
    """Rows given to a new request. Such a row starts without biases, mask, counts, asked."""
    biases = Section(BIAS_DTYPE, "bias")
    """Biases of rows in `params`."""
    mask_rows = Section(np.int32, "mask")
    """[num_masks] rows of this step; where several inputs of a row are sampled, as often as there is a mask for one of
    them, in their order."""
    masks = Section(np.uint32, "mask", "mask_word")
    """[num_masks, mask_words(vocab_size)]: holds for its row from this draw on, until replaced."""
    counts = Section(COUNT_DTYPE, "count")
    """Tokens so far of rows in `params` that have penalties; those sampled from now on the ranks count."""
    requested = Section(REQUESTED_DTYPE, "requested")
    """Tokens whose log probabilities rows in `params` want."""
    prompt_runs = Section(PROMPT_LOGPROBS_DTYPE, "prompt_run")
    """Positions whose log probabilities rows with HAS_TOKENS want; at most one run a row, in the order of `rows`."""
    prompt_targets = Section(np.int32, "prompt_target")
    """[num_prompt_logprobs], at most MAX_PROMPT_LOGPROBS: the tokens after the positions of `prompt_runs`, one run
    after the other."""

    items = Section(ITEM_DTYPE, "item")
    """Items that the last inputs of rows with HAS_TOKENS and SAMPLE are, in the order of `rows` and of these inputs."""

    __slots__ = ("kind",)

    def __init__(self, generation: int, step: int, kind: FrameKind = FrameKind.STEP, **sections: Array) -> None:
        super().__init__(generation, step, sections)
        self.kind = kind

    @property
    def has_tokens(self) -> npt.NDArray[np.bool_]:
        """[num_rows] which rows have HAS_TOKENS."""
        return (self.flags & _HAS_TOKENS) != 0

    @property
    def samples_per_row(self) -> Int32Array:
        """[num_rows] how many inputs of each row are sampled."""
        is_sampled = (self.flags & _SAMPLE) != 0
        samples = is_sampled.astype(np.int32)
        if len(self.num_samples):
            samples[is_sampled] = self.num_samples
        return samples

    def encode(self) -> bytes:
        """The frame's bytes, checksum filled in."""
        return self._encode(self.kind)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepFrame:
        """Reads a frame; the arrays are views of `buffer`. Raises EngineError when the bytes are not one."""
        kind, generation, step, arrays = cls._decode(buffer)
        return cls(generation, step, FrameKind(kind), **arrays)


_NO_TOKENS = np.empty(0, np.int32)


class StepResult(Message):
    """Results from rank 0: the tokens of the rows of the frame that had SAMPLE, in the frame's row order.

    A row brings at least one token and at most as many as inputs of it were sampled: those that the drafts among its
    inputs agree with, and one more.
    """

    __slots__ = ()

    tokens = Section(np.int32, "token")
    """[num_tokens], a row's one after the other; -1: the row's logits hold a NaN, and it gets no token."""
    num_tokens = Section(np.int32, "sampled_row")
    """[num_sampled_rows] how many tokens each row brought. Empty: one each."""
    drafts = Section(np.int32, "drafted_row", "draft")
    """[num_sampled_rows, most wanted]: drafts of what follows each row's tokens, -1 behind those wanted of it."""
    logprob_rows = Section(np.int32, "logprob")
    """[num_logprob_rows]: indices into `tokens` of those whose rows asked for logprobs."""
    logprobs = Section(np.float32, "logprob")
    """[num_logprob_rows]: log probability of the sampled token, of the model's own distribution: before penalties,
    biases, masks, temperature and filters. These and all others are NaN where the logits hold one."""
    top_ids = Section(np.int32, "logprob", "k")
    """[num_logprob_rows, k]: likeliest tokens, descending; k is the largest asked for in this step."""
    top_logprobs = Section(np.float32, "logprob", "k")
    """[num_logprob_rows, k]"""
    requested_logprobs = Section(np.float32, "logprob", "requested")
    """[num_logprob_rows, m] of the tokens each row asked for (`StepFrame.requested`); m is the most asked for in this
    step, and what lies behind a row's own number means nothing."""
    prompt_logprobs = Section(np.float32, "prompt_target")
    """[num_prompt_logprobs]: log probability of each of the frame's `prompt_targets`, given the tokens before it."""
    prompt_top_ids = Section(np.int32, "prompt_target", "prompt_k")
    """[num_prompt_logprobs, k]: likeliest tokens in its place, descending, equal ones by id; k is the most asked."""
    prompt_top_logprobs = Section(np.float32, "prompt_target", "prompt_k")
    """[num_prompt_logprobs, k]"""

    item_logprobs = Section(np.float32, "item", "requested_of_item")
    """[num_items, m] of the tokens that each item's row asked for, after the item; m as in `requested_logprobs`."""

    def __init__(self, generation: int, step: int, tokens: Int32Array = _NO_TOKENS, **sections: Array) -> None:
        super().__init__(generation, step, {"tokens": tokens, **sections})

    @classmethod
    def max_bytes(cls, num_tokens: int, num_logprobs: int) -> int:
        """Upper bound of an encoded result of `num_tokens` tokens with the `num_logprobs` likeliest each, of
        MAX_PROMPT_LOGPROBS prompt tokens and of MAX_ITEMS items."""
        return cls.num_bytes(
            token=num_tokens,
            sampled_row=num_tokens,
            drafted_row=num_tokens,
            draft=MAX_DRAFTS,
            logprob=num_tokens,
            k=num_logprobs,
            requested=MAX_ROW_REQUESTED,
            prompt_target=MAX_PROMPT_LOGPROBS,
            prompt_k=num_logprobs,
            item=MAX_ITEMS,
            requested_of_item=MAX_ROW_REQUESTED,
        )

    def encode(self) -> bytes:
        """The result's bytes, checksum filled in."""
        return self._encode(0)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepResult:
        """Reads a result; the arrays are views of `buffer`. Raises EngineError when the bytes are not one."""
        _, generation, step, arrays = cls._decode(buffer)
        return cls(generation, step, **arrays)
