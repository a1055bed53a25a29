"""What is sent to one client: its answer, no faster than it reads, by a lane where one leads to its proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from cluster.http.active import ActiveRequest
from cluster.http.answer import Answer
from cluster.http.errors import error_event, response_start, send_json
from cluster.http.lane import HEADER, Lanes, ReplicaLane
from configs.errors import RequestError


class Delivery:
    """One response. Call `close` when nothing more is sent."""

    def __init__(self, send: Send, request_headers: list[tuple[bytes, bytes]], lanes: Lanes) -> None:
        self.begun = False
        self.request: ActiveRequest | None = None
        """The request it answers; set before it begins."""
        self._request_headers = request_headers
        self._lanes = lanes
        self._lane: ReplicaLane | None = None
        self._stream_id = 0
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
        request = self.request
        assert request is not None, "a request is tracked before its answer begins"
        request.stuck_since = self._now()
        if not self.begun:
            await self._begin(answer)
        if not self._writable.is_set():
            await self._writable.wait()
        if self._lane is None:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        else:
            await self._lane.write(self._stream_id, chunk)
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
        if self._lane is not None and self._lane.is_open:
            if last:
                await self._lane.write(self._stream_id, last)
            self._lane.end(self._stream_id)
            last = b""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def close(self) -> None:
        """Gives the lane back."""
        if self._lane is not None:
            self._lane.remove(self._stream_id)

    async def _begin(self, answer: Answer) -> None:
        self.begun = True
        self._failure = answer.failure
        headers = {"cache-control": "no-cache", **answer.headers}
        if (found := await self._lanes.find(self._request_headers)) is not None:
            self._lane, self._stream_id = found
            self._lane.add(self._stream_id, self.tell_full)
            headers[HEADER.decode()] = "1"
        await self._send(response_start(200, "text/event-stream; charset=utf-8", headers))
