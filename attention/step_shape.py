"""The shape of a step: of one as it is, or of a captured one that others are padded to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attention.forward_batch import Int32Array, Int64Array

ANY_LEN = 2**31 - 1
"""`max_seq_len` of a captured shape whose rows may be as long as they can."""
FEW_ROWS = 8
"""Sampled rows of the captured shapes for prompts that nothing or little else runs beside, at most."""


@dataclass(frozen=True, order=True, slots=True)
class StepShape:
    """How many tokens and rows a step has.

    Where each row has one token and samples it, all are decodes: each padding row has one token too. In other captured
    shapes the last row is padding and has all tokens that a step does not fill; rows between the step's and it have
    none.
    """

    num_tokens: int
    num_rows: int
    num_sampled: int
    """Inputs that are sampled, one of a row but for rows with drafts; who has fewer samples the last row for the
    rest."""
    max_seq_len: int = ANY_LEN
    """Tokens of the longest row, this step's included; of a captured shape, the most that its rows may have."""

    @property
    def is_decode(self) -> bool:
        return self.num_rows == self.num_sampled == self.num_tokens

    def holds(self, step: StepShape) -> bool:
        """Whether a step of that shape can be padded to this one, a captured one."""
        if self.is_decode:
            return step.is_decode and step.num_rows <= self.num_rows
        return (
            step.num_tokens <= self.num_tokens
            and step.num_rows < self.num_rows
            and step.num_sampled <= self.num_sampled
            and step.max_seq_len <= self.max_seq_len
        )

    def padded(self, prefix_lens: Int32Array, extend_lens: Int32Array) -> tuple[Int64Array, Int64Array]:
        """`prefix_lens` and `extend_lens` of a step's rows, and of those that pad the step to this shape, a captured
        one: [num_rows] each."""
        num_rows = len(extend_lens)
        prefixes, lens = np.zeros((2, self.num_rows), np.int64)
        prefixes[:num_rows], lens[:num_rows] = prefix_lens, extend_lens
        if self.is_decode:
            lens[num_rows:] = 1
        else:
            lens[-1] = self.num_tokens - lens.sum()
        return prefixes, lens
