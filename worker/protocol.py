"""The two binary messages of a step: `StepFrame` (coordinator to every rank) and `StepResult` (rank 0 back).

Each array of a message is declared once, with its dtype, its lengths and what may be wrong with it; `worker.sections`
turns it into bytes and back. A frame carries only what changed: decode rows carry no token ids (the last token is
already on the devices), pages and sampling parameters travel once.

Every rank gets the same bytes and verifies magic, generation, step order, checksum and every section: divergence is an
error in one step, not a hang, and a wrong frame never a wild write.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from configs.errors import EngineError
from worker.sections import Array, Message, Section

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
Records = npt.NDArray[np.void]

MAX_ROW_BIASES = 2048
"""Most biases of one row: what a request may ask for, and what `min_tokens` and `bad_words` ban."""
MAX_ROW_ASKED = 128
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

ASKED_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4")])
"""A token whose log probability a row with logprobs wants too, in the order of the answers; MAX_ROW_ASKED a row."""

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
    RESTING_STEP = 4
    """Run one forward pass, and none of the draft head, which lacks keys and values of its tokens from then on."""


class RowFlag(IntFlag):
    """Flags of what a row of a step does."""

    HAS_TOKENS = 1
    """Its `lens` input tokens are in `token_ids`; without it the ranks know them: the row's own last sampled token and,
    where several of its inputs are sampled, drafts of what follows it."""
    SAMPLE = 2
    """The logits of its last input, or of as many as `num_draws` says, are sampled; without it the row is a prefill
    chunk that is not the last."""


# Plain integers: operations of enumerations take a microsecond each.
_HAS_TOKENS = int(RowFlag.HAS_TOKENS)
_SAMPLE = int(RowFlag.SAMPLE)


def mask_words(vocab_size: int) -> int:
    """uint32 words of a mask over the vocabulary: bit v of word v // 32 says whether token v may be sampled."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Sizes of a rank's tables."""

    num_rows: int
    """Rows of the request table, padding included: valid rows are 1 to num_rows - 1."""
    vocab_size: int
    max_model_len: int
    max_draws: int = 1
    """Most inputs of a row that the rank samples in one step."""


# Faults of a section that is not empty. Each completes "step 3 of generation 1 ...".


def _check_rows(rows: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    return None if _is_inside(rows, 1, limits.num_rows) else f"names a row outside 1 to {limits.num_rows - 1}"


def _check_num_draws(num_draws: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    is_sampled = (frame.flags & _SAMPLE) != 0
    if len(num_draws) != np.count_nonzero(is_sampled) or (num_draws > frame.lens[is_sampled]).any():
        return "samples other rows than it says, or more inputs than a row has"
    if _is_inside(num_draws, 1, limits.max_draws + 1):
        return None
    return f"samples {num_draws.max()} inputs of a row; at least 1 and at most {limits.max_draws}"


def _check_lens(lens: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    if len(frame.num_draws) and (wrong := _check_num_draws(frame.num_draws, frame, limits)) is not None:
        return wrong
    has_tokens = frame.has_tokens
    known = lens[~has_tokens]
    if lens.min() < 1 or not (known == (frame.draws[~has_tokens].clip(1) if len(frame.num_draws) else 1)).all():
        return "has a row of impossible length"
    if (num_inputs := int(lens[has_tokens].sum())) != len(frame.token_ids):
        return f"has {len(frame.token_ids)} token ids for {num_inputs} inputs"
    if frame.starts.min() < 0 or (frame.starts + lens).max() > limits.max_model_len:
        return f"has a row outside positions 0 to {limits.max_model_len - 1}"
    return None


def _check_num_wanted(num_wanted: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    is_sampled = (frame.flags & _SAMPLE) != 0
    if len(num_wanted) != np.count_nonzero(is_sampled) or not _is_inside(num_wanted, 0, limits.max_draws):
        return f"wants drafts of other rows than it samples, or more than {limits.max_draws - 1} of one"
    if ((frame.starts + frame.lens)[is_sampled] + num_wanted - 1).max() > limits.max_model_len:
        return "wants drafts behind the last position"
    return None


def _check_token_ids(token_ids: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    if _is_inside(token_ids, 0, limits.vocab_size):
        return None
    return f"has a token id outside a vocabulary of {limits.vocab_size}"


def _check_params(params: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    return _check_rows(params["row"], frame, limits)


def _check_ids(records: Records, name: str, limits: FrameLimits) -> str | None:
    if _is_inside(records["row"], 1, limits.num_rows) and _is_inside(records["token_id"], 0, limits.vocab_size):
        return None
    return f"has {name} outside its rows or a vocabulary of {limits.vocab_size}"


def _check_biases(biases: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if (wrong := _check_ids(biases, "a bias", limits)) is not None:
        return wrong
    # NaN and +inf fail the comparison.
    if not (biases["value"] < np.inf).all():
        return "has a bias that is no number to add"
    too_many = np.bincount(biases["row"]).max() > MAX_ROW_BIASES
    return f"has a row with more than {MAX_ROW_BIASES} biases" if too_many else None


def _check_counts(counts: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if (wrong := _check_ids(counts, "a count", limits)) is not None:
        return wrong
    is_count = counts["num_generated"].min() >= 0 and _is_inside(counts["in_prompt"], 0, 2)
    return None if is_count else "has a count below 0"


def _check_asked(asked: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if (wrong := _check_ids(asked, "an asked token", limits)) is not None:
        return wrong
    too_many = np.bincount(asked["row"]).max() > MAX_ROW_ASKED
    return f"has a row that asks for more than {MAX_ROW_ASKED} log probabilities" if too_many else None


def _check_masks(mask_rows: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    if not _is_inside(mask_rows, 1, limits.num_rows):
        return f"has a mask of a row outside 1 to {limits.num_rows - 1}"
    most = np.ones(limits.num_rows, np.int32)
    most[frame.rows] = frame.draws.clip(1)
    if (np.bincount(mask_rows, minlength=limits.num_rows) > most).any():
        return "has more masks of a row than tokens are drawn for it: two of one row, where it is one"
    if frame.masks.shape[1] != mask_words(limits.vocab_size):
        return f"has masks of {frame.masks.shape[1]} words for a vocabulary of {limits.vocab_size}"
    return None if frame.masks.any(axis=1).all() else "has a mask that allows nothing"


def _check_prompt_runs(runs: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    targets = frame.prompt_targets
    if len(targets) > MAX_PROMPT_LOGPROBS or int(runs["num"].sum()) != len(targets) or (runs["num"] < 1).any():
        positions = runs["num"].tolist()
        return f"has {len(targets)} prompt targets for {positions} positions; at most {MAX_PROMPT_LOGPROBS} fit"
    if not (_is_inside(targets, 0, limits.vocab_size) and _is_inside(runs["k"], 0, limits.vocab_size + 1)):
        return f"has a target or a number of likeliest tokens outside a vocabulary of {limits.vocab_size}"
    # The place of each record's row in the frame; records of rows that it does not name, or out of order, are missed.
    at = np.flatnonzero(np.isin(frame.rows, runs["row"]) & frame.has_tokens)
    if not np.array_equal(frame.rows[at], runs["row"]):
        return "has prompt log probabilities of a row without tokens, or out of order"
    ends = runs["start"] + runs["num"]
    if (runs["start"] < frame.starts[at]).any() or (ends > frame.starts[at] + frame.lens[at]).any():
        return "has prompt log probabilities of positions that are no inputs"
    return None


def _check_prompt_targets(targets: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    return None if len(frame.prompt_runs) else f"has {len(targets)} prompt targets for no positions"


def _check_items(items: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if len(items) > MAX_ITEMS or items["len"].min() < 1 or not _is_inside(items["row"], 1, limits.num_rows):
        return f"has an item of no tokens or of no row, or more than {MAX_ITEMS} items"
    num_items = np.bincount(items["row"], minlength=limits.num_rows)
    num_tokens = np.bincount(items["row"], items["len"], limits.num_rows)
    whole = (frame.flags & (_HAS_TOKENS | _SAMPLE)) == _HAS_TOKENS | _SAMPLE
    rows = frame.rows[whole & (num_items[frame.rows] > 0)]
    if not np.array_equal(items["row"], np.repeat(rows, num_items[rows])):
        return "has items of a row that does not end with its tokens, or out of order"
    return "has items longer than a row" if (num_tokens[frame.rows] > frame.lens).any() else None


def _is_inside(values: Int32Array, first: int, end: int) -> bool:
    return bool(values.min() >= first and values.max() < end)


class StepFrame(Message):
    """One step's work. Rows are ids from 1.

    For row i of the step: `rows[i]` is its slot in the request table (0 is the padding row and never sent),
    `starts[i]` the position of its first input token, `lens[i]` how many input tokens it has, `flags[i]` RowFlag.
    """

    rows = Section(np.int32, "row", check=_check_rows)
    starts = Section(np.int32, "row")
    lens = Section(np.int32, "row", check=_check_lens)
    flags = Section(np.int32, "row")
    num_draws = Section(np.int32, "sampled_row")
    """[num_sampled_rows]: how many of its last inputs are sampled of each row that has SAMPLE. Empty: one each."""
    num_wanted = Section(np.int32, "drafting_row", check=_check_num_wanted)
    """[num_sampled_rows]: how many drafts of what follows its tokens the ranks make of each row that has SAMPLE. It has
    pages for as many less one, and for the inputs before. Empty: none of any."""
    token_ids = Section(np.int32, "token", check=_check_token_ids)
    """Input tokens of the rows with HAS_TOKENS, one after the other in row order."""
    page_deltas = Section(np.int32, "delta", 3)
    """[num_deltas, 3] of (row, index in the row's page table, page id): pages that this step's rows gained."""
    window_pages = Section(np.int32, "window_page", 2)
    """[num_window_pages, 2] of (page id, page of the window pool): where layers with a sliding window keep what this
    step writes to the page, and to a page at most once. Empty without a window pool."""
    params = Section(PARAMS_DTYPE, "param", check=_check_params)
    """Rows given to a new request. Such a row starts without biases, mask, counts, asked."""
    biases = Section(BIAS_DTYPE, "bias", check=_check_biases)
    """Biases of rows in `params`."""
    mask_rows = Section(np.int32, "mask", check=_check_masks)
    """[num_masks] rows of this step; where several inputs of a row are sampled, as often as there is a mask for one of
    them, in their order."""
    masks = Section(np.uint32, "mask", "mask_word")
    """[num_masks, mask_words(vocab_size)]: holds for its row from this draw on, until replaced."""
    counts = Section(COUNT_DTYPE, "count", check=_check_counts)
    """Tokens so far of rows in `params` that have penalties; those sampled from now on the ranks count."""
    asked = Section(ASKED_DTYPE, "asked", check=_check_asked)
    """Tokens whose log probabilities rows in `params` want."""
    prompt_runs = Section(PROMPT_LOGPROBS_DTYPE, "prompt_run", check=_check_prompt_runs)
    """Positions whose log probabilities rows with HAS_TOKENS want; at most one run a row, in the order of `rows`."""
    prompt_targets = Section(np.int32, "prompt_target", check=_check_prompt_targets)
    """[num_prompt_logprobs], at most MAX_PROMPT_LOGPROBS: the tokens after the positions of `prompt_runs`, one run
    after the other."""

    items = Section(ITEM_DTYPE, "item", check=_check_items)
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
    def draws(self) -> Int32Array:
        """[num_rows] how many inputs of each row are sampled."""
        is_sampled = (self.flags & _SAMPLE) != 0
        draws = is_sampled.astype(np.int32)
        if len(self.num_draws):
            draws[is_sampled] = self.num_draws
        return draws

    def encode(self) -> bytes:
        """The frame's bytes, checksum filled in."""
        return self._encode(self.kind)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepFrame:
        """Reads a frame; the arrays are views of `buffer`. Raises EngineError when the bytes are not one."""
        kind, generation, step, arrays = cls._decode(buffer)
        return cls(generation, step, FrameKind(kind), **arrays)

    def check(self, limits: FrameLimits) -> None:
        """Raises EngineError unless every section of a step fits `limits` and the others."""
        wrong = self._wrong(limits) if len(self.rows) else "has no rows"
        if wrong is not None:
            raise EngineError(f"step {self.step} of generation {self.generation} {wrong}")


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
    asked_logprobs = Section(np.float32, "logprob", "asked")
    """[num_logprob_rows, m] of the tokens each row asked for (`StepFrame.asked`); m is the most asked for in this
    step, and what lies behind a row's own number means nothing."""
    prompt_logprobs = Section(np.float32, "prompt_target")
    """[num_prompt_logprobs]: log probability of each of the frame's `prompt_targets`, given the tokens before it."""
    prompt_top_ids = Section(np.int32, "prompt_target", "prompt_k")
    """[num_prompt_logprobs, k]: likeliest tokens in its place, descending, equal ones by id; k is the most asked."""
    prompt_top_logprobs = Section(np.float32, "prompt_target", "prompt_k")
    """[num_prompt_logprobs, k]"""

    item_logprobs = Section(np.float32, "item", "asked_of_item")
    """[num_items, m] of the tokens that each item's row asked for, after the item; m as in `asked_logprobs`."""

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
            asked=MAX_ROW_ASKED,
            prompt_target=MAX_PROMPT_LOGPROBS,
            prompt_k=num_logprobs,
            item=MAX_ITEMS,
            asked_of_item=MAX_ROW_ASKED,
        )

    def encode(self) -> bytes:
        """The result's bytes, checksum filled in."""
        return self._encode(0)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepResult:
        """Reads a result; the arrays are views of `buffer`. Raises EngineError when the bytes are not one."""
        _, generation, step, arrays = cls._decode(buffer)
        return cls(generation, step, **arrays)
