"""HTTP: routes, body limits, disconnects and the one shape of every error. Plain ASGI below the route table.

`create_app(model)` builds the whole app from a `ServedModel`; nothing at module level holds state, so it can be
called in the process that serves (Ray Serve's `__serve_build_asgi_app__`, or uvicorn).
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from cluster.openai.answer import Answer
from cluster.openai.job import RequestContext
from cluster.openai.served_model import ServedModel
from cluster.openai.serving import OpenAIServing
from cluster.openai.tokenize import TokenizerServing
from cluster.openai.wire import ModelList, error_body
from cluster.openai.writer import event
from configs.errors import DeadlineError, EngineError, OverloadedError, RequestError

logger = logging.getLogger(__name__)

_JSON = "application/json"
_encode = msgspec.json.Encoder().encode
_STATUS_CODES = {404: "not_found", 405: "method_not_allowed"}
_RETRY_AFTER_S = 1.0


class _Disconnected(Exception):
    """The client went away."""


def create_app(model: ServedModel) -> FastAPI:
    """The HTTP server of one replica."""
    serving = OpenAIServing(model)
    tokenizer = TokenizerServing(model)
    # The routes below check and describe themselves: FastAPI's own 422 and OpenAPI pages would contradict them.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.routes.extend(
        [
            Route("/v1/chat/completions", _Generate(model, serving.chat), methods=["POST"]),
            Route("/v1/completions", _Generate(model, serving.completions), methods=["POST"]),
            *(
                Route(f"{prefix}/{handle.__name__}", _Generate(model, handle), methods=["POST"])
                for prefix in ("", "/v1")
                for handle in (tokenizer.tokenize, tokenizer.detokenize)
            ),
            Route("/v1/models", _models(model), methods=["GET"]),
            Route("/v1/models/{name:path}", _model(model), methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/ready", _ready(model), methods=["GET"]),
            Route("/version", _version(model), methods=["GET"]),
        ]
    )
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestError, _on_request_error)
    return app


class _Generate:
    """ASGI endpoint of the two routes that generate: reads the body, runs the request, writes the answer.

    The request runs as a task beside one that watches for the client going away, whatever the answer is: streamed or
    not, queued or running.
    """

    def __init__(self, model: ServedModel, handle: Callable[[bytes, RequestContext], Awaitable[Answer]]) -> None:
        self._model = model
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._read_body(scope, receive)
        except _Disconnected:
            return
        except RequestError as error:
            await _send_error(send, error)
            return
        answering = asyncio.create_task(self._answer(body, send))
        watching = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Whichever is left, also when this task is cancelled from outside.
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        headers = _headers(scope)
        content_type = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise RequestError("The body must be application/json.", code="unsupported_media_type", status=415)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestError("Compressed bodies are not supported.", code="unsupported_media_type", status=415)
        limit = self._model.server.max_body_bytes
        length = headers.get(b"content-length", b"")
        too_large = RequestError(
            f"The body exceeds server.max_body_bytes={limit}.", code="request_too_large", status=413
        )
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise too_large
        timeout_s = self._model.server.request_timeout_s
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Disconnected
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RequestError(
                f"The body did not arrive within server.request_timeout_s={timeout_s:g}.",
                code="request_timeout",
                status=408,
            ) from None

    async def _answer(self, body: bytes, send: Send) -> None:
        begun = False
        streamed = False
        try:
            answer = await self._handle(body, RequestContext(request_id=uuid.uuid4().hex))
            streamed = answer.streamed
            async with aclosing(answer.chunks) as chunks:
                async for chunk in chunks:
                    if not streamed:
                        await _send_json(send, 200, chunk, answer.headers)
                        return
                    if not begun:
                        begun = True
                        await send(
                            _start(
                                200,
                                b"text/event-stream; charset=utf-8",
                                {"cache-control": "no-cache", **answer.headers},
                            )
                        )
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:  # noqa: BLE001 -- the last place that can still tell the client
            failure = _as_request_error(error, self._model)
            if not begun:
                await _send_error(send, failure)
                return
            await send({"type": "http.response.body", "body": event(error_body(failure)), "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_request_error(error: Exception, model: ServedModel) -> RequestError:
    """What the client is told; what it must not see goes to the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, DeadlineError):
        return RequestError(str(error), code="deadline_exceeded", status=504)
    if isinstance(error, EngineError):
        if not model.engine.connected:
            return OverloadedError("The engine is not available; try again later.", retry_after_s=_RETRY_AFTER_S)
        logger.error("engine error: %s", error)
        return RequestError("The engine failed while running this request.", code="engine_error", status=500)
    reference = uuid.uuid4().hex
    logger.error("internal error %s", reference, exc_info=error)
    return RequestError(f"Internal error {reference}.", code="internal_error", status=500)


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _start(status: int, content_type: bytes, extra: Mapping[str, str]) -> Message:
    headers = [(b"content-type", content_type)]
    headers += [(name.encode(), value.encode()) for name, value in extra.items()]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_json(send: Send, status: int, body: bytes, extra: Mapping[str, str] | None = None) -> None:
    await send(_start(status, _JSON.encode(), {"content-length": str(len(body)), **(extra or {})}))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_error(send: Send, error: RequestError) -> None:
    await _send_json(send, error.status, _encode(error_body(error)), _error_headers(error))


def _error_headers(error: RequestError) -> dict[str, str]:
    if isinstance(error, OverloadedError):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def _json(message: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(message), status, headers, media_type=_JSON)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in our shape; 405 keeps its Allow header."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    message = {404: "There is no such route.", 405: f"{request.method} is not allowed here."}.get(status, "Error.")
    return _json(
        error_body(RequestError(message, code=_STATUS_CODES.get(status, "error"), status=status)), status, headers
    )


async def _on_request_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, RequestError) else RequestError("Error.", status=500)
    return _json(error_body(known), known.status, _error_headers(known))


_Endpoint = Callable[[Request], Awaitable[Response]]


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


def _ready(model: ServedModel) -> _Endpoint:
    async def ready(request: Request) -> Response:
        if not model.ready:
            raise OverloadedError("The engine is not ready.", retry_after_s=_RETRY_AFTER_S)
        return _json({"status": "ready"})

    return ready


def _version(model: ServedModel) -> _Endpoint:
    async def version(request: Request) -> Response:
        return _json({"version": model.version})

    return version


def _models(model: ServedModel) -> _Endpoint:
    async def models(request: Request) -> Response:
        return _json(ModelList(model.cards()))

    return models


def _model(model: ServedModel) -> _Endpoint:
    async def card(request: Request) -> Response:
        return _json(model.card(request.path_params["name"]))

    return card
