"""Checks of single values of a request that its type alone cannot say; each names what is wrong by its path."""

from __future__ import annotations

from collections.abc import Sequence

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


def prompts(given: object, param: str, vocab_size: int) -> Sequence[str | list[int]]:
    """The prompts that a field holds: a string, token ids, or a list of either kind.

    Raises:
        RequestError: wrong type, empty, too many, or an id outside the vocabulary.
    """
    first = given[0] if isinstance(given, list) and given else given
    if isinstance(first, str):
        return texts(given, param)
    return id_lists(given, param, vocab_size, or_texts="a string, a list of strings, ")


def texts(given: object, param: str) -> list[str]:
    """A string or a list of strings, none of them empty. Raises RequestError for anything else, or too many."""
    parsed = []
    for path, text in _entries(given, param, isinstance(given, str), "a string or a list of strings"):
        if not isinstance(text, str):
            raise RequestError(f"{path} must be a string.", code="invalid_type", param=path)
        if not text:
            raise RequestError(f"{path} must not be empty.", code="empty_string", param=path)
        parsed.append(text)
    return parsed


def id_lists(given: object, param: str, vocab_size: int, or_texts: str = "") -> list[list[int]]:
    """Token ids or a list of lists of them, none of them empty.

    Args:
        or_texts: what else the field may be, for the message.

    Raises:
        RequestError: anything else, too many, or an id outside the vocabulary.
    """
    kinds = f"{or_texts}a list of token ids or a list of such lists"
    parsed = []
    for path, ids in _entries(given, param, is_one_prompt(given), kinds):
        parsed.append(token_ids(ids, path, vocab_size))
        if not ids:
            raise RequestError(f"{path} must not be empty.", code="empty_array", param=path)
    return parsed


def is_one_prompt(given: object) -> bool:
    """Whether what `prompts` takes is one prompt, and no list of them."""
    return isinstance(given, str) or (isinstance(given, list) and len(given) > 0 and type(given[0]) is int)


def _entries(given: object, param: str, is_one: bool, kinds: str) -> list[tuple[str, object]]:
    """Each of the prompts in a field, with its path."""
    if is_one:
        return [(param, given)]
    if not isinstance(given, list) or not given:
        raise RequestError(f"{param} must be {kinds}, and not empty.", code="invalid_type", param=param)
    if len(given) > MAX_SEQUENCES:
        raise RequestError(f"{param} holds {len(given)} prompts; at most {MAX_SEQUENCES} are allowed.", param=param)
    return [(f"{param}[{i}]", entry) for i, entry in enumerate(given)]


def num_logprobs(count: int, param: str, server: ServerConfig) -> None:
    """Raises RequestError for more log probabilities in a place than `server.max_logprobs`."""
    if count > server.max_logprobs:
        raise RequestError(f"{param}={count} exceeds server.max_logprobs={server.max_logprobs}.", param=param)


def check_token_ids(ids: list[int], param: str, vocab_size: int) -> None:
    """Raises RequestError for an id outside the vocabulary: it must never reach a device."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        i = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise RequestError(f"{param}[{i}] must be a token id from 0 to {vocab_size - 1}.", param=f"{param}[{i}]")


def token_ids(ids: object, param: str, vocab_size: int) -> list[int]:
    """A list of token ids that the model knows, if of any. Raises RequestError for anything else."""
    if not isinstance(ids, list):
        raise RequestError(f"{param} must be a list of token ids.", code="invalid_type", param=param)
    if not set(map(type, ids)) <= {int}:  # a third of a loop's time, and a body may hold a million
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
