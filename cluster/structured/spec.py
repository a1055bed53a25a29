"""What an answer must match, as requests say it: OpenAI's `response_format`, vLLM's and SGLang's fields.

Reads the fields' shape only and costs next to nothing; whether the schema, regex or grammar itself is any good is
found out by `checker.GrammarChecker`, in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from cluster.structured.limits import MAX_ENUM_VALUES, MAX_GRAMMAR_BYTES
from configs.errors import RequestError

GRAMMAR_FIELDS = ("response_format", "structured_outputs", "regex", "ebnf", "json_schema")
"""OpenAI's, vLLM's and three of SGLang's, of which `json_schema` is a schema or its JSON text."""


class GrammarKind(StrEnum):
    """What the body of a `GrammarSpec` is."""

    JSON_SCHEMA = "json_schema"
    """A schema as JSON."""
    REGEX = "regex"
    """A regular expression in Rust's syntax, UTF-8; the whole answer matches it."""
    CHOICE = "choice"
    """A JSON list of strings."""
    GRAMMAR = "grammar"
    """A grammar in Lark's syntax as llguidance has it, or in GBNF, UTF-8."""
    STRUCTURAL_TAG = "structural_tag"
    """JSON of a `StructuralTag`."""
    COMPILED = "compiled"
    """llguidance's JSON of a grammar: what a check returned, put into a larger one by this server."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One grammar as it was asked for."""

    kind: GrammarKind
    body: bytes
    param: str
    """Path of the field it came from, for errors."""
    strict: bool = True
    """A keyword of the schema that cannot be enforced is refused; False: it is ignored."""
    compact: bool = False
    """JSON without any whitespace; False: at most one space after each comma and colon."""


class Tag(msgspec.Struct, frozen=True):
    """A piece of text whose middle is JSON of a schema."""

    begin: str
    schema: dict[str, Any] | bool
    end: str = ""


class StructuralTag(msgspec.Struct, frozen=True):
    """Free text in which each trigger must go on as one of the tags that begin with it."""

    structures: list[Tag]
    triggers: list[str]


def schema_grammar(schema: object, param: str, *, strict: bool) -> GrammarSpec:
    """JSON of a schema. Raises RequestError when it is none, or too long."""
    return _json_schema(schema, param, strict=strict)


def object_grammar(param: str) -> GrammarSpec:
    """Any JSON object."""
    return _spec(GrammarKind.JSON_SCHEMA, b'{"type":"object"}', param)


def lark_grammar(text: str, param: str) -> GrammarSpec:
    """A grammar that this server wrote itself, in Lark's syntax. Raises RequestError when it is too long."""
    return _spec(GrammarKind.GRAMMAR, text.encode(), param)


def compiled_grammar(grammar: str, param: str) -> GrammarSpec:
    """A grammar made of checked ones. Raises RequestError when it is too long."""
    return _spec(GrammarKind.COMPILED, grammar.encode(), param)


def read_grammar(own: GrammarSpec | None = None, **fields: object) -> GrammarSpec | None:
    """What the fields of a request ask for; None: any text.

    Args:
        own: of another field, read already; it takes the place of `response_format`.
        fields: by name, each one of `GRAMMAR_FIELDS`.

    Raises:
        RequestError: a field has the wrong shape, or two of them ask for something.
    """
    if own is not None:
        fields.pop("response_format", None)
    read = [_READERS[name](value, name) for name, value in fields.items() if value is not None]
    specs = [spec for spec in (own, *read) if spec is not None]
    if len(specs) > 1:
        raise RequestError(
            f"{specs[0].param} and {specs[1].param} cannot both be given: an answer has one grammar.",
            param=specs[1].param,
        )
    return specs[0] if specs else None


def _response_format(value: object, param: str) -> GrammarSpec | None:
    fields = _object(value, param)
    kind = fields.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return object_grammar(f"{param}.type")
        case "json_schema":
            path = f"{param}.json_schema"
            given = _object(fields.get("json_schema"), path)
            strict = given.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise _wrong_type(f"{path}.strict", "a boolean")
            return _json_schema(given.get("schema"), f"{path}.schema", strict=bool(strict))
        case "structural_tag":
            return _structural_tag(fields, param)
        case "regex" | "choice" | "grammar":
            return _READERS[kind](fields.get(kind), f"{param}.{kind}")
    raise RequestError(
        f"{param}.type must be text, json_object, json_schema, structural_tag, regex, choice or grammar.",
        param=f"{param}.type",
    )


def _structured_outputs(value: object, param: str) -> GrammarSpec | None:
    fields = {name: entry for name, entry in _object(value, param).items() if entry is not None}
    compact = fields.pop("disable_any_whitespace", False)
    if not isinstance(compact, bool):
        raise _wrong_type(f"{param}.disable_any_whitespace", "a boolean")
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


def _json_schema(value: object, param: str, *, strict: bool = True) -> GrammarSpec:
    if value is None:
        raise RequestError(f"{param} is required.", code="missing_required_parameter", param=param)
    if isinstance(value, str):
        return _spec(GrammarKind.JSON_SCHEMA, value.encode(), param, strict=strict)
    if not isinstance(value, dict | bool):
        raise _wrong_type(param, "a JSON schema")
    return _spec(GrammarKind.JSON_SCHEMA, msgspec.json.encode(value), param, strict=strict)


def _json_object(value: object, param: str) -> GrammarSpec:
    if value is not True:
        raise _wrong_type(param, "a boolean")
    return object_grammar(param)


def _choice(value: object, param: str) -> GrammarSpec:
    if not isinstance(value, list) or not value:
        raise _wrong_type(param, "a list of strings, and not empty")
    if len(value) > MAX_ENUM_VALUES:
        raise RequestError(f"{param} has {len(value)} entries; at most {MAX_ENUM_VALUES} are allowed.", param=param)
    for i, choice in enumerate(value):
        if not isinstance(choice, str):
            raise _wrong_type(f"{param}[{i}]", "a string")
        if not choice:
            raise RequestError(f"{param}[{i}] must not be empty.", code="empty_string", param=f"{param}[{i}]")
    return _spec(GrammarKind.CHOICE, msgspec.json.encode(value), param)


def _text(kind: GrammarKind) -> Callable[[object, str], GrammarSpec]:
    def read(value: object, param: str) -> GrammarSpec:
        if not isinstance(value, str):
            raise _wrong_type(param, "a string")
        if not value:
            raise RequestError(f"{param} must not be empty.", code="empty_string", param=param)
        return _spec(kind, value.encode(), param)

    return read


def _structural_tag(value: object, param: str) -> GrammarSpec:
    try:
        if isinstance(value, str):
            tag = msgspec.json.decode(value, type=StructuralTag)
        else:
            tag = msgspec.convert(value, StructuralTag)
    except msgspec.DecodeError as error:
        reason, _, path = str(error).partition(" - at `$")
        path = param + path.removesuffix("`")
        raise RequestError(f"{path}: {reason}.", param=path) from None
    return _spec(GrammarKind.STRUCTURAL_TAG, msgspec.json.encode(tag), param)


def _object(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong_type(param, "an object")
    return value


def _spec(kind: GrammarKind, body: bytes, param: str, *, strict: bool = True, compact: bool = False) -> GrammarSpec:
    if len(body) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{param} takes {len(body)} bytes; at most {MAX_GRAMMAR_BYTES} are allowed.",
            code="grammar_too_complex",
            param=param,
        )
    return GrammarSpec(kind=kind, body=body, param=param, strict=strict, compact=compact)


def _wrong_type(param: str, expected: str) -> RequestError:
    return RequestError(f"{param} must be {expected}.", code="invalid_type", param=param)


_STRUCTURED_OUTPUTS: Mapping[str, Callable[[object, str], GrammarSpec | None]] = {
    "json": _json_schema,
    "regex": _text(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _text(GrammarKind.GRAMMAR),
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
_READERS: Mapping[str, Callable[[object, str], GrammarSpec | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "json_schema": _json_schema,
    "regex": _text(GrammarKind.REGEX),
    "choice": _choice,
    "grammar": _text(GrammarKind.GRAMMAR),
    "ebnf": _text(GrammarKind.GRAMMAR),
}
