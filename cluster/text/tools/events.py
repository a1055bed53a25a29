"""The events of a parsed answer: reasoning, text and tool calls, in the order in which the model wrote them.

Every route with parsed answers converts these events: for a stream one by one, for a whole answer after `collect`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The beginning of a tool call. The calls of an answer are numbered from 0. A call begins after the previous one
    has ended."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments. All pieces with one index, joined, are the JSON text that the model
    wrote."""

    index: int
    fragment: str


Event = Content | Reasoning | CallStarted | Arguments


@dataclass(frozen=True, slots=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str
    """JSON text. It is cut off if the answer was cut off inside the call."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole answer, parsed."""

    content: str
    reasoning: str
    calls: list[Call]


def collect(events: Sequence[Event]) -> Parsed:
    """Joins the events of one answer."""
    content = "".join([event.text for event in events if isinstance(event, Content)])
    reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
    started = [event for event in events if isinstance(event, CallStarted)]
    fragments: list[list[str]] = [[] for _ in started]
    for event in events:
        if isinstance(event, Arguments):
            fragments[event.index].append(event.fragment)
    calls = [Call(call.id, call.name, "".join(pieces)) for call, pieces in zip(started, fragments, strict=True)]
    return Parsed(content, reasoning, calls)
