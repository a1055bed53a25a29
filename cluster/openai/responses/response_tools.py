"""Reads `tools` and `tool_choice` of responses, where a namespace groups functions.

A function in a namespace has one name for the model, `<namespace>__<function>`, and two fields for clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.openai.responses.responses_request import InputTokensRequest
from cluster.openai.tool_fields import as_tool_choice
from cluster.requests.images import LeftOut
from cluster.requests.shapes import MAX_TOOLS
from cluster.text.tools.tool_use import ToolUse, function_tool, tool_use
from configs.errors import RequestError


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of one request."""

    use: ToolUse | None
    """What the model may call. None if no tool is a function."""
    names: Mapping[str, tuple[str, str]]
    """The model's name of each function in a namespace -> namespace and name."""


def name_in_model(called: Mapping[str, Any]) -> str:
    """The model's name of the function that a call has in `namespace` and `name`."""
    namespace, name = called.get("namespace"), called["name"]
    return str(name) if namespace is None else f"{namespace}__{name}"


def read_tools(request: InputTokensRequest, left_out: LeftOut) -> ResponseTools:
    """The tools of `request`, without those that are no functions. Raises RequestError, with the field's path, for
    a wrong `tool_choice`, or if the model would know two functions by one name."""
    functions, names = [], {}
    for i, given in enumerate(request.tools or ()):
        space = given if given.get("type") == "namespace" else {}
        for j, tool in enumerate(space.get("tools", [given])):
            path = f"tools[{i}]" + (f".tools[{j}]" if space else "")
            if (kind := tool.get("type")) not in (None, "function"):
                left_out.unknown(f"tools.{kind}", path)
                continue
            name = name_in_model({"namespace": space.get("name"), "name": tool["name"]})
            shown = {**tool, "name": name, "description": tool.get("description") or space.get("description")}
            shown = {key: it for key, it in shown.items() if key != "type" and it is not None}
            functions.append(function_tool(shown, path))
            if space:
                names[name] = (space["name"], tool["name"])
    if len(functions) > MAX_TOOLS:
        raise RequestError(f"tools has more than {MAX_TOOLS} functions; send fewer.", param="tools")
    choice = request.tool_choice
    if isinstance(choice, dict):
        # A name without its namespace is enough.
        known = {name: it for it, (_, name) in names.items()} | {tool.name: tool.name for tool in functions}
        called = [{**it, "name": known.get(name := name_in_model(it), name)} for it in choice.get("tools", [choice])]
        choice = {**choice, "tools": called, "name": called[0]["name"]}
    parallel = request.parallel_tool_calls is not False
    return ResponseTools(tool_use(functions, as_tool_choice(choice, nested=False), parallel=parallel), names)
