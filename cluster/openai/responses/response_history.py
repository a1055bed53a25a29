"""Items of conversations that began at another server: what the model reads, and what is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cluster.requests.images import LeftOut, placeholder
from configs.errors import RequestError

_CALLS: Mapping[str, tuple[str, str | None]] = {
    "apply_patch_call": ("operation", None),
    "code_interpreter_call": ("code", "outputs"),
    "custom_tool_call": ("input", None),
    "file_search_call": ("queries", "results"),
    "local_shell_call": ("action", None),
    "mcp_call": ("arguments", "output"),
    "shell_call": ("action", None),
}
"""Type of a call -> its fields with the arguments and with the result. None if another item has the result."""
_OWN = ("message", "reasoning", "function_call", "function_call_output", "item_reference")


def as_functions(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A checked item as messages, reasoning, and calls of functions with their outputs. Empty if it is left out."""
    kind = item["type"]
    if kind in _OWN:
        return [item]
    call_id, call_kind = str(item.get("call_id") or item.get("id")), kind.removesuffix("_output")
    if call_kind not in _CALLS:
        return []
    given, result = _CALLS[call_kind]
    output = {"type": "function_call_output", "call_id": call_id}
    if call_kind != kind:
        return [{**output, "output": item.get("output")}]
    arguments, name = item.get(given), str(item.get("name") or kind.removesuffix("_call"))
    if not isinstance(arguments, dict | str if given == "arguments" else dict):
        arguments = {given: arguments}
    call = {**item, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return [call] if result is None else [call, {**output, "output": item.get(result) or item.get("error")}]


def shown_text(content: Any) -> str:
    """What the model sees of a message's content or of an output: texts, placeholders of images and files, and JSON.
    Raises RequestError for JSON that is nested too deep."""
    shown = []
    for part in content if isinstance(content, list) else [content]:
        fields = part if isinstance(part, dict) else {"text": "" if part is None else part}
        texts = (placeholder(part), *map(fields.get, ("text", "refusal", "logs")))
        text = next((it for it in texts if isinstance(it, str)), None)
        try:
            shown.append(msgspec.json.encode(part).decode() if text is None else text)
        except RecursionError:
            raise RequestError("input has JSON that is nested too deep.", param="input") from None
    return "\n".join(shown)


def leave_out(items: Sequence[Mapping[str, Any]], left_out: LeftOut) -> None:
    """Adds the items and parts of items that the model is not shown to `left_out`. Raises RequestError for one that the
    settings refuse."""
    for i, item in enumerate(items):
        parts = item.get("content") or item.get("output") or item.get("summary")
        if not as_functions(item) or (item.get("encrypted_content") and not parts):
            left_out.unknown(f"input.{item['type']}", f"input[{i}]")
        elif isinstance(parts, list):
            for part in parts:
                left_out.medium(str(part.get("type")) if isinstance(part, dict) else "", "input", f"input[{i}]")
