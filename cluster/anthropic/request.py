"""What comes in at /v1/messages: the request and its blocks as pydantic models, and their translation to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from cluster.requests.body import validated
from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy, message_names, neutral, own_name, renamed
from cluster.requests.sampling_fields import SamplingFields
from cluster.requests.schema import Documented
from configs.errors import RequestError

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
_BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
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

    effort: str | None = None
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
    stop_sequences: list[str] | None = None
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

# --- To a chat --------------------------------------------------------------------------------------------------------


def chat_fields(request: CountTokensRequest) -> tuple[dict[str, Any], list[str]]:
    """The fields of the chat that `request` means, only those it names; and where each of its messages comes from.

    Raises:
        RequestError: with the path of the field at fault.
    """
    messages, sources = _messages(request)
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    if fields["messages"][-1]["role"] == "assistant":
        # The answer goes on where the caller's beginning of it ends.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(request, MessagesRequest):
        fields |= {name: value for name in SamplingFields.model_fields if (value := getattr(request, name)) is not None}
        fields["max_completion_tokens"] = request.max_tokens
        if request.stop_sequences is not None:
            fields["stop"] = request.stop_sequences
    if request.tools:
        fields["tools"] = [_chat_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        fields |= _chat_tool_choice(request.tool_choice)
    if request.thinking is not None and request.thinking.type != "adaptive":
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking.type == "enabled"}
    output = request.output_config
    if output is not None and output.effort is not None:
        fields["reasoning_effort"] = output.effort
    if output is not None and output.format is not None:
        schema = {"name": "output", "strict": True, "schema": output.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields, sources


def _chat_tool(tool: ToolParam) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    for name in ("description", "strict"):
        if (value := getattr(tool, name)) is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: ToolChoiceParam) -> dict[str, Any]:
    fields: dict[str, Any] = {"tool_choice": {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)}
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError(
                "tool_choice.name is required.", code="missing_required_parameter", param="tool_choice.name"
            )
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _messages(request: CountTokensRequest) -> tuple[list[dict[str, Any]], list[str]]:
    messages: list[dict[str, Any]] = []
    sources: list[str] = []
    if request.system is not None:
        messages.append({"role": "system", "content": _texts(_blocks(request.system, "system", "system"))})
        sources.append("system")
    for i, given in enumerate(request.messages):
        path = f"messages[{i}]"
        message = validated(MessageParam, given, path)
        blocks = _blocks(message.content, message.role, f"{path}.content")
        if message.role == "assistant":
            messages.append(_assistant_message(blocks))
            sources.append(path)
            continue
        results = [block for block in blocks if isinstance(block, ToolResultParam)]
        messages += [_tool_message(result, f"{path}.content") for result in results]
        if len(results) < len(blocks):
            messages.append({"role": message.role, "content": _texts(blocks)})
        sources += [path] * (len(messages) - len(sources))
    return messages, sources


def _blocks(content: object, role: str, path: str) -> list[Block]:
    """The blocks of `content`, each checked."""
    if isinstance(content, str):
        return [TextParam(type="text", text=content)]
    if not isinstance(content, list) or not content:
        raise RequestError(f"{path} must be a string or a list of blocks.", code="invalid_type", param=path)
    blocks = []
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise RequestError(f"{path}[{i}] must be an object.", code="invalid_type", param=f"{path}[{i}]")
        kind = block.get("type")
        model = _BLOCKS[role].get(kind) if isinstance(kind, str) else None
        if model is None:
            raise RequestError(
                f"{path}[{i}].type must be one of {', '.join(_BLOCKS[role])}.",
                code="unsupported_parameter",
                param=f"{path}[{i}].type",
            )
        blocks.append(validated(model, block, f"{path}[{i}]"))
    return blocks


def _texts(blocks: list[Block]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} for block in blocks if isinstance(block, TextParam)]


def _assistant_message(blocks: list[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _texts(blocks) or ""}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingParam)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if uses := [block for block in blocks if isinstance(block, ToolUseParam)]:
        message["tool_calls"] = [
            {
                "id": use.id,
                "type": "function",
                "function": {"name": use.name, "arguments": msgspec.json.encode(use.input).decode()},
            }
            for use in uses
        ]
    return message


def _tool_message(result: ToolResultParam, path: str) -> dict[str, Any]:
    content = [] if result.content is None else _texts(_blocks(result.content, "system", path))
    if result.is_error:
        # A chat's tool message has no other place for it.
        content.insert(0, {"type": "text", "text": "Error:"})
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": content or ""}


_NAMES = (
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    (r"response_format\.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"chat_template_kwargs\.enable_thinking", "thinking"),
)
"""What a chat calls it, and what this API calls it."""


def in_own_words(error: RequestError, sources: Sequence[str]) -> RequestError:
    """A chat's error with the names of this API's fields.

    Args:
        sources: from `chat_fields`.
    """
    return renamed(error, [*_NAMES, *message_names(sources, calls="content")])


def ignored_options(request: CountTokensRequest, unread: Sequence[str], *, thinks: bool) -> list[str]:
    """Options of `request` that the model's template does not read, by their names here.

    Args:
        unread: as a chat calls them.
        thinks: whether the model thinks, unless its template can be told not to.
    """
    own = [own_name(path, _NAMES) for path in unread]
    if request.thinking is not None and (request.thinking.type == "enabled") == thinks:
        return [name for name in own if name != "thinking"]  # it is as asked for, without being told
    return own
