"""Drafts that a step verifies, and the choice of the sampled tokens that count.

A row with drafts has its last token and the drafts as inputs, and a token is sampled after each. If a token equals the
draft at its position, the next token is the same, bit for bit, as without drafts. The first token that differs is the
row's last in this step. The row's next inputs overwrite the keys and values of the drafts after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.protocol import Int32Array
from worker.upload import upload

_NO_DRAFT = -2
"""A value that no sampled token has: ids are at least 0, and a row with a NaN gets -1."""


@dataclass(frozen=True, slots=True, eq=False)
class StepDrafts:
    """The drafts that a step verifies, in arrays with one entry for each sampled input."""

    index_in_row: Int32Array
    """[num_sampled] index of each sampled input within its row, from 0. On the host."""
    firsts: torch.Tensor
    """[num_sampled] int64, device: index of the row's first sampled input."""
    tokens: torch.Tensor
    """[num_sampled] int64, device: the draft that each sampled token must equal. `_NO_DRAFT` for a row's last token."""

    @classmethod
    def of(cls, num_samples: Int32Array, following: torch.Tensor) -> StepDrafts:
        """The drafts of a step's rows.

        Args:
            num_samples: [num_rows]: number of sampled inputs of each row.
            following: [num_sampled] int64, device: the input that follows each sampled input in the step.
        """
        device = following.device
        firsts = np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
        index_in_row = np.arange(len(firsts)) - firsts
        # A row's drafts are its last inputs.
        is_last = index_in_row == np.repeat(num_samples, num_samples) - 1
        tokens = following.masked_fill(upload(is_last, device), _NO_DRAFT)
        return cls(index_in_row.astype(np.int32), upload(firsts, device), tokens)

    def accepted(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_sampled] bool: whether all tokens sampled before this one in its row equal their drafts.

        Args:
            tokens: [num_sampled] int64, device: the sampled tokens.
        """
        is_wrong = tokens != self.tokens
        num_wrong = (
            is_wrong.cumsum(0) - is_wrong.long()
        )  # number of wrong drafts before each token, counted over all rows
        return num_wrong == num_wrong.index_select(0, self.firsts)

    def lasts(self, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """[num_sampled] bool: whether this is the row's last token of this step. Each row has exactly one.

        Args:
            tokens: [num_sampled] int64, device: the sampled tokens.
            accepted: [num_sampled] bool, device: the result of the method `accepted` for `tokens`.
        """
        return accepted & (tokens != self.tokens)
