"""Sends an answer to one client, no faster than the client reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.types import Message, Send

from cluster.http.active import ActiveRequest
from cluster.http.http_errors import error_event, response_start, send_json
from cluster.http.response import HttpResponse, LoopTurns
from configs.errors import RequestError

KEEP_ALIVE_S = 15.0
"""Seconds of silence after which, or after twice as many at most, a stream sends a comment. Load balancers end
connections that are silent for a minute, and a request may wait for longer in the queue."""
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients of server-sent events skip
# An event is a line that ends with "\n". Clients that split text like Python's `splitlines`, such as httpx's
# `iter_lines`, also end lines at these characters inside JSON strings, so they are sent as JSON escapes.
_LINE_ENDS = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}
_LAST_WORDS_S = 1.0  # seconds for a slow client to read the last bytes


def _in_lines(events: bytes) -> bytes:
    """Returns `events` without characters at which some clients would split a line of data."""
    for character, escape in _LINE_ENDS.items():
        events = events.replace(character, escape)
    return events


class Delivery:
    """One response. Call `close` when the response has ended."""

    def __init__(self, send: Send, turns: LoopTurns) -> None:
        """`send` must return once the client's connection accepts more, as ASGI servers do."""
        self.streaming = False
        """Whether a streamed answer has begun."""
        self.request: ActiveRequest | None = None
        """The answered request. It must be set before the answer begins."""
        self._turns = turns
        self._failure: Callable[[RequestError], bytes] = error_event
        self._unbounded_send = send
        self._loop = asyncio.get_running_loop()
        self._spoke = False  # whether something was sent since the timer last fired
        self._timer: asyncio.TimerHandle | None = None
        self._keeping: asyncio.Task[None] | None = None

    def keep_alive(self, response: HttpResponse) -> None:
        """Sends comments into a silent stream from now on, possibly as its beginning."""
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._break_silence, response)

    async def stream(self, chunk: bytes, response: HttpResponse) -> None:
        """Sends a part of a streamed answer, and waits until the connection accepts more."""
        self._spoke = True
        if self._keeping is not None:
            await self._keeping
        await self._write(chunk, response)
        await self._turns.after(chunk)

    async def whole(self, parts: AsyncIterator[bytes], response: HttpResponse) -> None:
        """Sends an answer that is not a stream. If it has several parts, it gets no length header, and each part is
        sent once the connection accepts more."""
        part = await anext(parts)
        begun = False
        async for following in parts:
            if not begun:
                begun = True
                await self._send(response_start(200, "application/json", response.headers))
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            await self._turns.after(part)
            part = following
        if begun:
            await self._send({"type": "http.response.body", "body": part, "more_body": False})
        else:
            await send_json(self._send, 200, part, response.headers)

    async def fail(self, error: RequestError) -> None:
        """Ends a streamed answer with `error`."""
        with contextlib.suppress(TimeoutError):  # a client that reads nothing loses its connection instead
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._end(self._failure(error))

    async def end(self, response: HttpResponse) -> None:
        """Ends a streamed answer, which may have had no event."""
        if not self.streaming:
            await self.stream(b"", response)
        await self._end()

    async def _end(self, last: bytes = b"") -> None:
        if self._keeping is not None:
            await self._keeping
        self.close()
        await self._send({"type": "http.response.body", "body": _in_lines(last), "more_body": False})

    def close(self) -> None:
        """Stops the comments of a silent stream."""
        if self._timer is not None:
            self._timer.cancel()
        if self._keeping is not None:
            self._keeping.cancel()

    async def _write(self, chunk: bytes, response: HttpResponse) -> None:
        if not self.streaming:
            self.streaming = True
            self._failure = response.failure
            headers = {"cache-control": "no-cache", **response.headers}
            await self._send(response_start(200, "text/event-stream; charset=utf-8", headers))
        await self._send({"type": "http.response.body", "body": _in_lines(chunk), "more_body": True})

    async def _send(self, message: Message) -> None:
        """Sends a message. While `send` waits for the client to read, `stuck_since` shows since when."""
        request = self.request
        assert request is not None, "a request is tracked before its answer begins"
        request.stuck_since = self._loop.time()
        await self._unbounded_send(message)
        request.stuck_since = None

    def _break_silence(self, response: HttpResponse) -> None:
        is_writing = self.request is None or self.request.stuck_since is not None
        if not self._spoke and not is_writing and self._keeping is None:
            self._keeping = self._loop.create_task(self._say_alive(response))
        self._spoke = False
        self.keep_alive(response)

    async def _say_alive(self, response: HttpResponse) -> None:
        try:
            await self._write(_KEEP_ALIVE, response)
        finally:
            self._keeping = None
