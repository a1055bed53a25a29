"""Collects what the parsers of an answer find: events in order, and the rule for whitespace.

Whitespace next to a call or to the end of the reasoning is part of the format, not text. So whitespace is held until
the text after it is known. Everything else that a parser emits becomes an event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning
from cluster.text.tools.text_stream import SPACE


class Sink:
    """The events of one answer. Consecutive events of one kind are merged."""

    __slots__ = (
        "_arguments",
        "_calls_only",
        "_dropping",
        "_events",
        "_kind",
        "_max_calls",
        "_new_id",
        "_space",
        "num_calls",
        "tools",
    )

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        max_calls: int | None = None,
        calls_only: bool = False,
    ) -> None:
        """Args:
        tools: name of each tool that may be called -> JSON schema of its arguments.
        new_id: makes an id for a call without one.
        max_calls: maximum number of calls; further ones are read and dropped. None: no limit.
        calls_only: whether content is dropped.
        """
        self.tools = tools
        self.num_calls = 0
        self._new_id = new_id
        self._max_calls = max_calls
        self._calls_only = calls_only
        self._dropping = False
        self._arguments: list[str] = []  # arguments of the last call, in pieces
        # (kind, pieces of text) of each event. An integer stands for the arguments of the call with this index.
        self._events: list[tuple[type[Content | Reasoning] | CallStarted | int, list[str]]] = []
        self._space: list[str] = []  # held whitespace
        self._kind: type[Content | Reasoning] = Content  # whether the held whitespace is content or reasoning

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return [_event(kind, "".join(pieces)) for kind, pieces in events]

    def content(self, text: str) -> None:
        if not self._calls_only:
            self._say(Content, text)

    def reasoning(self, text: str) -> None:
        self._say(Reasoning, text)

    def end_reasoning(self) -> None:
        """Ends the reasoning at its closing tag, and drops the whitespace before the tag."""
        self._space.clear()

    def start_call(self, name: str, id_: str | None = None) -> None:
        """Begins a call to `name`, one of `tools`. The next arguments are those of this call."""
        self._space.clear()
        self._dropping = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._dropping:
            self._events.append((CallStarted(self.num_calls, id_ or self._new_id(), name), []))
            self.num_calls += 1
            self._arguments = []

    def arguments(self, fragment: str) -> None:
        if not self._dropping:
            self._arguments.append(fragment)
            self._add(self.num_calls - 1, fragment)

    @property
    def cuts_call(self) -> bool:
        """Whether the answer contains a call, and the JSON of the last call's arguments is incomplete."""
        text = "".join(self._arguments)
        # If a number is cut after a sign, point or e, msgspec calls it malformed; with a digit, truncated.
        return bool(self.num_calls) and (_is_truncated(text) or _is_truncated(text + "0"))

    def end(self) -> None:
        """Ends the answer. Held whitespace was text, unless a call is before it."""
        space = "".join(self._space)
        if space and (self._kind is Reasoning or not self.num_calls):
            self._add(self._kind, space)

    def _say(self, kind: type[Content | Reasoning], text: str) -> None:
        """Adds the held whitespace and `text`. The whitespace at the end of `text` is held."""
        if not text:
            return
        self._kind = kind
        visible = text.rstrip(SPACE)
        if visible:
            self._add(kind, "".join(self._space) + visible)
            self._space.clear()
        self._space.append(text[len(visible) :])

    def _add(self, kind: type[Content | Reasoning] | int, text: str) -> None:
        if not self._events or self._events[-1][0] != kind:
            self._events.append((kind, []))
        self._events[-1][1].append(text)


def _is_truncated(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        return "truncated" in str(error)
    return False


def _event(kind: type[Content | Reasoning] | CallStarted | int, text: str) -> Event:
    if isinstance(kind, CallStarted):
        return kind
    return Arguments(kind, text) if isinstance(kind, int) else kind(text)
