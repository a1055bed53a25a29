"""How what is checked by hand still describes itself in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class Documented:
    """Annotation of a field of type Any: in the document it is `kind`.

    For fields that code reads part by part so that an error names the part at fault, which a union's own error does
    not.
    """

    kind: Any
    """A type or a union of types."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(TypeAdapter(self.kind).core_schema)


def exactly_one(**types: str | list[str]) -> dict[str, Any]:
    """For a model's `json_schema_extra`: one of these fields is there and of its JSON types, the others are null."""
    return {
        "oneOf": [
            {
                "required": [name],
                "properties": {other: {"type": types[other] if other == name else "null"} for other in types},
            }
            for name in types
        ]
    }
