"""The outermost layer of the ASGI app: request ids, limits, access, and the form of errors."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.http.access import Access, route_path
from cluster.http.context import serving
from cluster.http.http_errors import ErrorShape, as_request_error, error_body, send_error
from cluster.http.quota import Quotas
from configs.errors import RequestError

logger = logging.getLogger(__name__)

MAX_HEADERS = 256
MAX_HEADER_BYTES = 64 << 10
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")
# Ray Serve reads the first two headers itself, and echoes and logs the first. Invalid bytes there would cause Ray's
# errors instead of ours.
_NAME_HEADERS = ("x-request-id", "x-session-id")
_RAY_HEADERS = ("serve-multiplexed-model-id", "x-request-timeout-seconds", "x-request-disconnect-disabled")
_ODD_NAME = "lockstep.odd_name"
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_HTTP_ERRORS = {404: ("not_found", "There is no such route."), 405: ("method_not_allowed", "Not allowed here: ")}


class Guard:
    """The whole ASGI application of a replica: `routes`, and what applies to all of them. Every response has
    `x-request-id`, and every error has the form of its API."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        access: Access,
        *,
        engine_is_there: Callable[[], bool],
        on_error: Callable[[RequestError], None] | None = None,
        names_responses: bool = True,
        error_shapes: Mapping[str, ErrorShape] | None = None,
        counted: Set[str] = frozenset(),
    ) -> None:
        """Args:
        access: decides which requests may call a route.
        engine_is_there: returns whether requests can reach an engine.
        on_error: called with the error of every response that is not a success.
        counted: paths for which requests of every method count against quotas. For other paths, only POSTs do.
        error_shapes: path prefix -> form of its errors. Responses below these prefixes also have `request-id`, like
            Anthropic's. Other paths use OpenAI's form.
        names_responses: False if a server in front adds the request's `x-request-id` to every response. It must run
            `ray_middlewares` before it reads the request.
        """
        self.router = Router(routes, redirect_slashes=False)
        self._access = access
        self._quotas = Quotas()
        self._engine_is_there = engine_is_there
        self._on_error = on_error
        self._names_responses = names_responses
        self._counted = counted
        self._error_shapes = error_shapes or {}

    @property
    def routes(self) -> list[BaseRoute]:
        """The served routes."""
        return self.router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.router(scope, receive, send)
            return
        if scope["type"] != "http":
            # If a websocket is closed before it is accepted, the server answers with 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = clean_names(scope)
        names = ["x-request-id"] if self._names_responses else []
        if self._error_shape(scope) is not None:
            names.append("request-id")
        response = _Response(send, [(name.encode(), request_id.encode()) for name in names])
        scope["app"] = self  # makes the router raise for an unknown path or method
        try:
            _check_headers(scope)
            if (odd := scope.get(_ODD_NAME)) is not None:
                raise RequestError(
                    f"{odd} must come once, with 1 to 128 letters, digits or . _ : + / = @ -", code="invalid_header"
                )
            context, key = self._access.admit(scope, request_id)
            if trace := _trace(scope):
                context = replace(context, trace=trace)
            counted = key if scope["method"] == "POST" or route_path(scope) in self._counted else None
            with self._quotas.take(counted) as meter, serving(scope, replace(context, meter=meter)):
                await self.router(scope, receive, response.send)
        except HTTPException as error:
            await self._refuse(response, _from_starlette(error, scope["method"]), scope, request_id, error.headers)
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets the one shape of errors
            failure = as_request_error(error, request_id, engine_is_there=self._engine_is_there())
            if response.begun:
                # The server sees that the response is incomplete and closes the connection, so the client does not take
                # it for complete.
                return
            await self._refuse(response, failure, scope, request_id)

    async def _refuse(
        self,
        response: _Response,
        error: RequestError,
        scope: Scope,
        request_id: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if self._on_error is not None:
            self._on_error(error)
        shape = self._error_shape(scope)
        body = error_body(error) if shape is None else shape(error, request_id)
        await send_error(response.send, error, body, headers or {})

    def _error_shape(self, scope: Scope) -> ErrorShape | None:
        path: str = scope["path"]
        for prefix, shape in self._error_shapes.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return shape
        return None


class _Response:
    """The `send` of one request, which adds the headers that every response has."""

    def __init__(self, send: Send, names: list[tuple[bytes, bytes]]) -> None:
        self.begun = False
        self._send = send
        self._headers = [*names, (b"x-content-type-options", b"nosniff")]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)


def is_request_id(name: bytes) -> bool:
    """Whether `name` may be a request id: short, and safe in logs."""
    return _REQUEST_ID.fullmatch(name) is not None


def ray_middlewares() -> list[Middleware]:
    """The middlewares before Ray Serve's own code in a replica. `cluster.serve.haproxy.REPLICA_SETTINGS` names this
    function."""
    return [Middleware(with_clean_names)]


def with_clean_names(app: ASGIApp) -> ASGIApp:
    """Wraps `app` so that `clean_names` runs first."""

    async def cleaned(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            clean_names(scope)
        await app(scope, receive, send)

    return cleaned


def clean_names(scope: Scope) -> str:
    """Returns the request's id, and makes it the only `x-request-id`. A request without an id gets a new one.

    Headers by which a client could control Ray Serve are removed. If `x-request-id` or `x-session-id` has invalid
    bytes, is too long or occurs twice, both are removed, and `Guard` refuses the request.
    """
    kept: list[tuple[bytes, bytes]] = []
    given: dict[str, bytes] = {}
    odd = None
    for name, value in scope["headers"]:
        plain = name.decode("latin-1").lower().replace("_", "-")
        if plain in _NAME_HEADERS and value:  # an empty id counts as none
            if plain in given or not is_request_id(value):
                odd = plain
            given[plain] = value
        elif plain not in _NAME_HEADERS + _RAY_HEADERS:
            kept.append((name, value))
    if odd is not None:
        scope[_ODD_NAME] = odd
        given.clear()
    request_id = given.setdefault("x-request-id", uuid.uuid4().hex.encode())
    scope["headers"] = kept + [(name.encode(), value) for name, value in given.items()]
    return request_id.decode()


def _trace(scope: Scope) -> dict[str, str]:
    """The request's W3C trace context, unchanged."""
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS}


def _check_headers(scope: Scope) -> None:
    headers = scope["headers"]
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise RequestError(
            f"The request has more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them; send fewer.",
            code="headers_too_large",
            status=431,
        )


def _from_starlette(error: HTTPException, method: str) -> RequestError:
    code, message = _HTTP_ERRORS.get(error.status_code, ("error", "The request cannot be served."))
    if error.status_code == 405:
        message += method
    return RequestError(message, code=code, status=error.status_code)
