"""The outermost layer, in the process that holds the clients' connections: Ray Serve's proxy.

Ray Serve has neither limits nor backpressure between a connection and a replica, routes a request before its body has
come, and speaks plain text when it fails.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=cluster.http.edge:middlewares` puts this around it; Serve reads that when its
proxies start (`cluster/serve/deployment.py` has it set where it starts Serve). Without it everything works, but each
part of a stream goes through Ray, a slow client's answer piles up in the proxy, and a replica that dies cuts its
streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import MutableMapping
from typing import Any

import uvicorn.protocols.http.auto
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.affinity import PEEKED_BYTES, REPLICA_SESSION, beginning_key, keeping_replica
from cluster.http.body import BODY
from cluster.http.connection import SCOPE_KEY, LimitedConnection
from cluster.http.endpoint import PAUSE, RESUME
from cluster.http.guard import is_request_id
from cluster.http.handover import HEADER, HandoverHub, Offer
from cluster.http.http_errors import error_event, send_error
from configs.errors import OverloadedError, RequestError

PROXY_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""The variable that Ray Serve's proxies read when they start."""
CALLBACK = "cluster.http.edge:middlewares"
"""The variable's value that puts this layer around them."""
# Headers by which a client could have its request go on after it left, or fill the proxy's table of models.
_INNER_HEADERS = re.compile(rb"x-request-disconnect-disabled|serve[_-]multiplexed[_-]model[_-]id|" + HEADER)
_SESSION = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").lower().encode()
_PEEK_S = 1.0  # a client that takes longer is served without
_RECENTLY_S = 600.0
_STATUS = {
    404: RequestError("There is no such route.", code="not_found", status=404),
    408: RequestError("The request took too long.", code="request_timeout", status=408),
    503: OverloadedError("No replica can take the request; try again later."),
}
_STOPPED = OverloadedError("The model is being stopped or replaced; try again later.", retry_after_s=5.0)
_FAILED = RequestError("The server failed while running this request.", code="engine_error", status=500)
_CUT = RequestError(
    "The replica that answered this request ended; try again.", code="engine_error", status=503, retry_after_s=1.0
)


def middlewares() -> list[Middleware]:
    """For Ray Serve's proxy: makes its connections limited ones, and returns the layer around it."""
    uvicorn.protocols.http.auto.AutoHTTPProtocol = LimitedConnection
    return [Middleware(Edge)]


class Edge:
    """ASGI middleware around Ray Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._hub = HandoverHub()
        self._answered: dict[str, float] = {}  # by route prefix: when a replica last answered there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: LimitedConnection | None = scope.pop(SCOPE_KEY, None)
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        scope["headers"] = _clean(scope["headers"])
        inbox = _Inbox(receive)
        await _name_session(scope, inbox)
        if inbox.body is not None:
            scope[BODY] = inbox.body
        if connection is None:
            await self._serve(scope, inbox, _Outbox(send, None))
            return
        connection.on_full = inbox.tell_full
        offer = None
        if connection.is_plain and scope["http_version"] != "1.0":  # a socket handed over is sent chunks
            self._hub.open()
            offer = self._hub.offer(connection.transport)
            scope["headers"].append((HEADER, offer.header))
        try:
            await self._serve(scope, inbox, _Outbox(send, offer))
        finally:
            connection.on_full = None
            if offer is not None:
                self._hub.withdraw(offer)

    async def _serve(self, scope: Scope, inbox: _Inbox, outbox: _Outbox) -> None:
        await self._app(scope, inbox.receive, outbox.send)
        if outbox.is_replicas:
            self._answered[scope.get("root_path", "")] = time.monotonic()
        elif outbox.status == 404 and self._was_served(scope["path"]):
            outbox.error = _STOPPED
        await outbox.complete()

    def _was_served(self, path: str) -> bool:
        """Whether an app answered there until a moment ago: it is being stopped or replaced."""
        earliest = time.monotonic() - _RECENTLY_S
        return any(
            answered > earliest and (path == prefix or path.startswith(f"{prefix}/"))
            for prefix, answered in self._answered.items()
        )


def _clean(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers but those that steer Ray Serve, and but for a request id that is no fit name: Serve then makes
    one."""
    ids = [value for name, value in headers if name == b"x-request-id"]
    keep_id = len(ids) == 1 and is_request_id(ids[0])
    return [
        (name, value)
        for name, value in headers
        if not _INNER_HEADERS.fullmatch(name) and (keep_id or name != b"x-request-id")
    ]


async def _name_session(scope: Scope, inbox: _Inbox) -> None:
    """Tells the router, where it goes by sessions, which replica keeps what the request needs.

    That is the one with the response of which it speaks; else the one of the session that the client names; else the
    one of prompts that begin like this one.
    """
    start = await inbox.peek(PEEKED_BYTES, _PEEK_S) if scope["method"] == "POST" else b""
    others = [it for it in scope["headers"] if it[0] != _SESSION]
    if (replica := keeping_replica(scope["path"], start)) is not None:
        scope["headers"] = [*others, (_SESSION, f"{REPLICA_SESSION}{replica}".encode())]
    elif len(others) == len(scope["headers"]):
        client = b"".join(value for name, value in others if name in (b"authorization", b"x-api-key"))
        if (key := beginning_key(start, client)) is not None:
            scope["headers"].append((_SESSION, f"prefix-{key}".encode()))


class _Inbox:
    """`receive` of one request, into which the connection's news are mixed for the replica to see."""

    def __init__(self, receive: Receive) -> None:
        self.body: bytes | None = None
        """All of the request's, where `peek` has come upon its end."""
        self._receive = receive
        self._peeked: deque[Message] = deque()
        self._news: deque[Message] = deque()
        self._pending: asyncio.Task[MutableMapping[str, Any]] | None = None
        self._has_news = asyncio.Event()

    def tell_full(self, full: bool) -> None:
        self._news.append({"type": PAUSE if full else RESUME})
        self._has_news.set()

    async def peek(self, size: int, timeout_s: float) -> bytes:
        """The first `size` bytes of the body, or what comes of it in time; `receive` gives them again."""
        start = b""
        is_whole = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(start) < size and not is_whole:
                    # Kept when this ends early: a message that has come must not be lost.
                    self._pending = self._pending or asyncio.ensure_future(_awaited(self._receive))
                    await asyncio.wait((self._pending,))
                    message, self._pending = self._pending.result(), None
                    self._peeked.append(message)
                    start += message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                    if is_whole and message["type"] == "http.request":
                        self.body = start
        return start[:size]

    async def receive(self) -> Message:
        if self._peeked:
            return self._peeked.popleft()
        if self._pending is None:
            self._pending = asyncio.ensure_future(_awaited(self._receive))
        if not self._news and not self._pending.done():
            news = asyncio.ensure_future(self._has_news.wait())
            try:
                await asyncio.wait((self._pending, news), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                self._pending.cancel()
                raise
            finally:
                news.cancel()
        if self._news:
            self._has_news.clear()
            return self._news.popleft()
        message, self._pending = self._pending.result(), None
        return message


async def _awaited(receive: Receive) -> Message:
    return await receive()


class _Outbox:
    """`send` of one request: what Ray Serve says itself gets our shape, and a stream never ends without a word."""

    def __init__(self, send: Send, offer: Offer | None) -> None:
        self.status: int | None = None
        self.error: RequestError | None = None
        """The error that is told in place of Serve's own words, once they are all there."""
        self._send = send
        self._offer = offer
        self._headers: dict[str, str] = {}
        self._streaming = False
        self._is_claimed = False
        self._done = False

    @property
    def is_replicas(self) -> bool:
        """Whether a replica answered, and not Serve itself."""
        return self.status is not None and self.error is None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if _is_serves_own(message):
                self.error = _STATUS.get(message["status"], _FAILED)
                self._headers = _other_headers(message)
            content_type = dict(message["headers"]).get(b"content-type", b"")
            self._streaming = content_type.startswith(b"text/event-stream")
            self._is_claimed = any(name == HEADER for name, _ in message["headers"])
            message = {**message, "headers": [it for it in message["headers"] if it[0] != HEADER]}
        if self.error is not None:
            return
        is_part = message["type"] == "http.response.body"
        self._done = is_part and not message.get("more_body", False)
        await self._send(message)
        if is_part and not self._done and self._is_claimed and self._offer is not None:
            self._is_claimed = False  # handed over after the first part, which need not wait for that
            await self._offer.hand_over()

    async def complete(self) -> None:
        """Must be called when the app has returned."""
        if self.error is not None or self.status is None:
            # Serve says nothing at all when the replica it chose ends before it answers.
            await send_error(self._send, self.error or _CUT, self._headers)
        elif self._streaming and not self._done:
            await self._send({"type": "http.response.body", "body": error_event(_CUT), "more_body": False})


def _is_serves_own(message: Message) -> bool:
    """Whether Ray Serve made this response, and not a replica: an error in plain text, without even its length."""
    headers = dict(message["headers"])
    return (
        message["status"] >= 400
        and headers.get(b"content-type", b"").startswith(b"text/plain")
        and b"content-length" not in headers
    )


def _other_headers(message: Message) -> dict[str, str]:
    kept = (b"x-request-id", b"retry-after")
    return {name.decode().lower(): value.decode() for name, value in message["headers"] if name.lower() in kept}
