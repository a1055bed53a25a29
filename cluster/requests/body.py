"""From the bytes of a request body to a checked model; what is wrong with it is named by its path."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from configs.errors import RequestError

_Model = TypeVar("_Model", bound=BaseModel)
_Checked = TypeVar("_Checked")
_LONG_BYTES = 1 << 20
_MANY_VALUES_BYTES = 32 << 10  # of JSON: some 900 messages of a word each, which are 5 to 10 ms
_ESCAPES = rb"(?<!\\)(?:\\\\)*"  # before a backslash that is not itself escaped
# A first half without its second, a second without its first, or either as the bytes that UTF-8 would need for it.
_LONE_SURROGATE = re.compile(
    _ESCAPES + rb"(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB]..)" + _ESCAPES + rb"(\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\xed[\xa0-\xbf][\x80-\xbf])"
)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        RequestError: not strict JSON (NaN and lone surrogates included), nested too deep, or not an object.
    """
    try:
        decoded = msgspec.json.decode(body)
    except ValueError as error:  # DecodeError, UnicodeDecodeError, and Python's limit on the digits of an int
        raise RequestError(f"The body is not valid JSON: {_reason(error, body)}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deep.", code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return decoded


async def decoded(body: bytes) -> dict[str, Any]:
    """`decode_body`; the event loop has its turn after one that took long, which is 5 ms for a MiB of small values."""
    raw = decode_body(body)
    if len(body) > _LONG_BYTES:
        await asyncio.sleep(0)
    return raw


async def off_loop(num_bytes: int, check: Callable[[], _Checked]) -> _Checked:
    """`check()` of that much JSON: beside the event loop where it is much, since 100,000 messages take a second."""
    return check() if num_bytes <= _MANY_VALUES_BYTES else await asyncio.to_thread(check)


def _reason(error: ValueError, body: bytes) -> str:
    lone = _LONE_SURROGATE.search(body)
    if lone is not None:
        half = lone[lone.lastindex or 0]
        shown = half.decode() if half.isascii() else rf"\u{ord(half.decode('utf-8', 'surrogatepass')):04x}"
        place = lone.end() - len(half)
        return f"it has a lone surrogate, {shown} at byte {place}: half of a character. Send whole characters."
    return f"it is not UTF-8 ({error.reason})." if isinstance(error, UnicodeDecodeError) else str(error)


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
