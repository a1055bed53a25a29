"""The clients of a load test. They stream completions from an OpenAI endpoint and record when tokens arrive.

This module runs one process's part of the load. It parses only what is measured: with hundreds of streams, a client
library's objects for every event would dominate the measurement.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

READ_TIMEOUT_S = 600.0


class _Choice(msgspec.Struct):
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Sample:
    """One request as its client measured it. Times are seconds on the machine's monotonic clock."""

    sent: float
    first: float | None = None
    """Time of the first event with a choice."""
    last: float = 0.0
    """Time of the last event with a choice."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between one piece of text and the next."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class StreamReader:
    """Turns the bytes of a streamed completion into a `Sample`, as they arrive."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._unread = b""
        self._last_text: float | None = None

    def feed(self, received: bytes, now: float) -> None:
        """Takes the bytes that arrived at `now`. They may begin and end at any point of an event."""
        *events, self._unread = (self._unread + received.replace(b"\r", b"")).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._take(_decode_event(event[6:]), now)

    def _take(self, event: _Event, now: float) -> None:
        sample = self._sample
        if event.error is not None:
            sample.error = str(event.error)
        if event.usage is not None:
            sample.input_tokens, sample.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            sample.cached_tokens = 0 if details is None else details.cached_tokens
        if not event.choices:
            return
        sample.last = now
        if sample.first is None:
            sample.first = now
        if event.choices[0].text:
            if self._last_text is not None:
                sample.gaps.append(now - self._last_text)
            self._last_text = now


@dataclass(frozen=True)
class Share:
    """The part of a level that one process runs."""

    url: str
    bodies: tuple[bytes, ...]
    """JSON of the requests, in the order in which they are sent."""
    output_tokens: int
    clients: int
    begin: float
    """Time when the first requests are sent, on the monotonic clock."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of every request, such as its authorization."""


def run_share(share: Share) -> tuple[list[Sample], float]:
    """A sample of each request, and the CPU seconds per second that this process used. Runs in a separate process."""
    cpu, began = time.process_time(), time.perf_counter()
    samples = asyncio.run(_run_clients(share))
    return samples, (time.process_time() - cpu) / (time.perf_counter() - began)


async def _run_clients(share: Share) -> list[Sample]:
    samples: list[Sample] = []
    bodies = iter(share.bodies)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client() -> None:
            for body in bodies:  # the clients share the iterator: the next free one sends the next request
                samples.append(await _stream(session, share, body))

        await asyncio.sleep(max(0.0, share.begin - time.perf_counter()))
        await asyncio.gather(*(client() for _ in range(share.clients)))
    return samples


async def _stream(session: aiohttp.ClientSession, share: Share, body: bytes) -> Sample:
    sample = Sample(sent=time.perf_counter())
    reader = StreamReader(sample)
    try:
        headers = {"Content-Type": "application/json", **share.headers}
        async with session.post(f"{share.url}/completions", data=body, headers=headers) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}: {await response.text()}"
                return sample
            async for received in response.content.iter_any():
                reader.feed(received, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        sample.error = repr(error)
    if sample.error is None and sample.output_tokens != share.output_tokens:
        sample.error = f"got {sample.output_tokens} tokens instead of {share.output_tokens}"
    return sample
