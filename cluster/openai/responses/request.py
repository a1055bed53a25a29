"""What comes in at /v1/responses: the request and its input items as pydantic models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy, neutral
from cluster.requests.sampling_fields import ReasoningEffort, SamplingFields
from cluster.requests.schema import Documented
from configs.errors import RequestError

_MAX_METADATA = 16
_MAX_TOKENS = 2**31 - 1
_INCLUDABLE = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})


class _Part(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True
    )


# --- Input items ------------------------------------------------------------------------------------------------------


class TextPart(_Part):
    """Text of a message or of a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(_Part):
    """An earlier answer's refusal."""

    type: Literal["refusal"]
    refusal: str


Parts = list[TextPart | RefusalPart]


class MessageItem(_Part):
    """A turn of the conversation, of this request or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, Documented(str | Parts)]


class FunctionCallItem(_Part):
    """A call the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    arguments: str


class FunctionCallOutputItem(_Part):
    """What a function that the model called gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Any, Documented(str | list[TextPart])]


class ReasoningPart(_Part):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInputItem(_Part):
    """What the model thought earlier; templates that want it get it."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = Field(None, fail_fast=True)


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningInputItem
ITEMS: Mapping[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningInputItem,
}

# --- The request ------------------------------------------------------------------------------------------------------


class FunctionTool(_Part):
    """A function the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(_Part):
    """`tool_choice` of one function."""

    type: Literal["function"]
    name: str


class AllowedTools(_Part):
    """`tool_choice` of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1, fail_fast=True)


class TextFormat(_Part):
    """What the text must look like."""

    type: Literal["text"]


class JsonObjectFormat(_Part):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(_Part):
    """JSON of a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseTextConfig(_Part):
    """How the text is written."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(_Part):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponsesStreamOptions(_Part):
    """What a stream carries besides its events."""

    include_obfuscation: bool | None = None
    """Without effect: events are never padded."""


_ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None


class InputTokensRequest(_Part):
    """POST /v1/responses/input_tokens: what of a request makes its prompt."""

    # A schema cannot say that it may be left out where a previous response is known.
    model_config = ConfigDict(json_schema_extra={"required": ["input"]})

    model: str | None = None
    """None: the one that is served."""
    input: Annotated[Any, Documented(str | list[InputItem])] = None
    """A text, or items; read by `input_items`. None only with `previous_response_id`."""
    instructions: str | None = None
    """A system message before everything else; not carried over by `previous_response_id`."""
    previous_response_id: str | None = Field(None, max_length=200)
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: ResponseTextConfig | None = None
    tools: list[Annotated[Any, Documented(FunctionTool)]] | None = Field(None, max_length=128)
    tool_choice: Annotated[Any, Documented(_ToolChoice)] = None


class ResponsesRequest(SamplingFields, InputTokensRequest):
    """POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra={})

    model: str
    input: Annotated[Any, Documented(str | list[InputItem])]
    """A text, or items; read by `input_items`."""
    max_output_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    max_tool_calls: int | None = Field(None, ge=1)
    """Without effect: it counts calls of tools that the server runs, and there are none."""
    metadata: dict[str, str] | None = Field(None, max_length=_MAX_METADATA)
    store: bool | None = None
    """Keep the response for GET and `previous_response_id`; true unless false."""
    background: bool | None = None
    """Answer at once; the response is made meanwhile. Needs `store`."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = None
    include: list[str] | None = Field(None, max_length=16)
    user: str | None = None

    @property
    def kept(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


FIELDS = FieldPolicy(
    {
        **UNSUPPORTED,
        "access_programs": neutral(),
        "context_management": neutral([]),
        "conversation": neutral(),
        "image": neutral(),
        "moderation": neutral(),
        "prompt": neutral(),
    },
    frozenset(
        {
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
        }
    ),
    STYLING,
)


def ignored_options(request: ResponsesRequest) -> list[str]:
    """Options of `request` that ask for a style this server does not have."""
    ignored = []
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary is not None:
        ignored.append("reasoning.summary")
    return ignored


def check_options(request: ResponsesRequest) -> None:
    """Raises RequestError for values that only together, or only here, are wrong."""
    if request.background and not request.kept:
        raise RequestError("background needs store to be true.", param="background")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream: true.", param="stream_options")
    for i, wanted in enumerate(request.include or ()):
        if wanted not in _INCLUDABLE:
            raise RequestError(
                f"include[{i}] is not supported by this server.", code="unsupported_parameter", param=f"include[{i}]"
            )
    for key, value in (request.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError(
                "metadata has keys of at most 64 and values of at most 512 characters.", param="metadata"
            )
