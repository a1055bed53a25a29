"""Tools for a model with a chat template that cannot show them: the system message describes tools, and calls and
results are text.

This module has the wording. Calls are written in the given layout, by default Hermes's, which many models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from cluster.text.conversation import Call, Turn
from cluster.text.tools.styles import CallLayout
from cluster.text.tools.tool_use import ToolUse, offers_tools


@dataclass(frozen=True, slots=True)
class GenericTools:
    """Shows tools, calls and results to a model without its template's help."""

    layout: CallLayout
    """How the model is asked to write calls."""
    shows_system: bool
    """Whether the chat template shows a system message. If False, the system text begins the first user message."""

    def turns(self, given: Sequence[Turn], use: ToolUse | None) -> list[Turn]:
        """Turns `given` into turns of system, user and assistant that are text only. Consecutive turns of one role are
        joined, because templates may require alternating roles, and several calls have several results. The first turn
        describes the tools `use`. At least one turn must be given."""
        turns = list(given)
        if use is not None and offers_tools(use):
            if turns[0].role != "system":
                turns.insert(0, Turn(role="system"))
            turns[0] = replace(turns[0], text=_joined(turns[0].text, self._instructions(use)))
        return [
            replace(same[0], text=_joined(*(turn.text for turn in same)))
            for same in (list(group) for _, group in groupby(map(self._as_text, turns), key=lambda turn: turn.role))
        ]

    def _instructions(self, use: ToolUse) -> str:
        """The system text that describes the tools."""
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

    def _as_text(self, turn: Turn) -> Turn:
        if turn.role == "tool":
            # The turn's `name` is the tool's here, and would be taken for the user's.
            return Turn(role="user", text=f"<tool_response>\n{turn.text}\n</tool_response>")
        role = "user" if turn.role == "system" and not self.shows_system else turn.role
        text = _joined(turn.text, self._written(turn.calls)) if turn.calls else turn.text
        return replace(turn, role=role, text=text, calls=(), call_id=None)

    def _written(self, calls: Sequence[Call]) -> str:
        """The text of `calls`, as the model would have written them."""
        layout = self.layout
        objects = []
        for call in calls:
            # Arguments that were cut off are a text, and are shown unchanged.
            text = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
            objects.append(f'{{"name": {json.dumps(call.name)}, "{layout.arguments_key}": {text}}}')
        return layout.begin + layout.separator.join(objects) + layout.end


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
