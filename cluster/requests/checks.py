"""Checks of request values that depend on settings or on the vocabulary, and so cannot be part of their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.requests.shapes import MAX_SEQUENCES
from configs.errors import RequestError
from configs.schema import ServerConfig

_MAX_LOGIT_BIAS = 100.0


def stops(given: str | list[str] | None, param: str, server: ServerConfig) -> dict[str, str]:
    """The stop strings or patterns of a field, by the path of each. Raises RequestError if there are too many."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {param: given}
    if len(given) > server.max_stop:
        raise RequestError(f"{param} has {len(given)} strings; at most {server.max_stop} are allowed.", param=param)
    return {f"{param}[{i}]": text for i, text in enumerate(given)}


def logit_bias(given: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Value to add to the logit of each token id, clipped to -100 to 100. Entries of 0 are dropped. Raises RequestError
    for an id outside the vocabulary."""
    for key in given or ():
        if int(key) >= vocab_size:
            param = f"logit_bias.{key}"
            raise RequestError(f"{param}: a key must be a token id from 0 to {vocab_size - 1}.", param=param)
    biases = {int(key): max(-_MAX_LOGIT_BIAS, min(_MAX_LOGIT_BIAS, bias)) for key, bias in (given or {}).items()}
    return {token: bias for token, bias in biases.items() if bias}


def prompts(given: Any, param: str, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a field, as texts or lists of token ids. The field's type is checked already, and the first entry
    shows which of the four forms of `shapes.Prompts` it has. Raises RequestError for an id outside the vocabulary."""
    if isinstance(given, str):
        return [given]
    lists = {param: given} if isinstance(given[0], int) else {f"{param}[{i}]": entry for i, entry in enumerate(given)}
    for path, entry in lists.items():
        if not isinstance(entry, str):
            check_token_ids(entry, path, vocab_size)
    return list(lists.values())


def num_sequences(n: int, num_prompts: int, param: str, server: ServerConfig) -> None:
    """Raises RequestError if a request wants more answers, per prompt or in total, than are allowed."""
    if n > server.max_n:
        raise RequestError(f"n={n} exceeds server.max_n={server.max_n}.", param=param)
    if n * num_prompts > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts times n={n} exceed {MAX_SEQUENCES}; send fewer at once.", param=param
        )


def num_logprobs(count: int, param: str, server: ServerConfig) -> None:
    """Raises RequestError if `count` exceeds `server.max_logprobs`."""
    if count > server.max_logprobs:
        raise RequestError(f"{param}={count} exceeds server.max_logprobs={server.max_logprobs}.", param=param)


def check_token_ids(ids: list[int], param: str, vocab_size: int) -> None:
    """Raises RequestError for an id outside the vocabulary, which must never reach a device."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise RequestError(f"{param}[{i}] must be a token id from 0 to {vocab_size - 1}.", param=f"{param}[{i}]")
