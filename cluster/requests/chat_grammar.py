"""The grammar of an answer in a chat: of its format, of its calls and of the thinking before either, put together."""

from __future__ import annotations

import asyncio

from cluster.requests.sampling_fields import SamplingFields
from cluster.requests.served_model import ServedModel
from cluster.structured.spec import compiled_grammar, schema_grammar
from cluster.text.answer_parser import AnswerFormat
from cluster.text.tools.grammar import after_reasoning
from cluster.text.tools.request import ToolUse


async def chat_grammar(
    model: ServedModel, fields: SamplingFields, use: ToolUse | None, form: AnswerFormat
) -> str | None:
    """What an answer must match, checked; None: anything.

    Args:
        use: the request's tools.
        form: how its answers are read.

    Raises:
        RequestError: a grammar or a schema is wrong or too complex, or they exclude each other.
        OverloadedError: too many grammars wait to be checked.
    """
    answer = await model.grammar(fields)
    special_id = model.tokenizer.special_id
    grammar = answer
    if use is not None and model.formats.needs_grammar(use, has_grammar=answer is not None):
        schemas = [schema_grammar(tool.parameters, tool.param, strict=tool.strict) for tool in use.callable]
        arguments = await asyncio.gather(*(model.grammars.check(schema) for schema in schemas))
        grammar = model.formats.call_grammar(use, arguments, special_id, answer)
    if grammar is not None and form.reasoning is not None and not form.starts_after_reasoning:
        grammar = after_reasoning(grammar, form.reasoning, special_id, is_open=form.starts_in_reasoning)
    if grammar is None or grammar == answer:
        return grammar
    return await model.grammars.check(compiled_grammar(grammar, "response_format" if use is None else "tools"))
