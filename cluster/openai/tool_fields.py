"""`tools` and `tool_choice` as OpenAI's two APIs have them, which differ in how deep a function lies."""

from __future__ import annotations

from typing import Any

from cluster.text.tools.request import Tool, ToolChoice, ToolMode, ToolUse, function_tool, invalid, tool_use
from configs.errors import RequestError

MAX_TOOLS = 128


def parse_tools(
    tools: object, tool_choice: object = None, parallel_tool_calls: bool | None = None, *, nested: bool = True
) -> ToolUse | None:
    """The tools of a request; None when it has none.

    Args:
        nested: as chat completions have it, a function below `function`. False: as responses do, in its place.

    Raises:
        RequestError: with the path of the field at fault, e.g. `tools[0].function.name`.
    """
    if tools is None or tools == []:
        if tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is only allowed with tools.", param="tool_choice")
        return None
    if not isinstance(tools, list):
        raise invalid("tools", "must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    parsed = [_parse_tool(tool, f"tools[{i}]", nested=nested) for i, tool in enumerate(tools)]
    return tool_use(parsed, _parse_choice(tool_choice, nested=nested), parallel=parallel_tool_calls is not False)


def _parse_tool(tool: object, path: str, *, nested: bool) -> Tool:
    if not isinstance(tool, dict):
        raise invalid(path, "must be an object")
    kind = tool.get("type", "function")
    if kind != "function" and (nested or kind is not None):
        raise RequestError(
            f"{path}.type must be function; no other kind of tool is supported.",
            code="unsupported_parameter",
            param=f"{path}.type",
        )
    if not nested:
        return function_tool({key: value for key, value in tool.items() if key != "type" and value is not None}, path)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function", "must be an object")
    return function_tool(function, f"{path}.function")


def _parse_choice(choice: object, *, nested: bool) -> ToolChoice:
    path = "tool_choice"
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return ToolChoice(ToolMode(choice))
        raise RequestError(f"{path} must be none, auto, required, or an object that names a function.", param=path)
    if not isinstance(choice, dict):
        raise invalid(path, "must be a string or an object")
    if choice.get("type") != "allowed_tools":
        return ToolChoice(ToolMode.NAMED, dict([_named(choice, path, nested=nested)]))
    allowed: Any = choice
    if nested:
        path, allowed = f"{path}.allowed_tools", choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise invalid(path, "must be an object")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise RequestError(f"{path}.mode must be auto or required.", param=f"{path}.mode")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise invalid(f"{path}.tools", "must be a list of tools, and not empty")
    if not nested:  # a type is not asked for there
        listed = [{**tool, "type": "function"} if isinstance(tool, dict) else tool for tool in listed]
    names = dict(_named(tool, f"{path}.tools[{i}]", nested=nested) for i, tool in enumerate(listed))
    return ToolChoice(ToolMode(mode), names)


def _named(choice: object, path: str, *, nested: bool) -> tuple[str, str]:
    """The path of a function's name, and the name."""
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise RequestError(f"{path}.type must be function.", param=f"{path}.type")
    function: Any = choice
    if nested:
        path, function = f"{path}.function", choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"{path}.name", "must be a string")
    return f"{path}.name", name
