"""Grammars for answers that call tools, in llguidance's dialect of Lark. Text to text: nothing is compiled here.

A grammar writes calls in the model's own format, so that the reader of the format reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.openai.reasoning import ReasoningStyle
from cluster.openai.tools.request import Tool
from cluster.openai.tools.styles import CallLayout, CallStyle

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = r"/(?s:.*)/"


def forced_calls(
    tools: Sequence[Tool], style: CallStyle, special_id: Callable[[str], int | None], *, parallel: bool
) -> str:
    """The grammar of an answer that is one call of `tools`, or with `parallel` at least one.

    Args:
        style: one with a layout.
        special_id: the id of a special token, None for text that is none.
    """
    layout = _layout(style)
    write = _Text(style.tags, special_id)
    more = f" ({write(layout.separator)} call)*" if parallel else ""
    return _lark(f"start: {write(layout.begin)} call{more} {write(layout.end)}", _call_rules(tools, layout))


def free_calls(tools: Sequence[Tool], style: CallStyle, special_id: Callable[[str], int | None]) -> str | None:
    """The grammar of any text in which every call is a right one. None for a format without a tag at its calls.

    Args: as of `forced_calls`.
    """
    layout = _layout(style)
    tag = next((tag for tag in style.tags if layout.begin.startswith(tag)), None)
    if tag is None:
        return None
    write = _Text(style.tags, special_id)
    # A list of calls ends where its end is; calls in tags of their own follow one another like any text.
    more = "" if layout.separator.startswith(layout.end) else f" ({write(layout.separator)} call)*"
    special = special_id(tag)
    head = f"head[lazy]: TEXT {_literal(tag)}" if special is None else f"head: TEXT <[{special}]>"
    return _lark(
        "start: (head body)* tail",
        head,
        f"body: {write(layout.begin.removeprefix(tag))} call{more} {write(layout.end)}",
        "tail: TEXT",
        f"TEXT: {_ANY_TEXT}",
        _call_rules(tools, layout),
    )


def after_reasoning(
    grammar: str, style: ReasoningStyle, special_id: Callable[[str], int | None], *, is_open: bool
) -> str:
    """`grammar`, for an answer that may think first, or with `is_open` does.

    Args:
        grammar: llguidance's JSON, `{"grammars": [...]}`.
    """
    end = special_id(style.end)
    if end is None:
        thinking = f"thinking[suffix={_literal(style.end)}]: {_ANY_TEXT}"
    else:
        thinking = f"thinking: TEXT <[{end}]>\nTEXT: {_ANY_TEXT}"
    begin = _Text((style.begin,), special_id)(style.begin)
    before = "thinking" if is_open else f"({begin} thinking)?"
    lark = _lark(f"start: {before} SPACE? @answer", thinking, r"SPACE: /\n{1,2}/")
    first, *others = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})


class _Text:
    """Writes literal text with the tags in it that are special tokens."""

    def __init__(self, tags: Sequence[str], special_id: Callable[[str], int | None]) -> None:
        self._ids = {tag: id_ for tag in tags if (id_ := special_id(tag)) is not None}

    def __call__(self, text: str) -> str:
        parts = []
        while text:
            at, tag = min(((at, tag) for tag in self._ids if (at := text.find(tag)) >= 0), default=(len(text), ""))
            if at:
                parts.append(_literal(text[:at]))
            if tag:
                parts.append(f"<[{self._ids[tag]}]>")
            text = text[at + len(tag) :]
        return " ".join(parts)


def _layout(style: CallStyle) -> CallLayout:
    assert style.layout is not None, f"{style.name} has no layout"
    return style.layout


def _call_rules(tools: Sequence[Tool], layout: CallLayout) -> str:
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        opening = f'{{"name": {json.dumps(tool.name)}, {json.dumps(layout.arguments_key)}: '
        rules.append(f"call_{i}: {_literal(opening)} arguments_{i} {_literal('}')}")
        rules.append(f"arguments_{i}: %json {json.dumps(_schema(tool))}")
    return "\n".join(rules)


def _schema(tool: Tool) -> Mapping[str, Any]:
    """The arguments' schema with one way to write each value: free whitespace is where small models get lost."""
    # What a schema says beyond what a grammar can keep is an error only where the caller asked for all of it.
    return {**tool.parameters, "x-guidance": {**_SEPARATORS, "lenient": not tool.strict}}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _lark(*rules: str) -> str:
    return "\n".join(("%llguidance {}", *rules, ""))
