"""The rows that decode in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.protocol import Int32Array


@dataclass(slots=True, eq=False)
class Decodes:
    """Rows that decode in the next step, with the number of inputs of each."""

    rows: Int32Array
    num_samples: Int32Array
    """[num_rows]: number of inputs of each row: its last token and the drafts to verify. The step samples a token after
    each input."""
    num_wanted: int = 0
    """Number of new drafts that the draft head makes for each sampled row of the step."""
    deltas: Int32Array | None = None
    """[n, 3] page deltas for the new pages of the rows. None until the rows have got their pages."""

    @property
    def num_tokens(self) -> int:
        """Total number of inputs of all rows."""
        return int(self.num_samples.sum())

    @property
    def has_drafts(self) -> bool:
        """Whether some row verifies drafts."""
        return bool((self.num_samples > 1).any())

    @classmethod
    def plain(cls, rows: Int32Array) -> Decodes:
        """Returns decodes in which each of `rows` has one input."""
        return cls(rows, np.ones(len(rows), np.int32))
