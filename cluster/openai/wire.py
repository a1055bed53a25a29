"""Response bodies: answers, SSE chunks and errors as msgspec structs. Each struct has the form of one OpenAI object."""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.requests.job import Usage


# The next two structs are not visited by the garbage collector, because an answer contains many of them.
class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    """The token's raw bytes, which may be a part of a character."""


class TokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of each token that the usage counts, including the token that ended the text."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Lists of equal length, with one entry for each token that the usage counts. With echo, the prompt's tokens come
    first."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Log probability of each token. Null for a prompt's first token, which has no token before it."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Number of characters of the text before each token."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    """1 for the likeliest token. Null for a prompt token outside the requested likeliest ones."""
    decoded_token: str


PromptLogprobsJson = list[dict[int, PromptLogprob] | None]
"""For each prompt token: token id -> log probability. Null for the first prompt token."""


Reason = Literal["stop", "length", "tool_calls", "abort"]


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str
    """A JSON object as text."""


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    content: str | None
    """The text for the user. Null for an answer with calls only."""
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The reasoning under another name. Clients read one of the two."""
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
    """A piece of a call. The first piece of an index has all fields and empty arguments, which later ones continue."""

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
    """Present with include_usage. Null in every chunk but the last, unless continuous_usage_stats is set."""
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    """Present only in the first chunk."""
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
    """A whole completion, or one chunk of a streamed completion."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | None = None
    object: Literal["text_completion"] = "text_completion"


class ModelCard(msgspec.Struct):
    """A model, with the fields that OpenAI's clients read, and those that Anthropic's read."""

    id: str
    created: int
    """Unix time of the server's start, in seconds."""
    created_at: str
    """`created` in the form of RFC 3339."""
    display_name: str
    max_model_len: int
    tool_template: Literal["own", "generic", "none"]
    """How the model is shown tools: by its own chat template, in the generic form, or not at all."""
    numerics: Literal["exact", "fast"]
    """exact: no bit of a logit depends on the number of ranks or on other requests. fast: bits may depend on both."""
    owned_by: str = "lockstep"
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """All models, on a single page."""

    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: bool = False
    object: Literal["list"] = "list"
