"""Turns texts and chats into token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Literal

from jinja2.exceptions import TemplateError

from cluster.text.chat_template import ChatTemplate
from cluster.text.conversation import Conversation, as_given
from cluster.text.formats import ModelFormats
from cluster.text.special_tokens import Marks, SpecialTokens
from cluster.text.tokenizer import Tokenizer
from configs.errors import ContextLengthError, RequestError

# Assumed characters per token, for the size of a long text's part that is encoded first. Texts have 3 to 5; code and
# tables have more.
_CHARS_PER_TOKEN = 8
_LEAST_PART = 4096
_COUNTED = 8  # number of contexts up to which the tokens of a text are counted
Use = Literal["run", "end", "count"]
"""How a text's tokens are used: run all of them, run the last ones that fit, or count them."""
# Errors that a template raises, or makes Python raise, if it cannot handle the messages.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class PromptEncoder:
    """Encodes texts and chats for one model. All methods block, and any thread may call them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        formats: ModelFormats,
        max_model_len: int,
        *,
        special_tokens_in_text: bool = False,
    ) -> None:
        """`special_tokens_in_text` is the setting `server.special_tokens_in_text`."""
        self._special = None if special_tokens_in_text else SpecialTokens(tokenizer, formats)
        self._tokenizer = tokenizer
        self._formats = formats
        self._max_model_len = max_model_len

    def prepare(self) -> None:
        """Creates in advance what the first chat would have to wait for. Takes up to a second."""
        if self._special is not None:
            self._special.prepare()

    def encode(
        self, text: str, param: str = "prompt", *, add_special_tokens: bool = True, use: Use = "run"
    ) -> list[int]:
        """Token ids of `text`. Takes 1 to 2 ms for 4 kB.

        Args:
            param: name of the request's field with the text, for errors.

        Raises:
            ContextLengthError: the text does not fit, judged by its length or by a part of it.
        """
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        ids = self._bounded(text, encode, param, use)
        return self._with_one_bos(ids) if add_special_tokens else ids

    def encode_chat(self, conversation: Conversation, use: Use = "run") -> list[int]:
        """Token ids of the text that the chat template makes, with a single BOS.

        Raises:
            RequestError: the model has no template, or its template cannot show the conversation or refuses it.
            ContextLengthError: the text does not fit, as in `encode`.
        """
        template, formats = self._tokenizer.template, self._formats
        check(conversation, template, formats)
        encode: Callable[..., list[int]] = self._tokenizer.encode
        if self._special is not None:
            marks = Marks()
            try:
                conversation = self._special.marked(conversation, marks)
            except RecursionError:
                message = "The request holds JSON that is nested too deep."
                raise RequestError(message, param=conversation.param) from None
            encode = partial(self._special.encode, marks=marks)
        encode = partial(encode, add_special_tokens=conversation.add_special_tokens)
        text = render(conversation, template, formats)
        return self._with_one_bos(self._bounded(text, encode, conversation.param, use))

    def _bounded(self, text: str, encode: Callable[[str], list[int]], param: str, use: Use) -> list[int]:
        """Returns `encode(text)`. A text that cannot fit is refused before it is encoded as a whole."""
        limit, longest = self._max_model_len * (_COUNTED if use == "count" else 1), self._tokenizer.longest_token
        size = _CHARS_PER_TOKEN * limit + _LEAST_PART
        if use == "end":
            # The last tokens should have an eighth of these characters, so the cut is too far away to change their ids.
            return encode(text[-8 * size :])
        num_tokens = -(-len(text) // longest) if longest else 0
        while num_tokens <= limit and size < len(text):
            # Near its end, a part's ids may differ from the ids of the whole text, but never a third of them.
            num_tokens = len(encode(text[:size])) * 2 // 3
            size *= 2
        if num_tokens > limit:
            raise ContextLengthError(
                max_model_len=self._max_model_len, num_prompt_tokens=num_tokens, param=param, at_least=True
            )
        return encode(text)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """Drops a second BOS at the beginning, because with two of them answers get worse without a visible sign."""
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def check(conversation: Conversation, template: ChatTemplate | None, formats: ModelFormats) -> None:
    """Raises RequestError, with the field's path, if the model cannot be shown a part of the conversation."""
    if formats.generic is None and not formats.takes_calls:
        for turn in conversation.turns:
            if turn.speaks_of_tools:
                raise RequestError(
                    f"{turn.path}: this model's chat template shows neither calls nor their results; leave "
                    "them out, or have the server set server.chat_template.",
                    code="unsupported_parameter",
                    param=turn.path,
                )
    formats.shown_tools(conversation.tools)
    if template is not None and conversation.documents and not template.reads("documents"):
        raise RequestError(
            "This model's chat template reads no documents; put them into a message.",
            code="unsupported_parameter",
            param="documents",
        )


def render(conversation: Conversation, template: ChatTemplate | None, formats: ModelFormats) -> str:
    """The text of a conversation that passed `check`. Blocks for as long as the template takes.

    The arguments of calls are given in the first form that the template accepts. DeepSeek's template joins arguments to
    text. All other templates write objects as JSON, and some accept nothing else, even for a call that was cut off.

    Raises:
        RequestError: the model has no chat template, or its template refuses these messages.
    """
    if template is None:
        raise RequestError(
            "This model has no chat template; use /v1/completions, or have the server set server.chat_template.",
            code="no_chat_template",
            param=conversation.param,
        )
    turns = conversation.turns
    if formats.generic is not None and conversation.speaks_of_tools:
        turns = formats.generic.turns(turns, conversation.tools)
    failure: Exception | None = None
    shown_id = str if formats.calls is None else formats.calls.shown_id
    for shape in (as_given, _as_text, _as_object):
        try:
            return template.render(
                [turn.message(shape, shown_id) for turn in turns],
                tools=formats.shown_tools(conversation.tools),
                documents=conversation.documents or None,
                variables=conversation.variables(template),
                continue_final_message=conversation.continue_final,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        except _REFUSALS as error:
            failure = error
            if not isinstance(error, TypeError) or not any(turn.calls for turn in turns):
                break
    # With `raise_exception`, a template writes a message for the caller.
    reason = str(failure) if isinstance(failure, TemplateError) else type(failure).__name__
    raise RequestError(
        f"The chat template refuses these messages; change them: {reason}", param=conversation.param
    ) from failure


def _as_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _as_object(arguments: object) -> object:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments
