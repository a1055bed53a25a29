"""Turns a response's input into a conversation. Consecutive reasoning, texts and calls of the assistant become one
turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.openai.openai_request import decoded_arguments
from cluster.openai.responses.response_history import as_functions, shown_text
from cluster.openai.responses.response_tools import name_in_model
from cluster.openai.responses.responses_request import InputTokensRequest, JsonSchemaFormat, ResponsesRequest
from cluster.structured.spec import GrammarSpec, object_grammar, schema_grammar
from cluster.text.conversation import Call, Conversation, Role, TemplateOption, Turn
from cluster.text.tools.tool_use import ToolUse
from configs.errors import RequestError

_BEGINS_TURN: Mapping[str, frozenset[str]] = {
    "reasoning": frozenset({"reasoning", "message", "function_call"}),
    "message": frozenset({"message", "function_call"}),
    "function_call": frozenset(),
}
"""Kind of item -> kinds in the assistant's last turn after which such an item begins a new turn."""


def conversation(
    request: InputTokensRequest, items: Sequence[Mapping[str, Any]], num_earlier: int, tools: ToolUse | None
) -> Conversation:
    """The conversation that the model continues.

    Args:
        items: items that `input_items` has checked, or that earlier responses contain.
        num_earlier: number of leading items that do not come from this request.
        tools: `ResponseTools.use` of the request.

    Raises:
        RequestError: a field is wrong; the error names its path.
    """
    effort = None if request.reasoning is None else request.reasoning.effort
    return Conversation(
        turns=turns(items, request.instructions, num_earlier),
        param="input",
        tools=tools,
        options=[] if effort is None else [TemplateOption("reasoning_effort", effort, "reasoning.effort")],
    )


def text_grammar(request: ResponsesRequest) -> GrammarSpec | None:
    """The grammar that `text.format` asks for, or None. Raises RequestError for a schema that is too long."""
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if isinstance(form, JsonSchemaFormat):
        return schema_grammar(form.schema_, "text.format.schema", strict=bool(form.strict))
    return object_grammar("text.format.type")


def input_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input as a list of items, each with its type."""
    if isinstance(given, str):
        given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [{"type": "message", **item} for item in given]


def turns(items: Sequence[Mapping[str, Any]], instructions: str | None, num_earlier: int = 0) -> list[Turn]:
    """The turns of a response's input. Has the arguments of `conversation`.

    Raises:
        RequestError: an output has no call, or the arguments of a call are JSON but not an object.
    """
    made = [Turn(role="system", text=instructions)] if instructions else []
    called: set[str] = set()
    said: set[str] = set()  # kinds of items in the last turn, if it is a turn of the assistant
    for i, given, item in ((i, it, read) for i, it in enumerate(items, -num_earlier) for read in as_functions(it)):
        kind = item["type"]
        path = "previous_response_id" if i < 0 else f"input[{i}]"
        if kind == "function_call_output":
            text, call_id = shown_text(item["output"]), item["call_id"]
            if call_id in called:
                made.append(Turn(role="tool", text=text, call_id=call_id, path=path))
            elif given is item:
                raise RequestError(
                    f"{path}.call_id: no function call has the id {call_id[:100]!r}; send the call before its output.",
                    param=f"{path}.call_id",
                )
            else:
                made.append(Turn(role="user", text=text, path=path))  # another server's call may not be in `input`
        elif kind == "message" and item["role"] != "assistant":
            role: Role = "user" if item["role"] == "user" else "system"
            made.append(Turn(role=role, text=shown_text(item["content"]), path=path))
        else:
            if not made or made[-1].role != "assistant" or said & _BEGINS_TURN[kind]:
                made.append(Turn(role="assistant", path=path))
                said = set()
            turn = made[-1]
            if kind == "message":
                turn = replace(turn, text=shown_text(item["content"]))
            elif kind == "reasoning":
                turn = replace(turn, thinking=shown_text(item.get("content") or item.get("summary")))
            else:
                called.add(item["call_id"])
                arguments = _arguments(item, path if i < 0 else f"{path}.arguments")
                call = Call(name_in_model(item), arguments, item["call_id"])
                turn = replace(turn, calls=(*turn.calls, call), path=turn.path if turn.calls else path)
            made[-1] = turn
            if turn.thinking if kind == "reasoning" else item.get("content") != []:
                said.add(kind)  # an empty item does not end the turn
    return made


def _arguments(call: Mapping[str, Any], path: str) -> dict[str, Any] | str:
    try:
        return decoded_arguments(call["arguments"])
    except RequestError as error:
        raise RequestError(f"{path} {error}.", param=path) from error
