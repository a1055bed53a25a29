"""From the fields of a request to the engine's `SamplingParams`: defaults filled in, ids checked, seeds dealt."""

from __future__ import annotations

import msgspec

from cluster.messages import SamplingParams
from cluster.openai.checks import check_token_ids
from cluster.openai.protocol import SamplingFields


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request gets that names no value; a model's generation_config may say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    seed: int,
    num_logprobs: int,
    vocab_size: int,
) -> SamplingParams:
    """One sequence's parameters; other choices of the same request differ in `seed` alone (see `choices_of`).

    Args:
        seed: when the request names none.
        num_logprobs: -1 none, k the sampled token's and the k likeliest.

    Raises:
        RequestError: a token id outside the vocabulary.
    """
    stop_token_ids = fields.stop_token_ids or []
    check_token_ids(stop_token_ids, "stop_token_ids", vocab_size)
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        top_k=max(top_k, 0),
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        seed=seed if fields.seed is None else fields.seed,
        stop_token_ids=tuple(stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        num_logprobs=num_logprobs,
    )


def choices_of(sampling: SamplingParams, num_choices: int) -> list[SamplingParams]:
    """`num_choices` times `sampling`, each with a seed of its own, counted up from the first one's."""
    return [
        msgspec.structs.replace(sampling, seed=_wrap_int64(sampling.seed + choice)) for choice in range(num_choices)
    ]


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
