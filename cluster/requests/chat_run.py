"""Turns a conversation into a run, for every route with chat messages: the prompt, the grammar, and how the answer is
parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from cluster.http.context import RequestContext
from cluster.requests.fields import ignored_header, lowered_header
from cluster.requests.job import JobOptions, Run
from cluster.requests.sampling_fields import SamplingFields
from cluster.requests.served_model import ServedModel
from cluster.structured.spec import GrammarKind, GrammarSpec, schema_grammar, text_grammar
from cluster.text.answer_parser import AnswerFormat
from cluster.text.conversation import Conversation
from cluster.text.shortened import shortened_ids
from cluster.text.tools.grammar import after_reasoning
from cluster.text.tools.tool_use import ToolUse
from configs.errors import RequestError

_ENDING_TOKENS = 16  # last tokens of a prompt that are searched for a tag and the whitespace after it


async def chat_run(
    model: ServedModel,
    prefix: str,
    conversation: Conversation,
    fields: SamplingFields,
    context: RequestContext,
    options: JobOptions,
    *,
    num_bytes: int,
    ignored: Sequence[str],
    max_tokens: int | None,
    own_grammar: GrammarSpec | None = None,
    truncate_prompt_tokens: int | None = None,
    drops_turns: bool = False,
    needs_no_telling: str | None = None,
) -> tuple[Run, dict[str, str]]:
    """Submits a conversation. Returns the run and the response headers. The headers list ignored fields (including
    fields that the chat template does not read) and say in which form the model was shown tools, calls or results, and
    to which number `max_tokens` was lowered.

    Args:
        prefix: prefix of the answer's id, such as `chatcmpl-`.
        num_bytes: length of the request bodies with the conversation.
        max_tokens: maximum length of the answer. If None, as many tokens as fit.
        own_grammar: argument of `SamplingFields.grammar`.
        truncate_prompt_tokens: argument of `ServedModel.truncated`.
        drops_turns: whether a conversation that does not fit together with `max_tokens` loses its oldest turns. If
            `max_tokens` is None, an eighth of the context is left for the answer. At most half of it is.
        needs_no_telling: a field that the model follows although its template does not read it.

    Raises:
        RequestError: a field is wrong; the error names its path.
        OverloadedError: too many chats or grammars wait to be prepared.
    """
    if drops_turns:
        most = model.max_model_len - min(max_tokens or model.max_model_len // 8, model.max_model_len // 2)
        ids = await model.threads.run(num_bytes, partial(shortened_ids, model.prompts, conversation, most))
    else:
        ids = await model.encode_chat(conversation, num_bytes, "run" if truncate_prompt_tokens is None else "end")
    continued = conversation.turns[-1].text if conversation.continue_final else ""
    ending = model.tokenizer.decode(ids[-_ENDING_TOKENS:], skip_special_tokens=False)
    form = model.formats.answer_format(conversation.tools, ending, continued)
    prompt = model.truncated(ids, truncate_prompt_tokens, max_tokens)
    default = model.defaults.max_new_tokens
    limit = model.checked_max_tokens(prompt, max_tokens, default=default, param=conversation.param)
    grammar = await _grammar(model, fields.grammar(own_grammar), conversation.tools, form)
    job = model.job(prefix, fields, [prompt], [limit], context, options, form=form, grammar=grammar)
    unread = [path for path in conversation.unread(model.tokenizer.template) if path != needs_no_telling]
    if unread and model.server.strict_fields:
        raise RequestError(f"This model's chat template reads no {unread[0]}; leave it out.", param=unread[0])
    headers = ignored_header([*ignored, *unread]) | lowered_header([max_tokens], [limit])
    if conversation.tools is not None or conversation.speaks_of_tools:
        headers["x-tool-template"] = model.formats.tool_template
    return model.run(job), headers


async def _grammar(
    model: ServedModel, asked: GrammarSpec | None, use: ToolUse | None, form: AnswerFormat
) -> str | None:
    """The checked grammar of an answer, or None. It allows the requested format and calls of the tools in `use`, and
    reasoning before them if answers of `form` begin with reasoning."""
    answer = None if asked is None else await model.grammars.check(asked)
    special_id = model.tokenizer.special_id
    grammar = answer
    if use is not None and model.formats.needs_grammar(use, has_grammar=answer is not None):
        schemas = [schema_grammar(tool.parameters, tool.param, strict=tool.strict) for tool in use.callable]
        arguments = await asyncio.gather(*(model.grammars.check(schema) for schema in schemas))
        grammar = model.formats.call_grammar(use, arguments, special_id, answer)
    if grammar is not None and form.reasoning is not None and not form.starts_after_reasoning:
        is_call = use is not None and use.is_forced
        grammar = after_reasoning(
            grammar, form.reasoning, special_id, is_open=form.starts_in_reasoning, is_call=is_call
        )
    if grammar is None or grammar == answer:
        return grammar
    param = "tools" if asked is None else asked.param
    return await model.grammars.check(text_grammar(GrammarKind.COMPILED, grammar, param))
