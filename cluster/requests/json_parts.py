"""Long answers as JSON, in parts of which each takes about a millisecond to make.

A replica answers all its streams on one event loop: while it makes an answer of a million log probabilities, they would
stand. So what may be long is made and encoded as it is sent, and whoever sends it lets the loop go on after each part.
No more of such an answer is in memory than its client reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar, cast

import msgspec

from cluster.http.response import PART_BYTES

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
LOWEST_LOGPROB = -9999.0  # JSON has no -inf; this is what clients know
_T = TypeVar("_T")
_MARK = secrets.token_hex(16)  # no text of a client or a model
_ENCODED_MARK = msgspec.json.encode(_MARK)
_BLOCK = 16  # items that are made and encoded at once


class _LongList(Generic[_T]):
    """Items that are made as they are written."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[_T]) -> None:
        self.items = items


def long_list(items: Iterable[_T]) -> list[_T]:
    """`items` in the place of a list of a message that only `json_parts` encodes; made as they are written, once."""
    return cast("list[_T]", _LongList(items))


def json_parts(message: object) -> Iterator[bytes]:
    """`message` as JSON; the parts are short, but for the texts and the plain lists in it."""
    found: list[_LongList[object]] = []

    def mark(value: object) -> str:
        if not isinstance(value, _LongList):
            raise NotImplementedError(f"{type(value).__name__} is nothing that JSON has")
        found.append(value)
        return _MARK

    encode = msgspec.json.Encoder(enc_hook=mark).encode

    def filled(body: bytes) -> Iterator[bytes]:
        """`body` with the lists that were found in it in the places of their marks."""
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
    """`parts`, joined to some of PART_BYTES or little more."""
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
    """`message` as one server-sent event that may be long."""
    yield b"data: "
    yield from json_parts(message)
    yield b"\n\n"


def finite(logprob: float) -> float:
    """`logprob`, or the lowest number clients know for minus infinity."""
    return max(logprob, LOWEST_LOGPROB)
