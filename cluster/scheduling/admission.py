"""Which requests may wait: what can never run, and what finds the queue full, is refused at once."""

from __future__ import annotations

from cluster.messages import Finished
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.request import Request, reason_never_fits, refused

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class Admission:
    """All that waits: in the queue, or for a first mask before it may queue."""

    def __init__(self, limits: SchedulerLimits, queue: PrefillQueue, guided: GuidedRows) -> None:
        self._limits = limits
        self._queue = queue
        self._guided = guided

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting + self._guided.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_waiting_tokens + self._guided.num_held_tokens

    def refusal(self, request: Request, now: float) -> Finished | None:
        """Why `request` may not wait, with when to come again if the queue is full; None if it may."""
        if (reason := reason_never_fits(request, self._limits)) is not None:
            # The ingress checks the same: it is the engine's fault that the request came this far.
            return refused(request.id, reason, "engine_error")
        if (full := self._reason_full(len(request.tokens))) is not None:
            reason = f"the queue is full: {full}; try again later"
            return refused(request.id, reason, "engine_overloaded", self._retry_after_s(now))
        return None

    def _reason_full(self, num_tokens: int) -> str | None:
        limits = self._limits
        num_waiting, num_waiting_tokens = self.num_waiting, self.num_waiting_tokens
        if num_waiting >= limits.max_num_queued_requests:
            return f"{num_waiting} requests wait, max_num_queued_requests={limits.max_num_queued_requests}"
        # A prompt longer than the limit may still wait alone.
        if num_waiting and num_waiting_tokens + num_tokens > limits.max_num_queued_tokens:
            return f"{num_waiting_tokens} tokens wait, max_num_queued_tokens={limits.max_num_queued_tokens}"
        return None

    def _retry_after_s(self, now: float) -> float:
        """When the queue will be empty if it goes on as it went lately."""
        rate = self._queue.tokens_per_s(now)
        drained_s = self.num_waiting_tokens / rate if rate else _MIN_RETRY_S
        return min(max(drained_s, _MIN_RETRY_S), _MAX_RETRY_S)
