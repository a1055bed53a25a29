"""Turns texts and chats into token ids."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from jinja2.exceptions import TemplateError

from cluster.text.chat_template import ChatTemplate
from cluster.text.conversation import Conversation, as_given
from cluster.text.formats import ModelFormats
from cluster.text.special_tokens import Marks, SpecialTokens
from cluster.text.tokenizer import Tokenizer
from configs.errors import OverloadedError, RequestError

_NUM_RENDERERS = 4
_MAX_RENDERING = 1024  # chats in the hands of the renderers and before them
# Errors that a template raises, or makes Python raise, for messages that it did not foresee.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class PromptEncoder:
    """Encodes for one model; chats in threads of its own."""

    def __init__(self, tokenizer: Tokenizer, formats: ModelFormats, *, special_tokens_in_text: bool = False) -> None:
        """`special_tokens_in_text`: the texts of a chat may hold special tokens (`server.special_tokens_in_text`)."""
        self._special = None if special_tokens_in_text else SpecialTokens(tokenizer, formats)
        self._tokenizer = tokenizer
        self._formats = formats
        self._renderers = ThreadPoolExecutor(_NUM_RENDERERS, thread_name_prefix="chat-template")
        self._num_rendering = 0

    def prepare(self) -> None:
        """Makes ready what only some chats need, before the first of them comes. Blocks for up to a second."""
        if self._special is not None:
            self._special.prepare()

    def close(self) -> None:
        """Takes no more chats."""
        self._renderers.shutdown(wait=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Blocks for as long as it takes, 1 to 2 ms for 4 kB; from any thread."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._with_one_bos(ids) if add_special_tokens else ids

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Token ids of the chat template's text, with one BOS however often the template writes it; the event loop goes
        on meanwhile. Raises RequestError where there is no template, it cannot show all of this, or it refuses these
        messages, and OverloadedError where too many templates wait to be rendered."""
        template, formats = self._tokenizer.template, self._formats
        check(conversation, template, formats)
        if self._num_rendering >= _MAX_RENDERING:
            raise OverloadedError("Too many chats are being prepared; try again later.")

        def encode() -> list[int]:
            marks = Marks()
            marked = conversation if self._special is None else self._special.marked(conversation, marks)
            add = conversation.add_special_tokens
            if self._special is not None and marks:
                return self._special.encode(render(marked, template, formats), marks, add_special_tokens=add)
            return self._tokenizer.encode(render(conversation, template, formats), add_special_tokens=add)

        self._num_rendering += 1
        try:
            # Never on the event loop: how long a template takes is not known before.
            ids = await asyncio.get_running_loop().run_in_executor(self._renderers, encode)
        finally:
            self._num_rendering -= 1
        return self._with_one_bos(ids)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        """A second BOS worsens answers and shows nowhere: text that begins with one gets no other."""
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


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

    The arguments of calls have the first shape that the template takes: DeepSeek's join them to text; all others write
    objects as JSON, and some of them take nothing else, also of a call that was cut off.

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
    for shape in (as_given, _as_text, _as_object):
        try:
            return template.render(
                [turn.message(shape) for turn in turns],
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
    # `raise_exception` in a template speaks to the caller.
    reason = str(failure) if isinstance(failure, TemplateError) else type(failure).__name__
    raise RequestError(f"The chat template refuses these messages: {reason}", param=conversation.param) from failure


def _as_text(arguments: object) -> object:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _as_object(arguments: object) -> object:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments
