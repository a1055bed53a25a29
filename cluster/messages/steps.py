"""The time and cost of each step: measured by the coordinator, sent in records, read in the Engine replica.

The coordinator's loop measures every step, so this costs only two clock readings, a few sums over the rows and one
`pack` per step. It uses neither torch nor Ray.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from cluster.messages.engine import EngineStats, SchedulerStats
from parallel.step_cost import StepCost
from worker.protocol import StepFrame

STEP_DTYPE = np.dtype(
    [
        ("launched_s", "<f8"),  # CLOCK_MONOTONIC of the host
        ("duration_s", "<f4"),  # from the launch, or the end of the step before if later, to the step's end
        ("gap_s", "<f4"),  # seconds before the launch in which no step was in flight although requests waited
        ("num_rows", "<i4"),  # sequences in the step
        ("num_decodes", "<i4"),  # sequences that computed their last token, and no prompt
        ("num_prefill_tokens", "<i4"),  # prompt tokens that the step computed
        ("num_sampled", "<i4"),  # tokens that the step sampled
        ("flops", "<f4"),  # FLOPs that the model needs for the step, all ranks together
        ("read_bytes", "<f4"),  # bytes of weights, keys and values that the step must read, all ranks together
    ],
    align=False,
)
"""One retired step."""

_REPORT_INTERVAL_S = 0.1
_RECORD = struct.Struct("<dffiiiiff")
# Maximum bytes of records. Without a reader, the records of the last seconds are enough.
_MAX_UNREAD_BYTES = _RECORD.size * 4096


class StepMeter:
    """Measures the steps of one coordinator and computes their cost. Used by one thread."""

    def __init__(self, cost: StepCost, clock: Callable[[], float] = time.monotonic) -> None:
        self.cost = cost
        """The cost of steps launched from now on, summed over all ranks."""
        self._clock = clock
        # For each step in flight: launch time; rows, decodes and prompt tokens; FLOPs and bytes.
        self._in_flight: deque[tuple[float, tuple[int, int, int], tuple[float, float]]] = deque()
        self._last_end: float | None = None  # when a step last ended; None if the engine has been idle since
        self._records = bytearray()
        self._reported_at = -_REPORT_INTERVAL_S
        self.num_steps = 0
        """Number of steps launched so far."""

    def launched(self, frame: StepFrame) -> None:
        """Records that `frame` was sent to the ranks."""
        self.num_steps += 1
        num_rows = num_decodes = len(frame.rows)
        if len(frame.token_ids):
            num_decodes -= int(np.count_nonzero(frame.has_tokens & (frame.samples_per_row <= 1)))
        num_logits = int(frame.samples_per_row.sum()) + len(frame.prompt_targets)
        cost = self.cost.step(frame.starts, frame.lens, num_logits)
        num_prompt_tokens = len(frame.token_ids)
        if len(frame.num_samples):
            # The input tokens of these rows are drafts, not prompt tokens.
            num_prompt_tokens -= int(frame.lens[frame.has_tokens & (frame.samples_per_row > 1)].sum())
        self._in_flight.append((self._clock(), (num_rows, num_decodes, num_prompt_tokens), cost))

    @property
    def oldest(self) -> tuple[bool, tuple[float, float]]:
        """Whether the oldest step in flight has prompts, and its (FLOPs, bytes)."""
        _, (*_, num_prefill_tokens), cost = self._in_flight[0]
        return num_prefill_tokens > 0, cost

    def retired(self, num_sampled: int) -> float:
        """Records the result of the oldest step, with `num_sampled` tokens. Returns the seconds that the step took."""
        now = self._clock()
        launched, counts, cost = self._in_flight.popleft()
        before = launched if self._last_end is None else self._last_end
        duration, gap = now - max(launched, before), max(0.0, launched - before)
        self._last_end = now
        if len(self._records) >= _MAX_UNREAD_BYTES:
            self._records.clear()
        self._records += _RECORD.pack(launched, duration, gap, *counts, num_sampled, *cost)
        return duration

    def lost(self) -> None:
        """Drops the steps in flight, which will not retire."""
        self._in_flight.clear()
        self._last_end = None

    def rest(self) -> None:
        """Records that no request waits or runs, so that the time until the next launch does not count as a gap."""
        self._last_end = None

    def is_due(self) -> bool:
        """Whether a busy engine should send its next report now."""
        return self._clock() - self._reported_at >= _REPORT_INTERVAL_S

    def report(self, scheduler: SchedulerStats, heartbeat_age_s: list[float]) -> EngineStats:
        """The engine's current figures, with the steps that retired since the last report."""
        self._reported_at = now = self._clock()
        age = now - self._in_flight[0][0] if self._in_flight else 0.0
        steps = bytes(self._records)
        self._records.clear()
        return EngineStats(
            time_s=now,
            scheduler=scheduler,
            num_steps=self.num_steps,
            step_age_s=age,
            heartbeat_age_s=heartbeat_age_s,
            steps=steps,
        )
