"""Drafts of what follows a request's tokens: what followed the last of them where they came before.

Each prediction is compared with the token that comes, drafted or not. So it is known how often a request's drafts would
be right before the first is paid for, and a request that does not repeat itself drafts nothing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from worker.protocol import Int32Array

# Earlier places of the last tokens that are compared, the latest first.
_MAX_TRIED = 8
# A new observation's share of a rate.
_WEIGHT = 0.2
_FIRST_RATES = (0.4, 0.8)
# A rate of 1 would never see a reason to draft less.
_MOST = 0.98


def learned(rate: float, is_right: bool) -> float:
    """The share of predictions that are right, after one more."""
    return min(rate + _WEIGHT * (is_right - rate), _MOST)


class NgramHistory:
    """One request's tokens, and where each few in a row of them came before.

    Args:
        least: fewest last tokens that must have come before.
        most: last tokens that are compared; of several places the one with the most in common is taken.
    """

    __slots__ = ("_before", "_ends", "_is_going", "_least", "_most", "_rates", "_source", "_tokens")

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._tokens = array("i")
        self._ends: dict[bytes, int] = {}  # by the `least` tokens that end there: the last such place
        self._before = array("i")  # by place: the place before it with the same last tokens; -1: none
        self._source = -1  # the place of the token that is predicted to come again now
        self._is_going = False  # whether the token before it came as predicted
        # The share of predictions that were right: after a match was found, and after a right one.
        self._rates = list(_FIRST_RATES)

    num_drafts = sys.maxsize
    """Tokens that are predicted at a time."""

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def chances(self) -> tuple[float, float] | None:
        """How likely the next token is the predicted one, and each one after it if those before were; None: nothing
        is predicted."""
        return None if self._source < 0 else (self._rates[self._is_going], self._rates[True])

    def take(self, tokens: Int32Array, *, is_whole: bool) -> None:
        """Goes on by `tokens`.

        Args:
            is_whole: more are not known. Else nothing is predicted.
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
        """The `count` tokens that are predicted; what is being repeated may reach into them."""
        known, source = self._tokens, self._source
        period = len(known) - source
        return [known[source + index % period] for index in range(count)]

    def _compare(self, token: int) -> None:
        is_right = self._tokens[self._source] == token
        self._rates[self._is_going] = learned(self._rates[self._is_going], is_right)
        self._source = self._source + 1 if is_right else -1
        self._is_going = is_right

    def _find(self) -> int:
        """The earlier place whose last tokens have the most in common with those at the end; -1: none has enough."""
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
