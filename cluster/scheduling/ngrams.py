"""Drafts from n-grams: the tokens that followed the request's last tokens when they occurred before.

Each predicted token is compared with the token that comes, whether a step verified the prediction or not. So the
acceptance rate is known before the first draft is paid for, and a request that does not repeat itself has no drafts.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from worker.protocol import Int32Array

# Maximum number of earlier occurrences that are compared, latest first.
_MAX_TRIED = 8
# Weight of a new observation in a rate.
_WEIGHT = 0.2
_FIRST_RATES = (0.4, 0.8)
# Maximum acceptance rate, because at 1 the drafter would never have a reason to draft less.
_MOST = 0.98


def learned(rate: float, is_right: bool) -> float:
    """The acceptance rate `rate` after one more draft, which was right or wrong."""
    return min(rate + _WEIGHT * (is_right - rate), _MOST)


class NgramHistory:
    """One request's tokens, with an index of its n-grams.

    Args:
        least: minimum number of last tokens that must have occurred before.
        most: maximum number of last tokens that are compared. The earlier occurrence with the longest match is used.
    """

    __slots__ = ("_before", "_ends", "_is_going", "_least", "_most", "_rates", "_source", "_tokens")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._tokens = array("i")
        self._ends: dict[bytes, int] = {}  # n-gram of `least` tokens -> position where it last ended
        self._before = array("i")  # for each position: the previous end of the same n-gram; -1 if there is none
        self._source = -1  # position of the token that is predicted next; -1 without a prediction
        self._is_going = False  # whether the last token came as predicted
        # Acceptance rates: of the first token after a new match, and of a token after a right prediction.
        self._rates = list(_FIRST_RATES)

    num_drafts = sys.maxsize
    """Number of tokens that can be predicted at a time: no limit."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def chances(self) -> tuple[float, float] | None:
        """Two probabilities: that the next token is as predicted, and that each later one is, if the tokens before it
        were. None without a prediction."""
        return None if self._source < 0 else (self._rates[self._is_going], self._rates[True])

    def take(self, tokens: Int32Array, *, is_whole: bool) -> None:
        """Appends `tokens`, the request's next ones.

        Args:
            is_whole: whether these are all tokens known so far. If False, nothing is predicted yet.
        """
        known, before, ends, least = self._tokens, self._before, self._ends, self._least
        for token in tokens.tolist():
            if self._source >= 0:
                self._compare(token)
            place = len(known)
            known.append(token)
            if place + 1 < least:
                before.append(-1)
                continue
            key = known[place + 1 - least :].tobytes()
            before.append(ends.get(key, -1))
            ends[key] = place
        if self._source < 0 and is_whole:
            self._source, self._is_going = self._find() + 1 or -1, False

    def drafts(self, count: int) -> Sequence[int]:
        """The next `count` predicted tokens. If the predicting part reaches the end of the sequence, the predicted
        tokens themselves continue it."""
        known, source = self._tokens, self._source
        period = len(known) - source
        return [known[source + index % period] for index in range(count)]

    def _compare(self, token: int) -> None:
        is_right = self._tokens[self._source] == token
        self._rates[self._is_going] = learned(self._rates[self._is_going], is_right)
        self._source = self._source + 1 if is_right else -1
        self._is_going = is_right

    def _find(self) -> int:
        """The earlier position that best matches the end of the sequence. -1 if no match is long enough."""
        known, before, most = self._tokens, self._before, self._most
        end = len(known) - 1
        longest, found, place = 0, -1, before[end] if before else -1
        for _ in range(_MAX_TRIED):
            if place < 0 or longest == most:
                break
            length = self._least
            while length < min(most, place + 1) and known[place - length] == known[end - length]:
                length += 1
            if length > longest:
                longest, found = length, place
            place = before[place]
        return found
