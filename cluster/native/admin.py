"""The routes for operators: /v1/admin/weights and /v1/admin/resize, /abort_request and /flush_cache in SGLang's form,
and /sleep, /wake_up and /is_sleeping in vLLM's. They need an admin key, and concern every replica of the app, except
/is_sleeping, which concerns the replica that answers."""

from __future__ import annotations

from functools import partial

import msgspec
from pydantic import ConfigDict, Field

from cluster.http.active import ActiveRequests
from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.messages.engine import Running
from cluster.messages.state import EngineState
from cluster.requests.answer import json_response
from cluster.requests.json_body import decode_body, validated
from cluster.requests.other_replicas import OtherReplicas
from cluster.requests.served_model import ServedModel
from cluster.requests.shapes import Shape
from configs.errors import ConfigError, EngineError, RequestError


class AbortRequest(Shape):
    """POST /abort_request: needs one of the two fields."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["rid"], "properties": {"rid": {"type": "string"}}},
                {"required": ["abort_all"], "properties": {"abort_all": {"const": True}}},
            ]
        },
    )

    rid: str | None = None
    """The `x-request-id` of the requests to end."""
    abort_all: bool | None = None


class WeightsRequest(Shape):
    """POST /v1/admin/weights."""

    model: str
    """A local directory, or a Hugging Face id, of the same model as the served one."""
    revision: str | None = None
    """Commit or tag of the repository on the Hub."""
    version: str | None = None
    """Name of the new weights. If null, the last part of `model`, and the `revision`."""
    running: Running = "continue"
    """What happens to running requests. continue: they go on with their KV. finish: they end with the old weights,
    while new requests wait. recompute: they keep their tokens and compute their KV again with the new weights."""


class ResizeRequest(Shape):
    """POST /v1/admin/resize."""

    tensor_parallel_size: int = Field(ge=1)
    """Number of ranks of each replica."""


class AppResized(msgspec.Struct):
    """The answer to /v1/admin/resize."""

    tensor_parallel_size: int
    pause_s: float
    """The longest time in seconds for which requests of a replica waited."""


class Aborted(msgspec.Struct):
    """Number of requests that were ended."""

    aborted: int


class Slept(msgspec.Struct):
    """The answer to /sleep and /wake_up."""

    seconds: float
    """Seconds that the change took."""


class Sleeping(msgspec.Struct):
    """Whether the engine sleeps."""

    is_sleeping: bool


class Flushed(msgspec.Struct):
    """The answer to /flush_cache."""

    success: bool = True


async def abort_request(
    here: ActiveRequests, others: OtherReplicas, body: bytes, context: RequestContext
) -> HttpResponse:
    """POST /abort_request: ends all requests with the `x-request-id` `rid`, or with `abort_all` every request. Raises
    OverloadedError if a replica did not answer; the others have ended theirs."""
    request = validated(AbortRequest, decode_body(body))
    if not request.abort_all and request.rid is None:
        raise RequestError("rid must be the id of a request.", code="invalid_type", param="rid")
    request_id = None if request.abort_all else request.rid
    aborted = here.abort(request_id, spare=context)
    return json_response(Aborted(aborted + sum(await others.ask("abort", (request_id,)))))


async def change_weights(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/admin/weights: changes to other weights of the same shape, and answers when the ranks use them.

    Raises:
        RequestError: the change is impossible or failed. The old weights stay in use, unless a rank failed while taking
            the new ones.
    """
    request = await model.threads.prepared(body, partial(validated, WeightsRequest))
    assert model.operations is not None, "an engine behind a socket alone has no ranks to change"
    try:
        changed = await model.operations.update_weights(**request.model_dump())
    except ConfigError as error:
        raise RequestError(str(error), code="weights_not_changed", param="model") from None
    except EngineError as error:
        # An operator may see the message that is for the log; the public message is for clients.
        raise RequestError(str(error), code="engine_error", status=500) from error
    assert changed is not None, "a path is no part"
    return json_response(changed)


async def resize(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/admin/resize: changes the number of ranks of every replica, one after the other.

    Raises:
        RequestError: a replica could not. The replicas after it are unchanged.
    """
    request = await model.threads.prepared(body, partial(validated, ResizeRequest))
    assert model.operations is not None, "an engine behind a socket alone has no ranks to change"
    try:
        pause_s = await model.operations.resize_app(request.tensor_parallel_size)
    except ConfigError as error:
        raise RequestError(str(error), code="not_resized", param="tensor_parallel_size") from None
    except EngineError as error:
        raise RequestError(str(error), code="engine_error", status=500) from error
    return json_response(AppResized(request.tensor_parallel_size, round(pause_s, 3)))


async def flush_cache(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /flush_cache: drops every cached prefix that no running request uses."""
    if model.operations is not None:
        await model.operations.flush_cache()
    model.engine.flush_cache()
    return json_response(Flushed())


async def is_sleeping(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """GET /is_sleeping."""
    return json_response(Sleeping(model.state is EngineState.SLEEPING))


async def sleep(model: ServedModel, body: bytes, context: RequestContext, *, wakes: bool) -> HttpResponse:
    """POST /sleep, which frees the memory of the devices while requests wait, or POST /wake_up, which restores the
    weights and continues requests. Answers when the change is done.

    Raises:
        RequestError: the engine sleeps or is awake already, or cannot sleep.
    """
    if model.operations is None:
        raise RequestError("This engine has no ranks that could sleep; leave the call out.", code="no_change")
    try:
        return json_response(Slept(round(await model.operations.sleep(wakes=wakes), 3)))
    except ConfigError as error:
        raise RequestError(str(error), code="no_change") from None
