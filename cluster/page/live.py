"""The page's view of a running engine: an event with the last minutes, then twice a second an event with changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from cluster.http.active import ActiveRequests
from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.messages.state import EngineState
from cluster.observability.board import StatsBoard
from cluster.requests.json_parts import event_parts
from cluster.requests.served_model import ServedModel
from configs.errors import OverloadedError

_INTERVAL_S = 0.5
_HISTORY_S = 120
_NUM_STEPS = 200
_MAX_READERS = 64


class SecondView(msgspec.Struct, frozen=True):
    """The counts of one second."""

    time: int
    """Start of the second on the host's CLOCK_MONOTONIC, in seconds."""
    generated: int
    """Number of tokens generated."""
    prefilled: int
    """Number of prompt tokens computed."""
    first_tokens: int
    """Number of answers that got their first token."""
    ttft: float
    """Sum of these answers' times to first token, in seconds."""


class StepView(msgspec.Struct, frozen=True):
    """One retired step. Times are in seconds."""

    duration: float
    gap: float
    rows: int
    prefill: int
    """Number of prompt tokens computed."""
    flops: float
    """FLOPs that the model needed, all ranks together."""
    read_bytes: float
    """Bytes of weights, keys and values that the step had to read, all ranks together."""


class PagesView(msgspec.Struct, frozen=True):
    """Numbers of KV pages. They are equal on all ranks, because ranks divide heads, not tokens."""

    owned: int
    cached: int
    evictable: int
    """The part of `cached` that no running request uses."""
    free: int


class RankView(msgspec.Struct, frozen=True):
    """The state of one rank."""

    device: str
    heartbeat_age_s: float | None
    """Seconds since the rank last took or awaited a frame. None if it sleeps, or if ranks are on several nodes."""


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the stream of /live."""

    time: float
    """Time of the event on the host's CLOCK_MONOTONIC, in seconds."""
    model: str
    state: EngineState
    is_preparing: bool
    """Whether CUDA graphs are left to capture. While they are, some steps take longer."""
    running: int
    waiting: int
    prompt_tokens: int
    prefix_hit_tokens: int
    drafted: int
    """Number of drafts that steps have verified."""
    accepted: int
    """Number of drafts that became tokens."""
    peak_flops: float
    """FLOP per second of large matrix products, measured at the start, all ranks together."""
    peak_bandwidth: float
    """Bytes per second that copies read and wrote, measured at the start, all ranks together."""
    pages: PagesView
    ranks: list[RankView]
    seconds: list[SecondView]
    """Seconds that may have changed since the last event, oldest first. The first event has the last two minutes."""
    steps: list[StepView]
    """Steps that retired since the last event, at most 200, oldest first."""


class LiveServing:
    """GET /live: server-sent events, twice a second, until the reader leaves or the server stops."""

    def __init__(self, model: ServedModel, requests: ActiveRequests) -> None:
        self._model = model
        self._requests = requests
        self._num_readers = 0

    async def live(self, body: bytes, context: RequestContext) -> HttpResponse:
        """Streams the events. Raises OverloadedError if there are too many readers, because each costs some work."""
        if self._num_readers >= _MAX_READERS:
            raise OverloadedError(f"{_MAX_READERS} readers follow the engine already; close one.", retry_after_s=10.0)
        return HttpResponse(self._events(), streamed=True)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        stream = LiveStream(self._model, self._model.engine.board)
        self._num_readers += 1
        try:
            # A stopping server does not wait for readers.
            while not self._requests.stopping:
                if (view := stream.view()) is not None:
                    yield b"".join(event_parts(view))
                if self._model.state is EngineState.DEAD:
                    break
                await asyncio.sleep(_INTERVAL_S)
        finally:
            self._num_readers -= 1


class LiveStream:
    """One reader's view of the engine, event by event."""

    def __init__(self, model: ServedModel, board: StatsBoard) -> None:
        self._model = model
        self._board = board
        self._last_step_s = float("-inf")
        self._last_second = 0

    def view(self) -> LiveView | None:
        """The changes since the last call. None before the engine's first report."""
        stats = self._board.latest
        if stats is None:
            return None
        scheduler = stats.scheduler
        ages = stats.heartbeat_age_s
        return LiveView(
            # This is the report's time plus its age, so that the page notices if reports stop.
            time=stats.time_s + self._board.age_s,
            model=self._model.model_name,
            state=self._model.state,
            is_preparing=stats.is_preparing,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            prompt_tokens=scheduler.total_prompt_tokens,
            prefix_hit_tokens=scheduler.total_prefix_hit_tokens,
            drafted=scheduler.total_drafted,
            accepted=scheduler.total_accepted,
            peak_flops=self._board.peak_flops,
            peak_bandwidth=self._board.peak_bandwidth,
            pages=PagesView(
                scheduler.num_owned_pages,
                scheduler.num_cached_pages,
                scheduler.num_evictable_pages,
                scheduler.num_free_pages,
            ),
            ranks=[
                RankView(device, ages[rank] + self._board.age_s if ages else None)
                for rank, device in enumerate(stats.devices)
            ],
            seconds=self._new_seconds(),
            steps=self._new_steps(),
        )

    def _new_seconds(self) -> list[SecondView]:
        seconds = [it for it in self._board.history()[-_HISTORY_S:] if it.time_s >= self._last_second]
        if seconds:
            self._last_second = seconds[-1].time_s
        return [
            SecondView(it.time_s, it.num_generated_tokens, it.num_prefill_tokens, it.num_first_tokens, it.ttft_s)
            for it in seconds
        ]

    def _new_steps(self) -> list[StepView]:
        steps = self._board.steps(_NUM_STEPS)
        steps = steps[steps["launched_s"] > self._last_step_s]
        if len(steps):
            self._last_step_s = float(steps["launched_s"][-1])
        return [
            StepView(round(duration, 6), round(gap, 6), rows, prefill, flops, read_bytes)
            for _, duration, gap, rows, _, prefill, _, flops, read_bytes in steps.tolist()
        ]
