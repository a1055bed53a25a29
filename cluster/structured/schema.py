"""Prepares JSON schemas for llguidance: checks limits, refuses schemas without finite matches, and closes open
objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from cluster.structured.grammar_limits import MAX_ENUM_VALUES, MAX_SCHEMA_DEPTH
from configs.errors import RequestError

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_MAX_PARAM_CHARS = 200
# With these keywords, several schemas together decide whether an object is open, so no object is closed.
_ENTANGLING = {"not", "if", "dependentSchemas", "unevaluatedProperties"}
_OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "required", "$ref", "allOf", "anyOf", "oneOf"}
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_LARGEST_BOUND = 2**63 - 1024  # the largest double that fits in an int64; llguidance refuses most bounds beyond it


def prepare_schema(schema: object, param: str, *, strict: bool = True) -> dict[str, Any]:
    """Checks `schema`, changes it in place and returns the schema to compile.

    An object that does not say whether it is open is closed. Otherwise an object that only names its properties would
    be followed by any number of invented ones. The closed schema allows less: everything that matches it matches
    `schema`. Number bounds that llguidance cannot represent are replaced. Without `strict`, patterns and minimum
    numbers of properties that it cannot enforce are removed.

    Raises:
        RequestError: `schema` is no schema, is nested too deep, has too many enum values, or has no finite match.
    """
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} must be a JSON schema.", code="invalid_type", param=param)
    num_values = 0
    entangled = False
    nodes = []
    for node, path, depth in _schemas(schema, param):
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_complex(f"is nested deeper than {MAX_SCHEMA_DEPTH} schemas", param)
        if not isinstance(node, dict):
            continue
        if "x-guidance" in node:
            raise RequestError(
                f"{path}: x-guidance is not supported; leave it out.", code="unsupported_parameter", param=path
            )
        values = node.get("enum")
        num_values += len(values) if isinstance(values, list) else 0
        if num_values > MAX_ENUM_VALUES:
            raise _too_complex(f"has more than {MAX_ENUM_VALUES} enum values", f"{path}.enum")
        entangled = entangled or not _ENTANGLING.isdisjoint(node) or _merges(node)
        _bound(node)
        nodes.append(node)
    if not _Finite(schema).ends():
        raise RequestError(f"{param} is matched by nothing finite; give its recursion an end.", param=param)
    if not entangled:
        for node in nodes:
            _close(node)
    if not strict:
        for node in nodes:
            _forgive(node)
    return schema if isinstance(schema, dict) else {}


def _schemas(schema: object, param: str) -> Iterator[tuple[object, str, int]]:
    """Yields every schema inside `schema` with its path and depth. Data (enum, const, default) is skipped."""
    stack: list[tuple[object, str, int]] = [(schema, param, 0)]
    while stack:
        node, path, depth = stack.pop()
        yield node, path[:_MAX_PARAM_CHARS], depth
        if not isinstance(node, dict):
            continue
        for key, value in node.items():
            if key in _SINGLE:
                stack.append((value, f"{path}.{key}", depth + 1))
            elif key in _LISTS and isinstance(value, list):
                stack += [(entry, f"{path}.{key}[{i}]", depth + 1) for i, entry in enumerate(value)]
            elif key in _BY_NAME and isinstance(value, dict):
                stack += [(entry, f"{path}.{key}.{name}", depth + 1) for name, entry in value.items()]


def _merges(node: dict[str, Any]) -> bool:
    """Whether several schemas apply to the properties of one object."""
    parts = [part for part in _list(node.get("allOf")) if isinstance(part, dict) and not _OF_OBJECTS.isdisjoint(part)]
    if len(parts) > 1:
        return True
    return "properties" in node and (bool(parts) or not {"$ref", "anyOf", "oneOf"}.isdisjoint(node))


def _bound(node: dict[str, Any]) -> None:
    """Replaces bounds as wide as an int64, a float32 or a double by the widest bounds that llguidance supports, which
    allow less."""
    for sign, keys in ((-1, ("minimum", "exclusiveMinimum")), (1, ("maximum", "exclusiveMaximum"))):
        for key in keys:
            bound = node.get(key)
            if isinstance(bound, int | float) and sign * bound > _LARGEST_BOUND:
                node[key] = sign * _LARGEST_BOUND


def _close(node: dict[str, Any]) -> None:
    properties = node.get("properties")
    if (
        isinstance(properties, dict)
        and properties
        and {"additionalProperties", "patternProperties"}.isdisjoint(node)
        and node.get("minProperties", 0) in range(len(properties) + 1)
        and isinstance(required := node.get("required", []), list)
        and all(name in properties for name in required if isinstance(name, str))
    ):
        node["additionalProperties"] = False


def _forgive(node: dict[str, Any]) -> None:
    """Removes a pattern with lookarounds, which llguidance cannot enforce. Also removes a minimum number of properties
    if some may be missing, because llguidance only counts unnamed ones."""
    pattern = node.get("pattern")
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        del node["pattern"]
    properties = node.get("properties")
    some_are_optional = isinstance(properties, dict) and not properties.keys() <= set(_names(node))
    kept = (node.get("additionalProperties"), node.get("minProperties"), node.get("maxProperties", 1)) == (False, 1, 1)
    if some_are_optional and not kept:
        node.pop("minProperties", None)


class _Finite:
    """Decides whether a schema has a finite match: computes the least fixed point over its local references."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._ends: dict[str, bool] = {}  # reference -> whether it has a finite match; False until proven

    def ends(self) -> bool:
        """Whether the root schema has a finite match. The compiler refuses references that lead nowhere."""
        while True:
            known = dict(self._ends)
            result = self._node(self._root)
            for reference in list(self._ends):
                self._ends[reference] = self._ends[reference] or self._node(_resolve(self._root, reference))
            if result or self._ends == known:
                return result

    def _node(self, node: object) -> bool:
        if not isinstance(node, dict):
            return node is not False
        if "enum" in node or "const" in node:
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and not self._ends.setdefault(reference, False):
            return False
        if not all(map(self._node, _list(node.get("allOf")))):
            return False
        for key in ("anyOf", "oneOf"):
            options = _list(node.get(key))
            if options and not any(map(self._node, options)):
                return False
        kinds = node.get("type")
        kinds = [kinds] if isinstance(kinds, str) else _list(kinds)
        return not kinds or any(all(map(self._node, _required(node, kind))) for kind in kinds)


def _required(node: dict[str, Any], kind: object) -> list[object]:
    """The schemas of the parts that a value of type `kind` must have."""
    properties = node.get("properties")
    if kind == "object" and isinstance(properties, dict):
        return [properties[name] for name in _names(node) if name in properties]
    least = node.get("minItems")
    if kind == "array" and isinstance(least, int) and least > 0:
        first = _list(node.get("prefixItems"))
        return first[:least] if least <= len(first) else [*first, node.get("items", True)]
    return []


def _names(node: dict[str, Any]) -> list[str]:
    """Names of the properties that an object must have."""
    return [name for name in _list(node.get("required")) if isinstance(name, str)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(root: object, reference: str) -> object:
    """The schema at a local reference (`#`, `#/$defs/a`). True, which any value matches, for every other reference."""
    if not reference.startswith("#"):
        return True
    node = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return True
    return node


def _too_complex(reason: str, param: str) -> RequestError:
    return RequestError(f"{param} {reason}.", code="grammar_too_complex", param=param)
