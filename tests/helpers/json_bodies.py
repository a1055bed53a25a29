"""JSON values drawn from a JSON Schema, and ones that it does not allow: what the routes are fuzzed with.

Knows the part of JSON Schema that pydantic and msgspec write; anything else is an error, not a gap.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema_rs
from hypothesis import assume
from hypothesis import strategies as st

_ANNOTATIONS = {"description", "default", "title", "discriminator", "$ref", "examples"}
_MOST_OPTIONAL = 4  # of the optional fields of an object at once: with more, nearly every body breaks some rule
_MOST_ITEMS = 3
_NEAR = 16


def _texts(most: int, least: int = 0) -> st.SearchStrategy[str]:
    # Lone surrogates are no text: UTF-8 cannot carry them.
    return st.text(st.characters(codec="utf-8"), min_size=least, max_size=most)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts(20)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts(8), inner, max_size=3)
)


class Bodies:
    """Values by the schemas of one OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], words: Sequence[str] = ()) -> None:
        """`words`: some texts are made of them."""
        self._document = document
        self._words = words
        self._named: dict[str, st.SearchStrategy[Any]] = {}
        self._validators: dict[str, jsonschema_rs.Draft202012Validator] = {}

    def validator(self, schema: Mapping[str, Any]) -> jsonschema_rs.Draft202012Validator:
        """Says whether a value is one of `schema`."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole)
        return self._validators[key]

    def valid(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        """Values of `schema`."""
        if "$ref" in schema:
            name = schema["$ref"]
            if name not in self._named:
                self._named[name] = st.deferred(lambda: self.valid(self._at(name)))
            return self._named[name]
        keys = schema.keys() - _ANNOTATIONS
        if "const" in keys:
            return st.just(schema["const"])
        if "enum" in keys:
            return st.sampled_from(schema["enum"])
        for union in ("anyOf", "oneOf"):
            if union in keys and "properties" not in keys:
                assert keys == {union}, f"{keys} beside a union"
                return st.one_of([self.valid(member) for member in schema[union]])
        if not keys:
            return anything
        return getattr(self, f"_{schema['type']}")(schema)

    def invalid(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        """Objects that are almost of `schema`: one value in them is another, or missing."""
        validator = self.validator(schema)

        @st.composite
        def broken(draw: st.DrawFn) -> Any:
            body = copy.deepcopy(draw(self.valid(schema)))
            places = _places(body)
            assume(places)
            holder, key = draw(st.sampled_from(places))
            if isinstance(holder, dict) and draw(st.booleans()):
                del holder[key]
            else:
                holder[key] = draw(anything)
            assume(not validator.is_valid(body))
            return body

        return broken()

    def _at(self, reference: str) -> Mapping[str, Any]:
        found: Any = self._document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
        return found  # type: ignore[no-any-return]

    def _null(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _integer(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        low, high = schema.get("minimum"), schema.get("maximum")
        near = 0 if low is None else low
        return st.integers(near, near + _NEAR if high is None else min(near + _NEAR, high)) | st.integers(low, high)

    def _number(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        exclusive = "exclusiveMinimum" in schema
        low = schema.get("exclusiveMinimum", schema.get("minimum"))
        return st.floats(low, schema.get("maximum"), exclude_min=exclusive, allow_nan=False, allow_infinity=False)

    def _string(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema:
            texts = st.from_regex(schema["pattern"], fullmatch=True)
            return texts.filter(lambda text: low <= len(text) and (high is None or len(text) <= high))
        texts = _texts(_NEAR if high is None else min(high, _NEAR), low)
        if not self._words or high is not None:
            return texts
        return texts | st.lists(st.sampled_from(self._words), min_size=max(low, 1), max_size=4).map("".join)

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "prefixItems" in schema:
            return st.tuples(*[self.valid(item) for item in schema["prefixItems"]]).map(list)
        low, high = schema.get("minItems", 0), schema.get("maxItems", _MOST_ITEMS)
        return st.lists(self.valid(schema.get("items", {})), min_size=low, max_size=max(low, min(high, _MOST_ITEMS)))

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        properties = {name: self.valid(inner) for name, inner in schema.get("properties", {}).items()}
        required = schema.get("required", [])
        optional = sorted(properties.keys() - set(required))
        extra = schema.get("additionalProperties", not properties)
        maps = [
            st.dictionaries(st.from_regex(pattern, fullmatch=True), self.valid(inner), max_size=3)
            for pattern, inner in schema.get("patternProperties", {}).items()
        ]
        if extra and not properties and not maps:
            most = min(schema.get("maxProperties", 3), 3)
            values = self.valid(extra) if isinstance(extra, dict) else anything
            maps = [st.dictionaries(_texts(8), values, max_size=most)]

        alternatives = schema.get("oneOf") or schema.get("anyOf") or [{}]

        @st.composite
        def objects(draw: st.DrawFn) -> dict[str, Any]:
            chosen = draw(st.sampled_from(alternatives))
            narrowed = chosen.get("properties", {})
            names = [*required, *chosen.get("required", ())]
            if others := [name for name in optional if name not in narrowed]:
                names += draw(st.lists(st.sampled_from(others), max_size=_MOST_OPTIONAL, unique=True))
            body = {}
            for name in names:
                values = properties[name]
                if name in narrowed:
                    values = values.filter(self.validator(narrowed[name]).is_valid)
                body[name] = draw(values)
            for entries in maps:
                body |= draw(entries)
            return body

        return objects()


def _places(body: Any) -> list[tuple[Any, Any]]:
    """Every container in `body` with each of its keys or places."""
    found: list[tuple[Any, Any]] = []
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in items:
        found.append((body, key))
        found += _places(value)
    return found
