"""Chat messages to prompt text: checks each message, makes of it what templates read, and renders the template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from jinja2.exceptions import TemplateError

from cluster.openai.protocol import ChatRequest
from cluster.text.chat_template import ChatTemplate
from cluster.text.formats import ModelFormats
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools.generic import GenericTools
from cluster.text.tools.request import ToolUse, is_told_of
from configs.errors import RequestError

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_OWN_VARIABLES = frozenset({"chat_template", "tokenize", "messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat template is given."""

    messages: list[dict[str, Any]]
    """From `parse_messages`."""
    tools: list[Mapping[str, Any]] | None = None
    generic: GenericTools | None = None
    """What shows the model tools, calls and results in place of the template."""
    use: ToolUse | None = None
    """For `generic`: the tools."""
    documents: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Templates write them; adding them again would double the first one."""


def chat_prompt(
    request: ChatRequest, tokenizer: Tokenizer, formats: ModelFormats, use: ToolUse | None = None
) -> ChatPrompt:
    """What the model's template makes a prompt of.

    Args:
        use: the request's tools.

    Raises:
        RequestError: with the path of the field at fault.
    """
    messages = parse_messages(request.messages)
    if formats.generic is None and not formats.takes_calls:
        _refuse_calls(messages)
    speaks_of_tools = is_told_of(use) or any(map(has_calls, messages))
    template = tokenizer.template
    if template is not None and request.documents and not template.reads("documents"):
        raise RequestError(
            "This model's chat template reads no documents.", code="unsupported_parameter", param="documents"
        )
    variables = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in _OWN_VARIABLES:
            param = f"chat_template_kwargs.{name}"
            raise RequestError(f"{param} is not allowed.", code="unsupported_parameter", param=param)
        if template is not None and template.takes(name):
            variables[name] = value
    if request.reasoning_effort is not None and template is not None and template.takes("reasoning_effort"):
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    continued = bool(request.continue_final_message)
    if continued and not messages[-1]["content"]:
        raise RequestError("The final message has no content to continue.", param="continue_final_message")
    return ChatPrompt(
        messages=messages,
        tools=formats.shown_tools(use),
        generic=formats.generic if speaks_of_tools else None,
        use=use,
        documents=request.documents or None,
        variables=variables,
        continue_final_message=continued,
        add_generation_prompt=request.add_generation_prompt is not False,
        add_special_tokens=bool(request.add_special_tokens),
    )


def unread_fields(request: ChatRequest, tokenizer: Tokenizer) -> list[str]:
    """Paths of fields of `request` that are for the template and that it does not read."""
    template = tokenizer.template
    unread = [
        f"chat_template_kwargs.{name}"
        for name in request.chat_template_kwargs or {}
        if template is None or not template.takes(name)
    ]
    if request.reasoning_effort is not None and (template is None or not template.takes("reasoning_effort")):
        unread.append("reasoning_effort")
    return unread


def render_prompt(tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
    """The text of a chat that the model continues. Blocks for as long as the template takes.

    Raises:
        RequestError: the model has no chat template, or its template refuses these messages.
    """
    if tokenizer.template is None:
        raise RequestError(
            "This model has no chat template; use /v1/completions, or have the server set server.chat_template.",
            code="no_chat_template",
            param="messages",
        )
    try:
        if prompt.generic is not None:
            prompt = replace(prompt, messages=prompt.generic.messages(prompt.messages, prompt.use))
        return _render_calls(tokenizer.template, prompt)
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # raise_exception() in a template speaks to the caller; anything else is a message it did not foresee.
        reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
        raise RequestError(f"The chat template refuses these messages: {reason}", param="messages") from error


def _render_calls(template: ChatTemplate, prompt: ChatPrompt) -> str:
    """The text, with the arguments of calls in the shape that `template` takes.

    DeepSeek's templates join arguments to text. All others write objects as JSON, and some of them take nothing else,
    also of a call that was cut off.
    """
    shapes = [prompt.messages]
    if any("tool_calls" in message for message in prompt.messages):
        shapes += [[_with_arguments(message, shape) for message in prompt.messages] for shape in (_as_text, _as_object)]
    for messages in shapes[:-1]:
        try:
            return _render(template, prompt, messages)
        except TypeError:
            continue
    return _render(template, prompt, shapes[-1])


def _render(template: ChatTemplate, prompt: ChatPrompt, messages: Sequence[Mapping[str, Any]]) -> str:
    return template.render(
        messages,
        tools=prompt.tools,
        documents=prompt.documents,
        variables=prompt.variables,
        continue_final_message=prompt.continue_final_message,
        add_generation_prompt=prompt.add_generation_prompt,
    )


def _with_arguments(message: Mapping[str, Any], shape: Callable[[Any], object]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": shape(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _as_object(arguments: object) -> object:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def has_calls(message: Mapping[str, Any]) -> bool:
    """Whether `message` holds calls or the result of one."""
    return bool(message.get("tool_calls")) or message.get("role") == "tool"


def _refuse_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    for i, message in enumerate(messages):
        path = f"messages[{i}].tool_calls" if "tool_calls" in message else f"messages[{i}].role"
        if has_calls(message):
            raise RequestError(
                f"{path}: this model's chat template shows neither calls nor their results to it.",
                code="unsupported_parameter",
                param=path,
            )


def parse_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates read them: contents are text, and the arguments of calls are objects, or text where a call
    was cut off.

    Raises:
        RequestError: with the path of the field at fault, e.g. `messages[0].content`.
    """
    if not isinstance(messages, list):
        raise RequestError("messages must be a list of messages.", code="invalid_type", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message.", code="empty_array", param="messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _parse_message(message: object, path: str) -> dict[str, Any]:
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
    # An answer of calls has no text; to a template it is empty, or it would write "None".
    text = "" if content is None and role in ("assistant", "tool") else _flatten(content, f"{path}.content")
    # Templates know `system`; `developer` is the newer name of the same role.
    parsed: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
    for key in ("name", "tool_call_id"):
        if (value := _optional_text(message, key, path)) is not None:
            parsed[key] = value
    if calls:
        parsed["tool_calls"] = calls
    # Two names of one thing: templates read one or the other.
    # Both are checked, also where the first is the one that counts.
    thoughts = [_optional_text(message, name, path) for name in ("reasoning_content", "reasoning")]
    thought = thoughts[0] or thoughts[1]
    if thought:
        parsed |= {"reasoning_content": thought, "reasoning": thought}
    return parsed


def _parse_calls(calls: object, role: str, path: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, or as text where they are no JSON."""
    if calls is None or calls == []:
        return []
    if role != "assistant":
        raise RequestError(f"{path}: only an assistant calls tools.", param=path)
    if not isinstance(calls, list):
        raise RequestError(f"{path} must be a list of calls.", code="invalid_type", param=path)
    return [_parse_call(call, f"{path}[{i}]") for i, call in enumerate(calls)]


def _parse_call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RequestError(f"{path} must be an object with a function.", code="invalid_type", param=path)
    if call.get("type", "function") != "function":
        raise RequestError(f"{path}.type must be function.", param=f"{path}.type")
    name = _optional_text(function, "name", f"{path}.function")
    if not name:
        param = f"{path}.function.name"
        raise RequestError(f"{param} is required.", code="missing_required_parameter", param=param)
    arguments = _parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    parsed: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if (call_id := _optional_text(call, "id", path)) is not None:
        parsed["id"] = call_id
    return parsed


def _parse_arguments(arguments: object, path: str) -> dict[str, Any] | str:
    """The object they are; text where they are no JSON: an answer that a limit cut off has such calls."""
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
