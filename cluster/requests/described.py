"""What the fields look like that code reads part by part: types for the OpenAPI document alone, which check nothing.

`checks` and `structured.spec` do the checking; a test draws bodies from the document and finds where the two disagree.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

_Text = Annotated[str, Field(min_length=1, max_length=1024)]

Stops = _Text | Annotated[list[_Text], Field(max_length=32)] | None
"""One or several; `server.max_stop` says how many."""
BadWords = Annotated[list[_Text], Field(max_length=128)] | None
LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None
"""By token id."""
Schema = dict[str, Any] | bool
"""A JSON schema."""
Pattern = Annotated[str, Field(min_length=1)] | None
"""A regular expression, or a grammar."""


class TextFormatParam(BaseModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectParam(BaseModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A schema and how strictly it is taken."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | str = Field(alias="schema")
    strict: bool | None = None
    """A keyword that cannot be enforced is refused; otherwise it is ignored."""


class JsonSchemaParam(BaseModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexParam(BaseModel):
    """What a regular expression matches."""

    type: Literal["regex"]
    regex: str = Field(min_length=1)


class ChoiceParam(BaseModel):
    """One of some texts."""

    type: Literal["choice"]
    choice: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)


class GrammarParam(BaseModel):
    """What a grammar of Lark or GBNF derives."""

    type: Literal["grammar"]
    grammar: str = Field(min_length=1)


class TagParam(BaseModel):
    """Text whose middle is JSON of a schema."""

    begin: str
    schema_: Schema = Field(alias="schema")
    end: str = ""


class StructuralTagParam(BaseModel):
    """Free text in which each trigger must go on as a tag."""

    structures: list[TagParam]
    triggers: list[str]


class StructuralTagFormat(StructuralTagParam):
    """`response_format` of tags."""

    type: Literal["structural_tag"]


ResponseFormat = (
    TextFormatParam
    | JsonObjectParam
    | JsonSchemaParam
    | RegexParam
    | ChoiceParam
    | GrammarParam
    | StructuralTagFormat
    | None
)


class StructuredOutputs(BaseModel):
    """One of these forms."""

    json_: Schema | str | None = Field(None, alias="json")
    regex: Pattern = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: Pattern = None
    json_object: bool | None = None
    structural_tag: StructuralTagParam | str | None = None
    disable_any_whitespace: bool | None = None
