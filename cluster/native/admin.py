"""The routes for operators: /abort_request and /flush_cache, in SGLang's shape. They ask for an admin key.

They act on the replica that answers.
"""

from __future__ import annotations

import msgspec

from cluster.http.active import ActiveRequests
from cluster.http.answer import Answer
from cluster.http.context import RequestContext
from cluster.openai.answer import json_answer
from cluster.openai.protocol import decode_body
from cluster.openai.served_model import ServedModel
from configs.errors import RequestError


class Aborted(msgspec.Struct):
    """How many requests were ended."""

    aborted: int


class Flushed(msgspec.Struct):
    """The engine was told to."""

    success: bool = True


class AdminServing:
    """Acts on one model's replica."""

    def __init__(self, model: ServedModel, requests: ActiveRequests) -> None:
        self._model = model
        self._requests = requests

    async def abort_request(self, body: bytes, context: RequestContext) -> Answer:
        """POST /abort_request: ends the requests whose `x-request-id` is `rid`, or with `abort_all` every one."""
        fields = decode_body(body)
        everyone, rid = fields.get("abort_all", False), fields.get("rid")
        if not isinstance(everyone, bool):
            raise RequestError("abort_all must be true or false.", code="invalid_type", param="abort_all")
        if not everyone and not isinstance(rid, str):
            raise RequestError("rid must be the id of a request.", code="invalid_type", param="rid")
        return json_answer(Aborted(self._requests.abort(None if everyone else rid, spare=context)))

    async def flush_cache(self, body: bytes, context: RequestContext) -> Answer:
        """POST /flush_cache: forgets every cached prompt that no running request uses."""
        self._model.engine.flush_cache()
        return json_answer(Flushed())
