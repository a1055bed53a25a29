"""Checks of single values of a request that its type alone cannot say; each names what is wrong by its path."""

from __future__ import annotations

from cluster.text.stop_regex import StopRegex
from configs.errors import RequestError
from configs.schema import ServerConfig

MAX_SEQUENCES = 1024
"""Most prompts times `n` of one request."""
_MAX_STOP_CHARS = 1024
_MAX_LOGIT_BIASES = 1024
_MAX_LOGIT_BIAS = 100.0
_MAX_WORDS = 128


def stop_strings(stop: object, server: ServerConfig, param: str = "stop") -> list[str]:
    """The stop strings of a request, none of them empty.

    Raises:
        RequestError: wrong type, too many, empty or too long.
    """
    stops = _texts(stop, param, server.max_stop)
    for path, text in stops.items():
        if not 0 < len(text) <= _MAX_STOP_CHARS:
            raise RequestError(f"{path} must have 1 to {_MAX_STOP_CHARS} characters.", param=path)
    return list(stops.values())


def stop_patterns(stop_regex: object, server: ServerConfig) -> list[StopRegex]:
    """The stop patterns of a request.

    Raises:
        RequestError: wrong type, too many, or a pattern that cannot be matched as text comes.
    """
    return [StopRegex(text, param) for param, text in _texts(stop_regex, "stop_regex", server.max_stop).items()]


def words(value: object, param: str) -> list[str]:
    """A list of words, none of them empty. Raises RequestError for anything else."""
    if isinstance(value, str):
        raise RequestError(f"{param} must be a list of strings.", code="invalid_type", param=param)
    texts = _texts(value, param, _MAX_WORDS)
    for path, text in texts.items():
        if not 0 < len(text) <= _MAX_STOP_CHARS:
            raise RequestError(f"{path} must have 1 to {_MAX_STOP_CHARS} characters.", param=path)
    return list(texts.values())


def logit_bias(value: object, vocab_size: int) -> dict[int, float]:
    """Token id to what is added to its logit, from -100 to 100; entries without effect are left out.

    Raises:
        RequestError: not an object of numbers, too many entries, or an id outside the vocabulary.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(
            "logit_bias must be an object of numbers by token id.", code="invalid_type", param="logit_bias"
        )
    if len(value) > _MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias has {len(value)} entries; at most {_MAX_LOGIT_BIASES} are allowed.", param="logit_bias"
        )
    biases = {}
    for key, bias in value.items():
        param = f"logit_bias.{key[:40]}"
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(f"{param}: a key must be a token id from 0 to {vocab_size - 1}.", param=param)
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise RequestError(f"{param} must be a number.", code="invalid_type", param=param)
        biases[int(key)] = float(max(-_MAX_LOGIT_BIAS, min(_MAX_LOGIT_BIAS, bias)))  # no float is as large as an int
    return {token: bias for token, bias in biases.items() if bias}


def prompts(prompt: object, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completion request: a string, token ids, or a list of either kind.

    Raises:
        RequestError: wrong type, empty, too many, or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        return [_checked_text(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.",
            code="invalid_type",
            param="prompt",
        )
    if type(prompt[0]) is int:
        return [_checked_ids(prompt, "prompt", vocab_size)]
    if len(prompt) > MAX_SEQUENCES:
        raise RequestError(f"prompt holds {len(prompt)} prompts; at most {MAX_SEQUENCES} are allowed.", param="prompt")
    are_texts = isinstance(prompt[0], str)
    parsed: list[str | list[int]] = []
    for i, entry in enumerate(prompt):
        param = f"prompt[{i}]"
        if i and isinstance(entry, str) != are_texts:
            kind = "a string" if are_texts else "a list of token ids"
            raise RequestError(f"{param} must be {kind}, as prompt[0] is.", code="invalid_type", param=param)
        parsed.append(_checked_text(entry, param) if are_texts else _checked_ids(entry, param, vocab_size))
    return parsed


def num_logprobs(count: int, param: str, server: ServerConfig) -> None:
    """Raises RequestError for more log probabilities in a place than `server.max_logprobs`."""
    if count > server.max_logprobs:
        raise RequestError(f"{param}={count} exceeds server.max_logprobs={server.max_logprobs}.", param=param)


def check_token_ids(ids: list[int], param: str, vocab_size: int) -> None:
    """Raises RequestError for an id outside the vocabulary: it must never reach a device."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise RequestError(f"{param}[{i}] must be a token id from 0 to {vocab_size - 1}.", param=f"{param}[{i}]")


def _checked_text(text: str, param: str) -> str:
    if not text:
        raise RequestError(f"{param} must not be empty.", code="empty_string", param=param)
    return text


def _checked_ids(ids: object, param: str, vocab_size: int) -> list[int]:
    if not isinstance(ids, list):
        raise RequestError(f"{param} must be a string or a list of token ids.", code="invalid_type", param=param)
    if not ids:
        raise RequestError(f"{param} must not be empty.", code="empty_array", param=param)
    if set(map(type, ids)) != {int}:  # a third of a loop's time, and a body may hold a million
        i = next(i for i, token in enumerate(ids) if type(token) is not int)
        raise RequestError(f"{param}[{i}] must be a token id.", code="invalid_type", param=f"{param}[{i}]")
    check_token_ids(ids, param, vocab_size)
    return ids


def _texts(value: object, param: str, most: int) -> dict[str, str]:
    """A string, a list of at most `most` strings or nothing, as strings by the path of each."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {param: value}
    if not isinstance(value, list):
        raise RequestError(f"{param} must be a string or a list of strings.", code="invalid_type", param=param)
    if len(value) > most:
        raise RequestError(f"{param} has {len(value)} strings; at most {most} are allowed.", param=param)
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise RequestError(f"{param}[{i}] must be a string.", code="invalid_type", param=f"{param}[{i}]")
    return {f"{param}[{i}]": text for i, text in enumerate(value)}
