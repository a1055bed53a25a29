"""How a model writes tool calls and reasoning, and what follows from that: what its template is shown, how answers are
parsed, and which grammar answers must match.

Nothing is guessed: a format that the chat template does not show is not parsed, unless a setting names the format. If
the template would drop tools, or calls could not be parsed, the generic form is used (`tools.generic`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster.text.answer_parser import AnswerFormat
from cluster.text.chat_template import ChatTemplate
from cluster.text.reasoning import REASONING_STYLES, ReasoningStyle, detect_reasoning
from cluster.text.tools.generic import GenericTools
from cluster.text.tools.grammar import CallGrammar, SpecialId
from cluster.text.tools.styles import STYLES, CallStyle, detect_calls
from cluster.text.tools.tool_use import ToolMode, ToolUse, offers_tools
from configs.errors import RequestError
from configs.schema import ServerConfig

ToolTemplate = Literal["own", "generic", "none"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """The formats of one served model."""

    calls: CallStyle | None = None
    """The format of calls. If None, calls are ordinary text."""
    reasoning: ReasoningStyle | None = None
    """The tags around reasoning. If None, such tags are ordinary text."""
    calls_are_off: bool = False
    """Whether calls are ordinary text because of a setting, not because their format is unknown."""
    takes_tools: bool = False
    """Whether the chat template shows tools to the model."""
    takes_calls: bool = False
    """Whether the chat template shows earlier calls and their results."""
    generic: GenericTools | None = None
    """Shows tools, calls and results to the model in place of the template. If None, the template shows them."""

    @classmethod
    def of(cls, template: ChatTemplate | None, server: ServerConfig) -> ModelFormats:
        """Decides the formats by the model's template and the settings."""
        source = "" if template is None else template.source
        thinking_name = _decide("reasoning_parser", server.reasoning_parser, detect_reasoning(source))
        call_name = _decide("tool_call_parser", server.tool_call_parser, detect_calls(source))
        calls = None if call_name is None else STYLES[call_name]
        formats = cls(
            calls=calls,
            reasoning=None if thinking_name is None else REASONING_STYLES[thinking_name],
            calls_are_off=server.tool_call_parser == "none",
            takes_tools=template is not None and template.reads("tools"),
            takes_calls="tool_calls" in source,
        )
        shows_all = formats.takes_tools and formats.takes_calls and (calls is not None or formats.calls_are_off)
        if template is not None and (
            server.tool_template == "generic" or (server.tool_template == "auto" and not shows_all)
        ):
            style = _generic_style(server, calls)
            assert style.layout is not None, f"{style.name} has no layout"
            generic = GenericTools(style.layout, template.shows_system())
            formats = replace(formats, calls=None if formats.calls_are_off else style, generic=generic)
        if server.tool_template == "auto":
            logger.info("server.tool_template: auto -> %s (by the chat template)", formats.tool_template)
        return formats

    @property
    def tool_template(self) -> ToolTemplate:
        """How the model is shown tools: by its own template, in the generic form, or not at all."""
        if self.generic is not None:
            return "generic"
        return "own" if self.takes_tools else "none"

    def shown_tools(self, use: ToolUse | None) -> list[Mapping[str, Any]] | None:
        """The `tools` for the template. None if no tools are offered, or the `generic` form shows them.

        Raises:
            RequestError: the model would not see the tools, or its calls could not be distinguished from text.
        """
        if use is None or not offers_tools(use) or self.generic is not None:
            return None
        reason = advice = ""
        if not self.takes_tools:
            reason, advice = "This model's chat template does not show tools to it", "server.tool_template=auto"
        elif self.calls is None and not self.calls_are_off:
            reason, advice = "The format this model calls tools in is not known", "server.tool_call_parser"
        if use.mode is ToolMode.AUTO and reason:
            raise RequestError(
                f"{reason}. Require a call (tool_choice required, or a named function), or have the server set "
                f"{advice}.",
                code="unsupported_parameter",
                param="tools",
            )
        return [tool.shown for tool in use.tools] if self.takes_tools else None

    def answer_format(self, use: ToolUse | None, prompt: str, continued: str = "") -> AnswerFormat:
        """How an answer is parsed. `ReasoningStyle.is_open` has the arguments `prompt` and `continued`."""
        reasoning = self.reasoning
        form = AnswerFormat(
            reasoning=reasoning,
            starts_in_reasoning=reasoning is not None and reasoning.is_open(prompt, continued),
            starts_after_reasoning=reasoning is not None and reasoning.is_over(prompt, continued),
            tools={},
        )
        if use is None or not offers_tools(use):
            return form
        calls = self._forced_style if use.is_forced else self.calls
        return replace(
            form,
            calls=calls,
            tools={} if calls is None else {tool.name: tool.parameters for tool in use.callable},
            max_calls=None if use.parallel else 1,
            calls_only=use.is_forced,
            call_is_named=use.mode is ToolMode.NAMED,
        )

    def call_grammar(
        self, use: ToolUse, arguments: Sequence[str], special_id: SpecialId, answer: str | None = None
    ) -> str:
        """The grammar for answers with calls, if `needs_grammar` returned True.

        Args:
            arguments: a checked grammar for the arguments of each tool that may be called.
            answer: the grammar of an answer without calls. None for any text.
        """
        style = self._forced_style if use.is_forced else self.calls
        assert style is not None, "what is not read binds nothing"
        calls = CallGrammar([tool.name for tool in use.callable], arguments, style, special_id)
        if use.is_forced:
            return calls.alone(parallel=use.parallel)
        return calls.in_text() if answer is None else calls.or_answer(answer, parallel=use.parallel)

    def needs_grammar(self, use: ToolUse | None, *, has_grammar: bool) -> bool:
        """Whether the tools of a request need a grammar: if a call is required, if a tool is strict, or if the request
        has a grammar (`has_grammar`) that would forbid calls.

        Raises:
            RequestError: an answer with a grammar cannot be distinguished from calls in this model's format.
        """
        if use is None or use.mode is ToolMode.NONE:
            return False
        if use.is_forced:
            return True
        if self.calls is None:
            return False
        is_tagged = self.calls.layout is not None and bool(self.calls.layout.tag)
        if has_grammar and not is_tagged:
            raise RequestError(
                "In this model's format of calls, tools and a format of the answer exclude each other unless "
                "tool_choice says which: none or required.",
                code="unsupported_parameter",
                param="tools",
            )
        return is_tagged and (has_grammar or any(tool.strict for tool in use.callable))

    @property
    def _forced_style(self) -> CallStyle:
        """The model's own format if a grammar can write it, else JSON."""
        return STYLES["json"] if self.calls is None or self.calls.layout is None else self.calls


def _generic_style(server: ServerConfig, calls: CallStyle | None) -> CallStyle:
    """The format in which the generic form asks for calls: the one that the setting names, if a text can explain it."""
    if server.tool_call_parser in ("auto", "none") or calls is None:
        return STYLES["hermes"]
    if calls.layout is not None and not calls.layout.head:
        return calls
    logger.warning(
        "server.tool_call_parser=%s has no effect: tools are shown in the generic form, which asks for calls in "
        "hermes's form; have server.chat_template show tools",
        server.tool_call_parser,
    )
    return STYLES["hermes"]


def _decide(setting: str, given: str, detected: Any) -> Any:
    """The name of a format, or None for none. The setting's value `given` overrides what was detected."""
    if given == "auto":
        logger.info("server.%s: auto -> %s (by the chat template)", setting, detected or "none")
        return detected
    if detected not in (None, given):
        logger.warning("server.%s=%s, but the chat template shows the format %s", setting, given, detected)
    return None if given == "none" else given
