"""The routes /v1/messages and /v1/messages/count_tokens, from body to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.anthropic.builder import MessageBuilder, sse
from cluster.anthropic.errors import anthropic_error
from cluster.anthropic.objects import StopReason, TokenCount
from cluster.anthropic.request import (
    FIELDS,
    CountTokensRequest,
    MessagesRequest,
    chat_fields,
    ignored_options,
    in_own_words,
)
from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.messages import FinishReason
from cluster.openai import protocol
from cluster.openai.chat import unread_fields
from cluster.openai.protocol import ChatRequest
from cluster.openai.serving import chat_job, chat_prompt, refuse_unread, tool_header
from cluster.requests.body import decoded, validated
from cluster.requests.fields import ignored_header
from cluster.requests.generation import Delta
from cluster.requests.http_responses import json_response, timed
from cluster.requests.job import Run
from cluster.requests.served_model import ServedModel
from cluster.text.tools.events import CallStarted, tell
from configs.errors import RequestError


class AnthropicServing:
    """Answers Anthropic's messages API for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def messages(self, body: bytes, context: RequestContext) -> HttpResponse:
        """POST /v1/messages. Raises RequestError for a bad request."""
        model = self._model
        raw = await decoded(body)
        ignored = FIELDS.check(MessagesRequest, raw, strict=model.server.strict_fields)
        request = validated(MessagesRequest, raw)
        fields, sources = chat_fields(request)
        try:
            chat = protocol.check_request(ChatRequest, fields, model.server)
            job = await chat_job(model, "msg_", chat, context)
        except RequestError as error:
            raise in_own_words(error, sources) from error
        thinks = model.formats.reasoning is not None
        unread = ignored_options(request, unread_fields(chat, model.tokenizer), thinks=thinks)
        refuse_unread(unread, model.server)
        builder = MessageBuilder(job.id, model.model_name)
        run = model.run(job)
        headers = {**ignored_header([*ignored, *unread]), **tool_header(model, chat)}
        if not request.stream:
            return timed(HttpResponse(_whole(run, builder), streamed=False, headers=headers), run)
        response = HttpResponse(
            _events(run, builder),
            streamed=True,
            headers=headers,
            failure=lambda error: sse(anthropic_error(error, context.request_id)),
        )
        return timed(response, run)

    async def count_tokens(self, body: bytes, context: RequestContext) -> HttpResponse:
        """POST /v1/messages/count_tokens. Raises RequestError for a bad request."""
        model = self._model
        raw = await decoded(body)
        # Whoever counts may send the whole request.
        ignored = FIELDS.check(MessagesRequest, raw, strict=model.server.strict_fields)
        request = validated(CountTokensRequest, raw)
        fields, sources = chat_fields(request)
        try:
            chat = protocol.check_request(ChatRequest, fields, model.server)
            model.check_name(chat.model)
            count = TokenCount(len(await chat_prompt(model, chat)))
        except RequestError as error:
            raise in_own_words(error, sources) from error
        return json_response(count, ignored_header(ignored))


async def _whole(run: Run, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    async with aclosing(_events(run, builder)) as chunks:
        async for _ in chunks:
            pass
    yield builder.encoded()


async def _events(run: Run, builder: MessageBuilder) -> AsyncGenerator[bytes, None]:
    """Runs the request and builds its message; yields its events."""
    begun = False
    called = False
    last: Delta | None = None
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            chunk = b"" if begun else builder.begin(run.usage())
            begun = True
            for delta in deltas:
                for event in delta.events:
                    chunk += tell(builder, event)
                    called = called or isinstance(event, CallStarted)
                last = delta
            if chunk:
                yield chunk
    assert last is not None, "a sequence ends with a delta"
    yield builder.finish(*_stop(last, called=called), run.usage())


def _stop(last: Delta, *, called: bool) -> tuple[StopReason, str | None]:
    """Why the model stopped, and the stop sequence that made it."""
    if last.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(last.stop_reason, str):
        return "stop_sequence", last.stop_reason
    return "tool_use" if called else "end_turn", None
