"""How requests end. A row and its pages are free again once no step in flight names the row.

A request that ends leaves whatever it waits in; its one `Finished` waits here for the next output.
"""

from __future__ import annotations

from cluster.engine.messages import Finished, FinishReason
from cluster.scheduling.admission import Admission
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.request import Request
from cluster.scheduling.row_pages import RowPages
from cluster.scheduling.row_table import RowTable
from worker.protocol import Int32Array


class Endings:
    """Ends requests that wait or run, and takes rows back."""

    def __init__(
        self, admission: Admission, queue: PrefillQueue, guided: GuidedRows, rows: RowTable, pages: RowPages
    ) -> None:
        self._admission = admission
        self._queue = queue
        self._guided = guided
        self._rows = rows
        self._pages = pages
        self._pending: list[Finished] = []
        self.num_draining = 0
        """Rows that are taken but no longer live: a step in flight names them."""

    @property
    def is_pending(self) -> bool:
        """Some request has finished and nobody was told."""
        return bool(self._pending)

    def take_pending(self) -> list[Finished]:
        """The finishes of which nobody was told."""
        pending, self._pending = self._pending, []
        return pending

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_code: str | None = None,
    ) -> None:
        """Ends a request that waits or runs."""
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
        del self._admission.live[request.id]
        is_held = request.guide is not None and self._guided.forget(request)
        if request.row:
            self._end_row(request)
        elif not is_held:
            self._queue.remove(request)

    def release(self, row: int) -> None:
        """Takes row and pages back; what the row has computed stays in the prefix cache as far as it may."""
        table = self._rows
        # A dropped token's KV may be there, but nobody knows the token.
        num_tokens = min(int(table.num_computed[row]), int(table.num_known[row]), int(table.num_cacheable[row]))
        self._pages.publish(row, table.tokens[row], num_tokens)
        self._pages.release(row, forget=not table.num_cacheable[row])
        table.give_back(row)
        self._queue.forget_row(row)

    def release_drained(self, named: Int32Array) -> None:
        """Takes back those of the rows that a retired step `named` whose request has ended, and that no other names."""
        if not self.num_draining:
            return
        table = self._rows
        drained = ~table.live[named] & (table.in_flight[named] == 0) & (table.admission[named] > 0)
        for row in named[drained].tolist():
            self.num_draining -= 1
            self.release(row)

    def _end_row(self, request: Request) -> None:
        """Frees the row of an ended request now, or lets it drain."""
        table, row = self._rows, request.row
        table.live[row] = False
        table.ready[row] = False
        self._queue.charge(request, int(table.num_known[row]) - request.num_prompt_tokens)
        self._queue.forget_row(row)
        if table.in_flight[row]:
            self.num_draining += 1
        else:
            self.release(row)

    def check_integrity(self) -> None:
        """Raises AssertionError unless these are the rows that drain."""
        table = self._rows
        draining = [row for row, request in enumerate(table.requests) if request is not None and not table.live[row]]
        assert len(draining) == self.num_draining, "draining rows are miscounted"
        assert table.in_flight[draining].all(), "an ended row that no step names was not released"
