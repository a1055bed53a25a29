"""The routes below /v1/responses, from body to answer: create, retrieve and delete a response, and count its input."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from cluster.http.context import RequestContext
from cluster.http.http_errors import as_request_error
from cluster.http.response import HttpResponse
from cluster.messages.engine import SamplingParams
from cluster.openai.responses import response_objects as objects
from cluster.openai.responses.response_history import leave_out
from cluster.openai.responses.response_store import ResponseStore, StoredResponse
from cluster.openai.responses.response_tools import ResponseTools, read_tools
from cluster.openai.responses.response_turns import conversation, input_items, text_grammar
from cluster.openai.responses.response_writer import ResponseBuilder, ResponseWriter
from cluster.openai.responses.responses_request import (
    FIELDS,
    InputTokensRequest,
    ReasoningOptions,
    ResponsesRequest,
    check_options,
    ignored_options,
)
from cluster.requests import checks
from cluster.requests.answer import answer_parts, in_parts, json_response
from cluster.requests.chat_run import chat_run
from cluster.requests.fields import ignored_header
from cluster.requests.images import LeftOut
from cluster.requests.job import JobOptions
from cluster.requests.json_parts import gathered
from cluster.requests.served_model import ServedModel
from cluster.text.conversation import Conversation
from configs.errors import RequestError

_ID_PREFIX = "resp_"
_Request = TypeVar("_Request", bound=InputTokensRequest)
_Checked = tuple[_Request, list[str], list[dict[str, Any]], ResponseTools]


class ResponsesServing:
    """Serves /v1/responses for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._store = ResponseStore()

    def answers(self) -> dict[str, Callable[..., Any]]:
        """The functions that find a client's stored response on this replica: `OtherReplicas.answers`."""
        return {
            "response": self._encoded,
            "conversation": self._conversation,
            "deletion": self._delete,
            "items": self._store.items,
        }

    async def create(self, body: bytes, context: RequestContext) -> HttpResponse:
        """POST /v1/responses. Raises RequestError for a bad request."""
        model = self._model
        checked = partial(self._checked, ResponsesRequest)
        request, ignored, new_items, tools = await model.threads.prepared(body, checked)
        check_options(request)
        earlier, num_bytes = await self._earlier(request.previous_response_id, context)
        items = earlier + await self._with_stored(new_items, context)
        num_bytes += len(body)
        chat = await model.threads.off_loop(num_bytes, lambda: conversation(request, items, len(earlier), tools.use))
        num_logprobs = (request.top_logprobs or 0) if request.with_logprobs else -1
        checks.num_logprobs(num_logprobs, "top_logprobs", model.server)
        run, headers = await chat_run(
            model,
            _ID_PREFIX,
            chat,
            request,
            context,
            JobOptions(num_logprobs=num_logprobs),
            num_bytes=num_bytes,
            ignored=ignored,
            max_tokens=request.max_output_tokens,
            own_grammar=text_grammar(request),
            drops_turns=request.truncation == "auto",
        )
        response = _response(request, run.job.id, run.job.sampling[0][0], model.model_name)
        builder = ResponseBuilder(response, tools.names)
        writer = ResponseWriter(run, builder, model.tokenizer)
        stored = StoredResponse(builder=builder, items=items, run=run, num_bytes=num_bytes)
        make = self._events if request.stream else self._whole
        return HttpResponse(make(stored, writer, context, headers), bool(request.stream), headers, writer.failed)

    async def retrieve(self, body: bytes, context: RequestContext) -> HttpResponse:
        """GET /v1/responses/{response_id}: the current response. Raises RequestError (404) if it is not stored."""
        parts = await self._model.others.find("response", context.client, context.path_params["response_id"])
        return HttpResponse(in_parts(parts), streamed=False)

    async def input_tokens(self, body: bytes, context: RequestContext) -> HttpResponse:
        """POST /v1/responses/input_tokens: the number of tokens of a response's prompt. Raises RequestError for a bad
        request."""
        model = self._model
        checked = partial(self._checked, InputTokensRequest)
        request, ignored, new_items, tools = await model.threads.prepared(body, checked)
        earlier, num_bytes = await self._earlier(request.previous_response_id, context)
        new_items = await self._with_stored(new_items, context)

        def check() -> Conversation:
            if request.input is None and not earlier:
                raise RequestError("input is required; add it.", code="missing_required_parameter", param="input")
            return conversation(request, earlier + new_items, len(earlier), tools.use)

        num_bytes += len(body)
        chat = await model.threads.off_loop(num_bytes, check)
        count = objects.InputTokens(len(await model.encode_chat(chat, num_bytes, "count")))
        return json_response(count, ignored_header(ignored))

    async def delete(self, body: bytes, context: RequestContext) -> HttpResponse:
        """DELETE /v1/responses/{response_id}. Cancels the response if it is in progress. Raises RequestError (404) if
        it is not stored."""
        id_: str = await self._model.others.find("deletion", context.client, context.path_params["response_id"])
        return json_response(objects.DeletedResponse(id_))

    def _checked(self, kind: type[_Request], raw: Mapping[str, Any]) -> _Checked[_Request]:
        """The request in `raw`, the names of what is ignored, its items and its tools. Raises RequestError."""
        # A client may send the whole request to have its tokens counted.
        request, ignored = self._model.checked(kind, raw, FIELDS, known=ResponsesRequest)
        left_out = LeftOut(self._model.server)
        items, tools = input_items(request.input or []), read_tools(request, left_out)
        leave_out(items, left_out)
        for name in ignored_options(request):
            left_out.unknown(name, name)
        return request, [*ignored, *left_out.names], items, tools

    async def _earlier(self, response_id: str | None, context: RequestContext) -> tuple[list[dict[str, Any]], int]:
        """The conversation that a request continues, and the bytes of that conversation."""
        if response_id is None:
            return [], 0
        try:
            found: tuple[list[dict[str, Any]], int] = await self._model.others.find(
                "conversation", context.client, response_id
            )
        except RequestError as error:
            if error.status != 404:
                raise
            raise RequestError(
                f"Previous response {response_id!r} not found; send the conversation as input instead.",
                code="previous_response_not_found",
                param="previous_response_id",
                status=404,
            ) from error
        return found

    async def _with_stored(self, items: list[dict[str, Any]], context: RequestContext) -> list[dict[str, Any]]:
        """Returns `items` with items of stored responses in place of references. Raises RequestError (404) if such an
        item is not stored."""
        ids = [str(item.get("id")) for item in items if item["type"] == "item_reference"]
        stored = iter(await self._model.others.find("items", context.client, ids) if ids else ())
        return [next(stored) if item["type"] == "item_reference" else item for item in items]

    def _encoded(self, client: str, response_id: str) -> Iterator[bytes]:
        return self._store.get(client, response_id).builder.encoded()

    def _delete(self, client: str, response_id: str) -> str:
        stored = self._store.delete(client, response_id)
        if stored.run is not None:
            stored.run.abort()
        return stored.id

    def _conversation(self, client: str, response_id: str) -> tuple[list[dict[str, Any]], int]:
        stored = self._store.get(client, response_id)
        if stored.run is not None:
            raise RequestError(
                "The previous response has not ended yet; wait for it.", param="previous_response_id", status=409
            )
        return stored.conversation(), stored.num_bytes

    async def _whole(
        self, stored: StoredResponse, writer: ResponseWriter, context: RequestContext, headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events(stored, writer, context, {})) as chunks:
            async for _ in chunks:
                pass
        if stored.error is not None:
            raise stored.error
        headers["server-timing"] = writer.run.server_timing()
        for part in gathered(writer.whole()):
            yield part

    async def _events(
        self, stored: StoredResponse, writer: ResponseWriter, context: RequestContext, headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Runs the request, builds its response and yields its events. Raises RequestError only before the first
        event."""
        builder = stored.builder
        try:
            if builder.response.store:
                # The response is stored once it starts, because one that never starts would never end and stay stored.
                self._store.put(context.client, stored)
            async with aclosing(answer_parts(writer, headers, streamed=True)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            connected = self._model.engine.connected
            stored.error = as_request_error(error, context.request_id, engine_is_there=connected)
            if not builder.begun:
                self._store.discard(context.client, stored)
                raise stored.error from error
            yield writer.failed(stored.error)
        finally:
            builder.abandon(writer.run.usage())  # if the response has not ended, its reader has left
            stored.run = None
            self._store.grow(context.client, stored, builder.num_bytes)


def _response(request: ResponsesRequest, id_: str, sampling: SamplingParams, model_name: str) -> objects.Response:
    """The response to `request`, with no output yet."""
    text = {"format": {"type": "text"}}
    if request.text is not None:
        text |= request.text.model_dump(by_alias=True, exclude_none=True)
    reasoning = request.reasoning or ReasoningOptions()
    return objects.Response(
        id=id_,
        created_at=int(time.time()),
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=objects.ReasoningSettings(reasoning.effort, reasoning.summary),
        store=request.is_stored,
        temperature=sampling.temperature,
        text=text,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
