"""What a handler returns for its endpoint to send."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from cluster.http.errors import error_event
from configs.errors import RequestError


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a success, chunk by chunk. Raises what went wrong, before the first chunk where it can.

    It starts nothing until its first chunk is asked for, and aborts its requests when it is closed.
    """

    chunks: AsyncGenerator[bytes, None]
    streamed: bool
    """Server-sent events; otherwise one chunk of JSON."""
    headers: dict[str, str] = field(default_factory=dict)
    """More response headers; complete once the first chunk is there."""
    failure: Callable[[RequestError], bytes] = error_event
    """What ends a stream that has begun and cannot go on."""
