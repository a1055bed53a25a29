"""The text of an answer to events: thinking, content and calls, told apart as the text comes.

One parser reads one answer. However its text is cut into pieces, the events of all pieces spell the same answer, which
is why a stream and a whole answer cannot differ.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.text.reasoning import ReasoningStyle, read_reasoning
from cluster.text.tools.events import Content, Event
from cluster.text.tools.sink import Sink
from cluster.text.tools.styles import CallStyle, read_content
from cluster.text.tools.text_stream import Reading, TextStream

_PIECE = 4096  # a reader that looks ahead looks at one piece: whole answers too are read in linear time


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the answers to one request are to be read."""

    reasoning: ReasoningStyle | None = None
    """None: a tag of thinking is text."""
    starts_in_reasoning: bool = False
    """The prompt has opened the thinking."""
    starts_after_reasoning: bool = False
    """The prompt has closed it."""
    calls: CallStyle | None = None
    """None: a call is text."""
    tools: Mapping[str, Mapping[str, Any]]
    """The tools that may be called: for each name the JSON schema of its arguments."""
    max_calls: int | None = None
    """Calls after as many are dropped."""
    calls_only: bool = False
    """A grammar makes the answer nothing but calls: what is no call is the beginning of one that was cut off."""
    call_is_named: bool = False
    """The request names the function to call."""

    @property
    def is_plain(self) -> bool:
        """Whether all of an answer is content."""
        return self.reasoning is None and self.calls is None

    @property
    def tags(self) -> frozenset[str]:
        """Special tokens that must be part of the text."""
        return frozenset((*(self.reasoning.tags if self.reasoning else ()), *(self.calls.tags if self.calls else ())))


class AnswerReader:
    """Reads one answer as its tokens come, and counts those of its thinking."""

    __slots__ = ("_reading", "_sink", "_starts", "_text", "_thinking_end", "num_reasoning_tokens")

    def __init__(self, form: AnswerFormat) -> None:
        self.num_reasoning_tokens = 0
        self._starts: list[int] | None = None if form.reasoning is None else []
        self._thinking_end: int | None = None  # characters of the answer up to there, tags included, once it is known
        self._text = TextStream()
        new_id = form.calls.new_id if form.calls else str
        self._sink = Sink(form.tools, new_id, max_calls=form.max_calls, calls_only=form.calls_only)
        self._reading = None if form.is_plain else self._read(form)
        if self._reading is not None:
            next(self._reading)

    def read(self, text: str, starts: Sequence[int] = (), *, ended: bool = False, cut: bool = False) -> list[Event]:
        """Returns what `text` made certain.

        Args:
            starts: characters of the answer before each new token. The tokens may be ahead of the text.
            ended: nothing follows.
            cut: it ended at a limit, and the model would have gone on.
        """
        if self._reading is None:
            return [Content(text)] if text else []
        for start in range(0, len(text), _PIECE):
            self._text.push(text[start : start + _PIECE])
            next(self._reading)
        if ended:
            self._text.ended, self._text.cut = True, cut
            next(self._reading, None)
            self._sink.end()
        if self._starts is not None:
            self._starts += starts
            end = self._thinking_end
            self.num_reasoning_tokens = len(self._starts) if end is None else bisect_left(self._starts, end)
            if end is not None and self._starts and self._starts[-1] >= end:
                self._starts = None
        return self._sink.take()

    def _read(self, form: AnswerFormat) -> Reading[None]:
        text, sink = self._text, self._sink
        if form.reasoning is not None:
            was_thinking = yield from read_reasoning(text, sink, form.reasoning, is_open=form.starts_in_reasoning)
            self._thinking_end = text.position if was_thinking else 0
            if was_thinking:
                yield from text.skip_space()
            if form.reasoning.read_rest is not None:
                return (yield from form.reasoning.read_rest(text, sink))
        yield from form.calls.read(text, sink) if form.calls else read_content(text, sink)
