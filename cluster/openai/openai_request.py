"""Requests of chats and completions, as types that check the values.

This module has the fields, their types and ranges, and says which known fields are refused as not supported, and what
happens to unknown ones. It knows neither tokens nor the engine. `wire` has the types of responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from cluster.requests import checks
from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy
from cluster.requests.json_body import validated
from cluster.requests.sampling_fields import SamplingFields
from cluster.requests.shapes import (
    MAX_TOKENS,
    MAX_TOOLS,
    ArgumentsSchema,
    Checked,
    Description,
    FunctionName,
    Prompts,
    ReasoningEffort,
    Shape,
    by_type,
    filled,
)
from configs.errors import RequestError
from configs.schema import ServerConfig

_MAX_SAFE_INT = 2**53 - 1  # the largest integer that every JSON reader represents exactly
COMPLETION_DEFAULT_MAX_TOKENS = 16


# --- Tools ------------------------------------------------------------------------------------------------------------


class FunctionParam(Shape):
    """A function that the model may call."""

    name: FunctionName
    description: Description | None = None
    parameters: ArgumentsSchema | None = None
    """The JSON schema of the function's arguments, which must be a schema of an object."""
    strict: bool | None = None


class ToolOffer(Shape):
    """A tool that the model may use."""

    type: Literal["function"] = "function"
    function: FunctionParam


class CalledName(Shape):
    """The name of a function."""

    name: FunctionName


class ChosenFunction(Shape):
    """A tool that the answer must call."""

    type: Literal["function"]
    function: CalledName


class AllowedFunctions(Shape):
    """The tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1, fail_fast=True)


class AllowedChoice(Shape):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


_Tool: Any = by_type(function=ToolOffer)
_Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None
_ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[ChosenFunction | AllowedChoice, Field(discriminator="type")] | None
)

# --- Messages ---------------------------------------------------------------------------------------------------------


class ContentPart(Shape):
    """A piece of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Shape):
    """The refusal in an earlier answer of the model."""

    type: Literal["refusal"]
    refusal: str


_Part: Any = by_type(text=ContentPart, input_text=ContentPart, output_text=ContentPart)
_Said: Any = by_type(text=ContentPart, input_text=ContentPart, output_text=ContentPart, refusal=RefusalPart)
Content = str | Annotated[list[_Part], Field(fail_fast=True)]


def decoded_arguments(given: dict[str, Any] | str | None) -> dict[str, Any] | str:
    """The arguments of a call, as in `Call.arguments`. Raises RequestError for JSON that is not an object."""
    decoded: Any = given
    if isinstance(given, str):
        try:
            decoded = msgspec.json.decode(given) if given.strip() else {}
        except (ValueError, RecursionError):
            return given
    if not isinstance(decoded, dict | None):
        raise RequestError("must be a JSON object, or one written as a string")
    return decoded or {}


class CalledFunction(Shape):
    """The function that a call names."""

    name: str = Field(min_length=1)
    arguments: Annotated[str | dict[str, Any] | None, AfterValidator(decoded_arguments)] = None
    """A JSON object, or a string that contains a JSON object."""


class ToolCallParam(Shape):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class PromptMessage(Shape):
    """A turn of the user, or instructions."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantTurn(Shape):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: str | Annotated[list[_Said], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    """The text of a refusal, if `content` is empty."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`, which counts if both are given."""


class ToolMessage(Shape):
    """The output of a tool that the model called."""

    role: Literal["tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None


def _supported(message: Any) -> Any:
    """Returns `message` unchanged, or raises RequestError if it has a role or field that is not supported."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "function":
        raise RequestError("must not be function; use the role tool", code="unsupported_parameter", param="role")
    for key in ("function_call", "audio"):
        if message.get(key):
            raise RequestError("is not supported; leave it out", code="unsupported_parameter", param=key)
    if message.get("tool_calls") and message.get("role") != "assistant":
        raise RequestError("is only allowed for an assistant, because only it calls tools", param="tool_calls")
    return message


Message = PromptMessage | AssistantTurn | ToolMessage
_Message = Annotated[Annotated[Message, Field(discriminator="role")], BeforeValidator(_supported)]
Messages = Annotated[list[_Message], Field(min_length=1, fail_fast=True), BeforeValidator(filled)]

# --- Requests ---------------------------------------------------------------------------------------------------------


class StreamOptions(Shape):
    """What a stream contains besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk contains the usage so far."""


class GenerationRequest(SamplingFields):
    """The fields that chat completions and completions share."""

    model: str
    """The model's name in /v1/models."""
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens of the answer."""
    n: int | None = Field(None, ge=1)
    """Number of answers to each prompt."""
    stream: bool | None = None
    """Whether the answer is sent as server-sent events."""
    stream_options: StreamOptions | None = None
    """Whether a stream ends with the usage (`include_usage`), and whether every chunk contains it."""
    prompt_logprobs: int | None = Field(None, ge=0)
    """Returns log probabilities of the prompt's tokens, and of this number of likeliest tokens at each position."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    """Number of the prompt's last tokens to keep. -1: as many as fit."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens such as BOS. If null, it does for a completion's prompt, and not for a
    chat's text."""
    return_token_ids: bool | None = None
    """Whether the answer contains the ids of the prompt's tokens and of its own tokens."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name a token `token_id:<id>` instead of by its text."""
    priority: int | None = Field(None, ge=-_MAX_SAFE_INT, le=_MAX_SAFE_INT)
    """Lower goes first among the client's requests. Across clients it counts within the range granted to the key."""
    cache_salt: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")
    """Only prompts with the same salt share cached pages. If null, the client's own salt is used."""
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """The answer's id without its prefix. If null, a random id."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of likeliest tokens at each prompt position. -1: no prompt log probabilities."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs


def _limit(value: int | None) -> int | None:
    if value == 0:
        raise RequestError("must be at least 1, or -1 for the most that fit")
    return MAX_TOKENS if value == -1 else value


_LIMITS: Any = [{"enum": [-1]}, {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}, {"type": "null"}]
_Limit = Annotated[
    int | None, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_limit), WithJsonSchema({"anyOf": _LIMITS, "default": None})
]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    max_tokens: _Limit = None
    """Maximum number of tokens of the answer. -1 or null: the most that fit, or a default of the operator for null."""
    messages: Messages
    """The conversation, oldest message first."""
    max_completion_tokens: _Limit = None
    """Newer name of max_tokens, which counts if both are given."""
    logprobs: bool | None = None
    """Whether the answer contains log probabilities of its tokens."""
    top_logprobs: int | None = Field(None, ge=0)
    """Number of likeliest tokens that are returned at each position, besides the sampled one."""
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the beginning of an answer. If null, true unless a message is continued."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message."""
    documents: list[dict[str, Any]] | None = Field(None, max_length=1024)
    """Objects with `title` and `text`, for chat templates that read documents."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template. Variables that it does not read are ignored."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model should reason, for chat templates that read this."""
    include_reasoning: bool | None = None
    """Whether the answer shows the model's reasoning. Reasoning tokens are counted either way. Null means true."""
    tools: Annotated[list[dict[str, Any]] | None, Checked(_Tools)] = None
    """Functions that the model may call."""
    tool_choice: Annotated[str | dict[str, Any] | None, Checked(_ToolChoice)] = None
    """none, auto, required, or the function to call. Null means auto."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Null means true."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        """Number of likeliest tokens at each position of the answer. -1: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts
    """A text, token ids, or a list of either kind. Each prompt gets its own answers."""
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    """0 is allowed with `echo` or `prompt_logprobs`, for a request that only needs the prompt. If null, 16."""
    logprobs: int | None = Field(None, ge=0)
    """Returns log probabilities of the answer's tokens, and of this number of likeliest tokens at each position."""
    echo: bool | None = None
    """Whether the answer's text begins with the prompt, and its log probabilities with those of the prompt."""

    @property
    def num_logprobs(self) -> int:
        """Number of likeliest tokens at each position of the answer. -1: no log probabilities."""
        return -1 if self.logprobs is None else self.logprobs


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)


WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields that are accepted and change no answer."""

_FIELDS = FieldPolicy(UNSUPPORTED, WITHOUT_EFFECT, STYLING, {"stream_options": StreamOptions})


def check_request(kind: type[_Request], raw: Mapping[str, Any], server: ServerConfig) -> tuple[_Request, list[str]]:
    """Checks a request of decoded JSON. Returns the request and the names of ignored fields. Raises RequestError with
    the path of the wrong field."""
    asked = {name: value for name, value in raw.items() if name != "best_of" or value != raw.get("n")}
    ignored = _FIELDS.check(kind, asked, strict=server.strict_fields)
    request = validated(kind, raw)
    _check_counts(request, server)
    return request, ignored


def _check_counts(request: ChatRequest | CompletionRequest, server: ServerConfig) -> None:
    """Checks limits that are settings, and fields that depend on each other."""
    checks.num_sequences(request.n or 1, 1, "n", server)
    if isinstance(request, ChatRequest):
        name = "top_logprobs"
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param=name)
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one.",
                param="continue_final_message",
            )
    else:
        name = "logprobs"
        if request.echo and request.stream and request.logprobs is not None and request.n not in (None, 1):
            raise RequestError("echo with logprobs and stream: true needs n=1.", param="n")
        if request.max_tokens == 0 and not (request.echo or request.prompt_logprobs is not None):
            raise RequestError("max_tokens must be at least 1 without echo or prompt_logprobs.", param="max_tokens")
    for param, count in ((name, request.num_logprobs), ("prompt_logprobs", request.num_prompt_logprobs)):
        checks.num_logprobs(count, param, server)
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is not allowed with stream: true.", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream: true.", param="stream_options")
