"""The request of /v1/responses and its input items, as types that check the values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from cluster.openai.openai_request import CalledName, FunctionParam, RefusalPart
from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy, neutral
from cluster.requests.sampling_fields import JsonObjectParam, SamplingFields, TextFormatParam
from cluster.requests.shapes import MAX_TOKENS, MAX_TOOLS, Checked, ReasoningEffort, Shape, by_type, filled
from configs.errors import RequestError

_MAX_METADATA = 16
_INCLUDABLE = frozenset({"message.output_text.logprobs", "reasoning.encrypted_content"})


# --- Input items ------------------------------------------------------------------------------------------------------


class TextPart(Shape):
    """A text in a message or in a function's output."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MediaPart(Shape):
    """An image or a file. The model sees a text that says so in its place."""

    type: Literal["input_image", "input_file"]


_Part = Annotated[TextPart | MediaPart | RefusalPart, Field(discriminator="type")]


class MessageItem(Shape):
    """A turn of the conversation, from this request or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)]


class FunctionCallItem(Shape):
    """A call that the model made earlier."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str


class FunctionCallOutputItem(Shape):
    """The output of a function that the model called."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[_Part], Field(fail_fast=True)]


class ReasoningPart(Shape):
    """A piece of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningInputItem(Shape):
    """Earlier reasoning of the model, for templates that read it."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] | None = Field(None, fail_fast=True)
    summary: list[ReasoningPart] | None = Field(None, fail_fast=True)
    """Read in place of an empty `content`."""


_Item: Any = by_type(
    message=MessageItem,
    function_call=FunctionCallItem,
    function_call_output=FunctionCallOutputItem,
    reasoning=ReasoningInputItem,
)
_Items = Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
_Input = str | Annotated[_Items, BeforeValidator(filled)]

# --- The request ------------------------------------------------------------------------------------------------------


class FunctionTool(FunctionParam):
    """A function that the model may call."""

    type: Literal["function"] | None = None


_MANY = Field(max_length=MAX_TOOLS, fail_fast=True)


class NamespaceTool(CalledName):
    """Functions that share a namespace. Calls of them have the fields `namespace` and `name`."""

    type: Literal["namespace"]
    description: str | None = None
    """Shown for functions without a description."""
    tools: Annotated[list[dict[str, Any]], Checked(Annotated[list[by_type(function=FunctionTool)], _MANY])]


_Tool: Any = by_type(function=FunctionTool, namespace=NamespaceTool)
_Tools = Annotated[list[_Tool], _MANY]


class NamespacedName(CalledName):
    """A function that the answer may call."""

    type: Literal["function"] = "function"
    namespace: str | None = None
    """The function's namespace. May be null if no other function has the name."""


class NamedFunction(NamespacedName):
    """A `tool_choice` that requires one function."""

    type: Literal["function"]


class AllowedTools(Shape):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamespacedName] = Field(min_length=1, fail_fast=True)


class JsonSchemaFormat(Shape):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseTextConfig(Shape):
    """The form of the answer's text."""

    format: Annotated[TextFormatParam | JsonObjectParam | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Shape):
    """How much the model reasons."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponsesStreamOptions(Shape):
    """What a stream contains besides its events."""

    include_obfuscation: bool | None = None
    """Has no effect, because events are never padded."""


_ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedTools, Field(discriminator="type")] | None
)


class InputTokensRequest(Shape):
    """POST /v1/responses/input_tokens: the fields of a request that determine its prompt."""

    # A schema cannot express that a field may be omitted only with a previous response.
    model_config = ConfigDict(json_schema_extra={"required": ["input"]})

    model: str | None = None
    """The model's name. If null, the served model."""
    input: Annotated[str | list[dict[str, Any]] | None, Checked(_Input | SkipJsonSchema[None])] = None
    """A text, or a list of items. Null is allowed only with `previous_response_id`."""
    instructions: str | None = None
    """A system message before everything else. A request with `previous_response_id` does not inherit it."""
    previous_response_id: str | None = Field(None, max_length=200)
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: ResponseTextConfig | None = None
    tools: Annotated[list[dict[str, Any]] | None, Checked(_Tools | None)] = None
    tool_choice: Annotated[str | dict[str, Any] | None, Checked(_ToolChoice)] = None


class ResponsesRequest(SamplingFields, InputTokensRequest):
    """POST /v1/responses."""

    model_config = ConfigDict(json_schema_extra={})

    model: str
    input: Annotated[str | list[dict[str, Any]], Checked(_Input)]
    """A text, or a list of items."""
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_tool_calls: int | None = Field(None, ge=1)
    """Has no effect, because it limits tools that the server runs, and this server runs none."""
    metadata: dict[str, str] | None = Field(None, max_length=_MAX_METADATA)
    store: bool | None = None
    """Whether the response is stored for GET and `previous_response_id`. Null means true."""
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    """auto: drops the oldest turns of a conversation that does not fit. Null means disabled."""
    include: list[str] | None = Field(None, max_length=16)
    user: str | None = None

    @property
    def is_stored(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


FIELDS = FieldPolicy(
    {
        **UNSUPPORTED,
        "access_programs": neutral(),
        "background": neutral(False),
        "context_management": neutral([]),
        "conversation": neutral(),
        "image": neutral(),
        "prompt": neutral(),
    },
    frozenset(
        {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier"}
    ),
    STYLING,
    {"reasoning": ReasoningOptions, "text": ResponseTextConfig},
    instead={
        "background": "use stream: true for a long answer",
        "conversation": "continue a stored response with previous_response_id, or send all items as input",
        "prompt": "send its text as instructions and input",
    },
)


def ignored_options(request: InputTokensRequest) -> list[str]:
    """Style options of `request` that this server does not support."""
    ignored = []
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        ignored.append("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary is not None:
        ignored.append("reasoning.summary")
    return ignored


def check_options(request: ResponsesRequest) -> None:
    """Raises RequestError for values that exclude each other, or that this server does not support."""
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream: true.", param="stream_options")
    for i, wanted in enumerate(request.include or ()):
        if wanted not in _INCLUDABLE:
            raise RequestError(
                f"include[{i}] is not supported by this server; leave it out.",
                code="unsupported_parameter",
                param=f"include[{i}]",
            )
    for key, value in (request.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise RequestError(
                "metadata must have keys of at most 64 and values of at most 512 characters.", param="metadata"
            )
