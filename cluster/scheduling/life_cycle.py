"""Requests from arrival to end: admission or refusal, deadlines, ends, and the return of rows.

A request that finds the queue full, or can never run, is refused at once. Other requests wait in the queue, or for a
first mask before they may queue. A request returns its row when it ends or is preempted; a preempted request waits
again. When a request ends, its `Finished` waits here for the next output. A row and its pages are free again once no
step in flight names the row.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.messages.engine import Finished, FinishReason, GenerateRequest
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.pages import RowPages
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.request import Guide, Request
from cluster.scheduling.row_table import RowTable
from configs.errors import EngineError, RequestError
from worker.protocol import Int32Array

_TOKEN_BYTES = 4
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class LifeCycle:
    """Requests that wait or run.

    Args:
        make_guide: creates a guide for a request that needs one. If it raises RequestError, the request is refused.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        rows: RowTable,
        pages: RowPages,
        queue: PrefillQueue,
        guided: GuidedRows,
        make_guide: Callable[[GenerateRequest], Guide | None],
    ) -> None:
        self._limits = limits
        self._rows = rows
        self._pages = pages
        self._queue = queue
        self._guided = guided
        self._make_guide = make_guide
        self._deadlines: list[tuple[float, int]] = []  # a heap of (time, request id), which may contain ended requests
        self._pending: list[Finished] = []
        self.live: dict[int, Request] = {}
        """Requests that wait or run, by id, in order of arrival."""
        self.num_draining = 0
        """Number of rows that are taken but not live, because a step in flight names them."""
        self.total_refused = 0
        self.total_expired = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting) + self._guided.num_held

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.waiting.num_tokens + self._guided.num_held_tokens

    @property
    def is_pending(self) -> bool:
        """Whether some `Finished` has not been sent yet."""
        return bool(self._pending)

    def take_pending(self) -> list[Finished]:
        """Returns every `Finished` that has not been sent yet, and counts them as sent."""
        pending, self._pending = self._pending, []
        return pending

    def add(self, requests: Sequence[GenerateRequest], now: float) -> list[Finished]:
        """Queues the requests of one submission, or refuses all of them if the queue is full. A request that can never
        run is refused alone.

        Returns:
            A `Finished` for each refused request.

        Raises:
            EngineError: an id is in use.
        """
        if (full := self._reason_full(requests)) is None:
            return [refusal for request in requests if (refusal := self._add(request, now)) is not None]
        self.total_refused += len(requests)
        rate = self._queue.rate.per_second(now)  # the time after which the queue is empty, at the recent rate
        drained_s = self.num_waiting_tokens / rate if rate else _MIN_RETRY_S
        retry_after_s = min(max(drained_s, _MIN_RETRY_S), _MAX_RETRY_S)
        return [_refused(request.id, full, "engine_overloaded", retry_after_s) for request in requests]

    def _reason_full(self, requests: Sequence[GenerateRequest]) -> str | None:
        """The reason why a submission may not wait, or None if it may.

        If nothing waits, any submission may wait, because a large one never could otherwise. The server limits the size
        of an HTTP request. One client cannot fill the queue for other clients: a client below its share may add to a
        full queue, up to twice the limits.
        """
        num_waiting, num_waiting_tokens, limits = self.num_waiting, self.num_waiting_tokens, self._limits
        if not num_waiting:
            return None
        num_tokens = sum(len(request.prompt) for request in requests) // _TOKEN_BYTES
        requests_used = (num_waiting + len(requests)) / limits.max_num_queued_requests
        tokens_used = (num_waiting_tokens + num_tokens) / limits.max_num_queued_tokens
        used = max(requests_used, tokens_used)
        if used <= 1 or (used <= 2 and self._is_below_its_share(requests[0].terms.client, len(requests))):
            return None
        if requests_used == used:
            full = f"{num_waiting} requests wait, max_num_queued_requests={limits.max_num_queued_requests}"
        else:
            full = f"{num_waiting_tokens} tokens wait, max_num_queued_tokens={limits.max_num_queued_tokens}"
        return f"the queue is full: {full}; try again later"

    def _is_below_its_share(self, client: str, num_more: int) -> bool:
        """Whether there are other clients, and this one has at most its share of the queue (including `num_more`
        requests) and of the waiting tokens. Iterates over all requests."""
        waiting = [request for request in self.live.values() if not request.row]
        own = [len(request.tokens) for request in waiting if request.terms.client == client]
        num_clients = len({client, *(request.terms.client for request in waiting)})
        has_room = (len(own) + num_more) * num_clients <= self._limits.max_num_queued_requests
        return num_clients > 1 and has_room and sum(own) * num_clients <= self._limits.max_num_queued_tokens

    def _add(self, request: GenerateRequest, now: float) -> Finished | None:
        if request.id in self.live:
            raise EngineError(f"request id {request.id} is in use; please report this bug")
        try:
            entry = Request.create(request, self._limits, now)
            if (reason := entry.reason_never_fits(self._limits)) is not None:
                # The replica checks the same before, so the engine is at fault if such a request arrives here.
                return _refused(request.id, reason, "engine_error")
            entry.guide = self._make_guide(request)
        except RequestError as error:
            return _refused(request.id, str(error), error.code)
        self.live[entry.id] = entry
        if entry.terms.deadline_s > 0:
            heapq.heappush(self._deadlines, (now + entry.terms.deadline_s, entry.id))
            if len(self._deadlines) > 2 * len(self.live) + 64:
                self._deadlines = [deadline for deadline in self._deadlines if deadline[1] in self.live]
                heapq.heapify(self._deadlines)
        if entry.guide is None:
            self._queue.push(entry)
        else:
            self._guided.hold(entry)
        return None

    def end_expired(self, now: float) -> None:
        """Ends the requests with a deadline before `now`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.live.get(heapq.heappop(self._deadlines)[1])
            if request is not None:
                self.total_expired += 1
                done = "running" if request.row else "waiting"
                error = f"The request's deadline of {request.terms.deadline_s:g} seconds passed while it was {done}."
                self.finish(request, FinishReason.ERROR, error=error, error_code="deadline_exceeded")

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """Ends a request that waits or runs. Its row is free at once, or as soon as no step in flight names the row."""
        self._pending.append(
            Finished(
                id=request.id,
                reason=reason,
                stop_token_id=stop_token_id,
                error=error,
                error_code=error_code,
                num_preemptions=request.num_preemptions,
            )
        )
        del self.live[request.id]
        is_held = request.guide is not None and self._guided.forget(request)
        if not (row := request.row):
            if not is_held:
                self._queue.remove(request)
            return
        self._queue.waiting.charge(request, int(self._rows.num_known[row]) - request.num_prompt_tokens)
        self._leave_row(row)

    def requeue(self, row: int, now: float, *, is_lost: bool = False) -> None:
        """Preempts the request of a row. The request waits with the tokens that were sent, computes them again, and
        continues to sample after them. Results of steps in flight for the row are dropped.

        Args:
            is_lost: whether a lost step may have had the request's mask, which its guide must then return again.
        """
        table, request = self._rows, self._rows.request(row)
        request.tokens = table.tokens[row, : table.num_known[row]].copy()
        request.num_preemptions += 1
        request.waits_since_s = now
        is_lost = is_lost or bool(table.in_flight[row])
        is_held = request.guide is not None and self._guided.requeue(request, is_lost=is_lost)
        table.requests[row] = replace(request)  # the request may get another row before this one is free
        request.row = 0
        self._leave_row(row)
        if not is_held:
            self._queue.push(request)

    def _leave_row(self, row: int) -> None:
        """Separates a request from its row. The row is free at once, or as soon as no step in flight names it."""
        self._rows.end(row)
        self._queue.forget_row(row)
        if self._rows.in_flight[row]:
            self.num_draining += 1
        else:
            self.release(row)

    def release(self, row: int) -> None:
        """Frees a row and its pages. The computed pages with known tokens stay in the prefix cache if it is enabled."""
        table = self._rows
        # A step may have computed the KV of a dropped token, but the coordinator does not know that token's id.
        num_tokens = min(int(table.num_computed[row]), int(table.num_known[row]), int(table.num_cacheable[row]))
        self._pages.publish(row, table.tokens[row], num_tokens)
        self._pages.keep_state(row, num_tokens)
        self._pages.release(row, forget=not table.num_cacheable[row])
        table.give_back(row)
        self._queue.forget_row(row)

    def release_drained(self, named: Int32Array) -> None:
        """Frees the rows among `named`, the rows of a retired step, that are not live and that no other step in flight
        names."""
        if not self.num_draining:
            return
        table = self._rows
        drained = ~table.live[named] & (table.in_flight[named] == 0) & (table.admission[named] > 0)
        for row in named[drained].tolist():
            self.num_draining -= 1
            self.release(row)

    def check_integrity(self) -> None:
        """Raises AssertionError if draining rows are miscounted, or one of them is named by no step in flight."""
        table = self._rows
        draining = [row for row, request in enumerate(table.requests) if request is not None and not table.live[row]]
        assert len(draining) == self.num_draining, "draining rows are miscounted"
        assert table.in_flight[draining].all(), "an ended row that no step names was not released"


def _refused(request_id: int, error: str, error_code: str, retry_after_s: float | None = None) -> Finished:
    """Returns the `Finished` of a request that was not accepted."""
    return Finished(
        id=request_id, reason=FinishReason.ERROR, error=error, error_code=error_code, retry_after_s=retry_after_s
    )
