"""The fields of a request that say how tokens are chosen and where a text ends: the same on every route."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.requests.described import (
    BadWords,
    LogitBias,
    Pattern,
    ResponseFormat,
    Schema,
    Stops,
    StructuredOutputs,
)
from cluster.requests.schema import Documented
from cluster.structured.spec import GRAMMAR_FIELDS, GrammarSpec, read_grammar

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""For chat templates that read it."""
_INT64_MAX = 2**63 - 1
_MAX_TOKENS = 2**31 - 1
_MAX_STOP_TOKEN_IDS = 128
_MAX_LOGPROB_TOKEN_IDS = 128


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
    """0: the likeliest token. None, here and below: what the model's makers or the operator set, else neutral."""
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    """Only of the likeliest tokens that have this probability together."""
    top_k: int | None = Field(None, ge=-1, le=_MAX_TOKENS)
    """0 and -1 both turn it off."""
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    """Only of tokens with at least this share of the likeliest one's probability."""
    seed: int | None = Field(None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    """The same one gives the same tokens, whatever else is served."""
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """Taken from a token's logit for each time the answer has it."""
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    """Taken from the logit of each token the answer has."""
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    """Above 1 against repetition. The bounds keep every logit finite in float32."""
    logit_bias: Annotated[Any, Documented(LogitBias)] = None
    """Token id, as a string, to what is added to its logit."""
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True)
    """Only these are sampled."""
    bad_words: Annotated[Any, Documented(BadWords)] = None
    """Words and phrases that the answer must not have, at its start or after a space."""
    logprob_token_ids: list[int] | None = Field(None, max_length=_MAX_LOGPROB_TOKEN_IDS)
    """With logprobs: these ids' log probabilities beside the likeliest."""
    min_tokens: int | None = Field(None, ge=0, le=_MAX_TOKENS)
    """Before the answer has as many, neither end of sequence, stop ids nor stop strings end it."""
    stop: Annotated[Any, Documented(Stops)] = None
    """A string or a list of strings."""
    stop_regex: Annotated[Any, Documented(Stops)] = None
    """A regular expression or a list of them: the text ends with the first match, which stays in it."""
    stop_token_ids: list[int] | None = Field(None, max_length=_MAX_STOP_TOKEN_IDS)
    """Tokens that end the text beside the model's own."""
    ignore_eos: bool | None = None
    """Whether the answer goes on past the model's own end."""
    include_stop_str_in_output: bool | None = None
    """Whether what ended the text stays in it."""
    no_stop_trim: bool | None = None
    """SGLang's name of the one above."""
    skip_special_tokens: bool | None = None
    """None: true."""
    response_format: Annotated[Any, Documented(ResponseFormat)] = None
    """What the answer must be: at most one of this and the following four. `structured.spec` reads them."""
    structured_outputs: Annotated[Any, Documented(StructuredOutputs | None)] = None
    """vLLM's form of it."""
    regex: Annotated[Any, Documented(Pattern)] = None
    """SGLang's form of a regular expression."""
    ebnf: Annotated[Any, Documented(Pattern)] = None
    """SGLang's form of a grammar."""
    json_schema: Annotated[Any, Documented(Schema | None)] = None
    """SGLang's form of a schema."""

    def grammar(self, own: GrammarSpec | None = None) -> GrammarSpec | None:
        """What the answer must match; None: any text.

        Args:
            own: of a field that one API alone has, in place of `response_format`.

        Raises:
            RequestError: a field has the wrong shape, or two of them ask for something.
        """
        return read_grammar(own, **{name: getattr(self, name) for name in GRAMMAR_FIELDS})
