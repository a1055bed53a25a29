"""The events of a background stream, kept so that any number of readers can follow it, from any event on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator


class EventLog:
    """Server-sent events in order; the number of an event is its place in the log. For use on one event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._parts: list[bytes] = []  # an event that is yet to be whole
        self.num_bytes = 0
        self._closed = False
        self._grown = asyncio.Event()

    def append(self, events: bytes) -> None:
        """Adds events, or a part of some; they can be read once the last one is whole."""
        self._parts.append(events)
        self.num_bytes += len(events)
        if events.endswith(b"\n\n"):
            self._events += [event + b"\n\n" for event in b"".join(self._parts).split(b"\n\n")[:-1]]
            self._parts.clear()
            self._wake()

    def close(self) -> None:
        """No event follows."""
        self._closed = True
        self._wake()

    async def follow(self, first: int = 0) -> AsyncGenerator[bytes, None]:
        """The events from number `first` on, until the log is closed."""
        while True:
            if first < len(self._events):
                events = self._events[first:]
                first = len(self._events)
                yield b"".join(events)
            elif self._closed:
                return
            else:
                await self._grown.wait()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()
