"""Drafts that a step verifies: which of the tokens that were sampled for a row count.

A row with drafts has its last token and them as inputs, and a token is sampled after each. A token that equals the
draft in its place leaves the next one as it would be without drafts, bit for bit; the first that differs is the row's
last in this step. Keys and values of the drafts behind it are overwritten by the row's next inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from worker.protocol import Int32Array
from worker.upload import upload

_NO_DRAFT = -2
"""Neither a token nor what a row with a NaN gets."""


@dataclass(frozen=True, slots=True, eq=False)
class StepDrafts:
    """The drafts of a step's rows, by sampled input."""

    index_in_row: Int32Array
    """[num_sampled] the how-manieth of its row each is, from 0; on the host."""
    firsts: torch.Tensor
    """[num_sampled] int64, device: index of the row's first."""
    tokens: torch.Tensor
    """[num_sampled] int64, device: the draft that the token sampled there has to equal; none behind a row's last."""

    @classmethod
    def of(cls, num_samples: Int32Array, following: torch.Tensor) -> StepDrafts:
        """The drafts of a step's rows.

        Args:
            num_samples: [num_rows]: how many inputs of each row are sampled.
            following: [num_sampled] int64, device: the step's input behind each sampled one.
        """
        device = following.device
        firsts = np.repeat(np.cumsum(num_samples) - num_samples, num_samples)
        index_in_row = np.arange(len(firsts)) - firsts
        # A row's drafts are the last of its inputs.
        is_last = index_in_row == np.repeat(num_samples, num_samples) - 1
        tokens = following.masked_fill(upload(is_last, device), _NO_DRAFT)
        return cls(index_in_row.astype(np.int32), upload(firsts, device), tokens)

    def kept(self, tokens: torch.Tensor) -> torch.Tensor:
        """[num_sampled] bool: all sampled before it for its row equal their drafts.

        Args:
            tokens: [num_sampled] int64, device, as they were sampled.
        """
        is_wrong = tokens != self.tokens
        num_wrong = is_wrong.cumsum(0) - is_wrong.long()  # before each, of all rows
        return num_wrong == num_wrong.index_select(0, self.firsts)

    def lasts(self, tokens: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """[num_sampled] bool: the row's last token of this step, of which each row has one.

        Args:
            tokens: as in `kept`, which returned `kept`.
        """
        return kept & (tokens != self.tokens)
