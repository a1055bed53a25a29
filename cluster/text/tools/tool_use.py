"""The tools of a request: which may be called, whether a call is required, and how many calls an answer may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from configs.errors import RequestError

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolMode(StrEnum):
    """How a request's tools are used."""

    NONE = "none"
    """The tools are not shown to the model, and nothing is parsed as a call."""
    AUTO = "auto"
    """The model decides whether it calls a tool."""
    REQUIRED = "required"
    """The answer has at least one call."""
    NAMED = "named"
    """The answer is one call of the one tool that may be called."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the tool's arguments, which must be a schema of an object."""
    strict: bool
    """Whether arguments must follow the schema even if no call is required."""
    shown: Mapping[str, Any]
    """The tool as the request describes it, for the chat template."""
    path: str
    """Path of the tool in the request."""
    param: str
    """Path of the tool's `parameters` in the request."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, at least one."""

    tools: tuple[Tool, ...]
    """All tools of the request, which the model is shown."""
    callable: tuple[Tool, ...]
    """The tools that may be called."""
    mode: ToolMode
    parallel: bool
    """Whether an answer may have several calls."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


def offers_tools(use: ToolUse | None) -> bool:
    """Whether the tools are shown to the model, which may then call them."""
    return use is not None and use.mode is not ToolMode.NONE


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a request allows or requires."""

    mode: ToolMode = ToolMode.AUTO
    names: Mapping[str, str] | None = None
    """Path in the request -> name, of each tool that may be called. None: all tools."""


def function_tool(function: Mapping[str, Any], path: str, *, parameters_name: str = "parameters") -> Tool:
    """Makes a tool of a function in the request.

    Args:
        function: its `name`, `parameters`, `description`, `strict`, and anything else that the template may show.
        path: path of the function in the request.
        parameters_name: the request's name for `parameters`.
    """
    parameters = function.get("parameters") or _NO_ARGUMENTS
    shown = {"type": "function", "function": {**function, "parameters": dict(parameters)}}
    schema = {"type": "object", **parameters}
    return Tool(function["name"], schema, bool(function.get("strict")), shown, path, f"{path}.{parameters_name}")


def tool_use(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> ToolUse | None:
    """The tools of a request, or None if it has none.

    Args:
        parallel: whether an answer may have several calls. Ignored if it must be one call of one tool.

    Raises:
        RequestError: a field is wrong; the error names its path.
    """
    if not tools:
        if choice.names is not None or choice.mode not in (ToolMode.NONE, ToolMode.AUTO):
            raise RequestError("tool_choice needs tools that are functions.", param="tool_choice")
        return None
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise RequestError(f"Two tools are named {tool.name}.", param=f"{tool.path}.name")
        by_name[tool.name] = tool
    for path, name in (choice.names or {}).items():
        if name not in by_name:
            raise RequestError(f"tools has no function {name[:64]}.", param=path)
    allowed = tools if choice.names is None else [tool for tool in tools if tool.name in choice.names.values()]
    return ToolUse(tuple(tools), tuple(allowed), choice.mode, parallel and choice.mode is not ToolMode.NAMED)
