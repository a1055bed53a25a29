"""The routes /v1/messages and /v1/messages/count_tokens, from body to answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from cluster.anthropic.message_objects import TokenCount
from cluster.anthropic.message_turns import conversation, output_grammar
from cluster.anthropic.message_writer import MessageWriter
from cluster.anthropic.messages_request import FIELDS, CountTokensRequest, MessagesRequest
from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.requests import checks
from cluster.requests.answer import answer, json_response
from cluster.requests.chat_run import chat_run
from cluster.requests.fields import ignored_header
from cluster.requests.images import LeftOut
from cluster.requests.job import JobOptions
from cluster.requests.served_model import ServedModel
from cluster.text.conversation import Conversation
from configs.errors import ContextLengthError

_Request = TypeVar("_Request", bound=CountTokensRequest)


async def messages(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/messages. Raises RequestError for a bad request."""
    request, ignored, chat = await model.threads.prepared(body, partial(_checked, model, MessagesRequest))
    fields = request
    if request.stop_sequences is not None:
        stops = checks.stops(request.stop_sequences, "stop_sequences", model.server)
        fields = request.model_copy(update={"stop": list(stops.values())})
    thinking = request.thinking
    as_asked = thinking is not None and (thinking.type == "enabled") == (model.formats.reasoning is not None)
    try:
        run, headers = await chat_run(
            model,
            "msg_",
            chat,
            fields,
            context,
            JobOptions(),
            num_bytes=len(body),
            ignored=ignored,
            max_tokens=request.max_tokens,
            own_grammar=output_grammar(request),
            needs_no_telling="thinking" if as_asked else None,
        )
    except ContextLengthError as error:
        error.max_tokens = request.max_tokens  # a prompt that is refused before it is encoded has no number
        raise
    writer = MessageWriter(run, model.model_name, context.request_id)
    return answer(writer, streamed=bool(request.stream), headers=headers)


async def count_tokens(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/messages/count_tokens. Raises RequestError for a bad request."""
    _, ignored, chat = await model.threads.prepared(body, partial(_checked, model, CountTokensRequest))
    count = TokenCount(len(await model.encode_chat(chat, len(body), "count")))
    return json_response(count, ignored_header(ignored))


def _checked(
    model: ServedModel, kind: type[_Request], raw: Mapping[str, Any]
) -> tuple[_Request, list[str], Conversation]:
    """Returns a request, its ignored fields, and the conversation that the model continues. Raises RequestError."""
    # A client may send the whole request to have its tokens counted.
    request, ignored = model.checked(kind, raw, FIELDS, MessagesRequest)
    left_out = LeftOut(model.server)
    chat = conversation(request, left_out)
    return request, [*ignored, *left_out.names], chat
