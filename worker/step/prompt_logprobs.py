"""Log probabilities of prompt tokens and of what follows items: which hidden states a step needs for them.

A step's targets are the tokens after some of its inputs (`StepFrame.prompt_runs`). Their hidden states run through the
last layer and the LM head beside those of the rows that are sampled, the latter a chunk of rows at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worker.protocol import StepFrame
from worker.step.step_layout import sampled_inputs

CHUNK_ROWS = 128
"""Targets whose logits are there at a time."""


class WantedTokens(NamedTuple):
    """Inputs of a step whose hidden states are wanted. [n] int64 each, on the host."""

    tokens: npt.NDArray[np.int64]
    """Places in the batch, ascending."""
    sampled: npt.NDArray[np.int64]
    """[num_sampled]: index into `tokens` of each sampled input, in row order."""
    scored: npt.NDArray[np.int64]
    """[num_prompt_logprobs + num_items]: index into `tokens` of the input before each target, and of each item's last.
    """

    @classmethod
    def of(cls, frame: StepFrame, item_lasts: npt.NDArray[np.int64]) -> WantedTokens:
        """The tokens that a checked frame wants, whose items end with `item_lasts`."""
        ends = np.cumsum(frame.lens, dtype=np.int64)
        rows, num_after = sampled_inputs(frame)
        sampled = ends[rows] - 1 - num_after
        at = np.flatnonzero(np.isin(frame.rows, frame.prompt_runs["row"]))  # records are in the order of rows
        counts = frame.prompt_runs["num"].astype(np.int64)
        first_inputs = (ends - frame.lens)[at] + frame.prompt_runs["start"] - frame.starts[at]
        scored = np.repeat(first_inputs - (np.cumsum(counts) - counts), counts) + np.arange(len(frame.prompt_targets))
        scored = np.concatenate((scored, item_lasts))
        tokens = np.union1d(sampled, scored)
        return cls(tokens, np.searchsorted(tokens, sampled), np.searchsorted(tokens, scored))
