"""Parses an answer's text into events: reasoning, content and tool calls.

One parser reads one answer. The events spell the same answer for any pieces into which the text is cut, so a stream and
a whole answer cannot differ.
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

# Characters per piece; the parser looks ahead only within a piece, so that it stays linear for whole answers
_PIECE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the answers to one request are parsed."""

    reasoning: ReasoningStyle | None = None
    """The tags around the reasoning. If None, such tags are ordinary text."""
    starts_in_reasoning: bool = False
    """Whether the prompt ends inside the reasoning, after its opening tag."""
    starts_after_reasoning: bool = False
    """Whether the prompt ends after the reasoning, with its closing tag."""
    calls: CallStyle | None = None
    """The format of tool calls. If None, calls are ordinary text."""
    tools: Mapping[str, Mapping[str, Any]]
    """The tools that may be called: name -> JSON schema of the arguments."""
    max_calls: int | None = None
    """Maximum number of calls; further ones are dropped. None: no limit."""
    calls_only: bool = False
    """Whether a grammar allows only calls. Text that is no call is then the beginning of a call that was cut off."""
    call_is_named: bool = False
    """Whether the request names the function to call."""

    @property
    def is_plain(self) -> bool:
        """Whether the whole answer is content."""
        return self.reasoning is None and self.calls is None

    @property
    def tags(self) -> frozenset[str]:
        """Special tokens that the detokenizer must show in the text, because the parser needs them."""
        return frozenset((*(self.reasoning.tags if self.reasoning else ()), *(self.calls.tags if self.calls else ())))


class AnswerReader:
    """Parses one answer token by token, and counts its reasoning tokens."""

    __slots__ = ("_reading", "_sink", "_starts", "_text", "_thinking_end", "num_reasoning_tokens")

    def __init__(self, form: AnswerFormat) -> None:
        self.num_reasoning_tokens = 0
        self._starts: list[int] | None = None if form.reasoning is None else []
        # Number of characters up to the end of the reasoning, including tags. None until the end is known.
        self._thinking_end: int | None = None
        self._text = TextStream()
        new_id = form.calls.new_id if form.calls else str
        self._sink = Sink(form.tools, new_id, max_calls=form.max_calls, calls_only=form.calls_only)
        self._reading = None if form.is_plain else self._read(form)
        if self._reading is not None:
            next(self._reading)

    def read(self, text: str, starts: Sequence[int] = (), *, ended: bool = False, cut: bool = False) -> list[Event]:
        """Returns the events that `text` made certain.

        Args:
            starts: number of characters of the answer before each new token. The tokens may be ahead of the text.
            ended: whether the answer ends with `text`.
            cut: whether the answer ended at a limit or a stop, where the model would have continued.
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

    @property
    def cuts_call(self) -> bool:
        """Whether the answer, once it has ended, contains an incomplete call."""
        return self._sink.cuts_call

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
