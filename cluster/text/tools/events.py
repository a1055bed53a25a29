"""What an answer consists of once reasoning and tool calls are told apart, in the order the model wrote it.

Every route that shows answers converts these: a stream one by one, a whole answer after `collect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking, without its tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. Calls of one answer count from 0; none begins before the one before it has ended."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments. All pieces of an index, joined, are the JSON text the model wrote."""

    index: int
    fragment: str


Event = Content | Reasoning | CallStarted | Arguments


@dataclass(slots=True)
class Call:
    """A whole call."""

    id: str
    name: str
    arguments: str
    """JSON text; cut off where the answer was."""


@dataclass(slots=True)
class Parsed:
    """A whole answer."""

    content: str
    reasoning: str
    calls: list[Call]


def collect(events: Iterable[Event]) -> Parsed:
    """The answer that `events` spell."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    fragments: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStarted(_, id_, name):
                calls.append(Call(id_, name, ""))
                fragments.append([])
            case Arguments(index, fragment):
                fragments[index].append(fragment)
    for call, pieces in zip(calls, fragments, strict=True):
        call.arguments = "".join(pieces)
    return Parsed("".join(content), "".join(reasoning), calls)


def merged(events: Sequence[Event]) -> list[Event]:
    """The same answer in as few events as possible: neighbours of one kind (and index) become one."""
    if len(events) < 2:
        return list(events)
    result: list[Event] = []
    for (kind, index), group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        same = list(group)
        if len(same) == 1 or kind is CallStarted:
            result += same
        elif kind is Arguments:
            assert index is not None
            result.append(Arguments(index, "".join(event.fragment for event in same if isinstance(event, Arguments))))
        else:
            text = "".join(event.text for event in same if isinstance(event, Content | Reasoning))
            result.append(Content(text) if kind is Content else Reasoning(text))
    return result
