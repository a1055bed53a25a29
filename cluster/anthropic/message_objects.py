"""Objects of /v1/messages, with Anthropic's names: the message, its content blocks, the events of a stream, and
errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from configs.errors import ContextLengthError, RequestError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""
    """Always empty, because this server accepts its own reasoning without a signature."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = {}


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Token counts. The prompt's tokens are `input_tokens` plus `cache_read_input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """The model's answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """The answer to /v1/messages/count_tokens."""

    input_tokens: int


# --- Events -----------------------------------------------------------------------------------------------------------


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AnthropicMessage


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


# --- Errors -----------------------------------------------------------------------------------------------------------


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """The body of every error response of these routes, and the last event of a stream that failed."""

    error: AnthropicErrorDetail
    request_id: str | None = None

    @classmethod
    def of(cls, error: RequestError, request_id: str | None = None) -> AnthropicError:
        """The body that shows `error` to clients."""
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        words = _too_long(error) if isinstance(error, ContextLengthError) else str(error)
        return cls(AnthropicErrorDetail(kind, words), request_id)


def _too_long(error: ContextLengthError) -> str:
    """Both sentences that Anthropic's API has for this error. Claude Code reads the numbers of the first, and others
    recognise the second."""
    prompt, limit = error.num_prompt_tokens, error.max_model_len
    first = f"input length and `max_tokens` exceed context limit: {prompt} + {error.max_tokens} > {limit}; "
    return first * (error.max_tokens > 0) + f"prompt is too long: {prompt} tokens > {limit} maximum"


MessageEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError
)
