"""Takes rows from running requests: where pages have run out, where a client is kept waiting by another that holds
more than its share (`Shares`), and where ranks are lost.

A preempted request waits with the tokens that were sent. It computes them again and samples on from the same position,
so its answer does not change. For another client a row goes only when that client has waited for a while, one row at
a time: most waits end by themselves, since answers do.
"""

from __future__ import annotations

from dataclasses import replace

from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.life_cycle import LifeCycle
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.row_table import RowTable

# A client that is kept waiting for so long gets a row of one that holds more than its share.
_PATIENCE_S = 0.05
# Shares are looked at no more often: that costs a walk over the rows.
_LOOK_EVERY_S = 0.01


class Preemption:
    """Preempts requests, and has them wait."""

    def __init__(
        self, limits: SchedulerLimits, rows: RowTable, queue: PrefillQueue, guided: GuidedRows, life: LifeCycle
    ) -> None:
        self._limits = limits
        self._rows = rows
        self._queue = queue
        self._guided = guided
        self._life = life
        self._next_look_s = 0.0

    def preempt_one(self, now: float) -> None:
        """Preempts the request that `Shares.victim` names, for want of pages. No step may be in flight."""
        assert not self._rows.in_flight.any(), "pages may come free when the steps in flight retire"
        row = self._queue.shares().victim()
        assert row is not None, "no request runs"
        self.requeue(row, now)

    def yield_row(self, now: float) -> bool:
        """Preempts a request of a client over its share, if another client has waited too long for a row or pages.
        Returns whether it did. The row is free once the steps in flight have retired."""
        queue = self._queue
        if now < self._next_look_s or self._life.num_draining or not queue.is_shared:
            return False
        if queue.has_rows and queue.lacks_pages is None:
            return False
        self._next_look_s = now + _LOOK_EVERY_S
        shares = queue.shares()
        waiting = queue.waiting.first(shares.has_its_share)
        if waiting is None or now - waiting.waits_since_s < _PATIENCE_S or shares.has_its_share(waiting.client):
            return False
        if queue.has_rows and waiting is not queue.lacks_pages:
            return False
        row = shares.victim(level=waiting.level)
        if row is None:
            return False
        queue.overtake_no_more(waiting)
        self.requeue(row, now)
        return True

    def requeue(self, row: int, now: float, *, is_lost: bool = False) -> None:
        """Has the request of a row wait, with the tokens that were sent. Steps in flight compute for it in vain.

        `is_lost`: as in `GuidedRows.requeue`.
        """
        table = self._rows
        request = table.request(row)
        request.tokens = table.tokens[row, : table.num_known[row]].copy()
        request.num_preemptions += 1
        request.waits_since_s = now
        is_lost = is_lost or bool(table.in_flight[row])
        is_held = request.guide is not None and self._guided.requeue(request, is_lost=is_lost)
        table.requests[row] = replace(request)  # the row drains while the request may have another
        request.row = 0
        self._life.leave_row(row)
        if not is_held:
            self._queue.push(request)
