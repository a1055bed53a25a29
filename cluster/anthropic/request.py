"""What comes in at /v1/messages: the request and its blocks as pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy, neutral
from cluster.requests.sampling_fields import ReasoningEffort, SamplingFields
from cluster.requests.schema import Documented

_MAX_TOKENS = 2**31 - 1


class _Part(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True
    )


# --- Blocks and messages ----------------------------------------------------------------------------------------------


class TextParam(_Part):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingParam(_Part):
    """What the model thought in an earlier turn; templates that want it get it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingParam(_Part):
    """Thinking of another server's model: nothing that this one can read."""

    type: Literal["redacted_thinking"]


class ToolUseParam(_Part):
    """A call the model made earlier."""

    type: Literal["tool_use"]
    id: str
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ToolResultParam(_Part):
    """What a tool that the model used gave back."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Any, Documented(str | list[TextParam] | None)] = None
    is_error: bool | None = None


Block = TextParam | ThinkingParam | RedactedThinkingParam | ToolUseParam | ToolResultParam
BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": {"text": TextParam},
    "user": {"text": TextParam, "tool_result": ToolResultParam},
    "assistant": {
        "text": TextParam,
        "thinking": ThinkingParam,
        "redacted_thinking": RedactedThinkingParam,
        "tool_use": ToolUseParam,
    },
}
"""What the messages of each role may hold."""


class MessageParam(_Part):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, Documented(str | list[Block])]


# --- The request ------------------------------------------------------------------------------------------------------


class ToolParam(_Part):
    """A tool the model may use."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoiceParam(_Part):
    """Whether, and which, tools are used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(_Part):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(_Part):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """What the text must look like, and how much the model thinks."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class RequestMetadata(_Part):
    """Accepted and not used."""

    user_id: str | None = None


class CountTokensRequest(_Part):
    """POST /v1/messages/count_tokens: what of a request makes its prompt."""

    model: str
    messages: Annotated[list[Any], Documented(list[MessageParam]), Field(min_length=1)]
    system: Annotated[Any, Documented(str | list[TextParam] | None)] = None
    tools: list[ToolParam] | None = Field(None, max_length=128)
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(SamplingFields, CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=_MAX_TOKENS)
    stop_sequences: list[str] | None = Field(None, fail_fast=True)
    stream: bool | None = None
    metadata: RequestMetadata | None = None


FIELDS = FieldPolicy(
    {
        **UNSUPPORTED,
        "container": neutral(),
        "context_management": neutral(),
        "mcp_servers": neutral([]),
        "speed": neutral("standard"),
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
    STYLING,
)
