"""Bodies to send: whole answers, SSE chunks and error bodies as msgspec structs, each the shape of one OpenAI
object."""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.requests.job import Usage


# The garbage collector has nothing to look for in the next two, of which an answer holds many.
class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    """The token's raw bytes, which need not be whole characters."""


class TokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct):
    """One entry for each token the usage counts, the one that ended the text included."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Aligned lists, one entry for each token the usage counts; with echo the prompt's tokens come first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for a prompt's first token, which nothing precedes."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the text before the token's."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    """1 for the likeliest; None for a prompt token that is not among those asked for."""
    decoded_token: str


PromptLogprobsJson = list[dict[int, PromptLogprob] | None]
"""For each prompt token, by token id; None for the first."""


Reason = Literal["stop", "length", "tool_calls", "abort"]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """JSON text."""


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    content: str | None
    """Null for an answer of calls alone."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The reasoning by its other name: clients read one or the other."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsJson | msgspec.UnsetType = msgspec.UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """The first of an index has everything and empty arguments, the others pieces of the arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    """Present with include_usage: null in every chunk but the last, unless it was asked for in all."""
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present in the first chunk."""
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsJson | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """A whole completion, and also one chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct):
    """A model, with the fields of OpenAI's clients and those of Anthropic's."""

    id: str
    created: int
    """Unix time, seconds."""
    created_at: str
    """The time in the form of RFC 3339."""
    display_name: str
    max_model_len: int
    tool_template: Literal["own", "generic", "none"]
    """How the model is shown tools: by its chat template, in the generic form, or not at all."""
    numerics: Literal["exact", "fast"]
    """exact: not one bit of a logit depends on the number of ranks, or on what else runs."""
    owned_by: str = "lockstep"
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """All models, on the one page there is."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: Literal["list"] = "list"
