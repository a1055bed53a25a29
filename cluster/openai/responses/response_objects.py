"""Objects that /v1/responses sends: the response object, its output items, and the events of a stream.

Names and order of the fields are OpenAI's. Every struct is plain data, which `response_writer` fills.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cluster.openai.wire import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

# --- Output items -----------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    """Always empty, because this server cites nothing."""
    logprobs: list[TokenLogprob] = []
    """Log probabilities of each token of the text, if `include` asks for them."""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message with the model's answer."""

    id: str
    content: list[OutputText] = []
    status: ItemStatus = "in_progress"
    role: Literal["assistant"] = "assistant"


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A piece of the text in a reasoning item."""

    text: str = ""


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer."""

    id: str
    content: list[ReasoningText] = []
    summary: list[Any] = []
    """Always empty: the whole reasoning is in `content`."""
    status: ItemStatus = "in_progress"


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call that the model makes to a function."""

    id: str
    call_id: str
    """The id with which the caller's `function_call_output` names this call."""
    name: str
    arguments: str = ""
    """The arguments as JSON text."""
    namespace: str | msgspec.UnsetType = msgspec.UNSET
    """The function's namespace, if it has one."""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | CallItem

# --- The response -----------------------------------------------------------------------------------------------------


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, kw_only=True):
    """One response, which is complete or in progress."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time in seconds."""
    status: Status
    completed_at: int | None = None
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningSettings
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(msgspec.Struct):
    """The answer to a DELETE of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """The answer to /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


# --- Events -----------------------------------------------------------------------------------------------------------


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int
    """Number of earlier events in the stream."""


class _Lifecycle(_Event, kw_only=True):
    response: Response


class ResponseCreated(_Lifecycle, tag="response.created"):
    """The first event."""


class ResponseInProgress(_Lifecycle, tag="response.in_progress"):
    """The response has begun."""


class ResponseCompleted(_Lifecycle, tag="response.completed"):
    """The last event of a complete response."""


class ResponseIncomplete(_Lifecycle, tag="response.incomplete"):
    """The last event of a response that `max_output_tokens` or a cancel cut off."""


class ResponseFailed(_Lifecycle, tag="response.failed"):
    """The last event of a response that an error ended."""


class _ItemEvent(_Event, kw_only=True):
    output_index: int


class OutputItemAdded(_ItemEvent, tag="response.output_item.added", kw_only=True):
    item: OutputItem


class OutputItemDone(_ItemEvent, tag="response.output_item.done", kw_only=True):
    item: OutputItem


class _InnerEvent(_ItemEvent, kw_only=True):
    item_id: str


class _PartEvent(_InnerEvent, kw_only=True):
    content_index: int = 0


class ContentPartAdded(_PartEvent, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class ContentPartDone(_PartEvent, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class OutputTextDelta(_PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = []


class OutputTextDone(_PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningTextDelta(_PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningTextDone(_PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class FunctionCallArgumentsDelta(_InnerEvent, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class FunctionCallArgumentsDone(_InnerEvent, tag="response.function_call_arguments.done", kw_only=True):
    arguments: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
)
