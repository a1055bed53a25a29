"""Random JSON schemas that mean something: nested objects, enums, patterns, references, unions, bounds, any alphabet.

Each has short matches: strings, arrays and integers are bounded, and recursion may end at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_NAMES = ["name", "id", "größe", "名前", "is_ok", "a b", 'quo"te', "x", "тип", "📦", "price", "tags", "back\\slash"]
_WORDS = ["red", "green", "blau", "ñandú", "東京", "a\tb", "", "🙂", 'say "hi"', "c:\\x", "/", "null"]
_PATTERNS = [
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    r"^(foo|bar){1,3}[0-9]?$",
    r"^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?$",
    r"^#[0-9a-fA-F]{6}$",
    r"^[α-ω]{1,4}$",
    r"^.{3}$",
]
_FORMATS = ["date", "ipv4", "uuid"]  # a time's fraction of a second may be as long as it likes


class SchemaMaker:
    """Schemas from one seed."""

    def __init__(self, seed: int, *, bounded: bool = False) -> None:
        """`bounded`: no recursion and no fractions of any length, which a model that repeats itself may never end."""
        self._random = random.Random(seed)
        self._bounded = bounded
        self._defs: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        """An object schema, with definitions where it refers to some."""
        root = self._object(3)
        return {**root, "$defs": self._defs} if self._defs else root

    def _any(self, depth: int) -> dict[str, Any]:
        leaves: list[Callable[[], dict[str, Any]]] = [
            self._string,
            self._pattern,
            self._format,
            self._integer,
            self._number,
            self._enum,
            self._constant,
            self._plain,
        ]
        if depth <= 0:
            return self._random.choice(leaves)()
        nested = [self._object, self._array, self._tuple, self._union, self._one_of, self._linked_list, self._all_of]
        return self._random.choice([*leaves, *(lambda make=make: make(depth - 1) for make in nested)])()

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        schema = {"type": "object", "properties": {name: self._any(depth) for name in names}, "required": required}
        if self._random.random() < 0.5:
            schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        most = least + self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> dict[str, Any]:
        items = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(2, 3))]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        kinds = self._random.sample(_WORDS, 2)
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self._any(depth)},
                    "required": ["kind", "value"],
                    "additionalProperties": False,
                }
                for kind in kinds
            ]
        }

    def _all_of(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(-100, 100)
        return {"type": "integer", "allOf": [{"minimum": least}, {"maximum": least + self._random.randint(0, 300)}]}

    def _linked_list(self, depth: int) -> dict[str, Any]:
        name = f"node{len(self._defs)}"
        reference = {"$ref": f"#/$defs/{name}"}
        self._defs[name] = {}  # taken, before what is inside takes another
        following = self._any(0) if self._bounded else reference
        self._defs[name] = {
            "type": "object",
            "properties": {"value": self._any(depth - 1), "next": {"anyOf": [{"type": "null"}, following]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return reference

    def _string(self) -> dict[str, Any]:
        least = self._random.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 12)}

    def _pattern(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self._random.choice(_PATTERNS)}

    def _format(self) -> dict[str, Any]:
        return {"type": "string", "format": self._random.choice(_FORMATS)}

    def _integer(self) -> dict[str, Any]:
        least = self._random.randint(-10_000, 10_000)
        schema = {"type": "integer", "minimum": least, "exclusiveMaximum": least + self._random.randint(20, 5000)}
        return {**schema, "multipleOf": self._random.choice([2, 3, 10])} if self._random.random() < 0.3 else schema

    def _number(self) -> dict[str, Any]:
        least = round(self._random.uniform(-50, 50), 2)
        schema = {
            "type": "number",
            "exclusiveMinimum": least,
            "maximum": round(least + self._random.uniform(1, 100), 2),
        }
        return {**schema, "multipleOf": 0.25} if self._bounded else schema

    def _enum(self) -> dict[str, Any]:
        values: list[Any] = self._random.sample(_WORDS, 3)
        if self._random.random() < 0.4:
            values += self._random.sample([1, -2.5, None, True, [1, "x"], {"k": 0}], 2)
        return {"enum": values}

    def _constant(self) -> dict[str, Any]:
        return {"const": self._random.choice([*_WORDS, 7, None, {"a": [1, 2]}])}

    def _plain(self) -> dict[str, Any]:
        kind = self._random.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])
        return {"type": kind, "maximum": 10**6, "minimum": -1} if "integer" in kind else {"type": kind}
