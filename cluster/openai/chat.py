"""A request of chat completions as a conversation: each message checked, and what is wrong named by its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cluster.openai.protocol import ChatRequest
from cluster.openai.tool_fields import parse_tools
from cluster.text.conversation import Call, Conversation, Role, TemplateOption, Turn
from configs.errors import RequestError

# `developer` is the newer name of `system`, which is what templates know.
_ROLES: Mapping[str, Role] = {
    "assistant": "assistant",
    "developer": "system",
    "system": "system",
    "tool": "tool",
    "user": "user",
}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_OWN_VARIABLES = frozenset({"chat_template", "tokenize", "messages", "tools", "documents", "add_generation_prompt"})


def conversation(request: ChatRequest) -> Conversation:
    """What `request` has the model go on with. Raises RequestError, with the path of the field at fault."""
    tools = parse_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    turns = parse_turns(request.messages)
    options = []
    for name, value in (request.chat_template_kwargs or {}).items():
        path = f"chat_template_kwargs.{name}"
        if name in _OWN_VARIABLES:
            raise RequestError(f"{path} is not allowed.", code="unsupported_parameter", param=path)
        options.append(TemplateOption(name, value, path))
    if request.reasoning_effort is not None:
        options.append(TemplateOption("reasoning_effort", request.reasoning_effort, "reasoning_effort"))
    if request.continue_final_message and not turns[-1].text:
        raise RequestError("The final message has no content to continue.", param="continue_final_message")
    return Conversation(
        turns=turns,
        tools=tools,
        documents=request.documents,
        options=options,
        continue_final=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt is not False,
        add_special_tokens=bool(request.add_special_tokens),
    )


def parse_turns(messages: object) -> list[Turn]:
    """The turns of a list of messages.

    Raises:
        RequestError: with the path of the field at fault, e.g. `messages[0].content`.
    """
    if not isinstance(messages, list):
        raise RequestError("messages must be a list of messages.", code="invalid_type", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message.", code="empty_array", param="messages")
    return [_parse_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _parse_turn(message: object, path: str) -> Turn:
    if not isinstance(message, dict):
        raise RequestError(f"{path} must be an object.", code="invalid_type", param=path)
    role = message.get("role")
    if role == "function":
        raise RequestError(
            f"{path}.role=function is not supported.", code="unsupported_parameter", param=f"{path}.role"
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(sorted(_ROLES))}.", param=f"{path}.role")
    for key in ("function_call", "audio"):
        if message.get(key):
            raise RequestError(f"{path}.{key} is not supported.", code="unsupported_parameter", param=f"{path}.{key}")
    calls = _parse_calls(message.get("tool_calls"), role, f"{path}.tool_calls")
    content = message.get("content")
    text = "" if content is None and role in ("assistant", "tool") else _flatten(content, f"{path}.content")
    name, call_id = (_optional_text(message, key, path) for key in ("name", "tool_call_id"))
    # Two names of one thing; both are checked, also where the first is the one that counts.
    thoughts = [_optional_text(message, key, path) for key in ("reasoning_content", "reasoning")]
    return Turn(
        role=_ROLES[role],
        text=text,
        thinking=thoughts[0] or thoughts[1] or "",
        calls=calls,
        call_id=call_id,
        name=name,
        path=f"{path}.tool_calls" if calls else f"{path}.role",
    )


def _parse_calls(calls: object, role: str, path: str) -> tuple[Call, ...]:
    if calls is None or calls == []:
        return ()
    if role != "assistant":
        raise RequestError(f"{path}: only an assistant calls tools.", param=path)
    if not isinstance(calls, list):
        raise RequestError(f"{path} must be a list of calls.", code="invalid_type", param=path)
    return tuple(_parse_call(call, f"{path}[{i}]") for i, call in enumerate(calls))


def _parse_call(call: object, path: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{path} must be an object with a function.", code="invalid_type", param=path)
    if call.get("type", "function") != "function":
        raise RequestError(f"{path}.type must be function.", param=f"{path}.type")
    name = _optional_text(function, "name", f"{path}.function")
    if not name:
        param = f"{path}.function.name"
        raise RequestError(f"{param} is required.", code="missing_required_parameter", param=param)
    arguments = parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    return Call(name, arguments, _optional_text(call, "id", path))


def parse_arguments(arguments: object, path: str) -> dict[str, Any] | str:
    """The arguments of a call, as `Call` has them. Raises RequestError for JSON that is no object."""
    decoded = arguments
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return arguments
    if decoded is None:
        return {}
    if not isinstance(decoded, dict):
        raise RequestError(f"{path} must be a JSON object, or one written as a string.", param=path)
    return decoded


def _optional_text(holder: Mapping[str, Any], key: str, path: str) -> str | None:
    value = holder.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{path}.{key} must be a string.", code="invalid_type", param=f"{path}.{key}")
    return value


def _flatten(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} must be a string or a list of text parts.", code="invalid_type", param=path)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise RequestError(f"{path}[{i}] must be an object with a type.", code="invalid_type", param=f"{path}[{i}]")
        if kind not in _TEXT_PARTS:
            raise RequestError(
                f"{path}[{i}] is of type {kind[:40]}; this model takes text parts only.",
                code="unsupported_parameter",
                param=f"{path}[{i}].type",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{path}[{i}].text must be a string.", code="invalid_type", param=f"{path}[{i}].text")
        texts.append(text)
    return "\n".join(texts)
