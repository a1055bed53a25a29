"""Reads `tools` and `tool_choice` of OpenAI's two APIs, which nest the fields of a function differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.tool_use import ToolChoice, ToolMode, ToolUse, function_tool, tool_use


def parse_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = None,
    *,
    nested: bool = True,
) -> ToolUse | None:
    """The functions that a request offers, or None if it has none. The types are checked already.

    Args:
        nested: whether a function's fields are below `function`, as in chat completions. If False, they are in the tool
            itself, as in responses.

    Raises:
        RequestError: a field is wrong; the error names its path, such as `tools[0].function.name`.
    """
    functions = [
        function_tool(tool["function"], f"tools[{i}].function")
        if nested
        else function_tool({key: it for key, it in tool.items() if key != "type" and it is not None}, f"tools[{i}]")
        for i, tool in enumerate(tools or ())
        if tool.get("type") in (None, "function")
    ]
    return tool_use(functions, _choice(choice, nested=nested), parallel=parallel is not False)


def _choice(choice: str | Mapping[str, Any] | None, *, nested: bool) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        return ToolChoice(ToolMode(choice))
    function = ".function" if nested else ""
    if choice["type"] == "function":
        return ToolChoice(ToolMode.NAMED, {f"tool_choice{function}.name": _named(choice, nested=nested)})
    path, allowed = ("tool_choice.allowed_tools", choice["allowed_tools"]) if nested else ("tool_choice", choice)
    names = {
        f"{path}.tools[{i}]{function}.name": _named(tool, nested=nested) for i, tool in enumerate(allowed["tools"])
    }
    return ToolChoice(ToolMode(allowed["mode"]), names)


def _named(choice: Mapping[str, Any], *, nested: bool) -> str:
    name: str = (choice["function"] if nested else choice)["name"]
    return name
