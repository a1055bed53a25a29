"""What the fields of chats and completions look like that code reads part by part, for the OpenAPI document alone.

`chat`, `tool_fields` and `requests.checks` do the checking.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

Prompt = (
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]
    | Annotated[list[_TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[_TokenId], Field(min_length=1)]], Field(min_length=1, max_length=1024)]
)


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
