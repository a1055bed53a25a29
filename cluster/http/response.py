"""The responses that a handler returns, and its endpoint sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from cluster.http.http_errors import error_event
from configs.errors import RequestError

PART_BYTES = 32 << 10
"""Approximate bytes of a part of an answer that is not one event of a stream. A longer event is sent in several
parts."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The body of a successful response, chunk by chunk. Reading it raises errors, before the first chunk if possible.

    It starts nothing until its first chunk is read, and aborts its requests when it is closed.
    """

    chunks: AsyncGenerator[bytes, None]
    streamed: bool
    """Whether the body is server-sent events; otherwise it is JSON."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further response headers. They are complete once the first chunk exists."""
    failure: Callable[[RequestError], bytes] = error_event
    """Makes the last event of a stream in which an error occurs."""


class LoopTurns:
    """Lets the event loop serve other requests between the parts of long answers: in each turn of the loop, one part of
    one answer is made."""

    def __init__(self) -> None:
        self._taken = asyncio.Lock()

    async def after(self, part: bytes) -> None:
        """Waits for the answer's next turn after a large part. Call this before the next part is made."""
        if len(part) >= PART_BYTES:
            async with self._taken:
                await asyncio.sleep(0)
