"""The numbers of every running request: one array per number, indexed by row, so that a step needs no Python loop over
requests. `RowPages` holds the pages.

`RowTable` writes every column of a row in `take`, and `live` and `ready` in `end`. Other classes write these columns:

    column          written by
    num_computed    Launcher and PrefillQueue when a step is launched, Chunks for cached pages, StepTokens for drafts
    num_known       StepTokens when a step retires
    tokens          StepTokens when a step retires
    num_unverified  Launcher when drafts are launched, StepTokens when the step retires
    ready           Launcher, Drafter and GuidedRows at a launch; StepTokens for drafts, GuidedRows for masks
    in_flight       Launcher at a launch, Scheduler when a step retires or is lost
    num_drafts      Drafter at a launch
    predicted       Drafter when a step retires
    num_cacheable   Scheduler, for a row whose logits held a NaN
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.request import Request
from configs.errors import EngineError
from worker.protocol import Int32Array


class RowTable:
    """Rows 1 to `max_num_seqs`. Row 0 is padding. A row belongs to one request from `take` to `give_back`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        num_rows, self._ranks_draft = limits.max_num_seqs + 1, limits.speculation.is_by_ranks
        self.requests: list[Request | None] = [None] * num_rows
        self.ids = np.zeros(num_rows, np.int64)
        """Request id."""
        self.live = np.zeros(num_rows, np.bool_)
        """Whether the row's request runs. False after its end or preemption, when steps in flight may still name the
        row."""
        self.clients: Counter[str] = Counter()
        """Number of live rows of each client. Clients without live rows have no entry."""
        self.ready = np.zeros(num_rows, np.bool_)
        """Whether the next step may decode the row."""
        self.num_known = np.zeros(num_rows, np.int32)
        """Number of tokens whose ids the coordinator knows: the valid columns of `tokens`."""
        self.num_computed = np.zeros(num_rows, np.int32)
        """Number of tokens whose KV exists once all launched steps have run, and so the position of the next input. It
        is a lower bound, since it counts drafts in flight as rejected."""
        self.num_unverified = np.zeros(num_rows, np.int32)
        """Number of drafts in flight that are not verified yet. The position of the row's next input is between
        `num_computed` and `num_computed + num_unverified`."""
        self.num_drafts = np.zeros(num_rows, np.int32)
        """Number of drafts that the ranks make for the row in the last launched step that names it."""
        self.drafts_on_device = np.zeros(num_rows, np.bool_)
        """Whether the ranks track the row's position and drafts themselves. Such a row can decode again before its
        result comes. False if its masks or biases depend on its tokens."""
        self.num_prefill = np.zeros(num_rows, np.int32)
        """Number of tokens to prefill: the tokens that the request had at its admission."""
        self.num_cacheable = np.zeros(num_rows, np.int32)
        """Number of leading tokens whose pages may enter the prefix cache. Scored items are excluded, because they do
        not see all tokens before them. 0: none of the row's pages may stay in the cache."""
        self.max_total = np.zeros(num_rows, np.int32)
        """`Request.max_total_tokens`."""
        self.in_flight = np.zeros(num_rows, np.int32)
        """Number of steps in flight that compute the row."""
        self.admission = np.zeros(num_rows, np.int64)
        """Serial number of the admission that took the row, from 1. 0 if the row is free."""
        self.ends_on_eos = np.zeros(num_rows, np.bool_)
        self.has_stop_ids = np.zeros(num_rows, np.bool_)
        self.guided = np.zeros(num_rows, np.bool_)
        """Whether the request has a guide. After a step, such a row is not ready until its guide has made the next
        mask."""
        self.predicted = np.zeros(num_rows, np.bool_)
        """Whether the request's history predicts its next token."""
        self.num_guided = 0
        """Number of rows of requests with a guide."""
        # The system commits memory only when it is written, so a row takes the memory of its longest sequence so far.
        self.tokens = np.zeros((num_rows, limits.max_model_len), np.int32)
        """Token ids by position. Prefill reads them as inputs, and the prefix cache reads them to store pages."""
        self._free_rows = list(range(limits.max_num_seqs, 0, -1))
        self._num_admissions = 0

    @property
    def num_taken(self) -> int:
        return len(self.requests) - 1 - len(self._free_rows)

    def take(self, request: Request) -> int:
        """Gives a free row to `request` and returns the row."""
        row = self._free_rows.pop()
        num_tokens = len(request.tokens)
        self._num_admissions += 1
        self.requests[row] = request
        self.ids[row] = request.id
        self.live[row] = True
        self.clients[request.terms.client] += 1
        self.ready[row] = self.predicted[row] = False
        self.num_known[row] = num_tokens
        self.num_computed[row] = 0
        self.num_prefill[row] = num_tokens
        self.num_cacheable[row] = (
            num_tokens - request.num_item_tokens if request.num_item_tokens else request.max_total_tokens
        )
        self.max_total[row] = request.max_total_tokens
        self.in_flight[row] = self.num_unverified[row] = self.num_drafts[row] = 0
        self.drafts_on_device[row] = self._ranks_draft and request.guide is None and not request.has_timed_biases
        self.admission[row] = self._num_admissions
        self.ends_on_eos[row] = not request.sampling.ignore_eos
        self.has_stop_ids[row] = bool(request.stop_token_ids)
        self.guided[row] = request.guide is not None
        self.num_guided += int(self.guided[row])
        self.tokens[row, :num_tokens] = request.tokens
        request.row = row
        return row

    def may_end(self, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """Whether the steps in flight may bring each of `rows` to its maximum length."""
        most: npt.NDArray[np.bool_] = self.num_computed[rows] + self.num_unverified[rows] + 1 >= self.max_total[rows]
        return most

    def end(self, row: int) -> None:
        """Marks a row as not live: its request ends or waits again. Steps in flight may still name the row."""
        request = self.request(row)
        self.live[row] = self.ready[row] = False
        self.clients[request.terms.client] -= 1
        if not self.clients[request.terms.client]:
            del self.clients[request.terms.client]

    def give_back(self, row: int) -> None:
        """Frees the row for another request. Raises EngineError if it is free already or a step in flight names it."""
        request = self.requests[row]
        if request is None or self.in_flight[row]:
            raise EngineError(
                f"row {row} is free already, or {self.in_flight[row]} steps in flight name it; please report this bug"
            )
        if self.live[row]:
            self.end(row)
        request.row = 0
        self.num_guided -= int(self.guided[row])
        self.guided[row] = False
        self.requests[row] = None
        self.admission[row] = 0
        self._free_rows.append(row)

    def request(self, row: int) -> Request:
        """The request in this row."""
        request = self.requests[row]
        assert request is not None, f"row {row} has no request"
        return request

    def check_integrity(self) -> None:
        """Raises AssertionError if the columns, the free rows and the requests contradict each other."""
        taken = [row for row, request in enumerate(self.requests) if request is not None]
        assert sorted([*taken, *self._free_rows]) == list(range(1, len(self.requests))), "a row is lost or free twice"
        for row in taken:
            assert self.request(row).row == row, f"row {row} and its request disagree"
        clients = Counter(self.request(row).terms.client for row in np.flatnonzero(self.live).tolist())
        assert self.clients == clients, "rows of clients are miscounted"
        free = np.array(self._free_rows, np.int64)
        assert not (self.live[free] | self.ready[free]).any(), "a free row is live"
        assert not self.in_flight[free].any(), "a step in flight names a free row"
        assert not (self.ready & ~self.live).any(), "a dead row is ready"
        assert np.count_nonzero(self.guided) == self.num_guided, "guided rows are miscounted"
        live = np.flatnonzero(self.live)
        decoding = live[self.num_computed[live] >= self.num_prefill[live]]
        assert (self.num_known[decoding] <= self.num_computed[decoding] + 1).all(), "a row knows unsampled tokens"
        assert (self.num_known[live] <= self.max_total[live]).all(), "a row exceeds its length"
