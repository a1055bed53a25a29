"""The rows that decode in a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.protocol import Int32Array


@dataclass(slots=True, eq=False)
class Decodes:
    """Rows that decode in the next step, each with the inputs that it has there."""

    rows: Int32Array
    num_samples: Int32Array
    """[num_rows]: inputs of each row, its last token and the drafts to verify. A token is sampled after each."""
    num_wanted: int = 0
    """New drafts that the draft head is to make behind each row that the step samples."""
    deltas: Int32Array | None = None
    """[n, 3] page deltas that the rows need; None before they have got their pages."""

    @property
    def num_tokens(self) -> int:
        """Inputs of all rows."""
        return int(self.num_samples.sum())

    @property
    def has_drafts(self) -> bool:
        """Whether some row verifies drafts."""
        return bool((self.num_samples > 1).any())

    @classmethod
    def plain(cls, rows: Int32Array) -> Decodes:
        """Each of `rows` decodes one token."""
        return cls(rows, np.ones(len(rows), np.int32))
