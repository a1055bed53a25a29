"""The Engine replica's end of the unix socket to its coordinator.

It owns request ids, and the buffers between the task that reads the socket and the readers of requests' tokens. It
knows neither text nor HTTP, and it does not schedule. A message on the socket is a struct of `cluster.messages.engine`,
as msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from cluster.messages.engine import (
    Abort,
    EngineToCoordinator,
    Finished,
    FinishReason,
    FlushCache,
    Prefilled,
    PromptLogprobs,
    SamplingParams,
    StepOutput,
    Submit,
    Terms,
    TokenLogprobs,
    shared_sampling,
)
from cluster.messages.state import EngineState
from cluster.observability.board import StatsBoard
from cluster.observability.telemetry import Telemetry
from configs.errors import DeadlineError, EngineError, OverloadedError, RequestError
from parallel.sockets import LENGTH, MAX_FRAME_BYTES, read_frame

logger = logging.getLogger(__name__)

_MAX_UNSENT_BYTES = 64 << 20
_NO_TERMS = Terms()
MAX_CHUNK_TOKENS = 128
"""Maximum number of tokens that a late reader takes at once, so that the event loop also serves other requests."""


@dataclass(frozen=True, slots=True)
class WholePromptLogprobs:
    """Log probabilities of a whole prompt, before temperature and filters. Entry i is for the token at position i + 1,
    because the first token has no token before it."""

    logprobs: npt.NDArray[np.float32]
    """[num_prompt_tokens - 1]: log probability of each prompt token."""
    top_ids: npt.NDArray[np.int32]
    """[num_prompt_tokens - 1, k]: ids of the likeliest tokens at each position, likeliest first, equal ones by id."""
    top_logprobs: npt.NDArray[np.float32]
    """[num_prompt_tokens - 1, k]: log probabilities of `top_ids`."""

    @classmethod
    def join(cls, runs: Sequence[PromptLogprobs], k: int) -> WholePromptLogprobs:
        """Joins all runs of one request, given in order of arrival."""
        logprobs = np.frombuffer(b"".join(run.logprobs for run in runs), "<f4")
        return cls(
            logprobs,
            np.frombuffer(b"".join(run.top_ids for run in runs), "<i4").reshape(len(logprobs), k),
            np.frombuffer(b"".join(run.top_logprobs for run in runs), "<f4").reshape(len(logprobs), k),
        )


@dataclass(slots=True)
class TokenChunk:
    """Tokens that arrived for one request since the last read."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    """Log probabilities of each of `token_ids`. None if the request does not want them."""
    prompt_logprobs: WholePromptLogprobs | None
    """Only on the first chunk with a token, if the request wants prompt log probabilities."""
    finished: Finished | None
    """The end of the request, on its last chunk only."""


@dataclass(slots=True, eq=False, repr=False)
class RequestStream:
    """The tokens of one request, in order: call `wait_ready`, then `take`, until `done`.

    Only one task may read a stream. A reader that stops early must call `abort()`. A slow reader costs one int per
    token, at most the request's `max_tokens`.
    """

    _client: EngineClient
    id: int
    sampling: SamplingParams
    prefilled: Prefilled | None = None
    """Facts about the prompt's prefill. None until the first token."""
    done: bool = False
    """Whether the last chunk has been taken."""
    _tokens: list[int] = field(default_factory=list)
    _token_at: float = 0.0  # time of the last token; 0 before the first one
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _prompt_runs: list[PromptLogprobs] | None = field(default_factory=list)  # None once they have been taken
    _finished: Finished | None = None
    _waiter: asyncio.Future[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether `take` would return tokens or the end."""
        return not self.done and (bool(self._tokens) or self._finished is not None)

    def take(self) -> TokenChunk:
        """Returns the tokens that have arrived, at most MAX_CHUNK_TOKENS and possibly none. Does not wait."""
        tokens, self._tokens = self._tokens[:MAX_CHUNK_TOKENS], self._tokens[MAX_CHUNK_TOKENS:]
        logprobs = prompt_logprobs = None
        if self.sampling.num_logprobs >= 0:
            logprobs, self._logprobs = self._logprobs[: len(tokens)], self._logprobs[len(tokens) :]
        if tokens and self._prompt_runs is not None:
            if self.sampling.prompt_logprobs >= 0:
                prompt_logprobs = WholePromptLogprobs.join(self._prompt_runs, self.sampling.prompt_logprobs)
            self._prompt_runs = None
        finished = None if self._tokens else self._finished
        self.done = finished is not None
        return TokenChunk(tokens, logprobs, prompt_logprobs, finished)

    def abort(self) -> None:
        """Ends the request, unless it has ended. A pending or later read gets `FinishReason.ABORT`."""
        if self._finished is None:
            self._client._abort(self)

    def wake(self) -> None:
        """Ends a pending `wait_ready`, even if nothing can be taken."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _finish(self, finished: Finished) -> None:
        if self._finished is None:
            self._finished = finished
            self.wake()


async def wait_ready(streams: Sequence[RequestStream]) -> None:
    """Returns once one of `streams` is ready or was woken. One future serves all streams, so reading n streams needs no
    task per stream."""
    for stream in streams:
        if stream.ready:
            return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for stream in streams:
        stream._waiter = waiter
    try:
        await waiter
    finally:
        for stream in streams:
            stream._waiter = None


class EngineClient:
    """Submits requests to the coordinator, and gives each step's tokens to their streams."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, telemetry: Telemetry | None = None
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._streams: dict[int, RequestStream] = {}
        self._ids = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepOutput)
        self.telemetry = telemetry or Telemetry()
        """Receives the engine's reports and the intervals between tokens."""
        self._lost: str | None = None  # why the connection is lost
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, path: str, *, telemetry: Telemetry | None = None, timeout_s: float = 30.0) -> EngineClient:
        """Connects to the coordinator's socket, and waits until it exists.

        Raises:
            DeadlineError: nothing accepts at `path` within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                reader, writer = await _open(path)
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if loop.time() >= deadline:
                    raise DeadlineError(
                        f"no coordinator accepts on its socket within {timeout_s:g} s; see its log"
                    ) from error
                await asyncio.sleep(0.02)
        client = cls(reader, writer, telemetry)
        client._task = asyncio.create_task(client._read_steps(), name="engine-client-reader")
        return client

    @property
    def board(self) -> StatsBoard:
        """The figures that the engine reported last."""
        return self.telemetry.board

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def connected(self) -> bool:
        """Whether the connection to the coordinator works."""
        return self._lost is None

    @property
    def failure(self) -> str | None:
        """The reason why the connection is lost. None while it works."""
        return self._lost

    def submit(
        self,
        prompts: Sequence[bytes],
        params: Sequence[Sequence[SamplingParams]],
        terms: Terms = _NO_TERMS,
    ) -> list[RequestStream]:
        """Submits the sequences of one HTTP request, all or none.

        Args:
            prompts: little-endian int32 token ids, at least one for each prompt.
            params: parameters of each choice of each prompt.

        Returns:
            A stream for each choice, in the order of `params`.

        Raises:
            EngineError: the connection to the coordinator is lost.
            OverloadedError: the coordinator does not keep up with reading.
            RequestError: the request is too large.
        """
        if self._lost is not None:
            raise EngineError(self._lost)
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            raise OverloadedError("The engine is not keeping up with new requests; try again later.")
        sampling, choices = shared_sampling(params)
        streams = [RequestStream(self, next(self._ids), own) for of_prompt in params for own in of_prompt]
        self._send(
            Submit(first_id=streams[0].id, prompts=list(prompts), sampling=sampling, choices=choices, terms=terms)
        )
        self._streams.update((stream.id, stream) for stream in streams)
        return streams

    def flush_cache(self) -> None:
        """Makes the engine drop prefixes that no running request uses. Raises EngineError if the engine is gone."""
        if self._lost is not None:
            raise EngineError(self._lost)
        self._send(FlushCache())

    async def wait_closed(self) -> None:
        """Returns when the connection is lost."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def close(self) -> None:
        """Ends every open stream with an error, and closes the socket."""
        self._lose("the engine client was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _send(self, message: EngineToCoordinator) -> None:
        frame = bytearray(LENGTH.size)
        # The message is encoded in place, so that a large one is not copied again.
        self._encoder.encode_into(message, frame, LENGTH.size)
        num_bytes = len(frame) - LENGTH.size
        if num_bytes > MAX_FRAME_BYTES:
            raise RequestError(f"The request takes {num_bytes} bytes for the engine; send fewer prompts at once.")
        LENGTH.pack_into(frame, 0, num_bytes)
        self._writer.write(frame)

    def _abort(self, stream: RequestStream) -> None:
        self._streams.pop(stream.id, None)
        stream._finish(Finished(id=stream.id, reason=FinishReason.ABORT))
        if self._lost is None:
            self._send(Abort([stream.id]))

    async def _read_steps(self) -> None:
        reason = "the engine ended the connection"
        try:
            while True:
                self._dispatch(self._decoder.decode(await read_frame(self._reader)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        except (msgspec.DecodeError, EngineError) as error:
            reason = f"the engine sent what is not a step output: {error}"
        finally:
            self._lose(reason)
            self._writer.close()

    def _dispatch(self, output: StepOutput) -> None:
        """Gives one step's output to its streams. Ids without a stream are skipped: such requests were aborted here and
        still run in the engine."""
        streams = self._streams
        for prefilled in output.prefilled:
            if (stream := streams.get(prefilled.id)) is not None:
                stream.prefilled = prefilled
        for run in output.prompt_logprobs:
            if (stream := streams.get(run.id)) is not None and stream._prompt_runs is not None:
                stream._prompt_runs.append(run)
        for logprobs in output.logprobs:
            if (stream := streams.get(logprobs.id)) is not None:
                stream._logprobs.append(logprobs)
        # Two tolist() calls per step are cheaper than one numpy scalar per token.
        ids = np.frombuffer(output.ids, "<i8").tolist()
        now = time.monotonic()
        intervals: list[float] = []
        for request_id, token in zip(ids, np.frombuffer(output.tokens, "<i4").tolist(), strict=True):
            if (stream := streams.get(request_id)) is not None:
                stream._tokens.append(token)
                if stream._token_at:
                    intervals.append(now - stream._token_at)
                stream._token_at = now
                stream.wake()
        self.telemetry.intervals(intervals)
        for finished in output.finished:
            if (stream := streams.pop(finished.id, None)) is not None:
                stream._finish(finished)
        if output.stats is not None:
            self.telemetry.report(output.stats)

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        self.telemetry.life.enter(EngineState.DEAD)
        _fail_all(self._streams.values(), reason)
        self._streams.clear()


async def _open(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    # The socket is connected here, because the uvloop event loop refuses abstract addresses. This does not block: a
    # listening unix socket accepts at once.
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
        return await asyncio.open_unix_connection(sock=sock)
    except OSError:
        sock.close()
        raise


def _fail_all(streams: Iterable[RequestStream], reason: str) -> None:
    lost = list(streams)
    if lost:
        logger.error("engine connection lost, and %d open requests end with it: %s", len(lost), reason)
    for stream in lost:
        stream._finish(Finished(id=stream.id, reason=FinishReason.ERROR, error=reason, error_code="engine_error"))
