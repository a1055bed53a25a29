"""Requests on their way in: what finds the queue full, or can never run, is refused at once; the others wait.

Knows every request until it ends, and when it expires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.engine.messages import Finished, GenerateRequest
from cluster.scheduling.deadlines import Deadlines
from cluster.scheduling.guide import Guide
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.request import Request, reason_never_fits, refused
from configs.errors import EngineError, RequestError

_TOKEN_BYTES = 4
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class Admission:
    """Lets requests wait: in the queue, or for a first mask before they may queue."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queue: PrefillQueue,
        guided: GuidedRows,
        make_guide: Callable[[GenerateRequest], Guide | None],
    ) -> None:
        """`make_guide`: a guide for a request that needs one; a RequestError refuses the request."""
        self._limits = limits
        self._queue = queue
        self._guided = guided
        self._make_guide = make_guide
        self._deadlines = Deadlines()
        self.live: dict[int, Request] = {}
        """Requests that wait or run, by id, in order of arrival. `Endings` takes them out."""

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting + self._guided.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_waiting_tokens + self._guided.num_held_tokens

    def take(self, requests: Sequence[GenerateRequest], now: float) -> list[Finished]:
        """Lets each of `requests` wait, or refuses it: returns the refusals. Raises EngineError for an id in use."""
        return [refusal for request in requests if (refusal := self._take_one(request, now)) is not None]

    def _take_one(self, request: GenerateRequest, now: float) -> Finished | None:
        if request.id in self.live:
            raise EngineError(f"request id {request.id} is in use")
        try:
            entry = Request.create(request, self._limits, now)
            if (reason := reason_never_fits(entry, self._limits)) is not None:
                # The ingress checks the same: it is the engine's fault that the request came this far.
                return refused(request.id, reason, "engine_error")
            entry.guide = self._make_guide(request)
        except RequestError as error:
            return refused(request.id, str(error), error.code)
        self.live[entry.id] = entry
        if entry.deadline_s > 0:
            self._deadlines.add(entry.id, now + entry.deadline_s, self.live, len(self.live))
        if entry.guide is None:
            self._queue.push(entry)
        else:
            self._guided.hold(entry)
        return None

    def expired(self, now: float) -> list[Request]:
        """Live requests whose deadline has passed; each is named once."""
        return [self.live[i] for i in self._deadlines.take_expired(now) if i in self.live]

    def refuse_all(self, requests: Sequence[GenerateRequest], now: float) -> list[Finished]:
        """The refusals of a whole submission for which the queue has no room; none if it has."""
        if (full := self._reason_full(requests)) is None:
            return []
        retry_after_s = self._retry_after_s(now)
        return [refused(request.id, full, "engine_overloaded", retry_after_s) for request in requests]

    def _reason_full(self, requests: Sequence[GenerateRequest]) -> str | None:
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

    def _retry_after_s(self, now: float) -> float:
        """When the queue will be empty if it goes on as it went lately."""
        rate = self._queue.tokens_per_s(now)
        drained_s = self.num_waiting_tokens / rate if rate else _MIN_RETRY_S
        return min(max(drained_s, _MIN_RETRY_S), _MAX_RETRY_S)
