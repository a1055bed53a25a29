"""The body of a success, made of a run and a writer: streamed or whole. No HTTP here: bytes, and names of headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import chain

import msgspec

from cluster.http.answer import Answer
from cluster.openai.writer import AnswerWriter
from cluster.requests.job import Run
from cluster.requests.json_parts import gathered, json_parts


def answer(run: Run, writer: AnswerWriter, *, streamed: bool, headers: Mapping[str, str] | None = None) -> Answer:
    """`run` as `writer` writes it, with its Server-Timing beside `headers`."""
    shown = dict(headers or {})
    return Answer(_stream(run, writer, shown) if streamed else _whole(run, writer, shown), streamed, shown)


def json_answer(message: msgspec.Struct, headers: Mapping[str, str] | None = None) -> Answer:
    """`message`, whole."""
    return Answer(in_parts(json_parts(message)), streamed=False, headers=dict(headers or {}))


def timed(answer: Answer, run: Run) -> Answer:
    """`answer`, with the Server-Timing of `run` beside its headers from its first chunk on."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with aclosing(answer.chunks) as parts:
            async for chunk in parts:
                if "server-timing" not in answer.headers:
                    answer.headers["server-timing"] = run.server_timing()
                yield chunk

    return replace(answer, chunks=chunks())


async def in_parts(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """`parts`, each made when it is asked for."""
    for part in gathered(parts):
        yield part


async def _stream(run: Run, writer: AnswerWriter, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            parts = writer.chunks(deltas)
            if not begun:
                begun = True
                headers["server-timing"] = run.server_timing()
                parts = chain(writer.begin(run.job.num_outputs), parts)
            for part in gathered(parts):
                yield part
    yield writer.end(run.usage())


async def _whole(run: Run, writer: AnswerWriter, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            writer.collect(deltas)
    headers["server-timing"] = run.server_timing()
    for part in gathered(writer.whole(run.job.num_outputs, run.usage())):
        yield part
