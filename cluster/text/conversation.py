"""A conversation that the model is to go on with, whichever API it came by: turns, tools and options.

Whatever can still be found wrong with a part keeps the path at which its request has it, and is named by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.text.chat_template import ChatTemplate
from cluster.text.tools.tool_use import ToolUse, offers_tools

Role = Literal["system", "user", "assistant", "tool"]


def as_given(arguments: object) -> object:
    return arguments


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, made earlier in the conversation."""

    name: str
    arguments: Mapping[str, Any] | str
    """The object they are; text where they are no JSON: an answer that a limit cut off has such calls."""
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One side's words at a time."""

    role: Role
    text: str = ""
    """Empty for an answer of calls alone: to a template `None` would be a word."""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    """The call that this is the result of."""
    name: str | None = None
    """Who speaks, or which tool."""
    path: str = ""
    """The place of its calls, or of what makes it the result of one: not every model can be shown these."""

    @property
    def speaks_of_tools(self) -> bool:
        """Whether it holds calls or the result of one."""
        return bool(self.calls) or self.role == "tool"

    def message(self, shape: Callable[[Any], object] = as_given) -> dict[str, Any]:
        """The turn as chat templates read it; `shape` makes what they are given of the arguments of a call."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": shape(call.arguments)}}
                | ({} if call.id is None else {"id": call.id})
                for call in self.calls
            ]
        if self.thinking:
            # Three names of one thing: templates read one or another.
            message |= {"reasoning_content": self.thinking, "reasoning": self.thinking}
            if not (self.calls and self.text):  # gpt-oss's template refuses to show both before a call
                message["thinking"] = self.thinking
        return message


@dataclass(frozen=True, slots=True)
class TemplateOption:
    """A variable that a request sets for the chat template, if that reads it."""

    name: str
    value: Any
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The parts of a prompt."""

    turns: Sequence[Turn]
    """At least one."""
    param: str = "messages"
    """The field of the request that holds them."""
    tools: ToolUse | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    """For templates that read them."""
    options: Sequence[TemplateOption] = ()
    """The first of two that have one name counts."""
    continue_final: bool = False
    """The answer goes on where the last turn stops."""
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Templates write them; adding them again would double the first one."""

    @property
    def speaks_of_tools(self) -> bool:
        """Whether the model is told of tools, or a turn speaks of them."""
        return offers_tools(self.tools) or any(turn.speaks_of_tools for turn in self.turns)

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """The options that `template` reads, by name."""
        return {it.name: it.value for it in reversed(self.options) if template.takes(it.name)}

    def unread(self, template: ChatTemplate | None) -> list[str]:
        """Paths of the options that `template` does not read."""
        return [it.path for it in self.options if template is None or not template.takes(it.name)]
