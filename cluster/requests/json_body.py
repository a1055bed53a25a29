"""Turns the bytes of a request body into a checked model. Errors have the path of the wrong part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pydantic
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from configs.errors import ContextLengthError, RequestError

_Model = TypeVar("_Model", bound=BaseModel)
_MAX_PARTS = 1 << 17
"""Maximum number of lists, objects and fields of a body. Decoding this many holds the GIL for 20 ms. Ten times as many
would fit in a body of 8 MB, and block the event loop for half a second, even from another thread."""
_MAX_VALUES = 1 << 18
"""Maximum number of values in a body's lists and objects. Decoding this many ids holds the GIL for 20 ms, and checking
them for another 20."""
_MAX_NAME_CHARS = 40  # length to which a field's name is cut in a path
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
"""Name of the expected type for each error type of pydantic."""
_OF_MANY_TYPES = frozenset({"content", "output", "system", "tools"})
"""Fields with lists of typed entries. Other servers support more types of entries than this one."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# Each match is one escape, or two escapes that form one character. A group matches if half of such a pair stands alone,
# as an escape or in the bytes that UTF-8 would need.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.|(\xed[\xa0-\xbf][\x80-\xbf])", re.DOTALL
)


def decode_body(body: bytes, *, max_values: int = 0) -> dict[str, Any]:
    """The JSON object of a request body.

    Args:
        max_values: limit on the number of values, if it is higher than the usual limit.

    Raises:
        RequestError: the body is not strict JSON (no NaN, no lone surrogates), is nested too deep, is not an object, or
            (413) has too many parts or values.
    """
    _check_size(body, b"[{:", _MAX_PARTS, "lists, objects and fields")
    _check_size(body, b",", max(_MAX_VALUES, max_values), "values")
    try:
        decoded = msgspec.json.decode(body)
    except ValueError as error:  # DecodeError, UnicodeDecodeError, and Python's limit on the digits of an int
        raise RequestError(f"The body must be valid JSON: {_reason(error, body)}", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("The body is nested too deep; flatten it.", code="invalid_json") from error
    if not isinstance(decoded, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return decoded


def check_lists(raw: Mapping[str, Any], max_model_len: int) -> None:
    """Raises ContextLengthError if there are more messages than tokens fit in the context, because each message has at
    least one token."""
    for name in ("messages", "input"):
        if isinstance(raw.get(name), list) and len(raw[name]) > max_model_len:
            raise ContextLengthError(
                max_model_len=max_model_len, num_prompt_tokens=len(raw[name]), param=name, at_least=True
            )


def _check_size(body: bytes, marks: bytes, most: int, what: str) -> None:
    """Raises RequestError (413) if `body` contains `marks` more than `most` times outside its strings."""
    if sum(body.count(mark) for mark in marks) <= most:
        return
    num_marks, end = 0, 0
    for text in _TEXT.finditer(body):
        num_marks += sum(body.count(mark, end, text.start()) for mark in marks)
        end = text.end()
        if num_marks > most:
            break
    if num_marks + sum(body.count(mark, end) for mark in marks) > most:
        raise RequestError(f"The body has more than {most} {what}; send fewer.", code="request_too_large", status=413)


def _reason(error: ValueError, body: bytes) -> str:
    lone = next((found for found in _LONE_SURROGATE.finditer(body) if found.lastindex), None)
    if lone is not None:
        half = lone[0]
        shown = half.decode() if half.isascii() else rf"\u{ord(half.decode('utf-8', 'surrogatepass')):04x}"
        return f"it has a lone surrogate, {shown} at byte {lone.start()}: half of a character. Send whole characters."
    return f"it is not UTF-8 ({error.reason})." if isinstance(error, UnicodeDecodeError) else str(error)


def validated(kind: type[_Model], raw: object) -> _Model:
    """Checks `raw` against the field types of `kind`. Raises RequestError with the path of the wrong field."""
    try:
        return kind.model_validate(raw)
    except pydantic.ValidationError as error:
        raise _as_request_error(error, raw) from error


def below(path: str, error: RequestError) -> RequestError:
    """Returns `error` with a path for a field of the object at `path`."""
    param = path if error.param is None else f"{path}.{error.param}"
    return RequestError(str(error), code=error.code, param=param, status=error.status)


def _as_request_error(error: pydantic.ValidationError, raw: object) -> RequestError:
    errors = error.errors(include_url=False)
    # A union has errors for each of its types. The type that matched most of the value was probably meant. Wrong types
    # are reported before missing fields.
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
    """Yields every position in `raw` that pydantic's `loc` may mean, with its value. Any part of `loc` may be the name
    of a type in a union, and the value may have a field with that name too."""
    if not loc:
        yield [], raw
        return
    part, rest = loc[0], loc[1:]
    yield from _places(rest, raw)
    if (part in raw) if isinstance(raw, dict) else isinstance(raw, list) and isinstance(part, int) and part < len(raw):
        yield from (([part, *path], value) for path, value in _places(rest, raw[part]))
