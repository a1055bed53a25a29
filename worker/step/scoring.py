"""Log probabilities of prompt tokens and of the tokens after scored items, besides the step's sampled tokens.

A prompt's targets are the tokens after some of its inputs (`StepFrame.prompt_runs`). Scored items are texts that follow
one query and do not see each other (`StepFrame.items`). Their keys and values lie one after the other, like those of a
prompt. Two things make each item see only the query and itself: its positions, which rotary embeddings and windows
read, and a mask over the new tokens.

The last layer computes only the hidden states that are needed: of sampled inputs, of inputs before targets, and of the
last tokens of items. Then the LM head processes them in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import ForwardBatch, NewTokenMask
from worker.models.decoder import Decoder
from worker.protocol import StepFrame
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.sampler import Sampler
from worker.step.step import Step
from worker.upload import upload

Int64Array = npt.NDArray[np.int64]

_CHUNK_ROWS = 128
"""Maximum number of rows of logits that exist at a time."""


class Scoring:
    """Computes the log probabilities that a scored step requests.

    Args:
        max_rows: maximum number of rows of a decode, for which memory is planned. A chunk of logits has no more rows.
    """

    def __init__(self, decoder: Decoder, sampler: Sampler, max_rows: int) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._num_rows = min(_CHUNK_ROWS, max_rows)

    def run(
        self, step: Step, batch: ForwardBatch, forward: Callable[[ForwardBatch], torch.Tensor]
    ) -> tuple[torch.Tensor, LogprobTensors]:
        """Runs the step.

        Args:
            forward: runs the model and returns the hidden states of the batch's `sample_indices`.

        Returns:
            Hidden states [num_sampled, hidden_size] of the sampled inputs; and the log probabilities of the frame's
            prompt targets, followed by those requested after its items.
        """
        frame, device = step.frame, batch.positions.device
        num_targets, num_items = len(frame.prompt_targets), len(frame.items)
        items = Items.of(frame)
        if num_items:
            batch = items.seen_in(batch)
        wanted = WantedTokens.of(step, items.lasts)
        hidden = forward(replace(batch, sample_indices=upload(wanted.tokens, device)))
        scored = hidden.index_select(0, upload(wanted.scored, device))
        # An item has no target, only requested tokens, so its target here is a placeholder.
        targets = upload(np.concatenate((frame.prompt_targets, np.zeros(num_items, np.int64))), device)
        requested = self._sampler.requested_by(np.concatenate((np.zeros(num_targets, np.int32), frame.items["row"])))
        k = int(frame.prompt_runs["k"].max(initial=0))
        chunks = [
            self._sampler.logprobs_of(self._decoder.local_logits(states), ids, k, requested_ids)
            for states, ids, requested_ids in zip(
                *(torch.split(rows, self._num_rows) for rows in (scored, targets, requested)), strict=True
            )
        ]
        return hidden.index_select(0, upload(wanted.sampled, device)), LogprobTensors.joined(chunks)


class WantedTokens(NamedTuple):
    """Inputs of a step that need hidden states. [n] int64 each, on the host."""

    tokens: Int64Array
    """Indices among the step's tokens, ascending."""
    sampled: Int64Array
    """[num_sampled]: index into `tokens` of each sampled input, in row order."""
    scored: Int64Array
    """[num_prompt_logprobs + num_items]: index into `tokens` of the input before each target, then of each item's
    last."""

    @classmethod
    def of(cls, step: Step, item_lasts: Int64Array) -> WantedTokens:
        """The inputs needed by a checked step. `item_lasts` are the indices of its items' last tokens."""
        frame = step.frame
        ends = np.cumsum(frame.lens, dtype=np.int64)
        at = np.flatnonzero(np.isin(frame.rows, frame.prompt_runs["row"]))  # records are in the order of rows
        counts = frame.prompt_runs["num"].astype(np.int64)
        first_inputs = (ends - frame.lens)[at] + frame.prompt_runs["start"] - frame.starts[at]
        scored = np.repeat(first_inputs - (np.cumsum(counts) - counts), counts) + np.arange(len(frame.prompt_targets))
        scored = np.concatenate((scored, item_lasts))
        tokens = np.union1d(step.sampled_tokens, scored)
        return cls(tokens, np.searchsorted(tokens, step.sampled_tokens), np.searchsorted(tokens, scored))


class Items(NamedTuple):
    """The scored items of a step, on the host."""

    lasts: Int64Array
    """[num_items]: indices among the step's tokens of the items' last tokens."""
    positions: Int64Array
    """[num_tokens]: position of each of the step's tokens in its sequence."""
    item_of: npt.NDArray[np.int32]
    """[num_tokens]: number of the item in its row that a token belongs to, from 1. 0 if it belongs to none."""
    rows: tuple[slice | None, ...]
    """[num_rows]: range of the row's inputs among the step's tokens. None for a row without items."""

    @classmethod
    def of(cls, frame: StepFrame) -> Items:
        """The items of a checked frame."""
        ends = np.cumsum(frame.lens, dtype=np.int64)
        firsts = ends - frame.lens
        positions = np.arange(ends[-1]) - np.repeat(firsts - frame.starts, frame.lens)
        item_of = np.zeros(ends[-1], np.int32)
        lasts: list[Int64Array] = []
        rows: list[slice | None] = [None] * len(frame.rows)
        for i in np.flatnonzero(np.isin(frame.rows, frame.items["row"])):
            lens = frame.items["len"][frame.items["row"] == frame.rows[i]].astype(np.int64)
            bounds = np.concatenate(([0], np.cumsum(lens)))
            begin = ends[i] - bounds[-1]
            positions[begin : ends[i]] -= np.repeat(bounds[:-1], lens)
            item_of[begin : ends[i]] = np.repeat(np.arange(1, len(lens) + 1), lens)
            lasts.append(begin + bounds[1:] - 1)
            rows[i] = slice(int(firsts[i]), int(ends[i]))
        return cls(np.concatenate([np.empty(0, np.int64), *lasts]), positions, item_of, tuple(rows))

    def seen_in(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch of the same frame with the items' positions and mask. Does not wait for the device."""
        device = batch.positions.device
        positions, item_of = upload(self.positions, device), upload(self.item_of, device)
        parts = [None if row is None else _visible(item_of[row]) for row in self.rows]
        sizes = np.array([0 if part is None else part.numel() for part in parts])
        starts = np.where(sizes > 0, np.cumsum(sizes) - sizes, -1)
        mask = NewTokenMask(
            visible=torch.cat([part.view(-1) for part in parts if part is not None]),
            starts=upload(starts, device),
            positions=positions,
        )
        windowed = batch.in_window_pool
        if windowed is not None:
            windowed = replace(windowed, positions=positions, mask=mask)
        return replace(batch, positions=positions, mask=mask, in_window_pool=windowed)


def _visible(item_of: torch.Tensor) -> torch.Tensor:
    """[n, n] bool: which of a row's n inputs each input sees."""
    return ((item_of == 0) | (item_of == item_of[:, None])).tril_()
