"""One HTTP connection, within limits that uvicorn has not: the size and time of a request's head, and of a client's
silence while it is written to.

Made for whoever runs uvicorn: `uvicorn.Config(..., http=LimitedConnection)`, or Ray Serve's proxies (`edge.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from cluster.http.active import UNREAD_TIMEOUT_S
from cluster.http.http_errors import error_body
from configs.errors import RequestError

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Bound of request line and headers, and of what comes in a body's place without being one, such as trailers."""
HEAD_TIMEOUT_S = 15.0
LINGER_S = 10.0
"""How long the rest of a body is read, and thrown away, after its request was answered."""
SEND_BUFFER_BYTES = 128 << 10
"""Bytes that the kernel holds for a client that reads slowly; by itself it would take megabytes."""
_WRITE_BUFFER_BYTES = 16 << 10
SCOPE_KEY = "lockstep.connection"


class LimitedConnection(HttpToolsProtocol):
    """An HTTP connection that no client can make hold much memory, or hold for long without using it.

    Puts itself into the ASGI scope of its requests, under `SCOPE_KEY`, for `Edge` to take out.
    """

    on_full: Callable[[bool], None] | None = None
    """Called with True when the connection takes no more bytes to be sent, with False when it does again."""
    head_timeout_s = HEAD_TIMEOUT_S
    stall_timeout_s = UNREAD_TIMEOUT_S
    linger_s = LINGER_S

    _in_head = True
    _in_message = False
    _refused = False
    _heard = False  # a head's end or a part of a body was in the last bytes
    _num_silent_bytes = 0  # since then
    _timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    # ---- the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._set_timer(self.head_timeout_s, self._close_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(0, None)
        self._unset_stall_timer()
        self._tell_full(False)
        self.on_full = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._num_silent_bytes += len(data)
        self._heard = False
        super().data_received(data)
        if self._heard:
            self._num_silent_bytes = 0
        elif self._num_silent_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.stall_timeout_s, self._abort_stalled)
        self._tell_full(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_stall_timer()
        self._tell_full(False)

    @property
    def is_plain(self) -> bool:
        """Whether what is written to its socket is what the client reads: no TLS."""
        return self.transport.get_extra_info("sslcontext") is None

    # ---- the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, object]", self.scope)[SCOPE_KEY] = self
        self._in_head = self._in_message = True
        if self._timer is None:
            self._set_timer(self.head_timeout_s, self._close_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are nobody's headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._heard = True
        self._set_timer(0, None)
        if not self._refused:
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0" and self.cycle is not None:
                _send_unframed(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._heard = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._heard = True
        self._set_timer(0, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and not self.transport.is_closing():
            self._set_timer(self.linger_s, self.transport.abort)

    # ---- refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError("This is not HTTP/1.1.", code="invalid_http"))

    def _refuse_head(self) -> None:
        self._refuse(RequestError(f"The headers exceed {MAX_HEAD_BYTES} bytes.", code="headers_too_large", status=431))

    def _close_late(self) -> None:
        if self._in_message:
            self._refuse(
                RequestError(
                    f"The headers did not arrive within {self.head_timeout_s:g} seconds.",
                    code="request_timeout",
                    status=408,
                )
            )
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        self._refused = True
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # it would be written into the middle of another answer
            return
        body = msgspec.json.encode(error_body(error))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _abort_stalled(self) -> None:
        logger.info("a client did not read for %g seconds; its connection is ended", self.stall_timeout_s)
        self.transport.abort()

    # ---- timers

    def _set_timer(self, delay_s: float, callback: Callable[[], None] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if callback is None else self.loop.call_later(delay_s, callback)

    def _unset_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _tell_full(self, full: bool) -> None:
        if self.on_full is not None:
            self.on_full(full)


def _send_unframed(cycle: RequestResponseCycle) -> None:
    """Has a response to HTTP/1.0, which knows no chunks, end with its connection.

    Of itself uvicorn sends chunks wherever a response has no length.
    """
    send = cycle.send
    cycle.chunked_encoding = False

    async def unframed(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts off what is sent
        await send(message)

    cycle.send = unframed  # type: ignore[method-assign]  # it has no hook for it
