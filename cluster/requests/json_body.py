"""Turns the bytes of a request body into a checked model; what is wrong with it is named by its path."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from configs.errors import RequestError

_Model = TypeVar("_Model", bound=BaseModel)
_Checked = TypeVar("_Checked")
_INLINE_BYTES = 8 << 10  # are checked and encoded in 2 to 3 ms; a thread costs a tenth of one, and jitter
_MAX_PARTS = 1 << 17
"""Most lists, objects and fields of a body. The GIL is held while they are decoded, 20 ms for so many; ten times as
many, which fit a body of 8 MB, would hold the event loop up for half a second, from any thread."""
_MAX_NAME_CHARS = 40  # most of a field's name that a path shows
_KINDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a string",
}
"""Names of the type that a value should have had, by the type of pydantic's error."""
_OF_MANY_TYPES = frozenset({"content", "output", "system", "tools"})
"""Lists whose entries have types that other servers know and this one does not support."""
_PART = re.compile(rb'\\.|["\[{:]', re.DOTALL)
# Each escape is one match, or a pair of them that is one character; a group has a half without its other half, or the
# bytes that UTF-8 would need for one.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.|(\xed[\xa0-\xbf][\x80-\xbf])", re.DOTALL
)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises RequestError where it is not strict JSON (NaN and lone surrogates
    included), nested too deep, not an object, or (413) of too many parts."""
    if sum(body.count(mark) for mark in (b"[", b"{", b":")) > _MAX_PARTS and _has_too_many_parts(body):
        message = f"The body has more than {_MAX_PARTS} lists, objects and fields."
        raise RequestError(message, code="request_too_large", status=413)
    try:
        decoded = msgspec.json.decode(body)
    except ValueError as error:  # DecodeError, UnicodeDecodeError, and Python's limit on the digits of an int
        raise RequestError(f"The body is not valid JSON: {_reason(error, body)}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deep.", code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return decoded


async def prepared(body: bytes, prepare: Callable[[dict[str, Any]], _Checked]) -> _Checked:
    """`prepare` of a body's JSON: checks it and encodes its texts, beside the event loop where the body is long. Raises
    what `decode_body` and `prepare` raise."""
    return await off_loop(len(body), lambda: prepare(decode_body(body)))


async def off_loop(num_bytes: int, work: Callable[[], _Checked]) -> _Checked:
    """`work()` on that much of a body, in a thread where it is much: 100,000 messages take a second."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)


def _has_too_many_parts(body: bytes) -> bool:
    """Whether its structure has: brackets and colons in texts are none."""
    num_left, in_text = _MAX_PARTS, False
    for found in _PART.finditer(body):
        if found[0] == b'"':
            in_text = not in_text
        elif not in_text:
            num_left -= 1
            if num_left < 0:
                return True
    return False


def _reason(error: ValueError, body: bytes) -> str:
    lone = next((found for found in _LONE_SURROGATE.finditer(body) if found.lastindex), None)
    if lone is not None:
        half = lone[0]
        shown = half.decode() if half.isascii() else rf"\u{ord(half.decode('utf-8', 'surrogatepass')):04x}"
        return f"it has a lone surrogate, {shown} at byte {lone.start()}: half of a character. Send whole characters."
    return f"it is not UTF-8 ({error.reason})." if isinstance(error, UnicodeDecodeError) else str(error)


def validated(kind: type[_Model], raw: object) -> _Model:
    """`raw` as a `kind`, by its field types alone. Raises RequestError with the path of the field at fault."""
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        raise _as_request_error(error, raw) from error


def below(path: str, error: RequestError) -> RequestError:
    """`error` of a field of the object at `path`."""
    param = path if error.param is None else f"{path}.{error.param}"
    return RequestError(str(error), code=error.code, param=param, status=error.status)


def _as_request_error(error: pydantic.ValidationError, raw: object) -> RequestError:
    errors = error.errors(include_url=False)
    # A union has errors of each of its types: the one that got furthest into the value is the one meant. Its type is
    # told before what it lacks.
    found = [(each, _path(each, raw)) for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    first, place = max(found, key=lambda it: (len(it[1]), it[1][-1:] == ["type"], it[0]["type"] not in _KINDS))
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_NAME_CHARS]}" if path else part
    kind, message, context = first["type"], first["msg"], first.get("ctx", {})
    if isinstance(cause := context.get("error"), RequestError):
        nested = below(path, cause)
        return RequestError(f"{nested.param} {nested}.", code=nested.code, param=nested.param)
    if kind in ("missing", "union_tag_not_found"):
        return RequestError(f"{path} is required.", code="missing_required_parameter", param=path)
    if kind in _KINDS:
        kinds = dict.fromkeys(
            _KINDS[each["type"]] for each, other in found if other == place and each["type"] in _KINDS
        )
        return RequestError(f"{path} must be {' or '.join(kinds)}.", code="invalid_type", param=path)
    if kind == "union_tag_invalid":
        tags = context["expected_tags"].replace("'", "")
        message = f"must be one of {tags}"
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if place[-1:] == ["type"] and place[0] != "tool_choice" and _OF_MANY_TYPES.intersection(place[-3:-2]):
        code = "unsupported_parameter"
    return RequestError(f"{path}{' ' if message.startswith('must ') else ': '}{message}.", code=code, param=path)


def _path(error: ErrorDetails, raw: object) -> list[int | str]:
    """The path to an error in `raw`."""
    loc, last = error["loc"], []
    if error["type"] == "missing":
        loc, last = loc[:-1], [loc[-1]]
    elif error["type"].startswith("union_tag_"):
        last = [error["ctx"]["discriminator"].strip("'")]
    path, _ = max(_places(loc, raw), key=lambda found: (found[1] == error["input"], len(found[0])))
    return path + last


def _places(loc: Sequence[int | str], raw: Any) -> Iterator[tuple[list[int | str], object]]:
    """Every place in `raw` that pydantic's `loc` may mean, with the value there. Any part of `loc` may be the name of a
    type of a union that was tried, which the value may have a field of too."""
    if not loc:
        yield [], raw
        return
    part, rest = loc[0], loc[1:]
    yield from _places(rest, raw)
    if (part in raw) if isinstance(raw, dict) else isinstance(raw, list) and isinstance(part, int) and part < len(raw):
        yield from (([part, *path], value) for path, value in _places(rest, raw[part]))
