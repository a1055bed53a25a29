"""Drafts that the ranks made of what follows a request's tokens, and how often such drafts were right: each is compared
with the token that comes, verified or not."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.scheduling.ngrams import learned
from worker.protocol import Int32Array

FIRST_RATES = (0.6, 0.6)


class DraftHistory:
    """One request's drafts, with `num_tokens` before them. It stands in an NgramHistory's place."""

    __slots__ = ("_drafts", "_is_going", "_num_tokens", "_rates")

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._drafts: list[int] = []
        self._is_going = False  # whether a right draft was before them
        # The share of drafts that were right: of first ones, and of those behind right ones.
        self._rates = list(FIRST_RATES)

    def __len__(self) -> int:
        return self._num_tokens

    @property
    def num_drafts(self) -> int:
        """Drafts that there are."""
        return len(self._drafts)

    @property
    def chances(self) -> tuple[float, float] | None:
        """How likely drafts are right, as in NgramHistory; None where there are none."""
        return (self._rates[self._is_going], self._rates[True]) if self._drafts else None

    @property
    def new_chances(self) -> tuple[float, float]:
        """The chances that drafts have which the ranks have just made."""
        return (self._rates[False], self._rates[True])

    def take(self, tokens: Int32Array, *, is_whole: bool) -> None:
        """Goes on by `tokens`."""
        self._num_tokens += len(tokens)
        for token in tokens.tolist():
            if self._drafts:
                is_right = self._drafts[0] == token
                self._rates[self._is_going] = learned(self._rates[self._is_going], is_right)
                self._is_going, self._drafts = is_right, self._drafts[1:] if is_right else []

    def bring(self, drafts: Sequence[int]) -> None:
        """New drafts of what follows the tokens that are known."""
        self._drafts, self._is_going = list(drafts), False

    def drafts(self, count: int) -> Sequence[int]:
        """The first `count` of them."""
        return self._drafts[:count]
