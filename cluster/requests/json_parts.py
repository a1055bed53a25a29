"""Encodes long answers as JSON in parts that take about a millisecond each.

A replica serves all streams on one event loop, and encoding a million log probabilities at once would block the loop.
So long lists are made and encoded while they are sent, and the sender lets the loop serve other requests after each
part. Only what its client is reading is in memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar, cast

import msgspec

from cluster.http.response import PART_BYTES

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of the OpenAI and native routes."""
LOWEST_LOGPROB = -9999.0  # JSON has no -inf; clients know this value
_T = TypeVar("_T")
_MARK = secrets.token_hex(16)  # does not occur in texts of clients or models
_ENCODED_MARK = msgspec.json.encode(_MARK)
_BLOCK = 16  # number of items that are made and encoded at once


class _LongList(Generic[_T]):
    """A list with items that are made while it is written."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[_T]) -> None:
        self.items = items


def long_list(items: Iterable[_T]) -> list[_T]:
    """Puts `items` in place of a list in a message that only `json_parts` encodes. They are made once, while they are
    written."""
    return cast("list[_T]", _LongList(items))


def json_parts(message: object) -> Iterator[bytes]:
    """Yields `message` as JSON in short parts. Only texts and plain lists are not divided."""
    found: list[_LongList[object]] = []

    def mark(value: object) -> str:
        if not isinstance(value, _LongList):
            raise NotImplementedError(f"{type(value).__name__} cannot be encoded as JSON; please report this bug")
        found.append(value)
        return _MARK

    encode = msgspec.json.Encoder(enc_hook=mark).encode

    def filled(body: bytes) -> Iterator[bytes]:
        """Yields `body` with its lists in place of their marks."""
        lists = found.copy()
        found.clear()
        *texts, rest = body.split(_ENCODED_MARK)
        for text, long in zip(texts, lists, strict=True):
            yield text
            items = iter(long.items)
            before = b"["
            while block := list(islice(items, _BLOCK)):
                yield before
                yield from filled(encode(block)[1:-1])
                before = b","
            yield b"[]" if before == b"[" else b"]"
        yield rest

    return filled(encode(message))


def gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Joins short `parts` into parts of about PART_BYTES."""
    short: list[bytes] = []
    size = 0
    for part in parts:
        short.append(part)
        size += len(part)
        if size >= PART_BYTES:
            yield b"".join(short)
            short.clear()
            size = 0
    if size:
        yield b"".join(short)


def event_parts(message: msgspec.Struct) -> Iterator[bytes]:
    """Yields `message` as one server-sent event, in parts if it is long."""
    yield b"data: "
    yield from json_parts(message)
    yield b"\n\n"


def finite(logprob: float) -> float:
    """`logprob`, or the lowest number that clients know in place of minus infinity."""
    return max(logprob, LOWEST_LOGPROB)
