"""What the fields look like that code reads part by part: types for the OpenAPI document alone, which check nothing.

`chat` and `checks` do the checking; a test draws bodies from the document and finds where the two disagree.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

_Text = Annotated[str, Field(min_length=1, max_length=1024)]
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

Stops = _Text | Annotated[list[_Text], Field(max_length=32)] | None
"""One or several; `server.max_stop` says how many."""
BadWords = Annotated[list[_Text], Field(max_length=128)] | None
LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None
"""By token id."""
Prompt = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
    | Annotated[list[_TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[_TokenId], Field(min_length=1)]], Field(min_length=1, max_length=1024)]
)


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


_FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionParam(BaseModel):
    """A function the model may call."""

    name: _FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object's."""
    strict: bool | None = None


class ToolOffer(BaseModel):
    """A tool the model may use."""

    type: Literal["function"] = "function"
    function: FunctionParam


class CalledName(BaseModel):
    """The name of a function."""

    name: _FunctionName


class ChosenFunction(BaseModel):
    """One of the tools."""

    type: Literal["function"]
    function: CalledName


class AllowedFunctions(BaseModel):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1)


class AllowedChoice(BaseModel):
    """`tool_choice` of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


Tools = Annotated[list[ToolOffer], Field(max_length=128)] | None
ToolChoice = Literal["none", "auto", "required"] | ChosenFunction | AllowedChoice | None


class ContentPart(BaseModel):
    """A piece of a message's text. Parts of other types are refused."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(BaseModel):
    """The function of a call."""

    name: str = Field(min_length=1)
    arguments: Annotated[str, Field(pattern=r"^\{\}$")] | dict[str, Any] | None = None
    """A JSON object, or one written as a string."""


class ToolCallParam(BaseModel):
    """A call the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class PromptMessage(BaseModel):
    """What the model is told."""

    role: Literal["system", "developer", "user"]
    content: str | list[ContentPart]
    name: str | None = None


class AssistantTurn(BaseModel):
    """What the model answered earlier."""

    role: Literal["assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolMessage(BaseModel):
    """What a tool that the model called gave back."""

    role: Literal["tool"]
    content: str | list[ContentPart] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[PromptMessage | AssistantTurn | ToolMessage], Field(min_length=1)]
