"""Chat messages to prompt text: checks each message, flattens text parts and renders the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from cluster.openai.tokenizer import Tokenizer
from configs.errors import RequestError

_ROLES = frozenset({"system", "developer", "user", "assistant"})
_TEXT_PARTS = frozenset({"text", "input_text"})


def parse_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with text as their content, ready for a template.

    Raises:
        RequestError: with the path of the field at fault, e.g. `messages[0].content`.
    """
    if not isinstance(messages, list):
        raise RequestError("messages must be a list of messages.", code="invalid_type", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message.", code="empty_array", param="messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def render_prompt(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> str:
    """The text of a chat that the model continues. Blocks for as long as the template takes.

    Raises:
        RequestError: the model has no chat template, or its template refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "This model has no chat template; use /v1/completions, or have the server set server.chat_template.",
            code="no_chat_template",
            param="messages",
        )
    try:
        return tokenizer.render_chat(list(messages))
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # raise_exception() in a template speaks to the caller; anything else is a message it did not foresee.
        reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
        raise RequestError(f"The chat template refuses these messages: {reason}", param="messages") from error


def _parse_message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{path} must be an object.", code="invalid_type", param=path)
    role = message.get("role")
    if role in ("tool", "function"):
        raise RequestError(f"{path}.role={role} is not supported.", code="unsupported_parameter", param=f"{path}.role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(sorted(_ROLES))}.", param=f"{path}.role")
    for key in ("tool_calls", "function_call", "audio"):
        if message.get(key):
            raise RequestError(f"{path}.{key} is not supported.", code="unsupported_parameter", param=f"{path}.{key}")
    # Templates know `system`; `developer` is the newer name of the same role.
    parsed = {
        "role": "system" if role == "developer" else role,
        "content": _flatten(message.get("content"), f"{path}.content"),
    }
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise RequestError(f"{path}.name must be a string.", code="invalid_type", param=f"{path}.name")
        parsed["name"] = name
    return parsed


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
