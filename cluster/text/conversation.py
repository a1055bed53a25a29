"""A conversation that the model continues, independent of the API: turns, tools and options.

Parts that are checked later contain their path in the request, for error messages.
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
    """A tool call made earlier in the conversation."""

    name: str
    arguments: Mapping[str, Any] | str
    """An object, or text if the arguments are not JSON, as after a limit cut off an answer."""
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message, of the system, the user, the model or a tool."""

    role: Role
    text: str = ""
    """The message's text. Empty for an answer with calls only, because templates would write None as a word."""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    """For a result: id of the call that it belongs to."""
    name: str | None = None
    """Name of the speaker, or of the tool."""
    path: str = ""
    """Path of the turn's calls, or of the field that makes it a result. Some models cannot be shown either."""

    @property
    def speaks_of_tools(self) -> bool:
        """Whether the turn contains calls or is the result of one."""
        return bool(self.calls) or self.role == "tool"

    def message(
        self, shape: Callable[[Any], object] = as_given, shown_id: Callable[[str], str] = str
    ) -> dict[str, Any]:
        """The turn as chat templates read it. `shape` converts the arguments of calls, and `shown_id` the ids of
        calls."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        if self.call_id is not None:
            message["tool_call_id"] = shown_id(self.call_id)
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": shape(call.arguments)}}
                | ({} if call.id is None else {"id": shown_id(call.id)})
                for call in self.calls
            ]
        if self.thinking:
            # these are three names of one field, for different templates
            message |= {"reasoning_content": self.thinking, "reasoning": self.thinking}
            if not (self.calls and self.text):  # gpt-oss's template refuses to show both before a call
                message["thinking"] = self.thinking
        return message


@dataclass(frozen=True, slots=True)
class TemplateOption:
    """A chat template variable that a request sets, if the template reads it."""

    name: str
    value: Any
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat prompt is made of."""

    turns: Sequence[Turn]
    """At least one turn."""
    param: str = "messages"
    """Name of the request's field with the turns."""
    tools: ToolUse | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    """Documents for templates that read them."""
    options: Sequence[TemplateOption] = ()
    """Template variables. If two options have one name, the first one counts."""
    continue_final: bool = False
    """Whether the answer continues the last turn."""
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Whether the tokenizer adds special tokens. Templates write them, so adding would double the first one."""

    @property
    def speaks_of_tools(self) -> bool:
        """Whether tools are offered, or a turn contains calls or results."""
        return offers_tools(self.tools) or any(turn.speaks_of_tools for turn in self.turns)

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """The options that `template` reads, by name."""
        return {it.name: it.value for it in reversed(self.options) if template.takes(it.name)}

    def unread(self, template: ChatTemplate | None) -> list[str]:
        """Paths of the options that `template` does not read."""
        return [it.path for it in self.options if template is None or not template.takes(it.name)]
