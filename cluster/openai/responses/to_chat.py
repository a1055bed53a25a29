"""A response is a chat with other names: items become messages, every other field the chat's that means the same.

What a chat refuses is refused here too, by its name in this API.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.openai.responses.request import (
    ITEMS,
    FunctionCallOutputItem,
    InputTokensRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    RefusalPart,
    ResponsesRequest,
    TextPart,
)
from cluster.requests.body import validated
from cluster.requests.fields import message_names, own_name, renamed
from cluster.requests.sampling_fields import SamplingFields
from configs.errors import RequestError

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

# --- Items to messages ------------------------------------------------------------------------------------------------


def input_items(given: object) -> list[dict[str, Any]]:
    """The input as items, each checked, with its type and an id.

    Raises:
        RequestError: with the path of the field at fault.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        raise RequestError("input must be a string or a list of items.", code="invalid_type", param="input")
    if not given:
        raise RequestError("input must hold at least one item.", code="empty_array", param="input")
    return [_checked_item(item, f"input[{i}]") for i, item in enumerate(given)]


def _checked_item(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"{path} must be an object.", code="invalid_type", param=path)
    kind = item.get("type", "message")
    model = ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"{path}.type must be one of {', '.join(ITEMS)}.", code="unsupported_parameter", param=f"{path}.type"
        )
    checked = validated(model, item, path)
    if isinstance(checked, MessageItem):
        _texts(checked.content, f"{path}.content")
    elif isinstance(checked, FunctionCallOutputItem):
        _texts(checked.output, f"{path}.output")
    given_id = item.get("id")
    named = given_id if isinstance(given_id, str) and given_id else f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"
    return {**item, "type": kind, "id": named}


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


def chat_messages(
    items: Sequence[Mapping[str, Any]], instructions: str | None, num_earlier: int = 0
) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as a chat's messages, and where each comes from: what the assistant thought, said and called in
    one turn is one message.

    Args:
        items: checked by `input_items`, or made by an earlier response.
        num_earlier: of `items`, how many are not of this request.

    Raises:
        RequestError: an output belongs to no call.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    sources = ["instructions"] * len(messages)
    calls: set[str] = set()
    for i, item in enumerate(items, -num_earlier):
        kind = item.get("type", "message")
        source = "previous_response_id" if i < 0 else f"input[{i}]"
        if kind == "function_call_output":
            if item["call_id"] not in calls:
                param = f"{source}.call_id"
                raise RequestError(f"{param}: no function call has the id {item['call_id'][:100]!r}.", param=param)
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
        sources += [source] * (len(messages) - len(sources))
    return messages, sources


def _assistant_turn(messages: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The message that an item of the assistant's belongs to: the last one, or a new one."""
    last = messages[-1] if messages else {}
    begins = {"reasoning": ("reasoning_content", "content", "tool_calls"), "message": ("content", "tool_calls")}
    if last.get("role") != "assistant" or any(last.get(field) for field in begins.get(kind, ())):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


# --- Everything else to a chat ----------------------------------------------------------------------------------------


def chat_fields(
    request: ResponsesRequest | InputTokensRequest, messages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The fields of the chat that `request` means; only those it names."""
    fields: dict[str, Any] = {"model": request.model, "messages": messages}
    if isinstance(request, ResponsesRequest):
        fields |= {name: value for name in SamplingFields.model_fields if (value := getattr(request, name)) is not None}
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
    (r"response_format\.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.(?:function|allowed_tools)", "tool_choice"),
)
"""What a chat calls it, and what this API calls it."""


def in_own_words(error: RequestError, sources: Sequence[str]) -> RequestError:
    """A chat's error with the names of this API's fields.

    Args:
        sources: from `chat_messages`.
    """
    return renamed(error, [*_NAMES, *message_names(sources, calls=""), ("messages", "input")])


def own_names(paths: Sequence[str]) -> list[str]:
    """Paths of a chat's fields, as this API calls them."""
    return [own_name(path, _NAMES) for path in paths]
