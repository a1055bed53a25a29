"""How fields that are checked by hand still describe themselves in the OpenAPI document."""

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
