"""The acceptance rate of the drafts that the ranks make for one request. Each draft is compared with the token that
comes, whether a step verified the draft or not."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.scheduling.ngrams import learned
from worker.protocol import Int32Array

FIRST_RATES = (0.6, 0.6)


class DraftHistory:
    """One request's drafts by the ranks, after `num_tokens` known tokens. The interface is that of NgramHistory."""

    __slots__ = ("_drafts", "_is_going", "_num_tokens", "_rates")

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._drafts: list[int] = []
        self._is_going = False  # whether the draft before the first of `_drafts` was right
        # Acceptance rates: of a first draft, and of a draft after a right one.
        self._rates = list(FIRST_RATES)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def num_drafts(self) -> int:
        """Number of drafts that follow the known tokens."""
        return len(self._drafts)

    @property
    def chances(self) -> tuple[float, float] | None:
        """Probabilities that the first draft is right, and each later one after right ones. None without drafts."""
        return (self._rates[self._is_going], self._rates[True]) if self._drafts else None

    @property
    def new_chances(self) -> tuple[float, float]:
        """`chances` of drafts that the ranks have just made."""
        return (self._rates[False], self._rates[True])

    def take(self, tokens: Int32Array, *, is_whole: bool) -> None:
        """Compares the drafts with the request's next `tokens`. A wrong draft drops all later ones."""
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
