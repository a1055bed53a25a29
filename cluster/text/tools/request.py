"""What a request says of its tools, checked: which may be called, whether one must be, and how many at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from configs.errors import RequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_DESCRIPTION = 1 << 16
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
    """What the chat template is given: the tool as the request has it."""
    param: str
    """Path of `parameters` in the request."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request. There is at least one."""

    tools: tuple[Tool, ...]
    """All of them, as the model sees them."""
    callable: tuple[Tool, ...]
    """Those that may be called."""
    mode: ToolMode
    parallel: bool
    """Whether an answer may have several calls."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in (ToolMode.REQUIRED, ToolMode.NAMED)


def is_told_of(use: ToolUse | None) -> bool:
    """Whether the model is told of the tools: one that is may call them."""
    return use is not None and use.mode is not ToolMode.NONE


def parse_tools(tools: object, tool_choice: object = None, parallel_tool_calls: bool | None = None) -> ToolUse | None:
    """The tools of a request in the shape of chat completions; None when it has none.

    Raises:
        RequestError: with the path of the field at fault, e.g. `tools[0].function.name`.
    """
    if tools is None or tools == []:
        if tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is only allowed with tools.", param="tool_choice")
        return None
    if not isinstance(tools, list):
        raise _invalid("tools", "must be a list of tools")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are allowed.", param="tools")
    parsed = tuple(_parse_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    seen: set[str] = set()
    for i, tool in enumerate(parsed):
        if tool.name in seen:
            raise RequestError(f"Two tools are named {tool.name}.", param=f"tools[{i}].function.name")
        seen.add(tool.name)
    mode, names = _parse_choice(tool_choice, seen)
    allowed = tuple(tool for tool in parsed if names is None or tool.name in names)
    return ToolUse(parsed, allowed, mode, parallel_tool_calls is not False and mode is not ToolMode.NAMED)


def _parse_tool(tool: object, path: str) -> Tool:
    if not isinstance(tool, dict):
        raise _invalid(path, "must be an object")
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{path}.type must be function; no other kind of tool is supported.",
            code="unsupported_parameter",
            param=f"{path}.type",
        )
    function = tool.get("function")
    path = f"{path}.function"
    if not isinstance(function, dict):
        raise _invalid(path, "must be an object")
    name = function.get("name")
    if not isinstance(name, str):
        raise _invalid(f"{path}.name", "must be a string")
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{path}.name must have 1 to 64 characters, each a letter, a digit, `_`, `-` or `.`.", param=f"{path}.name"
        )
    description = function.get("description")
    if not isinstance(description, str | None):
        raise _invalid(f"{path}.description", "must be a string")
    if description is not None and len(description) > _MAX_DESCRIPTION:
        raise RequestError(
            f"{path}.description must have at most {_MAX_DESCRIPTION} characters.", param=f"{path}.description"
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise _invalid(f"{path}.strict", "must be true or false")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = _NO_ARGUMENTS
    if not isinstance(parameters, dict):
        raise _invalid(f"{path}.parameters", "must be an object")
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{path}.parameters must be the schema of an object: `type` must be object.",
            param=f"{path}.parameters.type",
        )
    if not isinstance(parameters.get("properties", {}), dict):
        raise _invalid(f"{path}.parameters.properties", "must be an object")
    shown = {"type": "function", "function": {**function, "parameters": dict(parameters)}}
    return Tool(name, {"type": "object", **parameters}, bool(strict), shown, f"{path}.parameters")


def _parse_choice(choice: object, names: set[str]) -> tuple[ToolMode, set[str] | None]:
    """The mode, and the names that may be called; None for all."""
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str):
        if choice in ("none", "auto", "required"):
            return ToolMode(choice), None
        raise RequestError(
            "tool_choice must be none, auto, required, or an object that names a function.", param="tool_choice"
        )
    if not isinstance(choice, dict):
        raise _invalid("tool_choice", "must be a string or an object")
    if choice.get("type") == "allowed_tools":
        return _parse_allowed(choice.get("allowed_tools"), names)
    return ToolMode.NAMED, {_named(choice, names, "tool_choice")}


def _parse_allowed(allowed: object, names: set[str]) -> tuple[ToolMode, set[str]]:
    path = "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise _invalid(path, "must be an object")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise RequestError(f"{path}.mode must be auto or required.", param=f"{path}.mode")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise _invalid(f"{path}.tools", "must be a list of tools, and not empty")
    return ToolMode(mode), {_named(tool, names, f"{path}.tools[{i}]") for i, tool in enumerate(listed)}


def _named(choice: object, names: set[str], path: str) -> str:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        raise RequestError(f"{path}.type must be function.", param=f"{path}.type")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _invalid(f"{path}.function.name", "must be a string")
    if name not in names:
        raise RequestError(f"tools has no function {name[:64]}.", param=f"{path}.function.name")
    return name


def _invalid(path: str, rule: str) -> RequestError:
    return RequestError(f"{path} {rule}.", code="invalid_type", param=path)
