"""The two binary messages of a step: `StepFrame` (coordinator to every rank) and `StepResult` (rank 0 back).

Each array of a message is declared once, with its dtype and its lengths. worker/sections.py encodes and decodes it, and
worker/frame_checks.py checks it. A frame contains only what changed: decode rows have no token ids (the last token is
already on the devices), and pages and sampling parameters are sent once.

Every rank gets the same bytes and verifies magic, generation, step order, checksum and every section. So a divergence
is an error within one step instead of a hang, and a wrong frame never causes a wild write.
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
"""Maximum number of biases of one row, including those that `min_tokens` and `bad_words` need."""
MAX_ROW_REQUESTED = 128
"""Maximum number of token ids for which one row may request log probabilities."""
MAX_PROMPT_LOGPROBS = 512
"""Maximum number of prompt tokens with log probabilities in one step. It bounds the memory and the result of a step."""
MAX_DRAFTS = 7
"""Maximum number of drafts of one row."""
MAX_ITEMS = 512
"""Maximum number of scored items in one step, over all rows. It bounds the step's result."""
ALWAYS = 2**31 - 1
"""`until` of a bias without an end."""

PARAMS_DTYPE = np.dtype(
    [
        ("row", "<i4"),
        ("top_k", "<i4"),  # 0: off
        ("num_logprobs", "<i4"),  # -1: none; k: those of the sampled token and of the k likeliest
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
"""Number of int32 words of a record. Devices store records as such words."""

BIAS_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4"), ("value", "<f4"), ("until", "<i4")])
"""`value`, finite or -inf, is added to a token's logit while the position of the token to be sampled is below `until`.

A row has at most MAX_ROW_BIASES, and at most one finite bias for the same token.
"""

COUNT_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4"), ("num_generated", "<i4"), ("in_prompt", "<i4")])
"""How often the answer so far contains a token, and whether (1 or 0) the prompt does. A row has one record per
token."""

REQUESTED_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4")])
"""A token for which a row requests a log probability. The result lists a row's tokens, at most MAX_ROW_REQUESTED, in
the order of these records."""

ITEM_DTYPE = np.dtype([("row", "<i4"), ("len", "<i4")])
"""A scored item: `len` of a row's last inputs. They see each other and the tokens before all items of the row, and
their positions continue from those tokens. The row's requested log probabilities are for the token after each item."""

PROMPT_LOGPROBS_DTYPE = np.dtype([("row", "<i4"), ("start", "<i4"), ("num", "<i4"), ("k", "<i4")])
"""A request for prompt log probabilities at `num` inputs of a row, from position `start` on. For each input, the result
has the log probability of the next token of the prompt, and the `k` likeliest tokens."""


class FrameKind(IntEnum):
    """What a frame makes a rank do."""

    STEP = 1
    """Run one forward pass."""
    CLOSE = 2
    """Leave the step loop."""
    CAPTURE = 3
    """Capture one more CUDA graph, and answer with the number of graphs not captured yet. Sent while no step is in
    flight, with the last step's id."""
    STEP_WITHOUT_DRAFT_HEAD = 4
    """Run one forward pass without the draft head, which then lacks keys and values of the step's tokens for good."""


class RowFlag(IntFlag):
    """Flags of a row in a step."""

    HAS_TOKENS = 1
    """The row's `lens` input tokens are in `token_ids`. Without this flag the ranks know them: the row's own last
    sampled token and, if several of its inputs are sampled, the drafts that follow it."""
    SAMPLE = 2
    """The logits of the row's last input, or of its last `num_samples` inputs, are sampled. Without this flag the row
    is a chunk of a prompt, but not the last."""


# Plain integers, because operations on enumerations take a microsecond each.
_HAS_TOKENS = int(RowFlag.HAS_TOKENS)
_SAMPLE = int(RowFlag.SAMPLE)


def mask_words(vocab_size: int) -> int:
    """Number of uint32 words of a mask over the vocabulary. Bit v % 32 of word v // 32 allows token v."""
    return -(-vocab_size // 32)


class StepFrame(Message):
    """The work of one step.

    For row i of the step, `rows[i]` is its slot in the request table, from 1 (0 is the padding row and never sent),
    `starts[i]` the position of its first input token, `lens[i]` its number of input tokens, and `flags[i]` a RowFlag. A
    step of plain decodes has only these four sections, and page deltas if a row begins a page. The other sections are
    empty unless a request begins or a row needs more than its next token.
    """

    rows = Section(np.int32, "row")
    starts = Section(np.int32, "row")
    lens = Section(np.int32, "row")
    flags = Section(np.int32, "row")
    num_samples = Section(np.int32, "sampled_row")
    """[num_sampled_rows]: how many of its last inputs are sampled, for each row with SAMPLE. If empty, one of each."""
    num_wanted = Section(np.int32, "drafting_row")
    """[num_sampled_rows]: number of drafts that the ranks make after the tokens of each row with SAMPLE. The row has
    pages for its inputs and for all but one of these drafts. If empty, the ranks make no drafts."""
    token_ids = Section(np.int32, "token")
    """Input tokens of the rows with HAS_TOKENS, one after the other in row order."""
    page_deltas = Section(np.int32, "delta", 3)
    """[num_deltas, 3] of (row, index in the row's page table, page id): pages that this step's rows gained."""
    window_pages = Section(np.int32, "window_page", 2)
    """[num_window_pages, 2] of (page id, window page): where layers with a sliding window store what this step writes
    to the page. Each page appears at most once. Empty without a window pool."""
    state_copies = Section(np.int32, "state_copy", 3)
    """[num_state_copies, 3] of (source slot, target slot, tokens that the state covers): copies of recurrent states, in
    order, before the step. A row's own slot has the row's number. Empty without recurrent layers."""
    params = Section(PARAMS_DTYPE, "param")
    """Rows given to a new request. Such a row starts without biases, mask, counts and requested log probabilities."""
    biases = Section(BIAS_DTYPE, "bias")
    """Biases of rows in `params`."""
    mask_rows = Section(np.int32, "mask")
    """[num_masks] rows of this step. A row appears once for each of its sampled inputs with a mask, in order."""
    masks = Section(np.uint32, "mask", "mask_word")
    """[num_masks, mask_words(vocab_size)]: the tokens that each of `mask_rows` may sample until its next mask."""
    counts = Section(COUNT_DTYPE, "count")
    """Counts, until now, of tokens in rows in `params` that have penalties. The ranks count later tokens themselves."""
    requested = Section(REQUESTED_DTYPE, "requested")
    """Tokens for which rows in `params` request log probabilities."""
    prompt_runs = Section(PROMPT_LOGPROBS_DTYPE, "prompt_run")
    """Requests of rows with HAS_TOKENS for prompt log probabilities, at most one a row, in the order of `rows`."""
    prompt_targets = Section(np.int32, "prompt_target")
    """[num_prompt_logprobs], at most MAX_PROMPT_LOGPROBS: the token after each position of `prompt_runs`, in order."""

    items = Section(ITEM_DTYPE, "item")
    """Scored items formed by the last inputs of rows with HAS_TOKENS and SAMPLE, in the order of `rows` and inputs."""

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
        """[num_rows] number of sampled inputs of each row."""
        is_sampled = (self.flags & _SAMPLE) != 0
        samples = is_sampled.astype(np.int32)
        if len(self.num_samples):
            samples[is_sampled] = self.num_samples
        return samples

    def encode(self) -> bytes:
        """The frame's bytes, checksum included."""
        return self._encode(self.kind)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepFrame:
        """Reads a frame. The arrays are views of `buffer`. Raises EngineError if the bytes are not a frame."""
        kind, generation, step, arrays = cls._decode(buffer)
        return cls(generation, step, FrameKind(kind), **arrays)


_NO_TOKENS = np.empty(0, np.int32)


class StepResult(Message):
    """Results from rank 0: the tokens of the frame's rows with SAMPLE, in the frame's row order.

    A row gets one token for each of its drafts that is accepted, and one more. It gets at most one per sampled input.
    """

    __slots__ = ()

    tokens = Section(np.int32, "token")
    """[num_tokens], a row's tokens one after the other. -1: the row's logits have a NaN, and it gets no token."""
    num_tokens = Section(np.int32, "sampled_row")
    """[num_sampled_rows] number of tokens of each row. If empty, each row has one token."""
    drafts = Section(np.int32, "drafted_row", "draft")
    """[num_sampled_rows, n]: drafts of the tokens after each row's tokens. Rows with fewer are padded with -1."""
    logprob_rows = Section(np.int32, "logprob")
    """[num_logprob_rows]: indices into `tokens` of the tokens with requested logprobs."""
    logprobs = Section(np.float32, "logprob")
    """[num_logprob_rows]: log probability of the sampled token in the model's own distribution, before penalties,
    biases, masks, temperature and filters. All log probabilities are NaN if the logits have a NaN."""
    top_ids = Section(np.int32, "logprob", "k")
    """[num_logprob_rows, k]: likeliest tokens, descending. k is the largest number requested in this step."""
    top_logprobs = Section(np.float32, "logprob", "k")
    """[num_logprob_rows, k]: log probabilities of `top_ids`."""
    requested_logprobs = Section(np.float32, "logprob", "requested")
    """[num_logprob_rows, m]: log probabilities of each row's requested tokens (`StepFrame.requested`). m is the largest
    number in this step, and values after a row's own number are meaningless."""
    prompt_logprobs = Section(np.float32, "prompt_target")
    """[num_prompt_logprobs]: log probability of each of the frame's `prompt_targets`, given the tokens before it."""
    prompt_top_ids = Section(np.int32, "prompt_target", "prompt_k")
    """[num_prompt_logprobs, k]: likeliest tokens at each target's position, descending, ties by id. k is the most
    requested."""
    prompt_top_logprobs = Section(np.float32, "prompt_target", "prompt_k")
    """[num_prompt_logprobs, k]: log probabilities of `prompt_top_ids`."""

    item_logprobs = Section(np.float32, "item", "requested_of_item")
    """[num_items, m]: requested log probabilities of the token after each item. m is the largest number requested."""

    def __init__(self, generation: int, step: int, tokens: Int32Array = _NO_TOKENS, **sections: Array) -> None:
        super().__init__(generation, step, {"tokens": tokens, **sections})

    @classmethod
    def max_bytes(cls, num_tokens: int, num_logprobs: int) -> int:
        """Upper bound of the bytes of an encoded result: with `num_tokens` tokens, the `num_logprobs` likeliest of
        each, MAX_PROMPT_LOGPROBS prompt tokens and MAX_ITEMS items."""
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
        """The result's bytes, checksum included."""
        return self._encode(0)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepResult:
        """Reads a result. The arrays are views of `buffer`. Raises EngineError if the bytes are not a result."""
        _, generation, step, arrays = cls._decode(buffer)
        return cls(generation, step, **arrays)
