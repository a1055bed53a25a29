"""The two binary messages of a step: `StepFrame` (coordinator to every rank) and `StepResult` (rank 0 back).

Little-endian, fixed header, then int32 arrays; no pickle, no torch, no Ray. A frame carries only what changed:
decode rows carry no token ids (the last token is already on the devices), pages and sampling parameters travel once.

    StepFrame   header | rows | starts | lens | flags | token_ids | page_deltas | params
                | biases | mask_rows | masks | counts | asked | scores | targets
    StepResult  header | tokens | logprob_rows | logprobs | top_ids | top_logprobs | asked_logprobs
                | target_logprobs | target_top_ids | target_top_logprobs

Every rank gets the same bytes and verifies magic, generation, step order and checksum: divergence is an error in
one step, not a hang.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag

import numpy as np
import numpy.typing as npt

from configs.errors import EngineError

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

_MAGIC = 0x4C4B5354  # "LKST"
_NUM_COUNTS = 12
# magic, checksum of all that follows these eight bytes, kind, generation, step, lengths of the sections
_HEADER = struct.Struct(f"<IIIIQ{_NUM_COUNTS}I")
_CHECKED_FROM = 8

HEADER_BYTES = _HEADER.size
MAX_ROW_BIASES = 2048
"""Most biases of one row: what a request may ask for, and what `min_tokens` and `bad_words` ban."""
MAX_ROW_ASKED = 128
"""Most token ids whose log probability one row may ask for."""
MAX_TARGETS = 512
"""Most prompt tokens whose log probability one step finds: it bounds the step's memory and its result."""
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

BIAS_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4"), ("value", "<f4"), ("until", "<i4")])
"""`value`, finite or -inf, is added to a token's logit while the token to be sampled has a position below `until`.

At most MAX_ROW_BIASES a row; of one token at most one is finite.
"""

COUNT_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4"), ("num_generated", "<i4"), ("in_prompt", "<i4")])
"""How often the answer so far has a token, and whether (1 or 0) the prompt has it; distinct tokens a row."""

ASKED_DTYPE = np.dtype([("row", "<i4"), ("token_id", "<i4")])
"""A token whose log probability a row with logprobs wants too, in the order of the answers; MAX_ROW_ASKED a row."""

SCORE_DTYPE = np.dtype([("row", "<i4"), ("start", "<i4"), ("num", "<i4"), ("k", "<i4")])
"""`num` positions of a row from `start` on, all inputs of this step, whose next token is known: its log probability
and the `k` likeliest tokens in its place are wanted. No such position is sampled."""


class FrameKind(IntEnum):
    """What a rank does with a frame."""

    STEP = 1
    """Run one forward pass."""
    CLOSE = 2
    """Leave the step loop."""


class RowFlag(IntFlag):
    """What a row of a step does."""

    HAS_TOKENS = 1
    """Its `lens` input tokens are in `token_ids`; without it the row has one input, its own last sampled token."""
    SAMPLE = 2
    """Its last position's logits are sampled; without it the row is a prefill chunk that is not the last."""


def mask_words(vocab_size: int) -> int:
    """uint32 words of a mask over the vocabulary: bit v of word v // 32 says whether token v may be sampled."""
    return -(-vocab_size // 32)


# An empty array has nothing to change: all messages may share it.
_NO_INT32 = np.empty(0, np.int32)
_NO_FLOAT32 = np.empty(0, np.float32)
_NO_IDS = np.empty((0, 0), np.int32)
_NO_LOGPROBS = np.empty((0, 0), np.float32)
_NO_DELTAS = np.empty((0, 3), np.int32)
_NO_PARAMS = np.empty(0, PARAMS_DTYPE)
_NO_BIASES = np.empty(0, BIAS_DTYPE)
_NO_MASKS = np.empty((0, 0), np.uint32)
_NO_COUNTS = np.empty(0, COUNT_DTYPE)
_NO_ASKED = np.empty(0, ASKED_DTYPE)
_NO_SCORES = np.empty(0, SCORE_DTYPE)


def _empty_int32() -> Int32Array:
    return _NO_INT32


@dataclass(slots=True, eq=False)
class StepFrame:
    """One step's work. Arrays are int32 and one-dimensional unless said otherwise; rows are ids from 1.

    For row i of the step: `rows[i]` is its slot in the request table (0 is the padding row and never sent),
    `starts[i]` the position of its first input token, `lens[i]` how many input tokens it has, `flags[i]` RowFlag.
    """

    generation: int
    step: int
    kind: FrameKind = FrameKind.STEP
    rows: Int32Array = field(default_factory=_empty_int32)
    starts: Int32Array = field(default_factory=_empty_int32)
    lens: Int32Array = field(default_factory=_empty_int32)
    flags: Int32Array = field(default_factory=_empty_int32)
    token_ids: Int32Array = field(default_factory=_empty_int32)
    """Input tokens of the rows with HAS_TOKENS, one after the other in row order."""
    page_deltas: Int32Array = field(default_factory=lambda: _NO_DELTAS)
    """[num_deltas, 3] of (row, index in the row's page table, page id): pages that this step's rows gained."""
    params: npt.NDArray[np.void] = field(default_factory=lambda: _NO_PARAMS)
    """PARAMS_DTYPE records of rows given to a new request. Such a row starts without biases, mask, counts, asked."""
    biases: npt.NDArray[np.void] = field(default_factory=lambda: _NO_BIASES)
    """BIAS_DTYPE records of rows in `params`."""
    mask_rows: Int32Array = field(default_factory=_empty_int32)
    """[num_masks] distinct rows of this step."""
    masks: UInt32Array = field(default_factory=lambda: _NO_MASKS)
    """[num_masks, mask_words(vocab_size)]: holds for its row from this step on, until replaced."""
    counts: npt.NDArray[np.void] = field(default_factory=lambda: _NO_COUNTS)
    """COUNT_DTYPE records of rows in `params` that have penalties; tokens sampled from now on the ranks count."""
    asked: npt.NDArray[np.void] = field(default_factory=lambda: _NO_ASKED)
    """ASKED_DTYPE records of rows in `params`."""
    scores: npt.NDArray[np.void] = field(default_factory=lambda: _NO_SCORES)
    """SCORE_DTYPE records of rows with HAS_TOKENS, at most one a row, in the order of `rows`."""
    targets: Int32Array = field(default_factory=_empty_int32)
    """[num_targets], at most MAX_TARGETS: the tokens after the positions of `scores`, one record after the other."""

    def encode(self) -> bytes:
        """The frame's bytes, checksum filled in."""
        body = b"".join(
            (
                self.rows.tobytes(),
                self.starts.tobytes(),
                self.lens.tobytes(),
                self.flags.tobytes(),
                self.token_ids.tobytes(),
                self.page_deltas.tobytes(),
                self.params.tobytes(),
                self.biases.tobytes(),
                self.mask_rows.tobytes(),
                self.masks.tobytes(),
                self.counts.tobytes(),
                self.asked.tobytes(),
                self.scores.tobytes(),
                self.targets.tobytes(),
            )
        )
        counts = (
            len(self.rows),
            len(self.token_ids),
            len(self.page_deltas),
            len(self.params),
            len(self.biases),
            len(self.mask_rows),
            self.masks.shape[1],
            len(self.counts),
            len(self.asked),
            len(self.scores),
            len(self.targets),
        )
        return _seal(self.kind, self.generation, self.step, counts, body)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepFrame:
        """Reads a frame; the arrays are views of `buffer`. Raises EngineError when the bytes are not one."""
        kind, generation, step, counts = _unseal(buffer)
        num_rows, num_tokens, num_deltas, num_params, num_biases, num_masks, num_words, *counts = counts
        num_counts, num_asked, num_scores, num_targets, _ = counts
        take = _Taker(buffer)
        return cls(
            generation=generation,
            step=step,
            kind=FrameKind(kind),
            rows=take.int32(num_rows),
            starts=take.int32(num_rows),
            lens=take.int32(num_rows),
            flags=take.int32(num_rows),
            token_ids=take.int32(num_tokens),
            page_deltas=take.int32(3 * num_deltas).reshape(-1, 3),
            params=take.records(PARAMS_DTYPE, num_params),
            biases=take.records(BIAS_DTYPE, num_biases),
            mask_rows=take.int32(num_masks),
            masks=take.uint32(num_masks * num_words).reshape(num_masks, num_words),
            counts=take.records(COUNT_DTYPE, num_counts),
            asked=take.records(ASKED_DTYPE, num_asked),
            scores=take.records(SCORE_DTYPE, num_scores),
            targets=take.int32(num_targets),
        )


@dataclass(slots=True, eq=False)
class StepResult:
    """What rank 0 sends back: one token for each row of the frame that had SAMPLE, in the frame's row order."""

    generation: int
    step: int
    tokens: Int32Array
    """[num_sampled]"""
    logprob_rows: Int32Array = field(default_factory=_empty_int32)
    """[num_logprob_rows]: indices into `tokens` of the rows that asked for logprobs."""
    logprobs: Float32Array = field(default_factory=lambda: _NO_FLOAT32)
    """[num_logprob_rows]: log probability of the sampled token, of the model's own distribution: before penalties,
    biases, masks, temperature and filters."""
    top_ids: Int32Array = field(default_factory=lambda: _NO_IDS)
    """[num_logprob_rows, k]: likeliest tokens, descending; k is the largest asked for in this step."""
    top_logprobs: Float32Array = field(default_factory=lambda: _NO_LOGPROBS)
    """[num_logprob_rows, k]"""
    asked_logprobs: Float32Array = field(default_factory=lambda: _NO_LOGPROBS)
    """[num_logprob_rows, m] of the tokens each row asked for (`StepFrame.asked`); m is the most asked for in this
    step, and what lies behind a row's own number means nothing."""
    target_logprobs: Float32Array = field(default_factory=lambda: _NO_FLOAT32)
    """[num_targets]: log probability of each of the frame's `targets`, given the tokens before it."""
    target_top_ids: Int32Array = field(default_factory=lambda: _NO_IDS)
    """[num_targets, k]: likeliest tokens in its place, descending, equal ones by id; k is the largest asked for."""
    target_top_logprobs: Float32Array = field(default_factory=lambda: _NO_LOGPROBS)
    """[num_targets, k]"""

    @staticmethod
    def max_bytes(num_rows: int, num_logprobs: int) -> int:
        """Upper bound of an encoded result of `num_rows` rows that ask for the `num_logprobs` likeliest each, and of
        MAX_TARGETS prompt tokens."""
        num_likeliest = 8 * num_logprobs
        return _HEADER.size + num_rows * (12 + num_likeliest + 4 * MAX_ROW_ASKED) + MAX_TARGETS * (4 + num_likeliest)

    def encode(self) -> bytes:
        """The result's bytes, checksum filled in."""
        body = b"".join(
            (
                self.tokens.tobytes(),
                self.logprob_rows.tobytes(),
                self.logprobs.tobytes(),
                self.top_ids.tobytes(),
                self.top_logprobs.tobytes(),
                self.asked_logprobs.tobytes(),
                self.target_logprobs.tobytes(),
                self.target_top_ids.tobytes(),
                self.target_top_logprobs.tobytes(),
            )
        )
        counts = (
            len(self.tokens),
            len(self.logprob_rows),
            self.top_ids.shape[1],
            self.asked_logprobs.shape[1],
            len(self.target_logprobs),
            self.target_top_ids.shape[1],
        )
        return _seal(0, self.generation, self.step, counts, body)

    @classmethod
    def decode(cls, buffer: bytes | memoryview) -> StepResult:
        """Reads a result; the arrays are views of `buffer`. Raises EngineError when the bytes are not one."""
        _, generation, step, counts = _unseal(buffer)
        num_tokens, num_rows, k, num_asked, num_targets, target_k, *_ = counts
        take = _Taker(buffer)
        if num_rows == num_targets == 0:
            return cls(generation=generation, step=step, tokens=take.int32(num_tokens))
        return cls(
            generation=generation,
            step=step,
            tokens=take.int32(num_tokens),
            logprob_rows=take.int32(num_rows),
            logprobs=take.float32(num_rows),
            top_ids=take.int32(num_rows * k).reshape(num_rows, k),
            top_logprobs=take.float32(num_rows * k).reshape(num_rows, k),
            asked_logprobs=take.float32(num_rows * num_asked).reshape(num_rows, num_asked),
            target_logprobs=take.float32(num_targets),
            target_top_ids=take.int32(num_targets * target_k).reshape(num_targets, target_k),
            target_top_logprobs=take.float32(num_targets * target_k).reshape(num_targets, target_k),
        )


class _Taker:
    """Cuts arrays off a message, one after the other."""

    def __init__(self, buffer: bytes | memoryview) -> None:
        self._buffer = buffer
        self._offset = _HEADER.size

    def int32(self, count: int) -> Int32Array:
        return np.frombuffer(self._buffer, np.int32, count, self._advance(4 * count))

    def float32(self, count: int) -> Float32Array:
        return np.frombuffer(self._buffer, np.float32, count, self._advance(4 * count))

    def uint32(self, count: int) -> UInt32Array:
        return np.frombuffer(self._buffer, np.uint32, count, self._advance(4 * count))

    def records(self, dtype: np.dtype[np.void], count: int) -> npt.NDArray[np.void]:
        return np.frombuffer(self._buffer, dtype, count, self._advance(dtype.itemsize * count))

    def _advance(self, num_bytes: int) -> int:
        offset = self._offset
        self._offset += num_bytes
        return offset


def _seal(kind: int, generation: int, step: int, counts: tuple[int, ...], body: bytes) -> bytes:
    unused = (0,) * (_NUM_COUNTS - len(counts))
    header = _HEADER.pack(_MAGIC, 0, kind, generation, step, *counts, *unused)
    checksum = zlib.crc32(body, zlib.crc32(header[_CHECKED_FROM:]))
    return struct.pack("<II", _MAGIC, checksum) + header[_CHECKED_FROM:] + body


def _unseal(buffer: bytes | memoryview) -> tuple[int, int, int, list[int]]:
    """Kind, generation, step and the _NUM_COUNTS lengths."""
    if len(buffer) < _HEADER.size:
        raise EngineError(f"step message of {len(buffer)} bytes is shorter than its header")
    magic, checksum, kind, generation, step, *counts = _HEADER.unpack_from(buffer)
    if magic != _MAGIC:
        raise EngineError(f"step message begins with {magic:#x}, not {_MAGIC:#x}")
    if zlib.crc32(memoryview(buffer)[_CHECKED_FROM:]) != checksum:
        raise EngineError(f"step message {step} of generation {generation} fails its checksum")
    return kind, generation, step, counts
