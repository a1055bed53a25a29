"""Types for the parts of request bodies. They check the values and generate the OpenAPI document.

A wrong value is refused with its path (`json_body.validated`). A rule that a type cannot express is a validator that
raises RequestError; the error's `param` is a path below the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from configs.errors import RequestError

MAX_SEQUENCES = 1024
"""Maximum number of prompts times `n` of one request."""
MAX_TOKENS = 2**31 - 1
MAX_TOOLS = 512
"""OpenAI allows 128, but agents with tools of many servers send more through Anthropic's API."""


class Shape(BaseModel):
    """An object in a request. Its types are strict: true is no integer, "1" is no number, 1.5 is no count."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


@dataclass(frozen=True, slots=True)
class Checked:
    """Annotates a field that is checked as a `kind`, but keeps the JSON that was sent, for the model or the client."""

    kind: Any
    """The type, or union of types, that the value must have."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(_as_it_came, handler.generate_schema(self.kind))


def _as_it_came(value: Any, check: Callable[[Any], Any]) -> Any:
    check(value)
    return value


def exactly_one(**types: str | list[str]) -> dict[str, Any]:
    """The `json_schema_extra` of a model in which exactly one of these fields is given, with its JSON types. The other
    fields must be null."""
    return {
        "oneOf": [
            {
                "required": [name],
                "properties": {other: {"type": types[other] if other == name else "null"} for other in types},
            }
            for name in types
        ]
    }


# --- Objects of many types --------------------------------------------------------------------------------------------


class Other(Shape):
    """An object of a type that this server does not know, with all of its fields in `model_extra`."""

    model_config = ConfigDict(extra="allow")
    type: str


def by_type(**kinds: type[Shape]) -> Any:
    """The union of `kinds`, by the value of `type`, and of objects with any other type, which become `Other`. Without a
    type, the first of `kinds` is meant."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        return next(iter(kinds)) if kind is None else kind if isinstance(kind, str) and kind in kinds else "other"

    schema = {"type": "object", "properties": {"type": {"type": "string", "not": {"enum": list(kinds)}}}}
    schema |= {"required": ["type"], "description": "Read as text or left out; `x-ignored-fields` says what was."}
    tagged = [Annotated[kind, Tag(name)] for name, kind in kinds.items()]
    return Annotated[Union[*tagged, Annotated[Other, Tag("other"), WithJsonSchema(schema)]], Discriminator(tag)]


# --- Texts and token ids ----------------------------------------------------------------------------------------------


def filled(value: Any) -> Any:
    """Returns `value`. Raises RequestError if `value` is an empty text or list."""
    if value in ("", []):
        raise RequestError("must not be empty", code="empty_string" if value == "" else "empty_array")
    return value


Text = Annotated[str, Field(min_length=1), BeforeValidator(filled)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), BeforeValidator(filled)]
_Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]
_TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]


def _form_of_texts(value: object) -> str | None:
    return "text" if isinstance(value, str) else "texts" if isinstance(value, list) and value else None


def _form_of_ids(value: object) -> str | None:
    return ("lists" if isinstance(value[0], list) else "ids") if isinstance(value, list) and value else None


def _form_of_prompts(value: object) -> str | None:
    first = value[0] if isinstance(value, list) and value else value
    return _form_of_texts(value) if isinstance(first, str) else _form_of_ids(value)


def _either(form: Callable[[object], str | None], forms: str) -> Discriminator:
    return Discriminator(form, custom_error_type="invalid_type", custom_error_message=f"must be {forms}, and not empty")


Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[_Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[_TokenIdLists, Tag("lists")],
    _either(_form_of_prompts, "a string, a list of strings, a list of token ids or a list of such lists"),
]
"""One prompt or several, as texts or as token ids."""
Texts = Annotated[
    Annotated[Text, Tag("text")] | Annotated[_Texts, Tag("texts")],
    _either(_form_of_texts, "a string or a list of strings"),
]
IdLists = Annotated[
    Annotated[TokenIds, Tag("ids")] | Annotated[_TokenIdLists, Tag("lists")],
    _either(_form_of_ids, "a list of token ids or a list of such lists"),
]


# --- Functions that the model may call --------------------------------------------------------------------------------


def _schema_of_object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if schema.get("type", "object") != "object":
        raise RequestError("must be object: a function takes the fields of one", param="type")
    if not isinstance(schema.get("properties", {}), dict):
        raise RequestError("must be an object", code="invalid_type", param="properties")
    return schema


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Description = Annotated[str, Field(max_length=1 << 16)]
ArgumentsSchema = Annotated[dict[str, Any], AfterValidator(_schema_of_object)]
"""The JSON schema of a function's arguments, which must be a schema of an object."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much the model should reason, for chat templates that read this."""
