"""The Engine replica's data about its engine: the latest figures, the last minutes by second, the last steps.

The engine client writes the data. `/v1/loads`, the metrics, the log and the page read it. It sends no queries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import EngineStats, Weights
from cluster.messages.steps import STEP_DTYPE

_HISTORY_S = 300
_KEPT_STEPS = 1 << 14


@dataclass(slots=True)
class StepCounts:
    """Counts over the steps that ended in a time span."""

    num_steps: int = 0
    step_s: float = 0.0
    """Total seconds of the steps."""
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    flops: float = 0.0
    """FLOPs that the model needed, all ranks together."""
    read_bytes: float = 0.0
    """Bytes of weights, keys and values that the steps had to read, all ranks together."""

    def add(self, steps: npt.NDArray[np.void]) -> None:
        """Counts `steps`, [num_steps] of STEP_DTYPE."""
        self.num_steps += len(steps)
        self.step_s += float(steps["duration_s"].sum())
        self.num_prefill_tokens += int(steps["num_prefill_tokens"].sum())
        self.num_generated_tokens += int(steps["num_sampled"].sum())
        self.flops += float(steps["flops"].sum(dtype=np.float64))
        self.read_bytes += float(steps["read_bytes"].sum(dtype=np.float64))

    def since(self, before: StepCounts) -> StepCounts:
        """The counts added since `before`, an earlier state of these counts."""
        return StepCounts(*(getattr(self, it.name) - getattr(before, it.name) for it in fields(StepCounts)))


@dataclass(slots=True)
class Second(StepCounts):
    """One second of the engine's life, with counts of the events in it."""

    time_s: int = field(kw_only=True)
    """Start of the second on the host's CLOCK_MONOTONIC, in whole seconds."""
    num_first_tokens: int = 0
    """Number of answers that got their first token."""
    ttft_s: float = 0.0
    """Sum of these answers' times to first token, in seconds."""


class StatsBoard:
    """The engine's figures in its last report. One thread writes, and other threads may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.latest: EngineStats | None = None
        """The engine's last report. None before the first report."""
        self._received_at = clock()
        self._seconds: deque[Second] = deque(maxlen=_HISTORY_S)
        self._steps = np.zeros(_KEPT_STEPS, STEP_DTYPE)
        self._num_steps = 0  # number of steps stored so far; modulo the array's size, the next index
        self.totals = StepCounts()
        """Counts since the engine's start."""
        self.peak_flops = 0.0
        """Measured FLOP per second of large matrix products, all ranks together. 0 before the engine has started."""
        self.peak_bandwidth = 0.0
        """Bytes per second that all ranks together copy in memory. 0 before the engine has started."""

    @property
    def weights(self) -> Weights | None:
        """The weights in use. None for the weights of the start."""
        return None if self.latest is None else self.latest.weights

    @property
    def age_s(self) -> float:
        """Seconds since the coordinator's last report. Above two seconds, the coordinator has a problem."""
        return self._clock() - self._received_at

    @property
    def kv_usage(self) -> float:
        """Share of the KV pages that running requests use, 0 to 1. Unused cached pages count as free."""
        if self.latest is None:
            return 0.0
        pages = self.latest.scheduler
        num_pages = pages.num_free_pages + pages.num_cached_pages + pages.num_owned_pages
        return (num_pages - pages.num_free_pages - pages.num_evictable_pages) / num_pages if num_pages else 0.0

    def update(self, stats: EngineStats) -> npt.NDArray[np.void]:
        """Stores a report. Returns the report's steps, [num_steps] of STEP_DTYPE."""
        self.latest = stats
        self._received_at = self._clock()
        steps = np.frombuffer(stats.steps, STEP_DTYPE)
        second = self._second()
        if len(steps):
            self._keep(steps)
            second.add(steps)
            self.totals.add(steps)
        return steps

    def first_token(self, ttft_s: float) -> None:
        """Counts an answer that began `ttft_s` after its request."""
        second = self._second()
        second.num_first_tokens += 1
        second.ttft_s += ttft_s

    def utilisation(self, steps: StepCounts) -> tuple[float, float] | None:
        """(MFU, MBU) during `steps`, each 0 to 1. None if they took no time, or before the engine has started."""
        if not (steps.step_s and self.peak_flops and self.peak_bandwidth):
            return None
        return steps.flops / steps.step_s / self.peak_flops, steps.read_bytes / steps.step_s / self.peak_bandwidth

    def history(self) -> list[Second]:
        """The last minutes, oldest second first. Seconds without reports are left out."""
        return list(self._seconds)

    def steps(self, count: int | None = None) -> npt.NDArray[np.void]:
        """[at most `count`] of STEP_DTYPE: the steps that retired last, oldest first. If None, the last 16384."""
        kept = min(self._num_steps, _KEPT_STEPS if count is None else count)
        return self._steps[np.arange(self._num_steps - kept, self._num_steps) % _KEPT_STEPS]

    def _second(self) -> Second:
        now = int(self._clock())
        if not self._seconds or self._seconds[-1].time_s != now:
            self._seconds.append(Second(time_s=now))
        return self._seconds[-1]

    def _keep(self, steps: npt.NDArray[np.void]) -> None:
        steps = steps[-_KEPT_STEPS:]
        self._steps[np.arange(self._num_steps, self._num_steps + len(steps)) % _KEPT_STEPS] = steps
        self._num_steps += len(steps)
