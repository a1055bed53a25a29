"""Reading one `RequestStream`, for tests and benchmarks. A server waits for all streams of a request at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

from cluster.requests.engine_client import RequestStream, TokenChunk, wait_ready


async def next_chunk(stream: RequestStream) -> TokenChunk:
    """The next tokens of `stream`, once there are any."""
    await wait_ready((stream,))
    return stream.take()


async def chunks_of(stream: RequestStream) -> AsyncIterator[TokenChunk]:
    """All chunks of `stream` to its last."""
    while not stream.done:
        yield await next_chunk(stream)
