"""Where the readers of an answer put what they found: events in order, and the rule for whitespace.

Whitespace next to a call or to the end of the reasoning is layout of the format, not text: it is held until what
follows is known. Anything else that a reader gives away comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning, merged
from cluster.text.tools.text_stream import SPACE


class Sink:
    """The events of one answer."""

    __slots__ = (
        "_calls_only",
        "_dropping",
        "_events",
        "_is_reasoning",
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
        tools: for each name that may be called, the JSON schema of its arguments.
        new_id: an id for a call that brings none.
        max_calls: calls after as many are read and dropped.
        calls_only: content is dropped.
        """
        self.tools = tools
        self.num_calls = 0
        self._new_id = new_id
        self._max_calls = max_calls
        self._calls_only = calls_only
        self._dropping = False
        self._is_reasoning = False
        self._events: list[Event] = []
        self._space: list[str] = []  # held whitespace of content or reasoning, whichever is being read

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return merged(events)

    def content(self, text: str) -> None:
        if self._calls_only:
            return
        visible = self._hold_space(text)
        if visible:
            self._events.append(Content(visible))

    def begin_reasoning(self) -> None:
        self._is_reasoning = True

    def reasoning(self, text: str) -> None:
        visible = self._hold_space(text)
        if visible:
            self._events.append(Reasoning(visible))

    def end_reasoning(self) -> None:
        """The closing tag is there: the whitespace before it is gone."""
        self._is_reasoning = False
        self._space.clear()

    def start_call(self, name: str, id_: str | None = None) -> None:
        """`name` is one of `tools`. The arguments that follow are this call's."""
        self._space.clear()
        self._dropping = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._dropping:
            self._events.append(CallStarted(self.num_calls, id_ or self._new_id(), name))
            self.num_calls += 1

    def arguments(self, fragment: str) -> None:
        if not self._dropping:
            self._events.append(Arguments(self.num_calls - 1, fragment))

    def end(self) -> None:
        """The answer is over: held whitespace was text after all, unless a call is before it."""
        space = "".join(self._space)
        self._space.clear()
        if space and self._is_reasoning:
            self._events.append(Reasoning(space))
        elif space and not self.num_calls:
            self._events.append(Content(space))

    def _hold_space(self, text: str) -> str:
        """What is certain of the held whitespace and `text`; the whitespace `text` ends with is held."""
        visible = text.rstrip(SPACE)
        if not visible:
            self._space.append(text)
            return ""
        certain = "".join(self._space) + visible
        self._space = [text[len(visible) :]]
        return certain
