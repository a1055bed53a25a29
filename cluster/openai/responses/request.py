"""What comes in at /v1/responses: the request and its input items as pydantic models, and their translation to a chat.

A response is a chat with other names: items become messages, and every other field becomes the chat field that means
the same. What a chat refuses is refused here too, by its name in this API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.openai.body import validated
from cluster.openai.fields import FieldPolicy, neutral
from cluster.openai.protocol import UNSUPPORTED, SamplingFields
from cluster.openai.schema import Documented
from configs.errors import RequestError

_MAX_METADATA = 16
_MAX_TOKENS = 2**31 - 1
_INCLUDABLE = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})


class _Part(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True
    )


# --- Input items ------------------------------------------------------------------------------------------------------


class TextPart(_Part):
    """Text of a message or of a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(_Part):
    """An earlier answer's refusal."""

    type: Literal["refusal"]
    refusal: str


Parts = list[TextPart | RefusalPart]


class MessageItem(_Part):
    """A turn of the conversation, of this request or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, Documented(str | Parts)]


class FunctionCallItem(_Part):
    """A call the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(_Part):
    """What a function that the model called gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Any, Documented(str | list[TextPart])]


class ReasoningPart(_Part):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInputItem(_Part):
    """What the model thought earlier; templates that want it get it."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = None


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningInputItem
_ITEMS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningInputItem,
}

# --- The request ------------------------------------------------------------------------------------------------------


class FunctionTool(_Part):
    """A function the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(_Part):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: str


class AllowedTools(_Part):
    """`tool_choice` of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1)


class TextFormat(_Part):
    """What the text must look like."""

    type: Literal["text"]


class JsonObjectFormat(_Part):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Part):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(_Part):
    """How the text is written."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(_Part):
    """How much the model thinks."""

    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(_Part):
    """What a stream carries besides its events."""

    include_obfuscation: bool | None = None
    """Without effect: events are never padded."""


_ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    model: str
    input: Annotated[Any, Documented(str | list[InputItem])]
    """A text, or items; read by `input_items`."""
    instructions: str | None = None
    """A system message before everything else; not carried over by `previous_response_id`."""
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    max_tool_calls: int | None = Field(None, ge=1)
    """Without effect: it counts calls of tools that the server runs, and there are none."""
    metadata: dict[str, str] | None = Field(None, max_length=_MAX_METADATA)
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = Field(None, max_length=200)
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    """Keep the response for GET and `previous_response_id`; true unless false."""
    background: bool | None = None
    """Answer at once; the response is made meanwhile. Needs `store`."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: list[Annotated[Any, Documented(FunctionTool)]] | None = Field(None, max_length=128)
    tool_choice: Annotated[Any, Documented(_ToolChoice)] = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = None
    include: list[str] | None = Field(None, max_length=16)
    user: str | None = None

    @property
    def kept(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


FIELDS = FieldPolicy(
    {
        **UNSUPPORTED,
        "access_programs": neutral(),
        "context_management": neutral([]),
        "conversation": neutral(),
        "image": neutral(),
        "moderation": neutral(),
        "prompt": neutral(),
    },
    frozenset(
        {
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        }
    ),
)


def check_options(request: ResponsesRequest) -> None:
    """Raises RequestError for values that only together, or only here, are wrong."""
    if request.background and not request.kept:
        raise RequestError("background needs store to be true.", param="background")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream: true.", param="stream_options")
    for i, wanted in enumerate(request.include or ()):
        if wanted not in _INCLUDABLE:
            raise RequestError(
                f"include[{i}] is not supported by this server.", code="unsupported_parameter", param=f"include[{i}]"
            )
    for key, value in (request.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError(
                "metadata has keys of at most 64 and values of at most 512 characters.", param="metadata"
            )
    for i, tool in enumerate(request.tools or ()):
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            raise RequestError(
                f"tools[{i}].type: this server has no tools of its own, only functions of the caller.",
                code="unsupported_parameter",
                param=f"tools[{i}].type",
            )


# --- Items to messages ------------------------------------------------------------------------------------------------


def input_items(given: object) -> list[dict[str, Any]]:
    """The input as items, each checked.

    Raises:
        RequestError: with the path of the field at fault.
    """
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        raise RequestError("input must be a string or a list of items.", code="invalid_type", param="input")
    if not given:
        raise RequestError("input must hold at least one item.", code="empty_array", param="input")
    return [_checked_item(item, f"input[{i}]") for i, item in enumerate(given)]


def _checked_item(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"{path} must be an object.", code="invalid_type", param=path)
    kind = item.get("type", "message")
    model = _ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"{path}.type must be one of {', '.join(_ITEMS)}.", code="unsupported_parameter", param=f"{path}.type"
        )
    checked = validated(model, item, path)
    if isinstance(checked, MessageItem):
        _texts(checked.content, f"{path}.content")
    elif isinstance(checked, FunctionCallOutputItem):
        _texts(checked.output, f"{path}.output")
    return item


def _texts(content: object, path: str) -> list[dict[str, Any]]:
    """The text parts of `content`, as a chat has them."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a string or a list of text parts.", code="invalid_type", param=path)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text", "text"):
            texts.append(validated(TextPart, part, f"{path}[{i}]").text)
        elif kind == "refusal":
            texts.append(validated(RefusalPart, part, f"{path}[{i}]").refusal)
        else:
            raise RequestError(
                f"{path}[{i}]: this model takes text parts only.",
                code="unsupported_parameter" if isinstance(kind, str) else "invalid_type",
                param=f"{path}[{i}]",
            )
    return [{"type": "text", "text": text} for text in texts]


def chat_messages(items: Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat's messages: what the assistant thought, said and called in one turn is one message.

    Args:
        items: checked by `input_items`, or made by an earlier response.

    Raises:
        RequestError: an output belongs to no call.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    calls: set[str] = set()
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            if item["call_id"] not in calls:
                raise RequestError(f"No function call has the call_id {item['call_id'][:100]!r}.", param="input")
            content = _texts(item["output"], "input")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _texts(item["content"], "input")})
        else:
            turn = _assistant_turn(messages, kind)
            if kind == "message":
                turn["content"] = _texts(item["content"], "input")
            elif kind == "reasoning":
                turn["reasoning_content"] = "\n".join(part["text"] for part in item.get("content") or ())
            else:
                calls.add(item["call_id"])
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
    return messages


def _assistant_turn(messages: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The message that an item of the assistant's belongs to: the last one, or a new one."""
    last = messages[-1] if messages else {}
    begins = {"reasoning": ("reasoning_content", "content", "tool_calls"), "message": ("content", "tool_calls")}
    if last.get("role") != "assistant" or any(last.get(field) for field in begins.get(kind, ())):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# --- Everything else to a chat ----------------------------------------------------------------------------------------


def chat_fields(request: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of the chat that `request` means; only those it names."""
    fields: dict[str, Any] = {
        name: value for name in SamplingFields.model_fields if (value := getattr(request, name)) is not None
    }
    fields["model"] = request.model
    fields["messages"] = messages
    if request.max_output_tokens is not None:
        fields["max_completion_tokens"] = request.max_output_tokens
    if request.with_logprobs:
        fields["logprobs"] = True
        fields["top_logprobs"] = request.top_logprobs or 0
    if request.reasoning is not None and request.reasoning.effort is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        fields["response_format"] = _response_format(request.text.format)
    if request.tools:
        fields["tools"] = [_chat_tool(tool) for tool in request.tools]
        if request.parallel_tool_calls is not None:
            fields["parallel_tool_calls"] = request.parallel_tool_calls
    if request.tool_choice is not None:
        fields["tool_choice"] = _chat_tool_choice(request.tool_choice)
    return fields


def _response_format(text_format: JsonObjectFormat | JsonSchemaFormat) -> dict[str, Any]:
    if isinstance(text_format, JsonObjectFormat):
        return {"type": "json_object"}
    schema = text_format.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _chat_tool(tool: object) -> object:
    """A function as a chat has it: one level deeper. Anything else is left for the chat to refuse."""
    if not isinstance(tool, dict):
        return tool
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        listed = [_chat_tool(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    return choice


_NAMES = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)
"""What a chat calls it, and what this API calls it."""


def in_own_words(error: RequestError) -> RequestError:
    """A chat's error with the names of this API's fields."""
    param = error.param or ""
    for chat_name, name in _NAMES:
        if param.startswith(chat_name):
            # Items and messages do not correspond one to one; their number would mislead.
            own = name if name == "input" else name + param.removeprefix(chat_name)
            return RequestError(str(error).replace(param, own), code=error.code, param=own, status=error.status)
    return error
