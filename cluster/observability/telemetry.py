"""One replica's telemetry: collects the replica's events, and turns them into figures, metrics, spans and log lines.

The engine client reports statistics and tokens, a run its end, and the HTTP side errors. No method waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from prometheus_client import generate_latest

from cluster.messages.engine import EngineStats
from cluster.messages.state import EngineLife, EngineState
from cluster.observability.board import StatsBoard, StepCounts
from cluster.observability.metrics import Metrics
from cluster.observability.record import Identity, RequestRecord
from cluster.observability.timeline import RecentRequests
from cluster.observability.tracing import RequestTracer
from configs.errors import RequestError

logger = logging.getLogger(__name__)

_LINE_INTERVAL_S = 10.0
_MAX_PAUSES = 256


class Telemetry:
    """Collects the events of all parts of one replica. Used by one thread."""

    def __init__(self, identity: Identity | None = None, life: EngineLife | None = None) -> None:
        """`life` is shared with the code that drains the replica. If None, a new one is made."""
        self.life = life or EngineLife()
        """The engine's state, as users see it."""
        self.board = StatsBoard()
        self.metrics = Metrics(identity or Identity(), self.board, self.life)
        self.recent = RecentRequests()
        self.export: Callable[[], None] | None = None
        """Called after each report of the engine, to export the metrics."""
        self.tracer: RequestTracer | None = None
        """Makes spans of requests. None if nothing consumes spans."""
        self.pauses: deque[tuple[float, float]] = deque(maxlen=_MAX_PAUSES)
        """(begin, end) of the last times in which ranks were replaced while requests waited, on CLOCK_MONOTONIC."""
        self._paused_s: float | None = None  # start of the current pause; None without one
        self._line_at = time.monotonic()
        self._line_totals = StepCounts()

    # Incoming events

    def report(self, stats: EngineStats) -> None:
        """Handles a report of the engine."""
        steps = self.board.update(stats)
        self.life.follow(stats.state)
        self._follow_pauses(stats)
        self.metrics.report(stats, steps)
        if self.export is not None:
            self.export()
        self._log_engine(stats)

    def intervals(self, seconds: Sequence[float]) -> None:
        """Handles the seconds between tokens of the same sequences, after a step."""
        self.metrics.itl.add(seconds)

    def first_token(self, ttft_s: float) -> None:
        """Handles the first token of an answer."""
        self.metrics.ttft.add(ttft_s)
        self.board.first_token(ttft_s)

    def finished(self, record: RequestRecord) -> None:
        """Handles the end of a request, whether it succeeded or not."""
        self.metrics.finished(record)
        self.recent.keep(record)
        pauses = self.pauses_between(record.context.arrived_s, record.ended_s)
        _log_request(record, sum(end - begin for begin, end in pauses))
        if self.tracer is not None:
            self.tracer.finished(record)

    def refused(self, error: RequestError) -> None:
        """Handles an error that a request got instead of its answer, or during it."""
        self.metrics.refused.labels(error.code, error.status).inc()

    def started(self, phases: dict[str, float], *, peak_flops: float, peak_bandwidth: float, **config: object) -> None:
        """Handles that the replica is ready.

        Args:
            phases: seconds of each phase of the start.
            peak_flops: measured FLOP per second of all ranks together.
            peak_bandwidth: measured bytes per second that all ranks together read and write in memory.
            config: a value for each label in `metrics.CONFIG`.
        """
        self.board.peak_flops, self.board.peak_bandwidth = peak_flops, peak_bandwidth
        self.metrics.started(phases, config)

    def pauses_between(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """The parts of `pauses` that lie within a time span."""
        parts = [(max(begin, begin_s), min(end, end_s)) for begin, end in self.pauses]
        return [(begin, end) for begin, end in parts if begin < end]

    def close(self) -> None:
        """Closes the replica's telemetry, and sends spans that were not sent yet."""
        if self.tracer is not None:
            self.tracer.close()

    # Outgoing figures

    def prometheus(self) -> bytes:
        """The metrics in Prometheus's format."""
        return generate_latest(self.metrics)

    def _follow_pauses(self, stats: EngineStats) -> None:
        if stats.state is EngineState.REBUILDING:
            self._paused_s = stats.time_s if self._paused_s is None else self._paused_s
        elif self._paused_s is not None:
            self.pauses.append((self._paused_s, stats.time_s))
            self._paused_s = None

    def _log_engine(self, stats: EngineStats) -> None:
        """Logs a line every ten seconds, if steps have run."""
        now = time.monotonic()
        seconds = now - self._line_at
        if seconds < _LINE_INTERVAL_S:
            return
        steps = self.board.totals.since(self._line_totals)
        self._line_at, self._line_totals = now, replace(self.board.totals)
        if not steps.num_steps:
            return
        scheduler = stats.scheduler
        fields = {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "kv_usage": round(self.board.kv_usage, 3),
            "generated_tok_s": round(steps.num_generated_tokens / seconds, 1),
            "prefill_tok_s": round(steps.num_prefill_tokens / seconds, 1),
            "step_ms": round(1e3 * steps.step_s / steps.num_steps, 2),
            "prefix_hit_ratio": round(scheduler.prefix_hit_ratio, 3),
            "preemptions": scheduler.total_preemptions,
        }
        if (utilisation := self.board.utilisation(steps)) is not None:
            fields["mfu"], fields["mbu"] = (round(share, 4) for share in utilisation)
        logger.info("engine", extra={"fields": fields})


def _log_request(record: RequestRecord, pause_s: float) -> None:
    """Logs one line per request, with the seed with which it can be repeated. `pause_s` is its time without steps."""
    fields: dict[str, object] = {"request_id": record.context.request_id, "id": record.id}
    if record.context.client:
        fields["client"] = record.context.client
    fields |= {
        "in": record.num_prompt_tokens,
        "cached": record.num_cached_tokens,
        "out": record.num_generated_tokens,
        "finish": ",".join(sorted(set(record.finish_reasons))),
        "seed": record.sampling.seed,
    }
    if len(record.num_generated) > 1:
        fields["sequences"] = len(record.num_generated)
    times = {
        "queue_ms": None if record.prefilled is None else record.prefilled.queue_s,
        "ttft_ms": record.ttft_s,
        "itl_ms": record.tpot_s,
        "e2e_ms": record.e2e_s,
        "pause_ms": pause_s or None,
    }
    fields |= {name: round(1e3 * seconds, 1) for name, seconds in times.items() if seconds is not None}
    logger.info("request", extra={"fields": fields})
