"""What is sent to one client: its answer, no faster than it reads, straight to its socket where that is handed over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import Send

from cluster.http.active import ActiveRequest
from cluster.http.answer import Answer
from cluster.http.errors import error_event, response_start, send_json
from cluster.http.handover import HEADER, Claim, ClientSocket, Handovers
from configs.errors import RequestError

_LAST_WORDS_S = 1.0  # for a client that reads slowly to take them


class Delivery:
    """One response. Call `close` when nothing more is sent."""

    def __init__(self, send: Send, request_headers: list[tuple[bytes, bytes]], handovers: Handovers) -> None:
        self.begun = False
        self.request: ActiveRequest | None = None
        """The request it answers; set before it begins."""
        self._request_headers = request_headers
        self._handovers = handovers
        self._claim: Claim | None = None
        self._socket: ClientSocket | None = None
        self._failure: Callable[[RequestError], bytes] = error_event
        self._send = send
        self._writable = asyncio.Event()
        self._writable.set()
        self._now = asyncio.get_running_loop().time

    def tell_full(self, full: bool) -> None:
        """The client's connection takes no more, or does again."""
        if full:
            self._writable.clear()
        else:
            self._writable.set()

    async def stream(self, chunk: bytes, answer: Answer) -> None:
        """Sends a part of a streamed answer, once the client has room for it."""
        if self._socket is not None and self._socket.send(chunk):
            return
        request = self.request
        assert request is not None, "a request is tracked before its answer begins"
        request.stuck_since = self._now()
        if self._socket is not None:
            await self._socket.flush()
        else:
            if not self.begun:
                await self._begin(answer)
            await self._write(chunk)
        request.stuck_since = None

    async def whole(self, chunk: bytes, answer: Answer) -> None:
        """Sends a whole answer."""
        self.begun = True
        await send_json(self._send, 200, chunk, answer.headers)

    async def fail(self, error: RequestError) -> None:
        """Ends a streamed answer with `error`."""
        await self.end(self._failure(error))

    async def end(self, last: bytes = b"") -> None:
        """Ends a streamed answer."""
        if self._socket is not None and last:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._write(last)
            last = b""
        self.close()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def close(self) -> None:
        """Gives the client's socket back."""
        if self._claim is not None:
            self._claim.close()
            self._claim = self._socket = None

    async def _write(self, chunk: bytes) -> None:
        if self._socket is not None:
            if not self._socket.send(chunk):
                await self._socket.flush()
        else:
            if not self._writable.is_set():
                await self._writable.wait()
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _begin(self, answer: Answer) -> None:
        self.begun = True
        self._failure = answer.failure
        headers = {"cache-control": "no-cache", **answer.headers}
        self._claim = self._handovers.claim(self._request_headers)
        if self._claim is not None:
            headers[HEADER.decode()] = "1"
        await self._send(response_start(200, "text/event-stream; charset=utf-8", headers))
        if self._claim is not None:
            self._socket = await self._claim.socket()
