"""HTTP responses to successful requests: the answer to a run, in the form of one API, or a whole JSON message."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from cluster.http.http_errors import error_event
from cluster.http.response import HttpResponse
from cluster.requests.generation import Delta
from cluster.requests.job import Run
from cluster.requests.json_parts import gathered, json_parts
from configs.errors import RequestError


class AnswerWriter(ABC):
    """Writes the answer to one run in the form of one API: as the events of a stream (`events`, `end`), or as one
    message (`add`, `whole`). Long parts are made while the caller reads them."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def add(self, deltas: Sequence[Delta]) -> None:
        """Adds what one engine step produced to an answer that is sent as one message."""
        for _ in self.events(deltas):
            pass

    @abstractmethod
    def whole(self) -> Iterable[bytes]:
        """The answer as one message, once every sequence has ended."""

    def events(self, deltas: Sequence[Delta]) -> Iterable[bytes]:
        """The stream's events for what one step produced. The first call also returns a stream's first events."""
        return ()

    def end(self) -> Iterable[bytes]:
        """The last events of a stream."""
        return ()

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream in which an error occurs."""
        return error_event(error)


def answer(writer: AnswerWriter, *, streamed: bool, headers: Mapping[str, str]) -> HttpResponse:
    """The response with `writer`'s answer. The run's times (Server-Timing) are added to `headers`."""
    shown = dict(headers)
    chunks = answer_parts(writer, shown, streamed=streamed)
    return HttpResponse(chunks, streamed, shown, writer.failed)


async def answer_parts(writer: AnswerWriter, headers: dict[str, str], *, streamed: bool) -> AsyncGenerator[bytes, None]:
    """The body of an answer, in parts. `headers` are complete once the first part exists."""
    run = writer.run
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            if not streamed:
                writer.add(deltas)
                continue
            if "server-timing" not in headers:
                headers["server-timing"] = run.server_timing()
            for part in gathered(writer.events(deltas)):
                yield part
    if not streamed:
        headers["server-timing"] = run.server_timing()
    for part in gathered(writer.end() if streamed else writer.whole()):
        yield part
        await asyncio.sleep(0)  # a caller may read all parts without sending them


def json_response(message: msgspec.Struct, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """The response with `message` as JSON, which is encoded while it is sent."""
    return HttpResponse(in_parts(json_parts(message)), streamed=False, headers=dict(headers or {}))


async def in_parts(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """A body of `parts`. Each part is made when it is needed."""
    for part in gathered(parts):
        yield part
