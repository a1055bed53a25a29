"""How many requests may wait: a submission that finds the queue full is refused at once."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.messages import GenerateRequest
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.prefill import PrefillQueue

_TOKEN_BYTES = 4
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

    def reason_full(self, requests: Sequence[GenerateRequest]) -> str | None:
        """Why the requests of one submission may not wait, or None.

        When nothing waits they may, however many and long they are: otherwise they never could, and trying again would
        be in vain. The server bounds the size of one HTTP request.
        """
        num_waiting = self.num_waiting
        if not num_waiting:
            return None
        limits = self._limits
        if num_waiting + len(requests) > limits.max_num_queued_requests:
            full = f"{num_waiting} requests wait, max_num_queued_requests={limits.max_num_queued_requests}"
        else:
            num_waiting_tokens = self.num_waiting_tokens
            num_tokens = sum(len(request.prompt) for request in requests) // _TOKEN_BYTES
            if num_waiting_tokens + num_tokens <= limits.max_num_queued_tokens:
                return None
            full = f"{num_waiting_tokens} tokens wait, max_num_queued_tokens={limits.max_num_queued_tokens}"
        return f"the queue is full: {full}; try again later"

    def retry_after_s(self, now: float) -> float:
        """When the queue will be empty if it goes on as it went lately."""
        rate = self._queue.tokens_per_s(now)
        drained_s = self.num_waiting_tokens / rate if rate else _MIN_RETRY_S
        return min(max(drained_s, _MIN_RETRY_S), _MAX_RETRY_S)
