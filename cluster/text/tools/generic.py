"""Tools for a model whose chat template cannot show them: its system message tells of them, and text stands for calls
and results.

Owns the words. Calls are written as the style has them, by default as Hermes does: many models have seen that form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from cluster.text.tools.request import ToolUse, is_told_of
from cluster.text.tools.styles import CallLayout


@dataclass(frozen=True, slots=True)
class GenericTools:
    """How one model is shown tools, calls and results without its template's help."""

    layout: CallLayout
    """Of the calls."""
    shows_system: bool
    """The chat template shows a system message; else what it says begins the first user message."""

    def messages(self, messages: Sequence[Mapping[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
        """`messages` as system, user and assistant messages of text alone, no two of one role in a row.

        Templates may want roles to alternate, and calls that follow one another have several results.

        Args:
            messages: at least one, from `parse_messages`.
            use: the request's tools, which the first message tells of.
        """
        given = list(messages)
        if use is not None and is_told_of(use):
            if given[0]["role"] != "system":
                given.insert(0, {"role": "system", "content": ""})
            given[0] = {**given[0], "content": _joined(given[0]["content"], self._told(use))}
        turns = []
        for _, same in groupby(map(self._as_text, given), key=lambda turn: turn["role"]):
            first, *rest = same
            turns.append({**first, "content": _joined(first["content"], *(turn["content"] for turn in rest))})
        return turns

    def _told(self, use: ToolUse) -> str:
        """What the model is told of its tools."""
        layout = self.layout
        call = f'{{"name": "<name of the tool>", "{layout.arguments_key}": {{<its arguments>}}}}'
        lines = [
            "You can use tools. Each line describes one, with the JSON schema of its arguments:",
            *(json.dumps(tool.shown, ensure_ascii=False) for tool in use.tools),
            "",
            "To use a tool, answer with",
            f"{layout.begin}{call}{layout.end}",
            "You are then told the result." + ("" if use.parallel else " Use one tool at a time."),
            "When you need no tool, answer in words.",
        ]
        return "\n".join(lines)

    def _as_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        turn = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        if message["role"] == "tool":
            # `name` is the tool's here, and would be taken for the user's.
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "system" and not self.shows_system:
            turn["role"] = "user"
        if calls := message.get("tool_calls"):
            turn["content"] = _joined(turn["content"], self._written(calls))
        return turn

    def _written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """`calls` as the model would have written them."""
        layout = self.layout
        objects = []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            # Arguments that were cut off are text.
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            objects.append(f'{{"name": {json.dumps(name)}, "{layout.arguments_key}": {text}}}')
        return layout.begin + layout.separator.join(objects) + layout.end


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
