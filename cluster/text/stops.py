"""What in a text ends it: stop strings and stop patterns, wherever the text is cut.

Owns the state between two pieces of one text. Which text comes out and why it ends does not depend on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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


class TextEnd(Protocol):
    """Finds the end of one text that comes in pieces."""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """(text that is certain, the stop string or pattern met or None). After a match the rest is dropped.

        Args:
            may_end: False: a match that ends in `text` does not count.
        """

    def flush(self) -> str:
        """The text held back, for a sequence that ended otherwise."""


def text_end(options: TextOptions) -> TextEnd:
    """What ends the text of one sequence."""
    strings = StopMatcher(options.stops, keep=options.include_stop)
    return PatternMatcher(options.patterns, strings) if options.patterns else strings


class PatternMatcher:
    """Finds stop patterns, and stop strings before them. What a pattern matches stays in the text: nothing is held."""

    __slots__ = ("_patterns", "_strings", "_tail")

    def __init__(self, patterns: Sequence[StopRegex], strings: StopMatcher) -> None:
        self._patterns = patterns
        self._strings = strings
        self._tail = ""  # of the text so far

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        end, source = len(text), None
        if may_end and text:
            for pattern in self._patterns:
                found = pattern.first_end(self._tail, text)
                if found is not None and (source is None or found < end):
                    end, source = found, pattern.source
        self._tail = StopRegex.window(self._tail, text)
        certain, stop = self._strings.push(text[:end], may_end=may_end)
        if stop is None and source is not None:
            return certain + self._strings.flush(), source
        return certain, stop

    def flush(self) -> str:
        return self._strings.flush()


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back only what may still become one.

    Per stop string it keeps how long a prefix of it the text ends with (Knuth-Morris-Pratt), so the result does not
    depend on how the text was cut, and a character costs the same however long the strings are. The match that ends
    first wins; of two that end together, the longer.
    """

    __slots__ = ("_failures", "_held", "_keep", "_states", "_stops")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """
        Args:
            stops: none of them empty.
            keep: the stop string stays in the text; then nothing is held back.
        """
        self._keep = keep
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_links(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
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
                        return seen[: len(seen) - (0 if self._keep else state)], stop
                    state = failures[i][state - 1]
                states[i] = state
        seen = self._held + text
        num_certain = len(seen) - (0 if self._keep else max(states))
        self._held = seen[num_certain:]
        return seen[:num_certain], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


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
