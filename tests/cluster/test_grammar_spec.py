"""What a request may say of its answer's form, before anything is compiled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.structured.grammar_limits import MAX_ENUM_VALUES, MAX_GRAMMAR_BYTES
from cluster.structured.schema import prepare_schema
from cluster.structured.spec import GrammarKind, GrammarSpec
from configs.errors import RequestError
from tests.helpers.chats import read_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def spec_of(**fields: Any) -> GrammarSpec:
    spec = read_grammar(**fields)
    assert spec is not None
    return spec


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


def test_text_and_nothing_ask_for_nothing() -> None:
    assert read_grammar() is None
    assert read_grammar(response_format={"type": "text"}) is None


def test_the_fields_of_three_servers_say_the_same() -> None:
    asked = [
        spec_of(response_format=json_schema(SCHEMA, strict=True)),
        spec_of(structured_outputs={"json": SCHEMA}),
        spec_of(structured_outputs={"json": msgspec.json.encode(SCHEMA).decode()}),
        spec_of(json_schema=SCHEMA),
    ]
    assert {(spec.kind, spec.body, spec.strict) for spec in asked} == {
        (GrammarKind.JSON_SCHEMA, msgspec.json.encode(SCHEMA), True)
    }
    regexes = [spec_of(regex="a+"), spec_of(structured_outputs={"regex": "a+"})]
    regexes.append(spec_of(response_format={"type": "regex", "regex": "a+"}))
    assert {(spec.kind, spec.body) for spec in regexes} == {(GrammarKind.REGEX, b"a+")}
    grammars = [spec_of(ebnf="root ::= x"), spec_of(structured_outputs={"grammar": "root ::= x"})]
    assert {spec.kind for spec in grammars} == {GrammarKind.GRAMMAR}


def test_only_strict_schemas_must_be_kept_in_every_keyword() -> None:
    assert not spec_of(response_format=json_schema(SCHEMA)).strict
    assert not spec_of(response_format=json_schema(SCHEMA, strict=False)).strict
    assert spec_of(response_format=json_schema(SCHEMA, strict=True)).strict


def test_neutral_values_do_not_count() -> None:
    fields = {"json_object": False, "regex": None, "choice": ["a"], "disable_any_whitespace": True}
    spec = spec_of(structured_outputs=fields)
    assert (spec.kind, spec.compact, spec.param) == (GrammarKind.CHOICE, True, "structured_outputs.choice")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(7)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": {"type": "regex"}}, "response_format.regex"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " *"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": ["a"] * (MAX_ENUM_VALUES + 1)}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        (
            {"structured_outputs": {"structural_tag": {"structures": [{}], "triggers": []}}},
            "structured_outputs.structural_tag.structures[0].begin",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"regex": ""}, "regex"),
        ({"regex": 1}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex"),
        ({"json_schema": {"enum": ["x" * MAX_GRAMMAR_BYTES]}}, "json_schema"),
    ],
)
def test_a_wrong_shape_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_grammar(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert caught.value.status == 400


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        (nested(61), "s"),
        ({"properties": {"a": {"enum": list(range(MAX_ENUM_VALUES + 1))}}}, "s.properties.a.enum"),
        ({"items": {"x-guidance": {}}}, "s.items"),
        (7, "s"),
        (False, "s"),
        ({"$ref": "#"}, "s"),
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, "s"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "s"),
        ({"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#"}]}, "s"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "s"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"type": "string"}]}]}, "s"),
    ],
)
def test_a_schema_beyond_the_limits_or_without_a_finite_match_is_refused(schema: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare_schema(schema, "s")
    assert caught.value.param == param


@pytest.mark.parametrize(
    "schema",
    [
        nested(60),
        {"enum": list(range(MAX_ENUM_VALUES))},
        {"$defs": {"node": {**NODE, "required": []}}, "$ref": "#/$defs/node"},
        {"$defs": {"node": {**NODE, "type": ["object", "null"]}}, "$ref": "#/$defs/node"},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "null"}}, "$ref": "#/$defs/a"},
        {"$ref": "https://example.com/unknown"},
        True,
    ],
)
def test_recursion_with_an_end_passes(schema: Any) -> None:
    prepare_schema(schema, "s")


def test_objects_that_say_nothing_of_other_properties_are_closed() -> None:
    schema = {
        "type": "object",
        "properties": {
            "inner": {"type": "object", "properties": {"a": {}}, "required": ["a"]},
            "open": {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}},
            "map": {"type": "object"},
            "number": {"allOf": [{"minimum": 1}, {"maximum": 2}]},
            "properties": {"type": "object", "properties": {"enum": {"const": {"properties": {"no": 1}}}}},
        },
        "required": ["inner"],
    }
    prepared = prepare_schema(schema, "s")
    assert prepared["additionalProperties"] is False
    inside = prepared["properties"]
    assert inside["inner"]["additionalProperties"] is False
    assert inside["open"]["additionalProperties"] == {"type": "string"}
    assert "additionalProperties" not in inside["map"]
    assert inside["properties"]["properties"]["enum"] == {"const": {"properties": {"no": 1}}}


def test_objects_with_a_least_number_of_properties_may_have_those_they_name() -> None:
    schema = {"properties": {"a": {}, "b": {}}, "minProperties": 1}
    assert prepare_schema(dict(schema), "s") == {**schema, "additionalProperties": False}
    more = {"properties": {"a": {}, "b": {}}, "minProperties": 2}
    assert prepare_schema(dict(more), "s")["minProperties"] == 2
    # llguidance would count unnamed ones alone: where a keyword may be ignored, this one is.
    assert "minProperties" not in prepare_schema(dict(more), "s", strict=False)
    assert "minProperties" not in prepare_schema({**schema, "additionalProperties": True}, "s", strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"required": ["a"]}}},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
    ],
)
def test_an_object_that_others_have_a_say_in_stays_open(schema: dict[str, Any]) -> None:
    assert b"additionalProperties" not in msgspec.json.encode(prepare_schema(schema, "s"))
