"""The routes for operators: /abort_request and /flush_cache, in SGLang's shape. They ask for an admin key.

They act on the replica that answers.
"""

from __future__ import annotations

from functools import partial

import msgspec
from pydantic import ConfigDict

from cluster.http.active import ActiveRequests
from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.requests.answer import json_response
from cluster.requests.json_body import prepared, validated
from cluster.requests.served_model import ServedModel
from cluster.requests.shapes import Shape
from configs.errors import RequestError


class AbortRequest(Shape):
    """POST /abort_request: one of the two."""

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


class Aborted(msgspec.Struct):
    """How many requests were ended."""

    aborted: int


class Flushed(msgspec.Struct):
    """The engine was told to."""

    success: bool = True


async def abort_request(requests: ActiveRequests, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /abort_request: ends the requests whose `x-request-id` is `rid`, or with `abort_all` every one."""
    request = await prepared(body, partial(validated, AbortRequest))
    if not request.abort_all and request.rid is None:
        raise RequestError("rid must be the id of a request.", code="invalid_type", param="rid")
    return json_response(Aborted(requests.abort(None if request.abort_all else request.rid, spare=context)))


async def flush_cache(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /flush_cache: forgets every cached prompt that no running request uses."""
    model.engine.flush_cache()
    return json_response(Flushed())
