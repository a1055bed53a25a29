"""The timeline of one request as a trace: its phases, and the engine's steps during its life.

It is in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from cluster.http.context import RequestContext
from cluster.messages.engine import SamplingParams
from cluster.observability.record import RequestRecord

NUM_REQUESTS = 1000
"""Number of ended requests that are kept."""
_MAX_STEPS = 4096
_NO_SAMPLING = SamplingParams(max_tokens=1)
_REQUEST_TRACK, _STEP_TRACK = 1, 2


class TraceEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A span (`ph` is X), or the name of a track (`ph` is M)."""

    name: str
    ph: str
    pid: int
    tid: int
    """Number of the event's track."""
    ts: float = 0.0
    """Microseconds since the request arrived."""
    dur: float = 0.0
    """Duration in microseconds."""
    args: dict[str, str | int | None]


class Timeline(msgspec.Struct, kw_only=True):
    """A request's timeline. It contains no part of the prompt or the answer."""

    trace_events: list[TraceEvent] = msgspec.field(name="traceEvents")
    display_time_unit: str = msgspec.field(name="displayTimeUnit", default="ms")
    steps_left_out: int = 0
    """Number of later steps that were left out, because a timeline has at most 4,096."""


class RecentRequests:
    """The requests that ended last. They are found by the answer's id and by `x-request-id`."""

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}  # in the order in which they ended

    def keep(self, record: RequestRecord) -> None:
        """Stores the record of a request that has ended."""
        self._records.pop(record.id, None)
        whole = record.context
        # Large parts are left out: parameters that may list a whole vocabulary, a URL, headers.
        context = RequestContext(request_id=whole.request_id, client=whole.client, arrived_s=whole.arrived_s)
        self._records[record.id] = replace(record, context=context, sampling=_NO_SAMPLING)
        if len(self._records) > NUM_REQUESTS:
            del self._records[next(iter(self._records))]

    def find(self, request_id: str, client: str | None) -> RequestRecord | None:
        """The last request with this id and client. If `client` is None, of any client. None if there is none."""
        for record in reversed(self._records.values()):
            if request_id in (record.id, record.context.request_id) and client in (None, record.context.client):
                return record
        return None


def timeline(
    record: RequestRecord, steps: npt.NDArray[np.void], pauses: Iterable[tuple[float, float]] = ()
) -> Timeline:
    """The timeline of a request that has ended.

    Args:
        steps: [num_steps] of STEP_DTYPE, oldest first. Steps outside the request's life are skipped.
        pauses: (begin, end) of times in its life without steps, because ranks were replaced.
    """
    arrived_s = record.context.arrived_s
    begin = np.searchsorted(_ends(steps), arrived_s)
    end = np.searchsorted(steps["launched_s"], record.ended_s)
    events = [
        _track(_REQUEST_TRACK, f"request {record.id}"),
        _track(_STEP_TRACK, "engine steps"),
        *_phases(record),
        *(_span(_STEP_TRACK, "pause", begin_s, end_s, arrived_s, {}) for begin_s, end_s in pauses),
        *_steps(steps[begin : min(end, begin + _MAX_STEPS)], arrived_s),
    ]
    return Timeline(trace_events=events, steps_left_out=max(int(end - begin) - _MAX_STEPS, 0))


def _phases(record: RequestRecord) -> Iterator[TraceEvent]:
    arrived_s, phases = record.context.arrived_s, record.phases
    missed = {} if record.prefilled is None else record.prefilled.missed
    about: dict[str, str | int | None] = {
        "x-request-id": record.context.request_id,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        **{f"missed_{why}_tokens": num for why, num in missed.items()},
        "output_tokens": record.num_generated_tokens,
        "sequences": len(record.num_generated),
        "finish_reasons": ", ".join(str(reason) for reason in record.finish_reasons),
        "error": record.error,
    }
    yield _span(_REQUEST_TRACK, "request", arrived_s, record.ended_s, arrived_s, about)
    if phases:
        phases = {"prepare": (arrived_s, phases["queue"][0]), **phases}
    for name, (begin_s, end_s) in phases.items():
        yield _span(_REQUEST_TRACK, name, begin_s, end_s, arrived_s, {})


def _ends(steps: npt.NDArray[np.void]) -> npt.NDArray[np.float64]:
    """Time when each step ended. A step begins at its launch, or at the end of the step before if that was later."""
    durations = np.cumsum(steps["duration_s"], dtype=np.float64)
    return np.maximum.accumulate(steps["launched_s"] - (durations - steps["duration_s"])) + durations


def _steps(steps: npt.NDArray[np.void], arrived_s: float) -> Iterator[TraceEvent]:
    # the encoder does not accept NumPy's floats
    for step, end_s in zip(steps, _ends(steps).tolist(), strict=True):
        about: dict[str, str | int | None] = {
            "rows": int(step["num_rows"]),
            "decodes": int(step["num_decodes"]),
            "prompt_tokens": int(step["num_prefill_tokens"]),
            "gap_before_us": round(1e6 * float(step["gap_s"])),
        }
        name = "prefill" if step["num_prefill_tokens"] else "decode"
        yield _span(_STEP_TRACK, name, end_s - float(step["duration_s"]), end_s, arrived_s, about)


def _span(
    track: int, name: str, begin_s: float, end_s: float, arrived_s: float, args: dict[str, str | int | None]
) -> TraceEvent:
    since, took = 1e6 * (begin_s - arrived_s), 1e6 * (end_s - begin_s)
    return TraceEvent(name=name, ph="X", pid=1, tid=track, ts=round(since, 1), dur=round(took, 1), args=args)


def _track(track: int, name: str) -> TraceEvent:
    return TraceEvent(name="thread_name", ph="M", pid=1, tid=track, args={"name": name})
