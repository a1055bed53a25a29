"""What comes in: OpenAI requests as pydantic models, validated once per request.

Owns which fields exist, their types and ranges, which known ones are refused because they are not supported, and what
happens to those nobody knows. It knows neither tokens nor the engine; what goes out is in `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

from cluster.openai.described import (
    BadWords,
    LogitBias,
    Messages,
    Pattern,
    Prompt,
    ResponseFormat,
    Schema,
    Stops,
    StructuredOutputs,
    ToolChoice,
    Tools,
)
from cluster.openai.fields import FieldPolicy, field_names, neutral, unknown_field
from cluster.openai.schema import Documented
from configs.errors import RequestError
from configs.schema import ServerConfig

_INT64_MAX = 2**63 - 1
_MAX_SAFE_INT = 2**53 - 1  # what every JSON reader keeps exact
_MAX_TOKENS = 2**31 - 1
_MAX_STOP_TOKEN_IDS = 128
_MAX_LOGPROB_TOKEN_IDS = 128
COMPLETION_DEFAULT_MAX_TOKENS = 16


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class SamplingFields(BaseModel):
    """How tokens are chosen and where a text ends: the fields every route that generates shares.

    Null means the default, as in OpenAI's own schema. `sampling.sampling_params` makes engine parameters of them, and
    `sampling.text_options` what is done with the text; fields of type Any are read there.
    """

    # Strict: true is no integer, "1" is no number, 1.5 is no count.
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    """0 and -1 both turn it off."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    """Above 1 against repetition. The bounds keep every logit finite in float32."""
    logit_bias: Annotated[Any, Documented(LogitBias)] = None
    """Token id, as a string, to what is added to its logit."""
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[Any, Documented(BadWords)] = None
    logprob_token_ids: list[int] | None = Field(None, max_length=_MAX_LOGPROB_TOKEN_IDS)
    """With logprobs: these ids' log probabilities beside the likeliest."""
    min_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS)
    """Before the answer has as many, neither end of sequence, stop ids nor stop strings end it."""
    stop: Annotated[Any, Documented(Stops)] = None
    """A string or a list of strings."""
    stop_regex: Annotated[Any, Documented(Stops)] = None
    """A regular expression or a list of them: the text ends with the first match, which stays in it."""
    stop_token_ids: list[int] | None = Field(None, max_length=_MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    """SGLang's name of the one above."""
    skip_special_tokens: bool | None = None
    """None: true."""
    response_format: Annotated[Any, Documented(ResponseFormat)] = None
    """What the answer must be. This and the following four are read by `structured.spec`; at most one may ask for
    something."""
    structured_outputs: Annotated[Any, Documented(StructuredOutputs | None)] = None
    """vLLM's form of it."""
    regex: Annotated[Any, Documented(Pattern)] = None
    """SGLang's forms of it: this, `ebnf` and `json_schema`."""
    ebnf: Annotated[Any, Documented(Pattern)] = None
    json_schema: Annotated[Any, Documented(Schema | None)] = None


class GenerationRequest(SamplingFields):
    """The fields that chat completions and completions share."""

    model: str
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(None, ge=0)
    """Log probabilities of the prompt's tokens, and of as many of the likeliest in their place."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    """Keep this many of the prompt's last tokens; -1: as many as fit."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own, such as BOS. None: to a completion's prompt yes, to a chat's text no."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens `token_id:<id>`."""
    priority: int | None = Field(None, ge=-_MAX_SAFE_INT, le=_MAX_SAFE_INT)
    """Lower goes first."""
    cache_salt: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")
    """Prompts share cached pages only under the same salt. None: one of the client's own."""
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """Takes the place of the header X-Request-Id in the answer's id."""

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def num_prompt_logprobs(self) -> int:
        """-1: none."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[Any, Documented(Messages)]
    """Checked by `chat.parse_messages`."""
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    """Newer name of max_tokens; wins over it."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    """Whether the prompt ends with the opening of an answer. None: true, unless a message is continued."""
    continue_final_message: bool | None = None
    """The answer goes on where the last message stops."""
    documents: list[dict[str, Any]] | None = Field(None, max_length=1024)
    """For templates that read them: objects with `title` and `text`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template; only those it reads."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For templates that read it."""
    include_reasoning: bool | None = None
    """Whether the answer shows the model's thinking; it is counted either way. None: true."""
    tools: Annotated[Any, Documented(Tools)] = None
    """Functions the model may call; read by `tools.request.parse_tools`, like the next one."""
    tool_choice: Annotated[Any, Documented(ToolChoice)] = None
    """none, auto, required, or the function to call. None: auto."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. None: true."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        """-1: none."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, Documented(Prompt)]
    """Read by `checks.prompts`."""
    max_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS)
    """0 only with `echo` or `prompt_logprobs`: the prompt alone is of interest."""
    logprobs: int | None = Field(None, ge=0)
    echo: bool | None = None
    """The prompt is a part of the text, and with `logprobs` of them."""

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int:
        """-1: none."""
        return -1 if self.logprobs is None else self.logprobs


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)
_Model = TypeVar("_Model", bound=BaseModel)


UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "audio": neutral(),
    "best_of": neutral(1),
    "chat_template": neutral(),
    "custom_logit_processor": neutral(),
    "custom_params": neutral(),
    "echo": neutral(False),
    "function_call": neutral("none", "auto"),
    "functions": neutral([]),
    "guided_choice": neutral(),
    "guided_decoding_backend": neutral(),
    "guided_grammar": neutral(),
    "guided_json": neutral(),
    "guided_regex": neutral(),
    "guided_whitespace_pattern": neutral(),
    "kv_transfer_params": neutral(),
    "length_penalty": neutral(1),
    "logits_processors": neutral([]),
    "lora_path": neutral(),
    "lora_request": neutral(),
    "mm_processor_kwargs": neutral({}),
    "modalities": neutral(["text"]),
    "prediction": neutral(),
    "prompt_embeds": neutral(),
    "return_hidden_states": neutral(False),
    "session_params": neutral(),
    "suffix": neutral(""),
    "use_beam_search": neutral(False),
    "verbosity": neutral("medium"),
    "web_search_options": neutral(),
}
"""Fields other servers know and this one does not, each with the values that ask for nothing."""

_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
    }
)
"""Fields that are accepted and change no answer."""

_FIELDS = FieldPolicy(UNSUPPORTED, _WITHOUT_EFFECT)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        RequestError: not strict JSON (NaN and lone surrogates included), nested too deep, or not an object.
    """
    try:
        decoded = msgspec.json.decode(body)
    except ValueError as error:  # DecodeError, UnicodeDecodeError, and Python's limit on the digits of an int
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deep.", code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return decoded


def parse_request(kind: type[_Request], body: bytes, server: ServerConfig) -> _Request:
    """A checked request.

    Raises:
        RequestError: with the path of the field at fault.
    """
    return check_request(kind, decode_body(body), server)


def check_request(kind: type[_Request], raw: Mapping[str, Any], server: ServerConfig) -> _Request:
    """A checked request of decoded JSON. Raises RequestError, with the path of the field at fault."""
    _refuse_unsupported(kind, raw)
    request = validated(kind, raw)
    if server.strict_fields and (unknown := unknown_fields(kind, raw)):
        known = [*field_names(kind), *(f"stream_options.{option}" for option in StreamOptions.model_fields)]
        raise unknown_field(unknown[0], known)
    _check_counts(request, server)
    return request


def validated(kind: type[_Model], raw: object, path: str = "") -> _Model:
    """`raw` as a `kind`, by its field types alone.

    Args:
        path: of `raw` in the request.

    Raises:
        RequestError: with the path of the field at fault.
    """
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        raise _as_request_error(error, raw, path) from error


def unknown_fields(kind: type[BaseModel], raw: Mapping[str, Any]) -> list[str]:
    """Names in `raw` that nobody here knows: ignored, or refused under `server.strict_fields`."""
    unknown = _FIELDS.unknown(kind, raw)
    options = raw.get("stream_options")
    if isinstance(options, dict):
        unknown += [f"stream_options.{name}" for name in options if name not in StreamOptions.model_fields]
    return unknown


def _check_counts(request: ChatRequest | CompletionRequest, server: ServerConfig) -> None:
    """Limits that are settings, and fields that need one another."""
    if request.num_choices > server.max_n:
        raise RequestError(f"n={request.n} exceeds server.max_n={server.max_n}.", param="n")
    if isinstance(request, ChatRequest):
        name = "top_logprobs"
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param=name)
        if request.continue_final_message and request.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
            )
    else:
        name = "logprobs"
        if request.echo and request.stream and request.logprobs is not None and request.num_choices > 1:
            raise RequestError("echo with logprobs and stream: true needs n=1.", param="n")
        if request.max_tokens == 0 and not (request.echo or request.prompt_logprobs is not None):
            raise RequestError("max_tokens must be at least 1 without echo or prompt_logprobs.", param="max_tokens")
    for param, count in ((name, request.num_logprobs), ("prompt_logprobs", request.num_prompt_logprobs)):
        if count > server.max_logprobs:
            raise RequestError(f"{param}={count} exceeds server.max_logprobs={server.max_logprobs}.", param=param)
    if request.logprob_token_ids and request.num_logprobs < 0:
        raise RequestError("logprob_token_ids needs logprobs.", param="logprob_token_ids")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is not allowed with stream: true.", param="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream: true.", param="stream_options")


def _refuse_unsupported(kind: type[BaseModel], raw: Mapping[str, Any]) -> None:
    if "best_of" in raw and raw["best_of"] == raw.get("n"):
        raw = {name: value for name, value in raw.items() if name != "best_of"}
    _FIELDS.refuse(kind, raw)


def _as_request_error(error: pydantic.ValidationError, raw: object, path: str) -> RequestError:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # A union has errors of each of its types: the one that got furthest into the value is the one meant.
    first, below = max(
        ((found, _path(found, raw)) for found in errors if found["loc"][:1] == errors[0]["loc"][:1]),
        key=lambda candidate: (len(candidate[1]), not _is_wrong_type(candidate[0])),
    )
    for part in below:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if first["type"] == "missing":
        return RequestError(f"{path} is required.", code="missing_required_parameter", param=path)
    code = "invalid_type" if _is_wrong_type(first) else "invalid_value"
    return RequestError(f"{path}: {first['msg']}.", code=code, param=path)


def _is_wrong_type(error: ErrorDetails) -> bool:
    """Whether the value is of the wrong type, and not only out of range."""
    return error["type"].endswith(("_type", "_parsing", "_parsing_size", "_from_float"))


def _path(error: ErrorDetails, raw: object) -> list[int | str]:
    """Where in `raw` an error is; pydantic also names the types of a union that it tried."""
    path: list[int | str] = []
    for part in error["loc"]:
        if isinstance(part, int):
            if isinstance(raw, list) and part < len(raw):
                path.append(part)
                raw = raw[part]
        elif isinstance(raw, dict) and part in raw:
            path.append(part)
            raw = raw[part]
    return [*path, error["loc"][-1]] if error["type"] == "missing" else path
