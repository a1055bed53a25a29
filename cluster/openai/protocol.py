"""What comes in: OpenAI requests as pydantic models, validated once per request.

Owns which fields exist, their types and ranges, and which known ones are refused because they are not supported.
It knows neither tokens nor the engine; what goes out is in `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from configs.errors import RequestError
from configs.schema import ServerConfig

_INT64_MAX = 2**63 - 1
_MAX_TOKENS = 2**31 - 1
_MAX_STOP_TOKEN_IDS = 128
COMPLETION_DEFAULT_MAX_TOKENS = 16


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    include_usage: bool | None = None


class SamplingFields(BaseModel):
    """How tokens are chosen and where a text ends: the fields every route that generates shares.

    Null means the default, as in OpenAI's own schema. `sampling.sampling_params` makes engine parameters of them.
    """

    # Strict: true is no integer, "1" is no number, 1.5 is no count.
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    """0 and -1 both turn it off."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    seed: int | None = Field(None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    stop: Any = None
    """A string or a list of strings; read by `checks.stop_strings`, which names the entry at fault."""
    stop_token_ids: list[int] | None = Field(None, max_length=_MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None


class GenerationRequest(SamplingFields):
    """The fields that chat completions and completions share."""

    model: str
    max_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Any
    """Checked by `chat.parse_messages`."""
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_TOKENS)
    """Newer name of max_tokens; wins over it."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        """-1: none."""
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any
    """Read by `checks.prompts`."""
    logprobs: int | None = Field(None, ge=0)

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int:
        """-1: none."""
        return -1 if self.logprobs is None else self.logprobs


_Request = TypeVar("_Request", ChatRequest, CompletionRequest)
_Model = TypeVar("_Model", bound=BaseModel)


def _neutral(*values: object) -> Callable[[object], bool]:
    # 0 == False in Python: types are compared too, but 0 and 0.0 are one JSON number.
    def is_neutral(value: object) -> bool:
        return value is None or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values
        )

    return is_neutral


_UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "add_generation_prompt": _neutral(True),
    "add_special_tokens": _neutral(),
    "allowed_token_ids": _neutral([]),
    "audio": _neutral(),
    "bad_words": _neutral([]),
    "best_of": _neutral(1),
    "cache_salt": _neutral(),
    "chat_template": _neutral(),
    "chat_template_kwargs": _neutral({}),
    "continue_final_message": _neutral(False),
    "documents": _neutral([]),
    "echo": _neutral(False),
    "frequency_penalty": _neutral(0),
    "function_call": _neutral("none", "auto"),
    "functions": _neutral([]),
    "guided_choice": _neutral(),
    "guided_grammar": _neutral(),
    "guided_json": _neutral(),
    "guided_regex": _neutral(),
    "include_stop_str_in_output": _neutral(False),
    "length_penalty": _neutral(1),
    "logit_bias": _neutral({}),
    "logprob_token_ids": _neutral([]),
    "min_tokens": _neutral(0),
    "modalities": _neutral(["text"]),
    "prediction": _neutral(),
    "presence_penalty": _neutral(0),
    "priority": _neutral(0),
    "prompt_embeds": _neutral(),
    "prompt_logprobs": _neutral(),
    "reasoning_effort": _neutral(),
    "repetition_penalty": _neutral(1),
    "response_format": _neutral({"type": "text"}),
    "return_token_ids": _neutral(False),
    "skip_special_tokens": _neutral(True),
    "structured_outputs": _neutral(),
    "suffix": _neutral(""),
    "tool_choice": _neutral("none", "auto"),
    "tools": _neutral([]),
    "truncate_prompt_tokens": _neutral(),
    "use_beam_search": _neutral(False),
    "verbosity": _neutral("medium"),
    "web_search_options": _neutral(),
}
"""Fields other servers know and this one does not, each with the values that ask for nothing. A field that is dropped
in silence gives an answer to another question, so anything else is refused."""


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
    _refuse_unsupported(raw)
    request = validated(kind, raw)
    if request.num_choices > server.max_n:
        raise RequestError(f"n={request.n} exceeds server.max_n={server.max_n}.", param="n")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if request.num_logprobs > server.max_logprobs:
        param = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
        raise RequestError(
            f"{param}={request.num_logprobs} exceeds server.max_logprobs={server.max_logprobs}.", param=param
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream: true.", param="stream_options")
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
        raise _as_request_error(error, path) from error


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED.keys() & raw.keys():
        value = raw[name]
        if _UNSUPPORTED[name](value) or (name == "best_of" and value == raw.get("n")):
            continue
        raise RequestError(f"{name} is not supported by this server.", code="unsupported_parameter", param=name)
    options = raw.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        param = "stream_options.continuous_usage_stats"
        raise RequestError(f"{param} is not supported by this server.", code="unsupported_parameter", param=param)


def _as_request_error(error: pydantic.ValidationError, path: str) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if first["type"] == "missing":
        return RequestError(f"{path} is required.", code="missing_required_parameter", param=path)
    wrong_type = first["type"].endswith(("_type", "_parsing", "_parsing_size", "_from_float"))
    code = "invalid_type" if wrong_type else "invalid_value"
    return RequestError(f"{path}: {first['msg']}.", code=code, param=path)
