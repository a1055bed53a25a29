"""A conversation to the text that the model continues, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from cluster.text.chat_template import ChatTemplate
from cluster.text.conversation import Conversation, Turn, as_given
from cluster.text.formats import ModelFormats
from configs.errors import RequestError


def check(conversation: Conversation, template: ChatTemplate | None, formats: ModelFormats) -> None:
    """Raises RequestError for what the model cannot be shown, with the path of the field at fault."""
    if formats.generic is None and not formats.takes_calls:
        for turn in conversation.turns:
            if turn.speaks_of_tools:
                raise RequestError(
                    f"{turn.path}: this model's chat template shows neither calls nor their results to it.",
                    code="unsupported_parameter",
                    param=turn.path,
                )
    formats.shown_tools(conversation.tools)
    if template is not None and conversation.documents and not template.reads("documents"):
        raise RequestError(
            "This model's chat template reads no documents.", code="unsupported_parameter", param="documents"
        )


def render(conversation: Conversation, template: ChatTemplate | None, formats: ModelFormats) -> str:
    """The text of a conversation that `check` has taken. Blocks for as long as the template takes.

    Raises:
        RequestError: the model has no chat template, or its template refuses these messages.
    """
    if template is None:
        raise RequestError(
            "This model has no chat template; use /v1/completions, or have the server set server.chat_template.",
            code="no_chat_template",
            param=conversation.param,
        )
    try:
        turns = conversation.turns
        if formats.generic is not None and conversation.speaks_of_tools:
            turns = formats.generic.turns(turns, conversation.tools)
        return _render_calls(turns, conversation, template, formats)
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        # raise_exception() in a template speaks to the caller; anything else is a message it did not foresee.
        reason = str(error) if isinstance(error, TemplateError) else type(error).__name__
        raise RequestError(f"The chat template refuses these messages: {reason}", param=conversation.param) from error


def _render_calls(
    turns: Sequence[Turn], conversation: Conversation, template: ChatTemplate, formats: ModelFormats
) -> str:
    """The text, with the arguments of calls in the shape that `template` takes.

    DeepSeek's templates join arguments to text. All others write objects as JSON, and some of them take nothing else,
    also of a call that was cut off.
    """

    def rendered(shape: Callable[[Any], object]) -> str:
        return template.render(
            [turn.message(shape) for turn in turns],
            tools=formats.shown_tools(conversation.tools),
            documents=conversation.documents or None,
            variables=conversation.variables(template),
            continue_final_message=conversation.continue_final,
            add_generation_prompt=conversation.add_generation_prompt,
        )

    shapes = (as_given, _as_text, _as_object) if any(turn.calls for turn in turns) else (as_given,)
    for shape in shapes[:-1]:
        try:
            return rendered(shape)
        except TypeError:
            continue
    return rendered(shapes[-1])


def _as_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _as_object(arguments: object) -> object:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments
