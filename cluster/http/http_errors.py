"""Errors for clients: one JSON form, and the headers that say whether and when to retry."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import msgspec
from starlette.types import Message, Send

from configs.errors import DeadlineError, EngineError, NotANumberError, OverloadedError, RequestError

logger = logging.getLogger(__name__)

_RETRIED = frozenset({408, 409, 429, 503})
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "overloaded_error"}
_encode = msgspec.json.Encoder().encode


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """The body of every error response, and the last chunk of a stream that failed."""

    error: ErrorDetail


def error_body(error: RequestError) -> ErrorBody:
    """The body that shows `error` to clients."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return ErrorBody(ErrorDetail(str(error), kind, error.param, error.code))


def error_event(error: RequestError) -> bytes:
    """`error` as the last event of a stream."""
    return b"data: " + _encode(error_body(error)) + b"\n\n"


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers for clients: when to retry, whether to retry, and how to authenticate."""
    headers = {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        # The standard knows only whole seconds. The openai package also reads milliseconds.
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1e3 * error.retry_after_s)))
    if isinstance(error, OverloadedError) and error.closes_connection:
        headers["connection"] = "close"
    if error.status in _RETRIED or error.status >= 500:
        again = error.status in _RETRIED or error.code == "engine_error"
        headers["x-should-retry"] = str(again).lower()
    return headers


def as_request_error(error: BaseException, request_id: str, *, engine_is_there: bool = True) -> RequestError:
    """The error that the client may see instead of `error`. Details that it must not see go to the log, with the id."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DeadlineError):
        return RequestError(str(error), code="deadline_exceeded", status=504)
    if isinstance(error, NotANumberError):
        logger.error("request %s: %s", request_id, error)
        return RequestError(str(error), code="not_a_number", status=500)
    if isinstance(error, EngineError):
        if not engine_is_there and error.public_message is None:
            return OverloadedError("The engine is not available; try again later.")
        logger.error("request %s: engine error: %s", request_id, error)
        message = error.public_message or "The engine failed while running this request."
        return RequestError(message, code="engine_error", status=500)
    logger.error("request %s: internal error; please report this bug", request_id, exc_info=error)
    return RequestError(f"Internal error; the request id is {request_id}.", code="internal_error", status=500)


def response_start(status: int, content_type: str, headers: Mapping[str, str]) -> Message:
    """The ASGI message that begins a response."""
    pairs = [(b"content-type", content_type.encode())]
    pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Sends a whole response."""
    length = {"content-length": str(len(body))}
    await send(response_start(status, "application/json", {**length, **headers}))
    await send({"type": "http.response.body", "body": body, "more_body": False})


ErrorShape = Callable[[RequestError, str], msgspec.Struct]
"""Makes the body of an error response from the error and the request's id."""


async def send_error(send: Send, error: RequestError, body: msgspec.Struct, headers: Mapping[str, str]) -> None:
    """Sends `error` as a whole response with this body. `headers` are added to the error's own headers."""
    await send_json(send, error.status, _encode(body), {**error_headers(error), **headers})
