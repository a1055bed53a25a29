"""Turns the fields of a request into the engine's `SamplingParams` and the `TextOptions` of its answer.

This module has the defaults, the checks that need the vocabulary, and the conversion of words and biases to token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from cluster.messages.engine import SamplingParams
from cluster.requests import checks
from cluster.requests.job import JobOptions
from cluster.requests.sampling_fields import SamplingFields
from cluster.text.stop_regex import StopRegex
from cluster.text.stops import TextOptions
from cluster.text.tokenizer import Tokenizer
from configs.errors import RequestError
from configs.schema import GenerationDefaults, SamplingValues, ServerConfig

_MAX_BAD_WORD_TOKENS = 1024
_VALUES = set(SamplingValues.model_fields)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary against which token ids and words are checked."""

    tokenizer: Tokenizer
    size: int
    """Number of ids with an embedding. The tokenizer may have another number of ids."""
    eos_token_ids: frozenset[int] = frozenset()


def sampling_params(
    fields: SamplingFields,
    defaults: GenerationDefaults,
    vocabulary: Vocabulary,
    options: JobOptions,
    *,
    max_tokens: Sequence[int],
    next_seed: Callable[[], int],
    grammar: str | None = None,
) -> list[list[SamplingParams]]:
    """The parameters of each prompt's choices.

    Choices differ in their seeds. The request's seed is that of each prompt's first choice, and later choices count up
    from it; without a seed, each choice of each prompt gets its own. Only the first choice requests the prompt's log
    probabilities, which are the same for all choices.

    Args:
        max_tokens: maximum length of the answer to each prompt.
        next_seed: returns an int64, for choices of a request without a seed.
        grammar: a checked grammar, or None for any text.

    Raises:
        RequestError: a field is wrong; the error names its path.
    """
    size = vocabulary.size
    stop_token_ids = fields.stop_token_ids or []
    checks.check_token_ids(stop_token_ids, "stop_token_ids", size)
    extra_ids = list(dict.fromkeys(fields.logprob_token_ids or []))
    checks.check_token_ids(extra_ids, "logprob_token_ids", size)
    if extra_ids and options.num_logprobs < 0:
        raise RequestError("logprob_token_ids needs logprobs.", param="logprob_token_ids")
    allowed = sorted(set(fields.allowed_token_ids or []))
    checks.check_token_ids(allowed, "allowed_token_ids", size)
    min_tokens = fields.min_tokens or 0
    if min_tokens > min(max_tokens):
        raise RequestError(f"min_tokens={min_tokens} exceeds max_tokens={min(max_tokens)}.", param="min_tokens")
    bias = checks.logit_bias(fields.logit_bias, size)
    words = bad_words(fields.bad_words or (), vocabulary)
    bias |= {word[0]: -math.inf for word in words if len(word) == 1}
    _check_choice_left(allowed, bias, {*stop_token_ids, *vocabulary.eos_token_ids} if min_tokens else set())
    chosen = defaults.model_dump(include=_VALUES, exclude_none=True)
    chosen |= fields.model_dump(include=_VALUES, exclude_none=True)
    if not 0 <= chosen.get("top_k", 0) < size:
        del chosen["top_k"]
    base = SamplingParams(
        max_tokens=max_tokens[0],
        seed=0 if fields.seed is None else fields.seed,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        num_logprobs=options.num_logprobs,
        logprob_token_ids=tuple(extra_ids),
        logit_bias=tuple(sorted(bias.items())),
        allowed_token_ids=tuple(allowed),
        bad_words=tuple(word for word in words if len(word) > 1),
        min_tokens=min_tokens,
        prompt_logprobs=options.num_prompt_logprobs,
        grammar=grammar,
        **chosen,
    )

    def choice_of(limit: int, choice: int) -> SamplingParams:
        return msgspec.structs.replace(
            base,
            max_tokens=limit,
            seed=next_seed() if fields.seed is None else (fields.seed + choice + 2**63) % 2**64 - 2**63,
            prompt_logprobs=-1 if choice else options.num_prompt_logprobs,
        )

    return [[choice_of(limit, choice) for choice in range(options.num_choices)] for limit in max_tokens]


def text_options(
    fields: SamplingFields, defaults: GenerationDefaults, server: ServerConfig, *, prompt_only: bool = False
) -> TextOptions:
    """How the answer's text is made and where it ends. Raises RequestError for a bad stop string or pattern."""
    skips = defaults.skip_special_tokens if fields.skip_special_tokens is None else fields.skip_special_tokens
    return TextOptions(
        stops=list(checks.stops(fields.stop, "stop", server).values()),
        patterns=[
            StopRegex(text, path) for path, text in checks.stops(fields.stop_regex, "stop_regex", server).items()
        ],
        include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        skip_special_tokens=skips is not False,
        prompt_only=prompt_only,
    )


def bad_words(words: Sequence[str], vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Token ids of each word, at the start of a text and after a space. Each sequence occurs once, and sequences that
    the model cannot write are left out. Raises RequestError if they have too many tokens."""
    tokenizer = vocabulary.tokenizer
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        alone = tuple(tokenizer.encode(word.lstrip(" ") or word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False))
        sequences[alone] = None
        if spaced[1:] != alone:  # otherwise the space is a separate token, and `alone` matches after it
            sequences[spaced] = None
    possible = [sequence for sequence in sequences if sequence and max(sequence) < vocabulary.size]
    num_tokens = sum(len(sequence) for sequence in possible)
    if num_tokens > _MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words are {num_tokens} tokens; at most {_MAX_BAD_WORD_TOKENS} are allowed.", param="bad_words"
        )
    return possible


def _check_choice_left(allowed: Sequence[int], bias: dict[int, float], ends: set[int]) -> None:
    """Raises RequestError if `allowed` has tokens, and all of them are banned by `bias` or `ends`."""
    if allowed and all(bias.get(token) == -math.inf or token in ends for token in allowed):
        raise RequestError(
            "allowed_token_ids leaves no token, because bad_words or min_tokens forbid all of them; allow others.",
            param="allowed_token_ids",
        )
