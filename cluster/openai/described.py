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
