"""The routes /v1/messages and /v1/messages/count_tokens, from body to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from cluster.anthropic.builder import MessageBuilder, sse
from cluster.anthropic.conversation import conversation, output_grammar
from cluster.anthropic.errors import anthropic_error
from cluster.anthropic.objects import StopReason, TokenCount
from cluster.anthropic.request import FIELDS, CountTokensRequest, MessagesRequest
from cluster.engine.messages import FinishReason
from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.requests import checks
from cluster.requests.body import prepared, validated
from cluster.requests.chat import chat_job, refuse_unread, tool_header
from cluster.requests.fields import ignored_header
from cluster.requests.generation import Delta
from cluster.requests.http_responses import json_response, timed
from cluster.requests.job import JobOptions, Run
from cluster.requests.served_model import ServedModel
from cluster.text.conversation import Conversation
from cluster.text.tools.events import CallStarted, tell

_Request = TypeVar("_Request", bound=CountTokensRequest)


class AnthropicServing:
    """Answers Anthropic's messages API for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def messages(self, body: bytes, context: RequestContext) -> HttpResponse:
        """POST /v1/messages. Raises RequestError for a bad request."""
        model = self._model
        ignored, request, chat = await prepared(body, partial(self._checked, MessagesRequest))
        fields = request
        if request.stop_sequences is not None:
            stops = checks.stops(request.stop_sequences, "stop_sequences", model.server)
            fields = request.model_copy(update={"stop": list(stops.values())})
        job = await chat_job(
            model,
            "msg_",
            chat,
            fields,
            context,
            JobOptions(),
            max_tokens=request.max_tokens,
            own_grammar=output_grammar(request),
        )
        unread = chat.unread(model.tokenizer.template)
        thinking = request.thinking
        if thinking is not None and (thinking.type == "enabled") == (model.formats.reasoning is not None):
            unread = [path for path in unread if path != "thinking"]  # it is as asked for, without being told
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
        ignored, _, chat = await prepared(body, partial(self._checked, CountTokensRequest))
        count = TokenCount(len(await model.prompts.encode_chat(chat)))
        return json_response(count, ignored_header(ignored))

    def _checked(self, kind: type[_Request], raw: Mapping[str, Any]) -> tuple[list[str], _Request, Conversation]:
        """The fields that are ignored, the request, and what it has the model go on with. Raises RequestError."""
        # Whoever counts may send the whole request.
        ignored = FIELDS.check(MessagesRequest, raw, strict=self._model.server.strict_fields)
        request = validated(kind, raw)
        self._model.check_name(request.model)
        return ignored, request, conversation(request)


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
