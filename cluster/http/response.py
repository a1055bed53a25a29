"""Responses that a handler returns for its endpoint to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from cluster.http.http_errors import error_event
from configs.errors import RequestError

PART_BYTES = 32 << 10
"""Approximate size of a part of an answer, if it is not one event of a stream. A longer event comes in several
parts."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """The body of a successful response, chunk by chunk. It raises errors, before the first chunk if possible.

    It starts nothing until its first chunk is read, and aborts its requests when it is closed.
    """

    chunks: AsyncGenerator[bytes, None]
    streamed: bool
    """Whether the body is server-sent events; otherwise it is JSON."""
    headers: dict[str, str] = field(default_factory=dict)
    """Further response headers, complete once the first chunk exists."""
    failure: Callable[[RequestError], bytes] = error_event
    """Makes the event that ends a stream which fails after it has begun."""


class LoopTurns:
    """Lets the event loop serve others between the parts of long answers: it makes one part per turn, for all of them
    together."""

    def __init__(self) -> None:
        self._taken = asyncio.Lock()

    async def after(self, part: bytes) -> None:
        """Await this before the next part is made."""
        if len(part) >= PART_BYTES:
            async with self._taken:
                await asyncio.sleep(0)
