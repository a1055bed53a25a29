"""Ends of a text: stop strings and stop patterns, wherever the text is cut.

Owns the state between two pieces of one text. Which text comes out and why it ends does not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.text.stop_regex import StopRegex


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become the text of an answer, and what in the text ends it."""

    stops: Sequence[str] = ()
    """None of them empty."""
    patterns: Sequence[StopRegex] = ()
    include_stop: bool = False
    """A stop string, and the text of a stop token, stay in the answer. What a pattern matches always does."""
    skip_special_tokens: bool = True
    prompt_only: bool = False
    """The one token that is generated is no part of the answer, which is about the prompt."""


class TextEnd:
    """Finds the end of one text that comes in pieces, and holds back only what may still become a stop string.

    Per stop string it keeps how long a prefix of it the text ends with (Knuth-Morris-Pratt), so the result does not
    depend on how the text was cut, and a character costs the same however long the strings are. The match that ends
    first wins; of two strings that end together the longer, and a string before a pattern. What a pattern matches stays
    in the text: nothing is held for it.
    """

    __slots__ = ("_failures", "_held", "_options", "_states", "_stops", "_tail")

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._stops = sorted(options.stops, key=len, reverse=True)
        self._failures = [_failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self._tail = ""  # the end of the text so far, for patterns

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """(text that is certain, the stop string or pattern met or None). After a match the rest is dropped. Without
        `may_end` a match that ends in `text` does not count."""
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
        """The text held back, for a sequence that ended otherwise."""
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
