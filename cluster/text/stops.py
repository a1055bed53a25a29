"""Stop strings and stop patterns, which end a text.

`TextEnd` has the state between two pieces of one text. The result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.text.stop_regex import StopRegex


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become the text of an answer, and what ends it."""

    stops: Sequence[str] = ()
    """The stop strings. No string is empty."""
    patterns: Sequence[StopRegex] = ()
    include_stop: bool = False
    """Whether a stop string, and the text of a stop token, stay in the answer. What a pattern matches always stays."""
    skip_special_tokens: bool = True
    prompt_only: bool = False
    """Whether the one generated token is left out of the answer, because the request is only about the prompt."""


class TextEnd:
    """Finds the end of one text that comes in pieces, and holds back only what may become a stop string.

    For each stop string, this object stores the length of the prefix with which the text ends (Knuth-Morris-Pratt). So
    the result does not depend on the pieces, and a character costs the same for strings of any length. The match that
    ends first wins. If two strings end together, the longer one wins, and a string wins over a pattern. What a pattern
    matches stays in the text, so nothing is held back for patterns.
    """

    __slots__ = ("_failures", "_held", "_options", "_states", "_stops", "_tail")

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._stops = sorted(options.stops, key=len, reverse=True)
        self._failures = [_failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self._tail = ""  # end of the text so far, in which patterns may begin

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Returns the text that is certain, and the stop string or pattern that ended it, or None. Text after a match
        is dropped.

        Args:
            may_end: whether a match that ends in `text` counts.
        """
        end, source = len(text), None
        if self._options.patterns:
            for pattern in self._options.patterns if may_end else ():
                found = pattern.first_end(self._tail, text)
                if found is not None and (source is None or found < end):
                    end, source = found, pattern.source
            self._tail = StopRegex.window(self._tail, text)
        certain, stop = self._until_string(text[:end], may_end)
        if stop is None and source is not None:
            return certain + self.flush(), source
        return certain, stop

    def flush(self) -> str:
        """The text that was held back, for a sequence that ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _until_string(self, text: str, may_end: bool) -> tuple[str, str | None]:
        if not self._stops:
            return text, None
        states, stops, failures = self._states, self._stops, self._failures
        for position, char in enumerate(text):
            for i, stop in enumerate(stops):
                state = states[i]
                while state and stop[state] != char:
                    state = failures[i][state - 1]
                if stop[state] == char:
                    state += 1
                if state == len(stop):
                    if may_end:
                        seen = self._held + text[: position + 1]
                        self._held = ""
                        return seen[: len(seen) - (0 if self._options.include_stop else state)], stop
                    state = failures[i][state - 1]
                states[i] = state
        seen = self._held + text
        num_certain = len(seen) - (0 if self._options.include_stop else max(states))
        self._held = seen[num_certain:]
        return seen[:num_certain], None


def _failure_links(stop: str) -> list[int]:
    links = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = links[length - 1]
        if stop[i] == stop[length]:
            length += 1
        links[i] = length
    return links
