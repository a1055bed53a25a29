"""Adjustments of rows' logits before a token is sampled: penalties, biases and masks, stored on the logits' device.

    1. repetition penalty: positive logits of tokens in the prompt or answer are divided by it, negative ones multiplied
    2. frequency penalty: subtracted for each time that the answer contains the token; presence penalty: subtracted once
    3. biases: added while the position of the token to be sampled is below the end of the bias
    4. the mask: tokens that it excludes get -inf

Penalties are computed in fp64 and rounded once to fp32, so CPU and GPU agree in every bit. Temperature and filters are
applied after all adjustments. Log probabilities are the model's, before any adjustment.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker.protocol import MAX_ROW_BIASES, MAX_ROW_REQUESTED, Int32Array, StepFrame, UInt32Array, mask_words
from worker.upload import upload

PENALISED = 1
MASKED = 2
BIAS_WORDS = 4
"""int32 words of a BIAS_DTYPE record."""
_MAX_COUNT = 2**14 - 1


class RowAdjustments:
    """The adjustments of every row. A row has none until a frame sets some. On CPU, only used memory is committed.

    Args:
        num_rows: rows of the request table. Row 0 is padding and has no adjustments.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._flags = np.zeros(num_rows, np.int32)
        self._num_biases = np.zeros(num_rows, np.int32)
        self._bias_ends = np.zeros(num_rows, np.int64)  # from this position on, no bias of the row applies
        self._num_requested = np.zeros(num_rows, np.int32)
        self._later_masks: list[tuple[Int32Array, UInt32Array]] = []
        self.heads = _zeros((num_rows, 2), np.int32, device)
        """[num_rows, 2] int32: flags (PENALISED, MASKED) and number of biases."""
        self.marks = _zeros((num_rows, vocab_size), np.int16, device)
        """[num_rows, vocab_size] int16: twice the number of times that the answer contains a token (at most 16383 are
        counted), plus 1 if the prompt contains it. Meaningless for rows without penalties."""
        self.biases = _zeros((num_rows, MAX_ROW_BIASES, BIAS_WORDS), np.int32, device)
        """[num_rows, MAX_ROW_BIASES, BIAS_WORDS] int32: BIAS_DTYPE records of each row. `heads` has their number."""
        self.masks = _zeros((num_rows, mask_words(vocab_size)), np.int32, device)
        """[num_rows, mask_words(vocab_size)] int32: one bit per token, 1 if a MASKED row may sample it."""
        self.requested = _zeros((num_rows, MAX_ROW_REQUESTED), np.int64, device)
        """[num_rows, MAX_ROW_REQUESTED] int64: ids of the tokens for which a row requests log probabilities."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables on the device."""
        tables = (self.heads, self.marks, self.biases, self.masks, self.requested)
        return sum(table.numel() * table.element_size() for table in tables)

    def update(self, frame: StepFrame) -> None:
        """Queues the changes that a checked `frame` contains. Kernels launched after this call see them."""
        changed = False
        self._later_masks = []
        if len(frame.params):
            changed = self._start_rows(frame.params)
        if len(frame.counts):
            self._put_counts(frame.counts)
        if len(frame.biases):
            self._put_biases(frame.biases)
            changed = True
        if len(frame.requested):
            rows, slots = frame.requested["row"], _slots(frame.requested["row"])
            np.add.at(self._num_requested, rows, 1)
            flat = upload(rows.astype(np.int64) * MAX_ROW_REQUESTED + slots, self._device)
            self.requested.view(-1).index_copy_(
                0, flat, upload(frame.requested["token_id"].astype(np.int64), self._device)
            )
        if len(frame.mask_rows):
            slots, now = _slots(frame.mask_rows), (frame.mask_rows, frame.masks)
            if last := int(slots.max()):
                now, *self._later_masks = [
                    (frame.mask_rows[slots == slot], frame.masks[slots == slot]) for slot in range(last + 1)
                ]
            self._put_masks(*now)
            changed |= not (self._flags[frame.mask_rows] & MASKED).all()
            self._flags[frame.mask_rows] |= MASKED
        if changed:
            self.heads.copy_(upload(np.stack((self._flags, self._num_biases), axis=1), self._device))

    def use_masks_after(self, num_drafts: int) -> None:
        """Queues the masks of the frame's rows for the tokens after `num_drafts` drafts, at least one. They apply to
        kernels launched afterwards."""
        if num_drafts <= len(self._later_masks):
            self._put_masks(*self._later_masks[num_drafts - 1])

    def changed(self, rows: Int32Array, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[len(rows)]: whether each of `rows` has adjustments for the token to be sampled at its position."""
        return (self._flags[rows] != 0) | (positions < self._bias_ends[rows])

    def num_requested(self, rows: Int32Array) -> Int32Array:
        """Number of log probabilities that each of `rows` requests."""
        return self._num_requested[rows]

    def count(self, rows: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor | None = None) -> None:
        """Counts a token sampled for each of `rows`. For rows without penalties the count has no effect.

        Args:
            rows: [num_rows] int64, device, distinct.
            tokens: [num_rows] int64, device.
            accepted: [num_rows] bool, device: the tokens to count. If None, all are counted.
        """
        marks = self.marks[rows, tokens]
        counts = marks < 2 * _MAX_COUNT if accepted is None else accepted & (marks < 2 * _MAX_COUNT)
        self.marks[rows, tokens] = torch.where(counts, marks + 2, marks)

    def _start_rows(self, params: npt.NDArray[np.void]) -> bool:
        """Clears the adjustments that the rows had. Returns whether `heads` changed."""
        rows = params["row"]
        had_any = bool(self._flags[rows].any() or self._num_biases[rows].any())
        penalised = (
            (params["repetition_penalty"] != 1.0)
            | (params["frequency_penalty"] != 0.0)
            | (params["presence_penalty"] != 0.0)
        )
        self._flags[rows] = np.where(penalised, PENALISED, 0)
        self._num_biases[rows] = self._bias_ends[rows] = self._num_requested[rows] = 0
        if penalised.any():
            self.marks.index_fill_(0, upload(rows[penalised].astype(np.int64), self._device), 0)
        return had_any or bool(penalised.any())

    def _put_counts(self, counts: npt.NDArray[np.void]) -> None:
        marks = 2 * np.minimum(counts["num_generated"], _MAX_COUNT) + counts["in_prompt"]
        flat = counts["row"].astype(np.int64) * self.marks.shape[1] + counts["token_id"]
        values = upload(marks.astype(np.int16), self._device)
        self.marks.view(-1).index_copy_(0, upload(flat, self._device), values)

    def _put_masks(self, rows: Int32Array, masks: UInt32Array) -> None:
        masked = upload(rows.astype(np.int64), self._device)
        self.masks.index_copy_(0, masked, upload(masks.view(np.int32), self._device))

    def _put_biases(self, biases: npt.NDArray[np.void]) -> None:
        rows = biases["row"]
        np.add.at(self._num_biases, rows, 1)
        np.maximum.at(self._bias_ends, rows, biases["until"])
        flat = upload(rows.astype(np.int64) * MAX_ROW_BIASES + _slots(rows), self._device)
        words = np.ascontiguousarray(biases).view(np.int32).reshape(-1, BIAS_WORDS)
        self.biases.view(-1, BIAS_WORDS).index_copy_(0, flat, upload(words, self._device))


def adjusted(
    logits: torch.Tensor, adjustments: RowAdjustments, row: int, position: int, params: np.void
) -> torch.Tensor:
    """A row's adjusted logits in a new tensor. NaN stays NaN. The CUDA version is in kernels/adjustments.py.

    Args:
        logits: [vocab_size] fp32, on the CPU like `adjustments`.
        row: row in the request table.
        position: position of the token to be sampled.
        params: PARAMS_DTYPE.
    """
    flags, num_biases = adjustments.heads[row].tolist()
    out = _penalised(logits, adjustments.marks[row], params) if flags & PENALISED else logits.clone()
    biases = adjustments.biases[row, :num_biases]
    biases = biases[biases[:, 3] > position]
    ids, values = biases[:, 1].long(), biases[:, 2].view(torch.float32)
    is_ban = values.isneginf()
    out.index_add_(0, ids[~is_ban], values[~is_ban])
    banned = ids[is_ban]
    out[banned] = out[banned].masked_fill(~out[banned].isnan(), -torch.inf)
    if flags & MASKED:
        bits = adjustments.masks[row].unsqueeze(1) >> torch.arange(32, dtype=torch.int32)
        out.masked_fill_(((bits & 1).view(-1)[: len(out)] == 0) & ~out.isnan(), -torch.inf)
    return out


def _penalised(logits: torch.Tensor, marks: torch.Tensor, params: np.void) -> torch.Tensor:
    repetition = float(params["repetition_penalty"])
    frequency, presence = float(params["frequency_penalty"]), float(params["presence_penalty"])
    scores = logits.double()
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(marks != 0, repeated, scores)
    counts = marks >> 1
    scores = scores - counts.double() * frequency
    return (scores - (counts > 0).double() * presence).float()


def _slots(rows: Int32Array) -> npt.NDArray[np.int64]:
    """[len(rows)] index of each entry among the entries of its row, from 0."""
    order = np.argsort(rows, kind="stable")
    firsts = np.searchsorted(rows[order], rows[order])
    slots = np.empty(len(rows), np.int64)
    slots[order] = np.arange(len(rows)) - firsts
    return slots


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    # torch.zeros would write the whole tensor, and so commit its memory.
    zeros = torch.from_numpy(np.zeros(shape, dtype))
    return zeros if device.type == "cpu" else torch.zeros(shape, dtype=zeros.dtype, device=device)
