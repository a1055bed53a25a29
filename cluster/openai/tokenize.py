"""The routes /tokenize and /detokenize: the token ids of a text or a chat, and the text of token ids.

Clients and load generators use them for counting. A request with the same fields would run on the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from pydantic import ConfigDict, Field

from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.openai.chat_turns import conversation
from cluster.openai.openai_request import ChatRequest, Messages, check_request
from cluster.requests.answer import json_response
from cluster.requests.checks import check_token_ids
from cluster.requests.fields import OWN_FIELDS, ignored_header
from cluster.requests.images import LeftOut
from cluster.requests.json_body import validated
from cluster.requests.json_parts import long_list
from cluster.requests.served_model import ServedModel
from cluster.requests.shapes import Shape, TokenId, exactly_one
from cluster.text.conversation import Conversation
from configs.errors import RequestError

_OWN_FIELDS = frozenset({"prompt", "messages", "model", "add_special_tokens", "return_token_strs"})


class TokenizeRequest(Shape):
    """POST /tokenize: a `prompt`, or `messages` with any chat field that the chat template reads."""

    model_config = ConfigDict(extra="allow", json_schema_extra=exactly_one(prompt="string", messages="array"))

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens are added to a prompt. Null means true. Not for messages: templates write them."""
    return_token_strs: bool | None = None


class Tokens(msgspec.Struct):
    """The tokens of a text or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Shape):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)


class Text(msgspec.Struct):
    """The text of token ids, including special tokens."""

    prompt: str


async def tokenize(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /tokenize. Raises RequestError for a bad request."""
    request, tokens, ignored = await model.threads.prepared(body, partial(_checked, model))
    if not isinstance(tokens, list):
        tokens = await model.encode_chat(tokens, len(body), "count")
    strings = long_list(map(model.tokenizer.token_text, tokens)) if request.return_token_strs else None
    shown = Tokens(len(tokens), model.max_model_len, long_list(tokens), strings)
    return json_response(shown, ignored_header(ignored))


def _checked(model: ServedModel, raw: Mapping[str, Any]) -> tuple[TokenizeRequest, list[int] | Conversation, list[str]]:
    """Returns a request, its prompt's tokens or its conversation, and the ignored fields."""
    request = validated(TokenizeRequest, raw)
    model.check_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Give either prompt or messages.", code="missing_required_parameter", param="prompt")
    if request.prompt is not None:
        ignored = OWN_FIELDS.check(TokenizeRequest, raw, strict=model.server.strict_fields)
        special = request.add_special_tokens is not False
        return request, model.prompts.encode(request.prompt, add_special_tokens=special, use="count"), ignored
    if request.add_special_tokens:
        raise RequestError(
            "add_special_tokens is not for messages; leave it out.",
            code="unsupported_parameter",
            param="add_special_tokens",
        )
    fields = {name: value for name, value in raw.items() if name not in _OWN_FIELDS}
    chat = {**fields, "model": model.model_name, "messages": raw["messages"]}
    whole, ignored = check_request(ChatRequest, chat, model.server)
    left_out = LeftOut(model.server)
    turns = conversation(whole, left_out)
    return request, turns, [*ignored, *left_out.names]


async def detokenize(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /detokenize. Raises RequestError for a bad request."""

    def text(raw: Mapping[str, Any]) -> tuple[str, list[str]]:
        request, ignored = model.checked(DetokenizeRequest, raw, OWN_FIELDS)
        check_token_ids(request.tokens, "tokens", model.vocab_size)
        return model.tokenizer.decode(request.tokens, skip_special_tokens=False), ignored

    decoded, ignored = await model.threads.prepared(body, text)
    return json_response(Text(decoded), ignored_header(ignored))
