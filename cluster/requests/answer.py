"""Successes as HTTP sends them: the answer to a run, as a writer of one API makes it, and whole messages in JSON."""

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
    """Writes the answer to one run: in the events of a stream (`events`, `end`), or whole (`add`, `whole`).

    What is long is made as it is read.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def add(self, deltas: Sequence[Delta]) -> None:
        """Takes what a step brought of a whole answer."""
        for _ in self.events(deltas):
            pass

    @abstractmethod
    def whole(self) -> Iterable[bytes]:
        """The answer as one message, once every sequence has ended."""

    def events(self, deltas: Sequence[Delta]) -> Iterable[bytes]:
        """The events that tell what a step brought; those that a stream begins with come before the first."""
        return ()

    def end(self) -> Iterable[bytes]:
        """The last events of a stream."""
        return ()

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that has begun and cannot go on."""
        return error_event(error)


def answer(writer: AnswerWriter, *, streamed: bool, headers: Mapping[str, str]) -> HttpResponse:
    """The answer to the run of `writer`, with the times of the run (Server-Timing) beside `headers`."""
    shown = dict(headers)
    chunks = answer_parts(writer, shown, streamed=streamed)
    return HttpResponse(chunks, streamed, shown, writer.failed)


async def answer_parts(writer: AnswerWriter, headers: dict[str, str], *, streamed: bool) -> AsyncGenerator[bytes, None]:
    """The body of an answer; its first part comes when `headers` are complete."""
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
        await asyncio.sleep(0)  # not everyone who reads the parts sends them


def json_response(message: msgspec.Struct, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """`message`, whole."""
    return HttpResponse(in_parts(json_parts(message)), streamed=False, headers=dict(headers or {}))


async def in_parts(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """`parts`, each made when it is asked for."""
    for part in gathered(parts):
        yield part
