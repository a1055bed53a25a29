"""Responses that a handler returns for its endpoint to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from cluster.http.http_errors import error_event
from configs.errors import RequestError

PART_BYTES = 32 << 10
"""A part of an answer is about as long, or is one event of a stream; where that is longer, it comes in parts itself."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The body of a success, chunk by chunk. Raises what went wrong, before the first chunk where it can.

    It starts nothing until its first chunk is asked for, and aborts its requests when it is closed.
    """

    chunks: AsyncGenerator[bytes, None]
    streamed: bool
    """Server-sent events; otherwise JSON."""
    headers: dict[str, str] = field(default_factory=dict)
    """More response headers; complete once the first chunk is there."""
    failure: Callable[[RequestError], bytes] = error_event
    """Makes the event that ends a stream that has begun and cannot go on."""


class LoopTurns:
    """Lets the event loop go on between the parts of long answers: it makes one part a turn, however many there are."""

    def __init__(self) -> None:
        self._taken = asyncio.Lock()

    async def after(self, part: bytes) -> None:
        """Must be awaited before the next part is asked for."""
        if len(part) >= PART_BYTES:
            async with self._taken:
                await asyncio.sleep(0)
