"""Reads `tools` and `tool_choice` of chat completions. Responses, which nest a function's fields differently, share
`as_tool_choice`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.text.tools.tool_use import ToolChoice, ToolMode, ToolUse, function_tool, tool_use


def parse_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = None,
) -> ToolUse | None:
    """The functions that a request offers, or None if it has none. The types are checked already.

    Raises:
        RequestError: a field is wrong; the error names its path, such as `tools[0].function.name`.
    """
    functions = [
        function_tool(tool["function"], f"tools[{i}].function")
        for i, tool in enumerate(tools or ())
        if tool.get("type") in (None, "function")
    ]
    return tool_use(functions, as_tool_choice(choice), parallel=parallel is not False)


def as_tool_choice(choice: str | Mapping[str, Any] | None, *, nested: bool = True) -> ToolChoice:
    """The meaning of a checked `tool_choice`. None means auto.

    Args:
        nested: whether a function's name is below `function`, as in chat completions. If False, it is in the choice
            itself, as in responses.
    """
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
