"""Checks of single values of a request that its type alone cannot say; each names what is wrong by its path."""

from __future__ import annotations

from configs.errors import RequestError
from configs.schema import ServerConfig

MAX_SEQUENCES = 1024
"""Most prompts times `n` of one request."""
_MAX_STOP_CHARS = 1024


def stop_strings(stop: object, server: ServerConfig) -> list[str]:
    """The stop strings of a request, none of them empty.

    Raises:
        RequestError: wrong type, too many, empty or too long.
    """
    if stop is None:
        return []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise RequestError("stop must be a string or a list of strings.", code="invalid_type", param="stop")
    if len(stops) > server.max_stop:
        raise RequestError(f"stop has {len(stops)} strings; at most {server.max_stop} are allowed.", param="stop")
    for i, text in enumerate(stops):
        param = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not isinstance(text, str):
            raise RequestError(f"{param} must be a string.", code="invalid_type", param=param)
        if not 0 < len(text) <= _MAX_STOP_CHARS:
            raise RequestError(f"{param} must have 1 to {_MAX_STOP_CHARS} characters.", param=param)
    return stops


def prompts(prompt: object, vocab_size: int) -> list[str | list[int]]:
    """The prompts of a completion request: a string, token ids, or a list of either.

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
    parsed: list[str | list[int]] = []
    for i, entry in enumerate(prompt):
        param = f"prompt[{i}]"
        parsed.append(_checked_text(entry, param) if isinstance(entry, str) else _checked_ids(entry, param, vocab_size))
    return parsed


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
    for i, token in enumerate(ids):
        if type(token) is not int:
            raise RequestError(f"{param}[{i}] must be a token id.", code="invalid_type", param=f"{param}[{i}]")
    check_token_ids(ids, param, vocab_size)
    return ids
