"""The acceptance rate of one request's drafts that the ranks make. Each draft is compared with the token that comes,
whether a step verified the draft or not."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.scheduling.ngrams import learned
from worker.protocol import Int32Array

FIRST_RATES = (0.6, 0.6)


class DraftHistory:
    """One request's drafts by the ranks. `num_tokens` tokens came before them. It has the interface of NgramHistory."""

    __slots__ = ("_drafts", "_is_going", "_num_tokens", "_rates")

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._drafts: list[int] = []
        self._is_going = False  # whether the draft before the first one was right
        # Acceptance rates: of first drafts, and of drafts after a right one.
        self._rates = list(FIRST_RATES)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def num_drafts(self) -> int:
        """Number of drafts."""
        return len(self._drafts)

    @property
    def chances(self) -> tuple[float, float] | None:
        """The chances that the drafts are right, as in NgramHistory. None without drafts."""
        return (self._rates[self._is_going], self._rates[True]) if self._drafts else None

    @property
    def new_chances(self) -> tuple[float, float]:
        """The chances of drafts that the ranks have just made."""
        return (self._rates[False], self._rates[True])

    def take(self, tokens: Int32Array, *, is_whole: bool) -> None:
        """Compares the drafts with the next tokens of the request."""
        self._num_tokens += len(tokens)
        for token in tokens.tolist():
            if self._drafts:
                is_right = self._drafts[0] == token
                self._rates[self._is_going] = learned(self._rates[self._is_going], is_right)
                self._is_going, self._drafts = is_right, self._drafts[1:] if is_right else []

    def bring(self, drafts: Sequence[int]) -> None:
        """Stores new drafts, which follow the known tokens."""
        self._drafts, self._is_going = list(drafts), False

    def drafts(self, count: int) -> Sequence[int]:
        """The first `count` drafts."""
        return self._drafts[:count]
