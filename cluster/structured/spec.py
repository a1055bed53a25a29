"""The grammar that an answer must match, from OpenAI's `response_format` and the fields of vLLM and SGLang.

The fields have the right types already, so reading them is cheap. `checker.GrammarChecker` finds out in another process
whether the schema, regex or grammar itself is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec

from cluster.structured.grammar_limits import MAX_GRAMMAR_BYTES
from configs.errors import RequestError

GRAMMAR_FIELDS = ("response_format", "structured_outputs", "regex", "ebnf", "json_schema")
"""The fields of OpenAI, of vLLM, and three of SGLang. `json_schema` is a schema or its JSON text."""


class GrammarKind(StrEnum):
    """The language of a `GrammarSpec`'s body."""

    JSON_SCHEMA = "json_schema"
    """A schema as JSON."""
    REGEX = "regex"
    """A regular expression in Rust's syntax, UTF-8, which the whole answer must match."""
    CHOICE = "choice"
    """A JSON list of strings."""
    GRAMMAR = "grammar"
    """A grammar in llguidance's Lark syntax, or in GBNF, UTF-8."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON of a `StructuralTag`."""
    COMPILED = "compiled"
    """llguidance's JSON of a grammar: a checked grammar that this server has put into a larger one."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One requested grammar."""

    kind: GrammarKind
    body: bytes
    param: str
    """Path of the grammar's field, for errors."""
    strict: bool = True
    """Whether a schema keyword that cannot be enforced is refused. If False, it is ignored."""
    compact: bool = False
    """Whether the JSON has no whitespace. If False, it may have one space after each comma and colon."""


class Tag(msgspec.Struct, frozen=True):
    """Text that contains JSON of a schema between `begin` and `end`."""

    begin: str
    schema: dict[str, Any] | bool
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True):
    """Free text. Where a trigger occurs, the text must continue as one of the tags that begin with the trigger."""

    structures: list[Tag]
    triggers: list[str]


def schema_grammar(schema: object, param: str, *, strict: bool = True) -> GrammarSpec:
    """A grammar for JSON of a schema, which may be given as text. Raises RequestError if the schema is too long."""
    body = schema.encode() if isinstance(schema, str) else msgspec.json.encode(schema)
    return _spec(GrammarKind.JSON_SCHEMA, body, param, strict=strict)


def object_grammar(param: str) -> GrammarSpec:
    """A grammar for any JSON object."""
    return _spec(GrammarKind.JSON_SCHEMA, b'{"type":"object"}', param)


def text_grammar(kind: GrammarKind, text: str, param: str) -> GrammarSpec:
    """A grammar with `text` as its body. Raises RequestError if the text is too long."""
    return _spec(kind, text.encode(), param)


def read_grammar(own: GrammarSpec | None = None, **fields: Any) -> GrammarSpec | None:
    """The grammar from the fields of a request. Each of `GRAMMAR_FIELDS` has its type in `SamplingFields`. None for any
    text.

    Args:
        own: the grammar of another field, which replaces `response_format`.

    Raises:
        RequestError: two fields have a grammar, one is too long, or `structured_outputs` does not have exactly one
            form.
    """
    if own is not None:
        fields.pop("response_format", None)
    read = [_READERS[name](value, name) for name, value in fields.items() if value is not None]
    specs = [spec for spec in (own, *read) if spec is not None]
    if len(specs) > 1:
        raise RequestError(
            f"{specs[0].param} and {specs[1].param} cannot both be given; an answer has one grammar, so leave one out.",
            param=specs[1].param,
        )
    return specs[0] if specs else None


def _response_format(fields: Mapping[str, Any], param: str) -> GrammarSpec | None:
    match fields["type"]:
        case "text":
            return None
        case "json_object":
            return object_grammar(f"{param}.type")
        case "json_schema":
            given = fields["json_schema"]
            return schema_grammar(given["schema"], f"{param}.json_schema.schema", strict=bool(given.get("strict")))
        case "structural_tag":
            return _structural_tag(fields, param)
        case kind:
            return _READERS[kind](fields[kind], f"{param}.{kind}")


def _structured_outputs(given: Mapping[str, Any], param: str) -> GrammarSpec | None:
    fields = {name: entry for name, entry in given.items() if entry is not None}
    compact = fields.pop("disable_any_whitespace", False)
    if fields.get("json_object") is False:
        del fields["json_object"]
    for name in fields:
        if name not in _STRUCTURED_OUTPUTS:
            raise RequestError(
                f"{param}.{name} is not supported by this server.",
                code="unsupported_parameter",
                param=f"{param}.{name}",
            )
    if len(fields) != 1:
        raise RequestError(f"{param} must have exactly one of {', '.join(_STRUCTURED_OUTPUTS)}.", param=param)
    [(name, entry)] = fields.items()
    spec = _STRUCTURED_OUTPUTS[name](entry, f"{param}.{name}")
    return msgspec.structs.replace(spec, compact=compact) if spec is not None and compact else spec


def _structural_tag(value: Any, param: str) -> GrammarSpec:
    try:
        if isinstance(value, str):
            tag = msgspec.json.decode(value, type=StructuralTag)
        else:
            tag = msgspec.convert(value, StructuralTag)
    except msgspec.DecodeError as error:
        reason, _, path = str(error).partition(" - at `$")
        path = param + path.removesuffix("`")
        raise RequestError(f"{path}: {reason}; correct the structural tag.", param=path) from None
    return _spec(GrammarKind.STRUCTURAL_TAG, msgspec.json.encode(tag), param)


def _spec(kind: GrammarKind, body: bytes, param: str, *, strict: bool = True) -> GrammarSpec:
    if len(body) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{param} takes {len(body)} bytes; at most {MAX_GRAMMAR_BYTES} are allowed.",
            code="grammar_too_complex",
            param=param,
        )
    return GrammarSpec(kind=kind, body=body, param=param, strict=strict)


_STRUCTURED_OUTPUTS: Mapping[str, Callable[[Any, str], GrammarSpec | None]] = {
    "json": schema_grammar,
    "regex": partial(text_grammar, GrammarKind.REGEX),
    "choice": lambda value, param: _spec(GrammarKind.CHOICE, msgspec.json.encode(value), param),
    "grammar": partial(text_grammar, GrammarKind.GRAMMAR),
    "json_object": lambda _, param: object_grammar(param),
    "structural_tag": _structural_tag,
}
_READERS: Mapping[str, Callable[[Any, str], GrammarSpec | None]] = {
    **_STRUCTURED_OUTPUTS,
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "json_schema": schema_grammar,
    "ebnf": partial(text_grammar, GrammarKind.GRAMMAR),
}
