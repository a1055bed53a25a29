"""Turns a `GrammarSpec` into llguidance's JSON of a grammar. This runs in a process that a grammar may end: see
`check_process`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from cluster.structured.schema import prepare_schema
from cluster.structured.spec import GrammarKind, GrammarSpec, StructuralTag
from cluster.text.tools.grammar import LarkText, literal
from configs.errors import RequestError

_CODE_FRAME = re.compile(r"^(\d+ \||\^+$)")
_POSITION = re.compile(r"^(at )?\d+\(\d+\): ")
_MAX_MESSAGE_CHARS = 300


class GrammarCompiler:
    """Compiles grammars for one model, because the model's special tokens may occur in texts around JSON."""

    def __init__(self, special_tokens: dict[str, int]) -> None:
        """`special_tokens` has the id of each special token's text."""
        self._text = LarkText(special_tokens)

    def compile(self, spec: GrammarSpec) -> str:
        """The grammar, which may still be too complex for llguidance. Raises RequestError if it cannot be compiled. The
        error has the field and, if possible, the position in it."""
        match spec.kind:
            case GrammarKind.JSON_SCHEMA:
                return _grammars([{"json_schema": _schema(_json(spec), spec, spec.param)}])
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(_unanchored(spec.body.decode()))
            case GrammarKind.CHOICE:
                # A terminal is one automaton, whereas a rule would try each choice separately.
                return _lark("start: CHOICE\nCHOICE: " + "|".join(map(literal, _json(spec))))
            case GrammarKind.GRAMMAR:
                return _lark(_as_lark(spec))
            case GrammarKind.STRUCTURAL_TAG:
                return self._structural_tag(msgspec.json.decode(spec.body, type=StructuralTag), spec)
            case GrammarKind.COMPILED:
                return spec.body.decode()

    def _structural_tag(self, tag: StructuralTag, spec: GrammarSpec) -> str:
        # Free text may follow the last tag.
        by_trigger: list[list[int]] = [[] for _ in tag.triggers]
        grammars: list[dict[str, Any]] = []
        tags = []
        for j, piece in enumerate(tag.structures):
            param = f"{spec.param}.structures[{j}]"
            i = next((i for i, trigger in enumerate(tag.triggers) if trigger and piece.begin.startswith(trigger)), None)
            if i is None:
                raise RequestError(f"{param}.begin must begin with one of the triggers.", param=f"{param}.begin")
            by_trigger[i].append(j)
            begin = self._text(piece.begin.removeprefix(tag.triggers[i]))
            tags.append(f"tag_{j}: {begin} @schema_{j} {self._text(piece.end)}")
            grammars.append({"name": f"schema_{j}", "json_schema": _schema(piece.schema, spec, f"{param}.schema")})
        used = [i for i, members in enumerate(by_trigger) if members]
        if not used:
            raise RequestError(f"{spec.param} needs structures and triggers.", param=spec.param)
        parts = [f"part_{i}: head_{i} ({_alternatives('tag', by_trigger[i])})" for i in used]
        heads = [self._text.up_to(tag.triggers[i], f"head_{i}") for i in used]
        start = ["start: part* TEXT", r"TEXT: /(.|\n)*/", f"part: {_alternatives('part', used)}"]
        return _grammars([{"name": "answer", "lark_grammar": "\n".join(start + parts + heads + tags)}, *grammars])


def clean_message(message: str) -> str:
    """The message of an llguidance error, without the excerpt of a grammar that the caller did not write."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    text = " ".join(line for line in lines if line and not _CODE_FRAME.match(line))
    return _POSITION.sub("", text)[:_MAX_MESSAGE_CHARS]


def _json(spec: GrammarSpec) -> Any:
    try:
        return msgspec.json.decode(spec.body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{spec.param} is not valid JSON: {error}.", param=spec.param) from None


def _schema(schema: object, spec: GrammarSpec, param: str) -> dict[str, Any]:
    prepared = prepare_schema(schema, param, strict=spec.strict)
    options = {
        "whitespace_flexible": False,
        "item_separator": "," if spec.compact else ", ?",
        "key_separator": ":" if spec.compact else ": ?",
        "coerce_one_of": not spec.strict,
        "lenient": not spec.strict,
    }
    return {**prepared, "x-guidance": options}


def _as_lark(spec: GrammarSpec) -> str:
    try:
        return any_to_lark(spec.body.decode())
    except Exception as error:  # noqa: BLE001 -- the converter raises Exception itself, and IndexError at the end
        raise RequestError(
            f"{spec.param} is neither a Lark grammar, with a rule `start`, nor GBNF, with a rule `root`: "
            f"{clean_message(str(error))}",
            param=spec.param,
        ) from None


def _unanchored(regex: str) -> str:
    """`regex` without an outer ^ and $, which have no effect because the whole answer must match."""
    regex = regex.removeprefix("^")
    escapes = len(regex) - 1 - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and escapes % 2 == 0 else regex


def _alternatives(name: str, numbers: Iterable[int]) -> str:
    return " | ".join(f"{name}_{i}" for i in numbers)


def _lark(grammar: str) -> str:
    return _grammars([{"lark_grammar": grammar}])


def _grammars(grammars: Sequence[dict[str, Any]]) -> str:
    return msgspec.json.encode({"grammars": grammars}).decode()
