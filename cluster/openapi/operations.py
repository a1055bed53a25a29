"""Every route with what it takes and gives: the table the OpenAPI document is made of.

A test compares it with the routes of the app, so that neither has one the other lacks. Fields come from the models
themselves: a new one is in the document without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from pydantic import BaseModel

from cluster.anthropic.objects import AnthropicError, AnthropicMessage, MessageEvent, TokenCount
from cluster.anthropic.request import CountTokensRequest, MessagesRequest
from cluster.http.errors import ErrorBody
from cluster.native.admin import Aborted, AbortRequest, Flushed
from cluster.native.generate import NativeRequest
from cluster.native.generate_answer import NativeAnswer
from cluster.native.score import ScoreRequest, Scores
from cluster.native.status import Healthy, Loads, Probe, ServerInfo, ServerLoad
from cluster.observability.timeline import Timeline
from cluster.openai.protocol import ChatRequest, CompletionRequest
from cluster.openai.responses.objects import DeletedResponse, InputTokens, ItemList, Response, StreamEvent
from cluster.openai.responses.request import InputTokensRequest, ResponsesRequest
from cluster.openai.tokenize import DetokenizeRequest, Text, TokenizeRequest, Tokens
from cluster.openai.wire import ChatChunk, ChatCompletion, Completion, ModelCard, ModelList
from cluster.page.live import LiveView

Tag = Literal["OpenAI", "Anthropic", "SGLang and vLLM", "Operations"]

_ANY = (401, 403, 429, 431, 500)
"""What every route may answer: no key, a key of the wrong role, a quota, too many headers, a fault of ours."""
_ENDPOINT = (*_ANY, 400, 408, 413, 415, 503)
"""Routes that may have a body: it can be wrong, slow, large or of another type, and the server can be stopping."""
_MODEL = (*_ENDPOINT, 404)
"""Routes where something may be named that does not exist: a model, or a response."""
_GENERATES = (*_MODEL, 409, 504)
"""Routes that wait for the engine: too long, or until an operator ends them."""


class Version(msgspec.Struct):
    """The version of the server."""

    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One in the path or the query."""

    name: str
    place: Literal["path", "query"]
    about: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    about: str
    tag: Tag
    request: type[BaseModel] | None = None
    answer: Any = None
    """A struct type, or a union of them. None: not JSON."""
    media_type: str = "application/json"
    """Type of an answer that is not JSON."""
    event: Any = None
    """What the data of each server-sent event is, on routes that stream."""
    errors: Sequence[int] = _ENDPOINT
    error: Any = ErrorBody
    parameters: Sequence[Parameter] = ()


_RESPONSE_ID = Parameter(name="response_id", place="path", about="The id of a response.")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        about="Answer a conversation.",
        tag="OpenAI",
        request=ChatRequest,
        answer=ChatCompletion,
        event=ChatChunk,
        errors=_GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        about="Continue texts, or prompts of token ids.",
        tag="OpenAI",
        request=CompletionRequest,
        answer=Completion,
        event=Completion,
        errors=_GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        about="Answer a conversation of items; keep the answer.",
        tag="OpenAI",
        request=ResponsesRequest,
        answer=Response,
        event=StreamEvent,
        errors=_GENERATES,
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        about="How many tokens the prompt of a response would have.",
        tag="OpenAI",
        request=InputTokensRequest,
        answer=InputTokens,
        errors=(*_MODEL, 409),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}",
        about="A kept response as it is now, or the events of a background stream.",
        tag="OpenAI",
        answer=Response,
        event=StreamEvent,
        errors=_MODEL,
        parameters=(
            _RESPONSE_ID,
            Parameter(name="stream", place="query", about="Follow the events.", schema={"type": "boolean"}),
            Parameter(
                name="starting_after",
                place="query",
                about="With `stream`: the number of the last event already known.",
                schema={"type": "integer", "minimum": -1, "maximum": 99999999},
            ),
        ),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response_id}",
        about="Forget a response; one on its way is cancelled.",
        tag="OpenAI",
        answer=DeletedResponse,
        errors=_MODEL,
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        about="What a response was made from.",
        tag="OpenAI",
        answer=ItemList,
        errors=_MODEL,
        parameters=(
            _RESPONSE_ID,
            Parameter(
                name="limit",
                place="query",
                about="Most items of a page; without it 20.",
                schema={"type": "integer", "minimum": 1, "maximum": 100},
            ),
            Parameter(
                name="order",
                place="query",
                about="Without it the newest come first.",
                schema={"enum": ["asc", "desc"]},
            ),
            Parameter(name="after", place="query", about="The id of the last item of the page before."),
        ),
    ),
    Operation(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        about="End a response that is on its way.",
        tag="OpenAI",
        answer=Response,
        errors=_MODEL,
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        method="GET", path="/v1/models", about="The model that is served.", tag="OpenAI", answer=ModelList, errors=_ANY
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        about="The model of this name.",
        tag="OpenAI",
        answer=ModelCard,
        errors=(*_ANY, 404),
        parameters=(Parameter(name="name", place="path", about="May hold slashes."),),
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        about="Answer a conversation of content blocks.",
        tag="Anthropic",
        request=MessagesRequest,
        answer=AnthropicMessage,
        event=MessageEvent,
        errors=_GENERATES,
        error=AnthropicError,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        about="How many tokens the prompt of a message would have.",
        tag="Anthropic",
        request=CountTokensRequest,
        answer=TokenCount,
        errors=_MODEL,
        error=AnthropicError,
    ),
    Operation(
        method="POST",
        path="/generate",
        about="Continue texts or token ids, with log probabilities.",
        tag="SGLang and vLLM",
        request=NativeRequest,
        answer=NativeAnswer | list[NativeAnswer],
        event=NativeAnswer,
        errors=_GENERATES,
    ),
    *(
        Operation(
            method="POST",
            path=path,
            about="How likely each of some tokens is to come next, for many texts.",
            tag="SGLang and vLLM",
            request=ScoreRequest,
            answer=Scores,
            errors=_GENERATES,
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation(
            method="POST",
            path=path,
            about="The token ids of a text or a chat.",
            tag="SGLang and vLLM",
            request=TokenizeRequest,
            answer=Tokens,
            errors=_MODEL,
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Operation(
            method="POST",
            path=path,
            about="The text of token ids.",
            tag="SGLang and vLLM",
            request=DetokenizeRequest,
            answer=Text,
            errors=_MODEL,
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
    Operation(
        method="GET",
        path="/health",
        about="The server is up, and its engine not dead.",
        tag="Operations",
        answer=Probe,
        errors=(431, 500, 503),
    ),
    Operation(
        method="GET",
        path="/ready",
        about="The engine runs: it has generated a token, and neither rebuilds nor drains.",
        tag="Operations",
        answer=Probe,
        errors=(431, 500, 503),
    ),
    Operation(
        method="GET",
        path="/health_generate",
        about="Generate one token now.",
        tag="Operations",
        answer=Healthy,
        errors=(*_ENDPOINT, 409),
    ),
    Operation(method="GET", path="/version", about="The version.", tag="Operations", answer=Version, errors=_ANY),
    Operation(method="GET", path="/server_info", about="What this replica is.", tag="Operations", answer=ServerInfo),
    Operation(method="GET", path="/v1/loads", about="What this replica does.", tag="Operations", answer=Loads),
    Operation(
        method="GET",
        path="/v1/timelines/{request_id}",
        about="What happened to a request that has ended, in the Trace Event Format.",
        tag="Operations",
        answer=Timeline,
        errors=_MODEL,
        parameters=(
            Parameter(name="request_id", place="path", about="The answer's id, or the request's `x-request-id`."),
        ),
    ),
    Operation(method="GET", path="/load", about="How many requests run or wait.", tag="Operations", answer=ServerLoad),
    Operation(
        method="GET",
        path="/live",
        about="What the engine does, twice a second.",
        tag="Operations",
        event=LiveView,
    ),
    Operation(
        method="GET",
        path="/metrics",
        about="Metrics in Prometheus' text format.",
        tag="Operations",
        media_type="text/plain",
        errors=_ANY,
    ),
    Operation(
        method="GET",
        path="/",
        about="A page to chat and to watch the engine.",
        tag="Operations",
        media_type="text/html",
        errors=(431, 500),
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        about="This document.",
        tag="Operations",
        answer=dict[str, Any],
        errors=_ANY,
    ),
    Operation(
        method="POST",
        path="/abort_request",
        about="End running requests. Needs an admin key.",
        tag="Operations",
        request=AbortRequest,
        answer=Aborted,
        errors=_MODEL,
    ),
    Operation(
        method="POST",
        path="/flush_cache",
        about="Forget cached prompts that nobody uses. Needs an admin key.",
        tag="Operations",
        answer=Flushed,
        errors=_MODEL,
    ),
)
