"""Items of a row: texts that follow one query and do not see each other, worked on in one step as if each were alone.

Their KV lies one behind the other, as a prompt's would. What makes each the only one behind its query is where it is
said to be, for the rotary embedding and for windows, and which of the new tokens it sees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import ForwardBatch, NewTokenMask
from worker.protocol import StepFrame
from worker.upload import upload

Int64Array = npt.NDArray[np.int64]


class Items(NamedTuple):
    """The items of a step, on the host."""

    lasts: Int64Array
    """[num_items] places in the batch of their last tokens."""
    positions: Int64Array
    """[num_tokens] of all of the step's inputs in their sequences."""
    item_of: npt.NDArray[np.int32]
    """[num_tokens] which item of its row an input belongs to, from 1; 0: to none."""
    rows: tuple[slice | None, ...]
    """[num_rows] inputs of each row that has items; None for the others."""

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
        """The batch of that frame, in which the items see what they are to see. Queues kernels only."""
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
    """[n, n] bool: which of a row's n inputs each sees."""
    return ((item_of == 0) | (item_of == item_of[:, None])).tril_()
