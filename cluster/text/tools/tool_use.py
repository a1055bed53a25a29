"""The tools of a request: which may be called, whether one must be, and how many at once."""

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
    """The model is not told of them, and nothing is read as a call."""
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The answer is at least one call."""
    NAMED = "named"
    """The answer is a call of the one tool that may be called."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object's."""
    strict: bool
    """Arguments follow the schema whether or not a call is required."""
    shown: Mapping[str, Any]
    """The tool as the request has it, for the chat template."""
    path: str
    """The place where the request has it."""
    param: str
    """Path of `parameters` there."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. There is at least one."""

    tools: tuple[Tool, ...]
    """All of them, as the model sees them."""
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
    """Whether the model is told of the tools: one that is may call them."""
    return use is not None and use.mode is not ToolMode.NONE


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that a request lets the model call."""

    mode: ToolMode = ToolMode.AUTO
    names: Mapping[str, str] | None = None
    """The names of those that may be called, each by the path at which the request has it. None: all."""


def function_tool(function: Mapping[str, Any], path: str, *, parameters_name: str = "parameters") -> Tool:
    """One tool.

    Args:
        function: its `name`, `parameters`, `description`, `strict` and whatever else the template may show.
        path: of the function in the request.
        parameters_name: what the request calls `parameters`.
    """
    parameters = function.get("parameters") or _NO_ARGUMENTS
    shown = {"type": "function", "function": {**function, "parameters": dict(parameters)}}
    schema = {"type": "object", **parameters}
    return Tool(function["name"], schema, bool(function.get("strict")), shown, path, f"{path}.{parameters_name}")


def tool_use(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> ToolUse | None:
    """The tools of a request; None when it has none. `parallel`: an answer may have several calls, where it need not be
    one of one tool. Raises RequestError with the path of the field at fault."""
    if not tools:
        if choice.names is not None or choice.mode not in (ToolMode.NONE, ToolMode.AUTO):
            raise RequestError("tool_choice is only allowed with tools.", param="tool_choice")
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
