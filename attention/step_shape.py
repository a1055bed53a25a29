"""The shape of a step, or of a captured CUDA graph to which steps are padded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.forward_batch import Int32Array, Int64Array

ANY_LEN = 2**31 - 1
"""`max_seq_len` of a captured shape for rows of any length."""
FEW_ROWS = 8
"""Largest number of sampled rows in the captured shapes for prompts that run alone or beside few other rows."""


@dataclass(frozen=True, order=True, slots=True)
class StepShape:
    """Numbers of tokens and rows of a step.

    If each row has one token and samples it, the step is a decode, and each padding row has one token too. In other
    captured shapes, the last row is padding and has all unused tokens. Rows between it and the step's rows have no
    tokens.
    """

    num_tokens: int
    num_rows: int
    num_sampled: int
    """Number of inputs after which a token is sampled: one per row, and more for rows with drafts. A step with fewer
    repeats the last row."""
    max_seq_len: int = ANY_LEN
    """Tokens of the longest row, this step's included. For a captured shape, the longest row that it supports."""

    @property
    def is_decode(self) -> bool:
        return self.num_rows == self.num_sampled == self.num_tokens

    def holds(self, step: StepShape) -> bool:
        """Whether a step of that shape can be padded to this captured shape."""
        if self.is_decode:
            return step.is_decode and step.num_rows <= self.num_rows
        return (
            step.num_tokens <= self.num_tokens
            and step.num_rows < self.num_rows
            and step.num_sampled <= self.num_sampled
            and step.max_seq_len <= self.max_seq_len
        )

    def padded(self, prefix_lens: Int32Array, extend_lens: Int32Array) -> tuple[Int64Array, Int64Array]:
        """`prefix_lens` and `extend_lens`, [num_rows] each, of a step's rows and of the rows that pad it to this
        captured shape."""
        num_rows = len(extend_lens)
        prefixes, lens = np.zeros((2, self.num_rows), np.int64)
        prefixes[:num_rows], lens[:num_rows] = prefix_lens, extend_lens
        if self.is_decode:
            lens[num_rows:] = 1
        else:
            lens[-1] = self.num_tokens - lens.sum()
        return prefixes, lens
