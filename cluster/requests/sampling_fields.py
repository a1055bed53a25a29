"""The fields of a request that say how tokens are chosen and where a text ends, for every route."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.requests.shapes import MAX_TOKENS, Checked, Shape, Text
from cluster.structured.grammar_limits import MAX_ENUM_VALUES
from cluster.structured.spec import GRAMMAR_FIELDS, GrammarSpec, read_grammar
from configs.schema import SamplingValues

_INT64_MAX = 2**63 - 1
_MAX_STOP_TOKEN_IDS = 128
_MAX_LOGPROB_TOKEN_IDS = 128

StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = StopText | Annotated[list[StopText], Field(max_length=32, fail_fast=True)]
"""One string or a list of strings. `server.max_stop` limits their number."""
JsonSchema = dict[str, Any] | bool
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_ENUM_VALUES, fail_fast=True)]


class TextFormatParam(Shape):
    """Any text."""

    type: Literal["text"]


class JsonObjectParam(Shape):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Shape):
    """A schema, its name, and how strictly the answer follows the schema."""

    name: str | None = None
    description: str | None = None
    schema_: JsonSchema | str = Field(alias="schema")
    strict: bool | None = None
    """If true, a schema keyword that cannot be enforced is refused; otherwise the keyword is ignored."""


class JsonSchemaParam(Shape):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexParam(Shape):
    """Text that matches a regular expression."""

    type: Literal["regex"]
    regex: Text


class ChoiceParam(Shape):
    """One of several texts."""

    type: Literal["choice"]
    choice: Choices


class GrammarParam(Shape):
    """Text that matches a grammar in Lark or GBNF."""

    type: Literal["grammar"]
    grammar: Text


class TagParam(Shape):
    """Text that contains JSON of a schema between `begin` and `end`."""

    begin: str
    schema_: JsonSchema = Field(alias="schema")
    end: str = ""


class StructuralTagParam(Shape):
    """Free text. Where a trigger occurs, the text must continue as a tag that begins with the trigger."""

    structures: list[TagParam]
    triggers: list[str]


class StructuralTagFormat(StructuralTagParam):
    """A `response_format` with tags."""

    type: Literal["structural_tag"]


ResponseFormat = (
    Annotated[
        TextFormatParam
        | JsonObjectParam
        | JsonSchemaParam
        | RegexParam
        | ChoiceParam
        | GrammarParam
        | StructuralTagFormat,
        Field(discriminator="type"),
    ]
    | None
)


class StructuredOutputs(Shape):
    """The form of the answer, given in one of these fields."""

    json_: JsonSchema | str | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: StructuralTagParam | str | None = None
    disable_any_whitespace: bool | None = None


class SamplingFields(SamplingValues, Shape):
    """How tokens are chosen and where a text ends: the fields that every generating route shares. Null means the
    default, as in OpenAI's schema.

    `sampling.sampling_params` turns them into engine parameters, and `sampling.text_options` says how the text is made.
    """

    seed: int | None = Field(None, ge=-_INT64_MAX - 1, le=_INT64_MAX)
    """Equal seeds give equal tokens, independent of other requests."""
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = Field(None, max_length=1024)
    """Values to add to the logits of tokens. A key is the token id as a string."""
    allowed_token_ids: list[int] | None = Field(None, fail_fast=True)
    """Only these token ids are sampled. Null: all."""
    bad_words: Annotated[list[StopText], Field(max_length=128, fail_fast=True)] | None = None
    """Words and phrases that must not occur in the answer, at its start or after a space."""
    logprob_token_ids: list[int] | None = Field(None, max_length=_MAX_LOGPROB_TOKEN_IDS)
    """Token ids that get log probabilities besides the likeliest tokens. Needs logprobs."""
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)
    """Until the answer has this many tokens, no end of sequence, stop id or stop string ends it."""
    stop: Stops | None = None
    """A string, or a list of strings, that ends the text."""
    stop_regex: Stops | None = None
    """A regular expression, or a list of them. The text ends after the first match and includes the match."""
    stop_token_ids: list[int] | None = Field(None, max_length=_MAX_STOP_TOKEN_IDS)
    """Token ids that end the text, besides the model's own."""
    ignore_eos: bool | None = None
    """Whether the answer continues after the model's end of sequence."""
    include_stop_str_in_output: bool | None = None
    """Whether the text includes the stop string that ended it."""
    no_stop_trim: bool | None = None
    """SGLang's name of `include_stop_str_in_output`."""
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text. Null means the server's default, usually true."""
    response_format: Annotated[dict[str, Any] | None, Checked(ResponseFormat)] = None
    """The form of the answer. At most one of this field and the next four may be given."""
    structured_outputs: Annotated[dict[str, Any] | None, Checked(StructuredOutputs | None)] = None
    """vLLM's field for the form of the answer."""
    regex: Text | None = None
    """SGLang's field for a regular expression."""
    ebnf: Text | None = None
    """SGLang's field for a grammar."""
    json_schema: JsonSchema | str | None = None
    """SGLang's field for a schema."""

    def grammar(self, own: GrammarSpec | None = None) -> GrammarSpec | None:
        """The grammar that the answer must match. None for any text.

        Args:
            own: the grammar from a field that only one API has, which replaces `response_format`.

        Raises:
            RequestError: a field has the wrong shape, or two fields have a grammar.
        """
        return read_grammar(own, **{name: getattr(self, name) for name in GRAMMAR_FIELDS})
