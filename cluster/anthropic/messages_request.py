"""The request of /v1/messages and its blocks, as types that check the values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy, neutral
from cluster.requests.sampling_fields import SamplingFields, StopText
from cluster.requests.shapes import (
    MAX_TOKENS,
    MAX_TOOLS,
    ArgumentsSchema,
    Description,
    FunctionName,
    Other,
    ReasoningEffort,
    Shape,
    by_type,
    filled,
)

# --- Blocks and messages ----------------------------------------------------------------------------------------------


class TextParam(Shape):
    """A piece of text."""

    type: Literal["text"]
    text: str


Texts = Annotated[list[TextParam], Field(fail_fast=True)]


class ThinkingParam(Shape):
    """The model's reasoning in an earlier turn, for templates that read it."""

    type: Literal["thinking"]
    thinking: str


class ToolUseParam(Shape):
    """A call that the model made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


_Output: Any = by_type(text=TextParam)


class ToolResultParam(Shape):
    """The output of a tool that the model used."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[_Output], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


Block = TextParam | ThinkingParam | ToolUseParam | ToolResultParam | Other
_Told: Any = by_type(text=TextParam, tool_result=ToolResultParam)
_Said: Any = by_type(text=TextParam, thinking=ThinkingParam, tool_use=ToolUseParam)


class SystemParam(Shape):
    """Instructions, at the beginning or between turns."""

    role: Literal["system"]
    content: str | Texts


class UserParam(Shape):
    """A turn of the user, or the outputs of tools that the model used."""

    role: Literal["user"]
    content: str | Annotated[list[_Told], Field(min_length=1, fail_fast=True), BeforeValidator(filled)]


class AssistantParam(Shape):
    """An earlier turn of the model. May be empty, because `max_tokens` may cut off a call before its arguments."""

    role: Literal["assistant"]
    content: str | Annotated[list[_Said], Field(fail_fast=True)]


Message = SystemParam | UserParam | AssistantParam

# --- The request ------------------------------------------------------------------------------------------------------


class ToolParam(Shape):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Description | None = None
    input_schema: ArgumentsSchema
    strict: bool | None = None
    defer_loading: bool | None = None
    """Whether the model is shown the tool only once a `tool_reference` in the conversation names it."""


_Tool: Any = by_type(custom=ToolParam)


class ToolChoiceParam(Shape):
    """Whether the model may or must use tools, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Shape):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(Shape):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Shape):
    """The form of the answer's text, and how much the model reasons."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class RequestMetadata(Shape):
    """Accepted, but not used."""

    user_id: str | None = None


class CountTokensRequest(Shape):
    """POST /v1/messages/count_tokens: the fields of a request that determine its prompt."""

    model: str
    messages: list[Annotated[Message, Field(discriminator="role")]] = Field(min_length=1, fail_fast=True)
    system: str | Texts | None = None
    tools: list[_Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(SamplingFields, CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: list[StopText] | None = Field(None, max_length=32, fail_fast=True)
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`, which counts if both are given."""


FIELDS = FieldPolicy(
    {
        **UNSUPPORTED,
        "compaction": neutral(),
        "container": neutral(),
        "mcp_servers": neutral([]),
        "thread": neutral(),
    },
    frozenset(
        {
            "betas",
            "cache_control",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "user_profile_id",
            "workspace_id",
        }
    ),
    {
        **STYLING,
        # This server never clears context, so a request to keep all of it, as Claude Code sends, has no effect.
        "context_management": neutral({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "speed": neutral("standard"),
    },
    {"thinking": ThinkingConfig, "output_config": OutputConfig},
)
