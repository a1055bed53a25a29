"""Turns a response's input into a conversation. Consecutive reasoning, texts and calls of the assistant become one
turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cluster.openai.openai_request import decoded_arguments
from cluster.openai.responses.responses_request import InputTokensRequest, JsonSchemaFormat, ResponsesRequest
from cluster.openai.tool_fields import parse_tools
from cluster.structured.spec import GrammarSpec, object_grammar, schema_grammar
from cluster.text.conversation import Call, Conversation, Role, TemplateOption, Turn
from configs.errors import RequestError

_BEGINS_TURN: Mapping[str, frozenset[str]] = {
    "reasoning": frozenset({"reasoning", "message", "function_call"}),
    "message": frozenset({"message", "function_call"}),
    "function_call": frozenset(),
}
"""Kind of item -> kinds in the assistant's last turn after which such an item begins a new turn."""


def conversation(request: InputTokensRequest, items: Sequence[Mapping[str, Any]], num_earlier: int) -> Conversation:
    """The conversation that the model continues.

    Args:
        items: items that `input_items` has checked, or that earlier responses contain.
        num_earlier: number of leading items that do not come from this request.

    Raises:
        RequestError: a field is wrong; the error names its path.
    """
    effort = None if request.reasoning is None else request.reasoning.effort
    return Conversation(
        turns=turns(items, request.instructions, num_earlier),
        param="input",
        tools=parse_tools(request.tools, request.tool_choice, request.parallel_tool_calls, nested=False),
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
    for i, item in enumerate(items, -num_earlier):
        kind = item.get("type", "message")
        path = "previous_response_id" if i < 0 else f"input[{i}]"
        if kind == "function_call_output":
            if item["call_id"] not in called:
                param = f"{path}.call_id"
                raise RequestError(
                    f"{param}: no function call has the id {item['call_id'][:100]!r}; send the call before its output.",
                    param=param,
                )
            made.append(Turn(role="tool", text=_text(item["output"]), call_id=item["call_id"], path=path))
        elif kind == "message" and item["role"] != "assistant":
            role: Role = "user" if item["role"] == "user" else "system"
            made.append(Turn(role=role, text=_text(item["content"]), path=path))
        else:
            if not made or made[-1].role != "assistant" or said & _BEGINS_TURN[kind]:
                made.append(Turn(role="assistant", path=path))
                said = set()
            turn = made[-1]
            if kind == "message":
                turn = replace(turn, text=_text(item["content"]))
            elif kind == "reasoning":
                turn = replace(turn, thinking="\n".join(part["text"] for part in item.get("content") or ()))
            else:
                called.add(item["call_id"])
                arguments = _arguments(item, path if i < 0 else f"{path}.arguments")
                call = Call(item["name"], arguments, item["call_id"])
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


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a checked `content`."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
