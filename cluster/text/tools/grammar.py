"""Grammars for answers with tool calls, in llguidance's JSON. This module only makes text, which is checked later.

A grammar writes calls in the model's own format, so that the format's parser can read them. The arguments of each tool
have a separate grammar, which was checked before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.text.reasoning import ReasoningStyle
from cluster.text.tools.styles import CallStyle

SpecialId = Callable[[str], int | None]
"""Returns the id of the special token with a text, or None if no special token has it."""
_ANY_TEXT = r"/(?s:.*)/"


class CallGrammar:
    """Makes grammars for calls to some tools, in one format."""

    def __init__(self, names: Sequence[str], arguments: Sequence[str], style: CallStyle, special_id: SpecialId) -> None:
        """Args:
        names: names of the tools that may be called.
        arguments: the checked grammar of the arguments of each tool.
        style: a format that has a layout.
        """
        assert style.layout is not None, f"{style.name} has no layout"
        self._layout = style.layout
        self._write = _writer(style.tags, special_id)
        self._rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(names)))}"]
        self._schemas: list[dict[str, Any]] = []
        for i, (name, schema) in enumerate(zip(names, arguments, strict=True)):
            before, after = map(self._write, self._layout.around(name))
            self._rules.append(f"call_{i}: {before} @arguments_{i} {after}")
            self._schemas += _named(f"arguments_{i}", schema)

    def alone(self, *, parallel: bool) -> str:
        """The grammar of an answer that is one call, or with `parallel` one or more calls."""
        return self._grammar(f"start: {self._calls(parallel)}")

    def or_answer(self, answer: str, *, parallel: bool) -> str:
        """The grammar of an answer that is only calls, or matches the grammar `answer`. The layout must have a tag."""
        rules = f"start: calls | @response\ncalls: {self._calls(parallel)}"
        return self._grammar(rules, *_named("response", answer))

    def in_text(self) -> str:
        """The grammar of any text in which every call is valid. The layout must have a tag."""
        layout = self._layout
        tag = layout.tag
        # A list of calls ends at its end tag. Calls with their own tags may follow each other like any text.
        more = "" if layout.separator.startswith(layout.end) else f"({self._write(layout.separator)} call)*"
        head = self._write.up_to(tag, "head")
        body = f"body: {self._write(layout.begin.removeprefix(tag))} call {more} {self._write(layout.end)}"
        return self._grammar(f"start: (head body)* tail\n{head}\n{body}\ntail: TEXT\nTEXT: {_ANY_TEXT}")

    def _calls(self, parallel: bool) -> str:
        layout = self._layout
        more = f"({self._write(layout.separator)} call)*" if parallel and layout.separator else ""
        return f"{self._write(layout.begin)} call {more} {self._write(layout.end)}"

    def _grammar(self, rules: str, *others: dict[str, Any]) -> str:
        lark = "\n".join((rules, *self._rules))
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._schemas, *others]})


def after_reasoning(
    answer: str, style: ReasoningStyle, special_id: SpecialId, *, is_open: bool, is_call: bool = False
) -> str:
    """The grammar `answer` for a model that may reason first. With `is_open`, the prompt has begun the reasoning; with
    `is_call`, the answer is only calls."""
    end = special_id(style.end)
    if end is None:
        thinking = f"thinking[suffix={literal(style.end)}]: {_ANY_TEXT}"
    else:
        thinking = f"thinking: THOUGHT <[{end}]>\nTHOUGHT: {_ANY_TEXT}"
    write = _writer(style.tags, special_id)
    before = "thinking" if is_open else f"({write(style.begin)} thinking {write(style.then)})?"
    lead = "SPACE?" if not style.answer else "" if is_call else write(style.answer)
    lark = f"start: {before} {lead} @answer\n{thinking}\nSPACE: /\\n{{1,2}}/"
    return json.dumps({"grammars": [{"lark_grammar": lark}, *_named("answer", answer)]})


def _named(name: str, grammar: str) -> list[dict[str, Any]]:
    """The rules of `grammar`, for use inside another one: the first is renamed to `name`, and the others stay."""
    first, *others = json.loads(grammar)["grammars"]
    return [{**first, "name": name}, *others]


class LarkText:
    """Writes literal text in Lark. Special tokens are written by id, because they have no bytes to match."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids` has the id of each special token's text."""
        self._ids = ids
        texts = sorted(map(re.escape, ids), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(texts) or '(?!)'})")

    def __call__(self, text: str) -> str:
        pieces = enumerate(self._special.split(text))
        return " ".join(f"<[{self._ids[piece]}]>" if i % 2 else literal(piece) for i, piece in pieces if piece)

    def up_to(self, tag: str, rule: str) -> str:
        """The rule for any text up to and including `tag`: one lazy token of the grammar, which must also have a rule
        TEXT."""
        return f"{rule}: TEXT <[{self._ids[tag]}]>" if tag in self._ids else f"{rule}[lazy]: TEXT {literal(tag)}"


def literal(text: str) -> str:
    """`text` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _writer(tags: Sequence[str], special_id: SpecialId) -> LarkText:
    return LarkText({tag: id_ for tag in tags if (id_ := special_id(tag)) is not None})
