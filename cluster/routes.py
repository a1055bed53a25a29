"""All routes of the endpoint: input and output types, required roles, and handlers.

The app (`serve.ingress`), the roles of API keys and the OpenAPI document are built from this one table. Fields come
from the request and answer models, so a new field is in the document without a change here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response as PlainResponse

from cluster.anthropic.message_objects import AnthropicError, AnthropicMessage, MessageEvent, TokenCount
from cluster.anthropic.messages import count_tokens, messages
from cluster.anthropic.messages_request import CountTokensRequest, MessagesRequest
from cluster.http.access import ADMINS, ANYONE, USERS
from cluster.http.active import ActiveRequests
from cluster.http.context import RequestContext, Role
from cluster.http.endpoint import Handler
from cluster.http.http_errors import ErrorBody
from cluster.http.response import HttpResponse
from cluster.messages.engine import WeightsChanged
from cluster.messages.state import EngineState
from cluster.native import admin
from cluster.native import server_status as status
from cluster.native.native_answer import NativeAnswer
from cluster.native.native_generate import NativeRequest, generate
from cluster.native.score import ScoreRequest, Scores, score
from cluster.observability.timeline import Timeline
from cluster.openai.completions import chat_completions, completions
from cluster.openai.models import model_card, model_list
from cluster.openai.openai_request import ChatRequest, CompletionRequest
from cluster.openai.responses.response_objects import DeletedResponse, InputTokens, Response, StreamEvent
from cluster.openai.responses.responses import ResponsesServing
from cluster.openai.responses.responses_request import InputTokensRequest, ResponsesRequest
from cluster.openai.tokenize import DetokenizeRequest, Text, TokenizeRequest, Tokens, detokenize, tokenize
from cluster.openai.wire import ChatChunk, ChatCompletion, Completion, ModelCard, ModelList
from cluster.page.live import LiveServing, LiveView
from cluster.page.page import page
from cluster.requests.served_model import ServedModel
from configs.errors import OverloadedError

_encode = msgspec.json.Encoder().encode


class Version(msgspec.Struct):
    """The version of the server."""

    version: str


class Handlers:
    """The objects that answer the routes of one replica. The methods of this class do not wait."""

    def __init__(self, model: ServedModel, requests: ActiveRequests, document: bytes) -> None:
        """`document` is the OpenAPI document as JSON."""
        self.model = model
        self.requests = requests
        self._document = document
        self.responses = ResponsesServing(model)
        self.live = LiveServing(model, requests)
        self.page = page()
        model.others.answers |= {
            "abort": requests.abort,
            "timeline": partial(status.timeline_here, model),
            **self.responses.answers(),
        }

    async def health(self, request: Request) -> PlainResponse:
        """GET /health. Raises OverloadedError if the engine is dead."""
        state = self.model.state
        if state is EngineState.DEAD:
            raise OverloadedError("The engine is dead; Ray Serve replaces it, so try again later.")
        return _json(status.Probe("ok", state))

    async def ready(self, request: Request) -> PlainResponse:
        """GET /ready. Raises OverloadedError while the engine is not running."""
        self.requests.check_admits()
        state = self.model.state
        if state is not EngineState.RUNNING:
            raise OverloadedError(f"The engine is {state}; try again later.")
        return _json(status.Probe("ready", state))

    async def version(self, request: Request) -> PlainResponse:
        """GET /version."""
        return _json(Version(self.model.version))

    async def metrics(self, request: Request) -> PlainResponse:
        """GET /metrics."""
        return PlainResponse(self.model.engine.telemetry.prometheus(), media_type=CONTENT_TYPE_LATEST)

    async def document(self, request: Request) -> PlainResponse:
        """GET /openapi.json."""
        return PlainResponse(self._document, media_type="application/json")

    async def models(self, request: Request) -> PlainResponse:
        """GET /v1/models."""
        return _json(model_list(self.model))

    async def named_model(self, request: Request) -> PlainResponse:
        """GET /v1/models/{name}. Raises RequestError (404) for another model's name."""
        return _json(model_card(self.model, request.path_params["name"]))


def _json(message: msgspec.Struct) -> PlainResponse:
    return PlainResponse(_encode(message), media_type="application/json")


ModelHandler = Callable[[ServedModel, bytes, RequestContext], Awaitable[HttpResponse]]
PlainHandler = Callable[[Request], Awaitable[PlainResponse]]
Tag = Literal["OpenAI", "Anthropic", "SGLang and vLLM", "Operations"]

_ANY = (400, 401, 403, 429, 431, 500)
"""Statuses of errors on every route: an invalid header, no key, a key of the wrong role or a foreign Host, a quota, too
many headers, an internal error."""
_ENDPOINT = (*_ANY, 408, 413, 415, 503)
"""Adds errors of routes that may have a body: it can be wrong, slow, large or of another type, and the server can be
stopping."""
_MODEL = (*_ENDPOINT, 404)
"""Adds the error of routes that name something that may not exist: a model, or a response."""
_GENERATES = (*_MODEL, 409, 504)
"""Adds errors of routes that wait for the engine: a timeout, or an operator ends the request."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    tag: Tag
    method: Literal["GET", "POST", "DELETE"]
    path: str
    """The path in Starlette's form, in which `:path` after a name means that the value may contain slashes."""
    about: str
    """A sentence that describes the route. The OpenAPI document adds whether an admin key is needed."""
    handler: ModelHandler | None = None
    """The handler, if it only needs the replica's model. None if `serving` or `plain` is set."""
    serving: Callable[[Handlers], Handler] | None = None
    """Returns the handler, if it needs more of a replica than its model."""
    plain: Callable[[Handlers], PlainHandler] | None = None
    """Returns the handler of a route without a body. It answers at once, even while the server is stopping."""
    request: type[BaseModel] | None = None
    answer: Any = None
    """Type of the JSON answer: a struct, or a union of structs. None if the answer is not JSON."""
    media_type: str = "application/json"
    """Media type of an answer that is not JSON."""
    event: Any = None
    """Type of the data in each server-sent event. None if the route does not stream."""
    errors: Sequence[int] = _ENDPOINT
    error: Any = ErrorBody
    roles: Set[Role] = USERS
    """Roles of the keys that may call the route. `ANYONE`: no key is needed."""
    costs: bool = False
    """Whether a request counts against its key's quota although the method is not POST."""


_openai = partial(Route, "OpenAI", errors=_MODEL)
_anthropic = partial(Route, "Anthropic", errors=_MODEL, error=AnthropicError)
_native = partial(Route, "SGLang and vLLM", errors=_MODEL)
_operations = partial(Route, "Operations")
_open = partial(Route, "Operations", errors=(400, 431, 500, 503), roles=ANYONE)
_watched = partial(Route, "Operations", roles=USERS | {Role.METRICS})
_admin = partial(Route, "Operations", errors=_MODEL, roles=ADMINS)
PATH_PARAMETERS = {
    "name": "The name of the model. It may contain slashes.",
    "request_id": "The answer's id, or the request's `x-request-id`.",
    "response_id": "The id of a response.",
}
"""Description of each path parameter."""

ROUTES: tuple[Route, ...] = (
    _openai(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        chat_completions,
        request=ChatRequest,
        answer=ChatCompletion,
        event=ChatChunk,
        errors=_GENERATES,
    ),
    _openai(
        "POST",
        "/v1/completions",
        "Continue a text, or a prompt of token ids.",
        completions,
        request=CompletionRequest,
        answer=Completion,
        event=Completion,
        errors=_GENERATES,
    ),
    _openai(
        "POST",
        "/v1/responses",
        "Answer a conversation of items, and store the response.",
        serving=lambda s: s.responses.create,
        request=ResponsesRequest,
        answer=Response,
        event=StreamEvent,
        errors=_GENERATES,
    ),
    _openai(
        "POST",
        "/v1/responses/input_tokens",
        "Count the tokens that the prompt of a response would have.",
        serving=lambda s: s.responses.input_tokens,
        request=InputTokensRequest,
        answer=InputTokens,
        errors=(*_MODEL, 409),
    ),
    _openai(
        "GET",
        "/v1/responses/{response_id}",
        "Return a stored response in its current state.",
        serving=lambda s: s.responses.retrieve,
        answer=Response,
    ),
    _openai(
        "DELETE",
        "/v1/responses/{response_id}",
        "Delete a stored response; cancel it if it is still running.",
        serving=lambda s: s.responses.delete,
        answer=DeletedResponse,
    ),
    _openai("GET", "/v1/models", "List the served model.", plain=lambda s: s.models, answer=ModelList, errors=_ANY),
    _openai(
        "GET",
        "/v1/models/{name:path}",
        "Return the model with this name.",
        plain=lambda s: s.named_model,
        answer=ModelCard,
        errors=(*_ANY, 404),
    ),
    _anthropic(
        "POST",
        "/v1/messages",
        "Answer a conversation of content blocks.",
        messages,
        request=MessagesRequest,
        answer=AnthropicMessage,
        event=MessageEvent,
        errors=_GENERATES,
    ),
    _anthropic(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens that the prompt of a message would have.",
        count_tokens,
        request=CountTokensRequest,
        answer=TokenCount,
    ),
    _native(
        "POST",
        "/generate",
        "Continue texts or token ids, with log probabilities.",
        generate,
        request=NativeRequest,
        answer=NativeAnswer | list[NativeAnswer],
        event=NativeAnswer,
        errors=_GENERATES,
    ),
    _native(
        "POST",
        "/v1/score",
        "Score texts by the probabilities of given next tokens.",
        score,
        request=ScoreRequest,
        answer=Scores,
        errors=_GENERATES,
    ),
    _native(
        "POST",
        "/tokenize",
        "Return the token ids of a text or a chat.",
        tokenize,
        request=TokenizeRequest,
        answer=Tokens,
    ),
    _native("POST", "/detokenize", "Return the text of token ids.", detokenize, request=DetokenizeRequest, answer=Text),
    _open(
        "GET",
        "/health",
        "Check that the server answers and its engine is not dead.",
        plain=lambda s: s.health,
        answer=status.Probe,
    ),
    _open(
        "GET",
        "/ready",
        "Check that the engine runs: it has generated a token, and neither rebuilds nor drains.",
        plain=lambda s: s.ready,
        answer=status.Probe,
    ),
    _operations(
        "GET",
        "/health_generate",
        "Generate one token now.",
        status.health_generate,
        answer=status.Healthy,
        costs=True,
        errors=(*_ENDPOINT, 409),
    ),
    _watched(
        "GET", "/version", "Return the version of the server.", plain=lambda s: s.version, answer=Version, errors=_ANY
    ),
    _watched(
        "GET",
        "/server_info",
        "Describe this replica: model, settings, ranks.",
        status.server_info,
        answer=status.ServerInfo,
    ),
    _watched("GET", "/v1/loads", "Return the current load of this replica.", status.loads, answer=status.Loads),
    _operations(
        "GET",
        "/v1/timelines/{request_id}",
        "Return the timeline of an ended request, in the Trace Event Format.",
        status.request_timeline,
        answer=Timeline,
        errors=_MODEL,
    ),
    _watched("GET", "/load", "Count the running and waiting requests.", status.server_load, answer=status.ServerLoad),
    _watched(
        "GET",
        "/live",
        "Stream the figures of the engine, twice a second.",
        serving=lambda s: s.live.live,
        event=LiveView,
    ),
    _operations(
        "GET",
        "/metrics",
        "Metrics in Prometheus' text format.",
        plain=lambda s: s.metrics,
        media_type="text/plain",
        errors=_ANY,
        roles=ADMINS | {Role.METRICS},
    ),
    _open(
        "GET",
        "/",
        "A page to chat and to watch the engine.",
        plain=lambda s: s.page,
        media_type="text/html",
        errors=(400, 431, 500),
    ),
    _operations(
        "GET", "/openapi.json", "This document.", plain=lambda s: s.document, answer=dict[str, Any], errors=_ANY
    ),
    _admin(
        "POST",
        "/abort_request",
        "End running requests.",
        serving=lambda s: partial(admin.abort_request, s.requests, s.model.others),
        request=admin.AbortRequest,
        answer=admin.Aborted,
    ),
    _admin(
        "POST",
        "/flush_cache",
        "Drop cached prefixes that no running request uses.",
        admin.flush_cache,
        answer=admin.Flushed,
    ),
    _admin(
        "POST",
        "/sleep",
        "Free the memory of the devices while requests wait.",
        partial(admin.sleep, wakes=False),
        answer=admin.Slept,
        errors=_GENERATES,
    ),
    _admin(
        "POST",
        "/wake_up",
        "Take the devices back, and continue with the requests.",
        partial(admin.sleep, wakes=True),
        answer=admin.Slept,
        errors=_GENERATES,
    ),
    _admin("GET", "/is_sleeping", "Return whether the engine sleeps.", admin.is_sleeping, answer=admin.Sleeping),
    _admin(
        "POST",
        "/v1/admin/resize",
        "Change the number of ranks.",
        admin.resize,
        request=admin.ResizeRequest,
        answer=admin.AppResized,
        errors=_GENERATES,
    ),
    _admin(
        "POST",
        "/v1/admin/weights",
        "Change to other weights of the same shape.",
        admin.change_weights,
        request=admin.WeightsRequest,
        answer=WeightsChanged,
        errors=_GENERATES,
    ),
)
