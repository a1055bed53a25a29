"""What each step cost, as the coordinator saw it: measured there, sent in records, read in the Engine replica.

No torch, no Ray: the coordinator's loop runs this for every step, so it keeps to two clock readings, a few sums over
the rows and one `pack`.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from cluster.engine.messages import EngineStats, SchedulerStats
from parallel.step_cost import StepCost
from worker.protocol import StepFrame

STEP_DTYPE = np.dtype(
    [
        ("launched_s", "<f8"),  # CLOCK_MONOTONIC of the host
        ("duration_s", "<f4"),  # from the launch, or from the end of the step before where that was later, to its end
        ("gap_s", "<f4"),  # how long no step was in flight before it, though there was work: time the ranks waited
        ("num_rows", "<i4"),  # sequences in the step
        ("num_decodes", "<i4"),  # those of them that computed their last token, and no prompt
        ("num_prefill_tokens", "<i4"),  # prompt tokens it computed
        ("num_sampled", "<i4"),  # tokens it brought
        ("flops", "<f4"),  # that the model needs for it, all ranks together
        ("read_bytes", "<f4"),  # of weights, keys and values that it must read, all ranks together
    ],
    align=False,
)
"""One retired step."""

_REPORT_INTERVAL_S = 0.1
_RECORD = struct.Struct("<dffiiiiff")
# Nobody may be there to read: then the records of the last seconds are enough.
_MAX_UNREAD_BYTES = _RECORD.size * 4096


# Steps of a kind after which it is known what one takes: the first ones touch everything for the first time.
_LEARNED = 16
# What was slow once, on a busy machine say, is forgotten in some hundred steps.
_FORGET = 0.99
# Of a step, whatever is in it.
_LEAST_S = 1e-3


class StepMeter:
    """Times the steps of one coordinator and counts what they cost. One thread."""

    def __init__(
        self,
        cost: StepCost,
        clock: Callable[[], float] = time.monotonic,
        peaks: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        """Args:
        cost: of all ranks together.
        peaks: FLOP/s and bytes/s that all ranks together were measured to do.
        """
        self.cost = cost
        """Of the steps that are launched from now on."""
        self._peaks = peaks
        self._clock = clock
        # By whether prompts are in the step: of the slowest lately, its duration over what the peaks allow.
        self._slowness = [0.0, 0.0]
        self._num_retired = [0, 0]
        # Launched at; rows, decodes and prompt tokens; FLOPs and bytes.
        self._in_flight: deque[tuple[float, tuple[int, int, int], tuple[float, float]]] = deque()
        self._last_end: float | None = None  # of a step; None where the engine had nothing to do since
        self._records = bytearray()
        self._reported_at = -_REPORT_INTERVAL_S
        self.num_steps = 0
        """Steps launched so far."""

    def launched(self, frame: StepFrame) -> None:
        """`frame` has been handed to the ranks."""
        self.num_steps += 1
        num_rows = num_decodes = len(frame.rows)
        if len(frame.token_ids):
            num_decodes -= int(np.count_nonzero(frame.has_tokens))
        num_logits = int(frame.draws.sum()) + len(frame.prompt_targets)
        cost = self.cost.step(frame.starts, frame.lens, num_logits)
        self._in_flight.append((self._clock(), (num_rows, num_decodes, len(frame.token_ids)), cost))

    def retired(self, num_sampled: int, possible_s: float = math.inf) -> None:
        """The oldest step's result is there, with that many tokens.

        Args:
            possible_s: at most so much of its duration was its own, and not other programs'.
        """
        now = self._clock()
        kind, least_s = self._least()
        launched, counts, cost = self._in_flight.popleft()
        before = launched if self._last_end is None else self._last_end
        duration, gap = now - max(launched, before), max(0.0, launched - before)
        self._last_end = now
        self._num_retired[kind] += 1
        self._slowness[kind] = max(self._slowness[kind] * _FORGET, min(duration, possible_s) / least_s)
        if len(self._records) >= _MAX_UNREAD_BYTES:
            self._records.clear()
        self._records += _RECORD.pack(launched, duration, gap, *counts, num_sampled, *cost)

    def expected_s(self) -> float:
        """What the oldest step in flight takes if it is like the slowest of those before, by what it has to compute
        and read; infinite before that is known."""
        kind, least_s = self._least()
        return self._slowness[kind] * least_s if self._num_retired[kind] >= _LEARNED else math.inf

    def _least(self) -> tuple[int, float]:
        """Whether prompts are in the oldest step in flight, and the seconds that the peaks allow for it."""
        _, (*_, num_prompt_tokens), cost = self._in_flight[0]
        least_s = _LEAST_S + sum(amount / peak for amount, peak in zip(cost, self._peaks, strict=True))
        return int(num_prompt_tokens > 0), least_s

    def lost(self) -> None:
        """The steps in flight will not retire."""
        self._in_flight.clear()
        self._last_end = None

    def rest(self) -> None:
        """There is nothing to do: the time until the next launch is nobody's delay."""
        self._last_end = None

    def is_due(self) -> bool:
        """Whether a busy engine's next report is due."""
        return self._clock() - self._reported_at >= _REPORT_INTERVAL_S

    def report(self, scheduler: SchedulerStats, heartbeat_age_s: list[float]) -> EngineStats:
        """The engine's figures now, with the steps that retired since the last report."""
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
