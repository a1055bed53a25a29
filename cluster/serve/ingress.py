"""The routes of the endpoint, and which handler answers each.

`create_app(model)` builds the whole app from a `ServedModel`; nothing at module level holds state, so it can be
called in the process that serves (Ray Serve's `__serve_build_asgi_app__`, or uvicorn). What is the same for all routes
is `cluster.http`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.anthropic.errors import anthropic_error
from cluster.anthropic.serving import AnthropicServing
from cluster.engine.state import EngineState
from cluster.http.access import Access
from cluster.http.active import ActiveRequests
from cluster.http.endpoint import Endpoint, Handler
from cluster.http.guard import Guard
from cluster.http.handover import Handovers
from cluster.http.keys import KeyRing
from cluster.http.response import LoopTurns
from cluster.native.admin import AdminServing
from cluster.native.generate import NativeServing
from cluster.native.score import ScoreServing
from cluster.native.status import Probe, StatusServing
from cluster.observability.prometheus import CONTENT_TYPE
from cluster.observability.telemetry import Telemetry
from cluster.openai.models import model_card, model_list
from cluster.openai.responses.serving import ResponsesServing
from cluster.openai.serving import OpenAIServing
from cluster.openai.tokenize import TokenizerServing
from cluster.openapi.document import build_document
from cluster.page.live import LiveServing
from cluster.page.page import page
from cluster.requests.served_model import ServedModel
from configs.errors import OverloadedError

_encode = msgspec.json.Encoder().encode
_READY_AFTER_S = 1.0


def create_app(
    model: ServedModel,
    active: ActiveRequests | None = None,
    keys: KeyRing | None = None,
    *,
    names_responses: bool = True,
) -> Guard:
    """The HTTP server of one replica.

    Args:
        active: where requests are counted; what drains them holds it too.
        keys: of `server.api_keys`. None: nobody is asked for one.
        names_responses: False behind a server that adds `x-request-id` itself.
    """
    requests = ActiveRequests(life=model.engine.telemetry.life) if active is None else active
    handovers, turns = Handovers(), LoopTurns()
    serving = OpenAIServing(model)
    tokenizer = TokenizerServing(model)
    responses = ResponsesServing(model, requests)
    anthropic = AnthropicServing(model)
    status = StatusServing(model)
    telemetry = model.engine.telemetry
    score = ScoreServing(model).score
    admin = AdminServing(model, requests)

    def engine_is_there() -> bool:
        return model.engine.connected

    def route(method: str, path: str, handle: Handler) -> Route:
        endpoint = Endpoint(handle, model.server, requests, handovers, turns, engine_is_there, telemetry.refused)
        return Route(path, endpoint, methods=[method])

    def post(path: str, handle: Handler) -> Route:
        return route("POST", path, handle)

    def get(path: str, handle: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, handle, methods=["GET"])

    routes = [
        post("/v1/chat/completions", serving.chat),
        post("/v1/completions", serving.completions),
        *(
            post(f"{prefix}/{handle.__name__}", handle)
            for prefix in ("", "/v1")
            for handle in (tokenizer.tokenize, tokenizer.detokenize)
        ),
        post("/v1/responses", responses.create),
        post("/v1/responses/input_tokens", responses.input_tokens),
        route("GET", "/v1/responses/{response_id}", responses.retrieve),
        route("DELETE", "/v1/responses/{response_id}", responses.delete),
        route("GET", "/v1/responses/{response_id}/input_items", responses.items),
        post("/v1/responses/{response_id}/cancel", responses.cancel),
        post("/v1/messages", anthropic.messages),
        post("/v1/messages/count_tokens", anthropic.count_tokens),
        post("/generate", NativeServing(model).generate),
        post("/v1/score", score),
        post("/score", score),
        route("GET", "/v1/loads", status.loads),
        route("GET", "/load", status.load),
        route("GET", "/v1/timelines/{request_id}", status.timeline),
        route("GET", "/server_info", status.server_info),
        route("GET", "/health_generate", status.health_generate),
        post("/abort_request", admin.abort_request),
        post("/flush_cache", admin.flush_cache),
        get("/v1/models", _models(model)),
        get("/v1/models/{name:path}", _model(model)),
        get("/health", _health(model)),
        get("/ready", _ready(model, requests)),
        get("/version", _version(model)),
        get("/", page()),
        route("GET", "/live", LiveServing(model, requests).live),
        get("/metrics", _metrics(telemetry)),
        get("/openapi.json", _openapi(model)),
    ]
    return Guard(
        routes,
        Access(keys, anyone=model.server.api_keys is False),
        engine_is_there=engine_is_there,
        on_error=telemetry.refused,
        names_responses=names_responses,
        error_shapes={"/v1/messages": anthropic_error},
    )


def _json(message: object) -> Response:
    """A success with `message` as its body."""
    return Response(_encode(message), media_type="application/json")


_Get = Callable[[Request], Awaitable[Response]]


def _health(model: ServedModel) -> _Get:
    async def health(request: Request) -> Response:
        if model.state is EngineState.DEAD:
            raise OverloadedError("The engine is dead.", retry_after_s=_READY_AFTER_S)
        return _json(Probe("ok", model.state))

    return health


def _ready(model: ServedModel, requests: ActiveRequests) -> _Get:
    async def ready(request: Request) -> Response:
        requests.check_admits()
        if model.state is not EngineState.RUNNING:
            raise OverloadedError(f"The engine is {model.state}.", retry_after_s=_READY_AFTER_S)
        return _json(Probe("ready", model.state))

    return ready


def _version(model: ServedModel) -> _Get:
    async def version(request: Request) -> Response:
        return _json({"version": model.version})

    return version


@functools.cache
def _document(version: str) -> bytes:
    """The OpenAPI document. Making it takes 150 ms, which no request should wait for."""
    return _encode(build_document(version))


def _openapi(model: ServedModel) -> _Get:
    body = _document(model.version)

    async def openapi(request: Request) -> Response:
        return Response(body, media_type="application/json")

    return openapi


def _metrics(telemetry: Telemetry) -> _Get:
    async def metrics(request: Request) -> Response:
        return Response(telemetry.prometheus(), media_type=CONTENT_TYPE)

    return metrics


def _models(model: ServedModel) -> _Get:
    async def models(request: Request) -> Response:
        return _json(model_list(model))

    return models


def _model(model: ServedModel) -> _Get:
    async def card(request: Request) -> Response:
        return _json(model_card(model, request.path_params["name"]))

    return card
