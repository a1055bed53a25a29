"""Reads a request's body, within limits of type, size and time."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from configs.errors import RequestError
from configs.schema import ServerConfig

_MAX_LENGTH_DIGITS = 18
_SLOWEST_S = 60.0
"""Maximum seconds for a body to arrive. A client that takes longer occupies its connection for nothing."""


class ClientDisconnect(Exception):
    """The client disconnected before its body was complete."""


async def read_body(scope: Scope, receive: Receive, server: ServerConfig) -> bytes:
    """The unparsed JSON of a request. Reads at most `server.max_body_bytes`.

    Raises:
        RequestError: 415 for another or a compressed type, 413 for too many bytes, 408 if the client is too slow.
        ClientDisconnect: the client is gone, so no one can be answered.
    """
    headers = dict(scope["headers"])
    content_type = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise RequestError("The body must be application/json.", code="unsupported_media_type", status=415)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError(
            "Compressed bodies are not supported; send it uncompressed.", code="unsupported_media_type", status=415
        )
    limit = server.max_body_bytes
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > limit):
        raise _too_large(limit)
    timeout_s = min(server.request_timeout_s, _SLOWEST_S)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, limit)
    except TimeoutError:
        raise RequestError(
            f"The body did not arrive within {timeout_s:g} seconds; send it again.", code="request_timeout", status=408
        ) from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The body exceeds server.max_body_bytes={limit}.", code="request_too_large", status=413)
