"""How one model writes calls and thinking, and what that makes of a request: what its template is shown, how its
answers are read, and which grammar they must match.

Nothing is guessed: a format that the chat template does not show is not read, unless a setting names it, and tools
that the template would leave out are refused. A call that is required needs neither: the grammar writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.openai.answer_parser import AnswerFormat
from cluster.openai.reasoning import REASONING_STYLES, ReasoningStyle, detect_reasoning
from cluster.openai.tools.detect import detect_calls
from cluster.openai.tools.grammar import forced_calls, free_calls
from cluster.openai.tools.request import ToolMode, ToolUse
from cluster.openai.tools.styles import STYLES, CallStyle
from configs.errors import RequestError
from configs.schema import ServerConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """Of one served model."""

    calls: CallStyle | None = None
    """None: what looks like a call is text."""
    reasoning: ReasoningStyle | None = None
    """None: tags of thinking are text."""
    calls_are_off: bool = False
    """Calls are text because a setting says so, not because their format is unknown."""
    takes_tools: bool = False
    """The chat template shows tools to the model."""
    takes_calls: bool = False
    """The chat template shows earlier calls and their results."""

    @classmethod
    def of(cls, template: str, *, reads_tools: bool, server: ServerConfig) -> ModelFormats:
        """What `template` and the settings say.

        Args:
            template: the chat template's source; several joined.
            reads_tools: whether it reads the variable `tools`.
        """
        calls, thinking = detect_calls(template), detect_reasoning(template)
        call_name = _decide("tool_call_parser", server.tool_call_parser, calls)
        thinking_name = _decide("reasoning_parser", server.reasoning_parser, thinking)
        return cls(
            calls=None if call_name is None else STYLES[call_name],
            reasoning=None if thinking_name is None else REASONING_STYLES[thinking_name],
            calls_are_off=server.tool_call_parser == "none",
            takes_tools=reads_tools,
            takes_calls="tool_calls" in template,
        )

    def shown_tools(self, use: ToolUse | None) -> list[Mapping[str, Any]] | None:
        """What the template is given as `tools`.

        Raises:
            RequestError: the model would not see the tools, or its calls could not be told from text.
        """
        if use is None or use.mode is ToolMode.NONE:
            return None  # a model that sees tools may call them
        if use.mode is ToolMode.AUTO:
            if not self.takes_tools:
                raise RequestError(
                    "This model's chat template does not show tools to it. Require a call (tool_choice required, or a "
                    "named function), or have the server set server.chat_template.",
                    code="unsupported_parameter",
                    param="tools",
                )
            if self.calls is None and not self.calls_are_off:
                raise RequestError(
                    "The format this model calls tools in is not known. Require a call (tool_choice required, or a "
                    "named function), or have the server set server.tool_call_parser.",
                    code="unsupported_parameter",
                    param="tools",
                )
        return [tool.shown for tool in use.tools] if self.takes_tools else None

    def answer_format(self, use: ToolUse | None, prompt: str, continued: str = "") -> AnswerFormat:
        """How an answer is read; `prompt` and `continued` as in `ReasoningStyle.is_open`."""
        reasoning = self.reasoning
        is_open = reasoning is not None and reasoning.is_open(prompt, continued)
        if use is None or use.mode is ToolMode.NONE:
            return AnswerFormat(reasoning=reasoning, starts_in_reasoning=is_open, tools={})
        return AnswerFormat(
            reasoning=reasoning,
            starts_in_reasoning=is_open,
            calls=self._forced_style if use.is_forced else self.calls,
            tools={tool.name: tool.parameters for tool in use.callable},
            max_calls=None if use.parallel else 1,
            call_is_named=use.mode is ToolMode.NAMED,
        )

    def call_grammar(self, use: ToolUse | None, special_id: Callable[[str], int | None]) -> str | None:
        """What an answer must match for its calls to be right, in llguidance's Lark; None when it is free.

        Under `auto` a grammar is needed only where a tool is strict. `special_id`: see `tools.grammar`.
        """
        if use is None:
            return None
        if use.is_forced:
            return forced_calls(use.callable, self._forced_style, special_id, parallel=use.parallel)
        is_bound = use.mode is ToolMode.AUTO and any(tool.strict for tool in use.callable)
        if is_bound and self.calls is not None and self.calls.layout is not None:
            return free_calls(use.callable, self.calls, special_id)
        return None

    @property
    def _forced_style(self) -> CallStyle:
        """The model's own format, where a grammar can write it."""
        return STYLES["json"] if self.calls is None or self.calls.layout is None else self.calls


def _decide(setting: str, given: str, detected: Any) -> Any:
    """The name of a format, None for none; a setting wins over what was detected."""
    if given == "auto":
        logger.info("server.%s: auto -> %s (by the chat template)", setting, detected or "none")
        return detected
    if detected not in (None, given):
        logger.warning("server.%s=%s, but the chat template shows the format %s", setting, given, detected)
    return None if given == "none" else given
