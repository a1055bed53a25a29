"""The routes below /v1/responses, from body to answer: create, look at, follow, cancel and forget a response.

A response is made by one generator, whoever reads it: the client itself, streamed or whole, or, for one in the
background, a task of its own that outlives the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from cluster.http.active import ActiveRequests
from cluster.http.affinity import response_prefix
from cluster.http.answer import Answer
from cluster.http.context import RequestContext
from cluster.http.errors import as_request_error
from cluster.messages import FinishReason, SamplingParams
from cluster.openai import protocol
from cluster.openai.answer import json_answer, once, timed
from cluster.openai.body import decode_body, validated
from cluster.openai.fields import ignored_header
from cluster.openai.generation import Delta
from cluster.openai.job import Run
from cluster.openai.protocol import ChatRequest
from cluster.openai.responses.builder import ResponseBuilder
from cluster.openai.responses.event_log import EventLog
from cluster.openai.responses.objects import DeletedResponse, ItemList, Reasoning, Response
from cluster.openai.responses.request import FIELDS, ResponsesRequest, check_options
from cluster.openai.responses.store import ResponseStore, StoredResponse
from cluster.openai.responses.to_chat import chat_fields, chat_messages, in_own_words, input_items
from cluster.openai.served_model import ServedModel
from cluster.openai.serving import chat_job
from cluster.openai.tools.events import Content, tell
from cluster.openai.wire import TokenLogprob
from cluster.openai.writer import token_logprobs
from configs.errors import RequestError

_MAX_LISTED_ITEMS = 100
_CANCEL_TIMEOUT_S = 2.0


class ResponsesServing:
    """Answers /v1/responses for one model."""

    def __init__(
        self, model: ServedModel, requests: ActiveRequests | None = None, store: ResponseStore | None = None
    ) -> None:
        """`requests`: where background responses are counted, so that a stopping server waits for them too."""
        self._model = model
        self._prefix = response_prefix(model.engine.telemetry.identity.replica)
        self._requests = ActiveRequests() if requests is None else requests
        self._store = ResponseStore() if store is None else store
        self._tasks: set[asyncio.Task[None]] = set()  # background responses; the event loop holds tasks weakly

    async def create(self, body: bytes, context: RequestContext) -> Answer:
        """POST /v1/responses. Raises RequestError for a bad request."""
        model = self._model
        raw = decode_body(body)
        headers = ignored_header(FIELDS.check(ResponsesRequest, raw, strict=model.server.strict_fields))
        request = validated(ResponsesRequest, raw)
        check_options(request)
        new_items = input_items(request.input)
        items, num_bytes = self._earlier(request, context)
        items += new_items
        fields = chat_fields(request, chat_messages(items, request.instructions))
        try:
            chat = protocol.check_request(ChatRequest, fields, model.server)
            job = await chat_job(model, self._prefix, chat, context)
        except RequestError as error:
            raise in_own_words(error) from error
        builder = ResponseBuilder(_response(request, job.id, job.sampling[0][0], model.model_name))
        run = model.run(job)
        stored = StoredResponse(builder=builder, items=items, run=run, num_bytes=num_bytes + len(body))
        if request.background:
            self._store.put(context.client, stored)
            answer = self._in_background(stored, context, streamed=bool(request.stream))
        elif request.stream:
            events = self._events(stored, context)
            answer = timed(Answer(events, streamed=True, failure=lambda error: _failed(builder, error)), run)
        else:
            answer = timed(Answer(self._whole(stored, context), streamed=False), run)
        answer.headers.update(headers)
        return answer

    async def retrieve(self, body: bytes, context: RequestContext) -> Answer:
        """GET /v1/responses/{response_id}; with `stream=true`, the events of a background stream.

        Raises:
            RequestError: 404 for a response that is not kept.
        """
        stored = self._store.get(context.client, context.path_params["response_id"])
        if context.query.get("stream", "false") != "true":
            return Answer(once(stored.builder.encoded()), streamed=False)
        if stored.log is None:
            raise RequestError("Only a background response made with stream: true can be streamed.", param="stream")
        after = context.query.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 9:
            raise RequestError("starting_after must be the number of an event.", param="starting_after")
        return Answer(stored.log.follow(max(int(after) + 1, 0)), streamed=True)

    async def items(self, body: bytes, context: RequestContext) -> Answer:
        """GET /v1/responses/{response_id}/input_items: what it was made from, the newest first.

        Raises:
            RequestError: 404 for a response that is not kept.
        """
        stored = self._store.get(context.client, context.path_params["response_id"])
        listed = [{"id": f"item_{i}", **item} for i, item in enumerate(stored.items)][-_MAX_LISTED_ITEMS:][::-1]
        more = len(stored.items) > len(listed)
        return json_answer(ItemList(data=listed, first_id=listed[0]["id"], last_id=listed[-1]["id"], has_more=more))

    async def cancel(self, body: bytes, context: RequestContext) -> Answer:
        """POST /v1/responses/{response_id}/cancel: ends one that is on its way; one that has ended stays as it is.

        Raises:
            RequestError: 404 for a response that is not kept.
        """
        stored = self._store.get(context.client, context.path_params["response_id"])
        if stored.run is not None:
            stored.run.abort()
            with contextlib.suppress(TimeoutError):  # it ends with its reader, who may be slow
                await asyncio.wait_for(stored.ended.wait(), _CANCEL_TIMEOUT_S)
        return Answer(once(stored.builder.encoded()), streamed=False)

    async def delete(self, body: bytes, context: RequestContext) -> Answer:
        """DELETE /v1/responses/{response_id}; one that is on its way is cancelled.

        Raises:
            RequestError: 404 for a response that is not kept.
        """
        stored = self._store.delete(context.client, context.path_params["response_id"])
        if stored.run is not None:
            stored.run.abort()
        return json_answer(DeletedResponse(stored.id))

    def _earlier(self, request: ResponsesRequest, context: RequestContext) -> tuple[list[dict[str, Any]], int]:
        """The conversation that the request goes on from, and its bytes."""
        if request.previous_response_id is None:
            return [], 0
        try:
            stored = self._store.get(context.client, request.previous_response_id)
        except RequestError as error:
            raise RequestError(
                f"Previous response {request.previous_response_id!r} not found; a replica keeps those it made, "
                "for a while.",
                code="previous_response_not_found",
                param="previous_response_id",
                status=404,
            ) from error
        if stored.run is not None:
            raise RequestError("The previous response has not ended yet.", param="previous_response_id", status=409)
        return stored.conversation(), stored.num_bytes

    def _in_background(self, stored: StoredResponse, context: RequestContext, *, streamed: bool) -> Answer:
        queued = stored.builder.queue()
        if streamed:
            stored.log = EventLog()
            stored.log.append(queued)
        body = stored.builder.encoded()
        task = asyncio.create_task(self._make(stored, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        release = context.keep_slot()
        task.add_done_callback(lambda _: release())
        if stored.log is not None:
            return Answer(stored.log.follow(), streamed=True)
        return Answer(once(body), streamed=False)

    async def _make(self, stored: StoredResponse, context: RequestContext) -> None:
        """Makes a background response to its end, whatever that is."""
        log = stored.log
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        with self._requests.track(context, task) as request:
            try:
                async with aclosing(self._events(stored, context)) as chunks:
                    async for chunk in chunks:
                        if log is not None:
                            log.append(chunk)
            except asyncio.CancelledError:
                if request.error is None:
                    raise
                last = _failed(stored.builder, request.error)
                if log is not None:
                    log.append(last)
            finally:
                if log is not None:
                    log.close()
                    self._store.grow(context.client, stored, log.num_bytes)

    async def _whole(self, stored: StoredResponse, context: RequestContext) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._events(stored, context)) as chunks:
            async for _ in chunks:
                pass
        if stored.error is not None:
            raise stored.error
        yield stored.builder.encoded()

    async def _events(self, stored: StoredResponse, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Runs the request and builds its response; yields its events.

        Raises:
            RequestError: nothing of a response has been yielded, and nobody was told that there is one.
        """
        builder = stored.builder
        try:
            if builder.response.store and not builder.response.background:
                # Not before it starts: what never starts never ends, and would be kept for good.
                self._store.put(context.client, stored)
            async with aclosing(self._steps(stored)) as steps:
                async for chunk in steps:
                    yield chunk
        except Exception as error:
            connected = self._model.engine.connected
            stored.error = as_request_error(error, context.request_id, engine_is_there=connected)
            if not builder.begun:
                self._store.discard(context.client, stored)
                raise stored.error from error
            yield _failed(builder, stored.error)
        finally:
            run = stored.run
            assert run is not None, "a response is made once"
            builder.abandon(run.usage())  # unless it has ended, its reader went away
            stored.run = None
            stored.ended.set()
            self._store.grow(context.client, stored, len(builder.encoded()))

    async def _steps(self, stored: StoredResponse) -> AsyncGenerator[bytes, None]:
        builder, run = stored.builder, stored.run
        assert run is not None, "a response is made once"
        begun = False
        reason = FinishReason.ABORT
        scores: list[TokenLogprob] = []  # of tokens whose text is yet to come
        async with aclosing(run.deltas()) as steps:
            async for deltas in steps:
                chunk = b"" if begun else builder.begin()
                begun = True
                for delta in deltas:
                    scores += self._scores(run, delta)
                    for event in delta.events:
                        # Only text has log probabilities; those of thinking and of calls have no place to be shown.
                        chunk += builder.say(event.text, scores) if isinstance(event, Content) else tell(builder, event)
                        scores = []
                    reason = delta.finish_reason or reason
                yield chunk
        if reason is FinishReason.ABORT:
            yield builder.cancel(run.usage())
        else:
            yield builder.finish(run.usage(), cut=reason is FinishReason.LENGTH)

    def _scores(self, run: Run, delta: Delta) -> list[TokenLogprob]:
        if not delta.logprobs:
            return []
        tokenizer = self._model.tokenizer
        sampling = run.job.sampling[0][0]
        return token_logprobs(sampling, delta.token_ids, delta.logprobs, tokenizer, tokenizer.token_text)


def _failed(builder: ResponseBuilder, error: RequestError) -> bytes:
    """The last event of a stream that `error` has ended."""
    return builder.fail("server_error" if error.status >= 500 else error.code, str(error))


def _response(request: ResponsesRequest, response_id: str, sampling: SamplingParams, model_name: str) -> Response:
    """The response to `request` before it has any output."""
    text = {"format": {"type": "text"}}
    if request.text is not None:
        text |= request.text.model_dump(by_alias=True, exclude_none=True)
    reasoning = request.reasoning
    return Response(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=Reasoning() if reasoning is None else Reasoning(reasoning.effort, reasoning.summary),
        store=request.kept,
        temperature=sampling.temperature,
        text=text,
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        user=request.user,
    )
