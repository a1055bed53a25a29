"""Successes in JSON: in parts where they are long, and with the times of their run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace

import msgspec

from cluster.http.response import HttpResponse
from cluster.requests.job import Run
from cluster.requests.json_parts import gathered, json_parts


def json_response(message: msgspec.Struct, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """`message`, whole."""
    return HttpResponse(in_parts(json_parts(message)), streamed=False, headers=dict(headers or {}))


def timed(response: HttpResponse, run: Run) -> HttpResponse:
    """`response`, with the Server-Timing of `run` beside its headers from its first chunk on."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        async with aclosing(response.chunks) as parts:
            async for chunk in parts:
                if "server-timing" not in response.headers:
                    response.headers["server-timing"] = run.server_timing()
                yield chunk

    return replace(response, chunks=chunks())


async def in_parts(parts: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """`parts`, each made when it is asked for."""
    for part in gathered(parts):
        yield part
