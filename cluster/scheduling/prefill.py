"""Plans the next prefills: chunks of the prompts of admitted requests, and the waiting requests to admit.

The scheduler plans decodes first. Then come prefills in progress, then the queue in its order (`FairQueue`). There are
two exceptions, so that one huge prompt does not delay all other requests:
- While a prefill is in progress, requests may go first if their whole prompts fit into half of what decodes leave.
- If the head of the queue lacks pages, the next few requests may overtake it, up to `MAX_OVERTAKEN` times. After that
  they wait until the head is admitted. A preempted request is never overtaken.

Clients share prefills too. While a client's prompt is in progress, another client's shorter prompt may begin with half
of what decodes leave, even if it does not fit as a whole. Clients with prompts in progress then share each step evenly.
Among waiting requests, the requests of clients that hold their share of rows and pages come last (`Shares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from cluster.scheduling.chunks import Chunks
from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import MAX_PREFIX_DELTAS, SchedulerLimits
from cluster.scheduling.pages import RowPages
from cluster.scheduling.prefill_plan import PrefillPlan
from cluster.scheduling.recent_rate import RecentRate
from cluster.scheduling.request import Request
from cluster.scheduling.row_table import RowTable
from cluster.scheduling.shares import Shares
from worker.protocol import ITEM_DTYPE, PROMPT_LOGPROBS_DTYPE, Int32Array, RowFlag

# Plain integers, because operations on enumerations take a microsecond each.
_CHUNK = int(RowFlag.HAS_TOKENS)
_LAST_CHUNK = int(RowFlag.HAS_TOKENS | RowFlag.SAMPLE)

MAX_OVERTAKEN = 16
# Number of requests behind one that cannot be admitted that a step tries to admit instead.
_LOOKAHEAD = 4
# A client with more than half of the rows leaves the last one free for this long after others were active.
_LAST_ROW_S = 10.0


class _Outcome(Enum):
    """What happened when the scheduler tried to admit a request."""

    ADMITTED = auto()
    LACKS_PAGES = auto()
    WAITS = auto()
    """The request waits one step, because another row computes the same part now, or this step is full."""


class PrefillQueue:
    """Waiting requests, and the rows in prefill: from a request's admission to the end of its prompt. Writes
    `RowTable.num_computed` of these rows."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, pages: RowPages) -> None:
        self._limits = limits
        self._rows = rows
        self._pages = pages
        self.chunks = Chunks(limits, rows, pages)
        """Plans the chunks of rows in prefill."""
        self.waiting = FairQueue()
        self.admits_new = True
        """Whether requests may be admitted for the first time."""
        self.rate = RecentRate()
        """Tokens per second of the requests that were admitted lately."""
        self.prefilling: list[int] = []
        """Rows in prefill, in order of admission."""
        self.total_prompt_tokens = 0
        """Number of tokens of all requests when they were admitted. A preempted request counts again."""
        # Whether the last attempt to admit requests failed for lack of pages, and no pages were freed since. Another
        # attempt would match prompts against the prefix cache in vain.
        self._is_blocked = False
        self._shared_s = -_LAST_ROW_S
        """Last time when `is_shared` was True in a plan."""
        self.lacks_pages: Request | None = None
        """First request that found too few pages when `plan` last admitted requests. None if all found enough."""

    @property
    def has_rows(self) -> bool:
        """Whether one more request may run. Pages are not checked."""
        return self._rows.num_taken < self._limits.max_num_running

    @property
    def is_shared(self) -> bool:
        """Whether requests wait, and more than one client has waiting or running requests."""
        running, waiting = self._rows.clients, self.waiting.clients
        return len(waiting) > 1 or (len(waiting) == 1 and bool(running.keys() - waiting.keys()))

    @property
    def is_kept_waiting(self) -> bool:
        """Whether a client may wait for rows or pages that another client holds."""
        return (self.lacks_pages is not None or not self.has_rows) and self.is_shared

    def shares(self) -> Shares:
        """The shares of the clients with running or waiting requests."""
        table, limits = self._rows, self._limits
        rows = np.flatnonzero(table.live)
        rows = rows[np.argsort(-table.admission[rows])]
        running = [(table.request(row), self._pages.num_row_pages(row)) for row in rows.tolist()]
        return Shares(running, self.waiting.clients, limits.max_num_running, limits.num_pages)

    @property
    def is_busy(self) -> bool:
        """Whether the next step may contain prompt chunks."""
        return bool(self.prefilling) or (bool(self.waiting) and not self._is_blocked and self.has_rows)

    def push(self, request: Request) -> None:
        """Adds a new or a preempted request to the queue."""
        if request.num_preemptions:
            request.num_overtaken = MAX_OVERTAKEN
        self.waiting.push(request)
        self._is_blocked = False

    def remove(self, request: Request) -> None:
        """Removes a waiting request."""
        self.waiting.remove(request)
        self._is_blocked = False

    def forget_row(self, row: int) -> None:
        """Removes a row from the prefills, because its request ended or was preempted. Its pages may be free now."""
        self._is_blocked = False
        if row in self.prefilling:
            self.prefilling.remove(row)

    def plan(self, budget: int, now: float) -> PrefillPlan:
        """Plans chunks of at most `budget` tokens in total, takes their pages, and admits requests."""
        plan = PrefillPlan(budget, now)
        if is_shared := self.is_shared:
            self._shared_s = now
        may_admit = self.has_rows and not all(self._leaves_last_row(client, now) for client in self.waiting.clients)
        shares = self.shares() if is_shared and may_admit and not self._is_blocked else None
        if in_progress := tuple(self.prefilling):
            self._admit(plan, shares, early_budget=min(budget // 2, budget - self._limits.max_item_tokens))
        for row, num_clients in self._in_turns(in_progress):
            if plan.budget <= 0:
                break
            for_others = plan.budget - max(plan.budget // num_clients, 1)
            plan.budget -= for_others
            self.chunks.go_on(row, plan)
            plan.budget += for_others
        self._admit(plan, shares)
        return plan

    def _in_turns(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Orders the rows in prefill for their chunks: first one row of each client, by fewest tokens left, then the
        other rows. Each row comes with the number of clients that share the step's remaining tokens."""
        table = self._rows
        first: dict[str, int] = {}
        for row in rows:
            first.setdefault(table.request(row).terms.client, row)
        if len(first) <= 1:
            return [(row, 1) for row in rows]
        heads = sorted(first.values(), key=self._num_left)
        turns = [(row, 1 if table.request(row).num_item_tokens else len(heads) - i) for i, row in enumerate(heads)]
        return turns + [(row, 1) for row in rows if row not in heads]

    def _num_left(self, row: int) -> int:
        return int(self._rows.num_prefill[row] - self._rows.num_computed[row])

    def commit(self, plan: PrefillPlan, frame: FrameBuilder) -> Int32Array:
        """Adds the plan to the frame, publishes its whole pages, and returns the rows whose prefill ends."""
        if not plan.rows:
            return np.empty(0, np.int32)
        table = self._rows
        ending: list[int] = []
        tokens: list[Int32Array] = []
        flags: list[int] = []
        for row, start, length in zip(plan.rows, plan.starts, plan.lens, strict=True):
            end = start + length
            tokens.append(table.tokens[row, start:end])
            table.num_computed[row] = end
            self._pages.note_chunk(row, end)
            if end == table.num_prefill[row]:
                ending.append(row)
                flags.append(_LAST_CHUNK)
            else:
                flags.append(_CHUNK)
            # A prompt with log probabilities does not read the cache, which may have its pages already.
            if not table.request(row).wants_prompt_logprobs:
                num_cacheable = min(end, int(table.num_cacheable[row]))
                self._pages.publish(row, table.tokens[row], num_cacheable)
                self._pages.keep_state(row, num_cacheable, int(table.num_prefill[row]))
        self.prefilling = [row for row in self.prefilling if row not in ending]
        if ending or self._limits.num_window_pages is not None:
            # The head of the queue may need the published pages, or window pages that any chunk is about to leave.
            self._is_blocked = False
        frame.add(
            rows=np.array(plan.rows, np.int32),
            starts=np.array(plan.starts, np.int32),
            lens=np.array(plan.lens, np.int32),
            flags=np.array(flags, np.int32),
            token_ids=np.concatenate(tokens),
        )
        self._add_wanted(plan, ending, frame)
        return np.array(ending, np.int32)

    def _add_wanted(self, plan: PrefillPlan, ending: list[int], frame: FrameBuilder) -> None:
        """Adds the scored items and the requested prompt log probabilities of the chunks."""
        table = self._rows
        if plan.num_items:
            items = [(row, length) for row in ending for length in table.request(row).sampling.item_lens]
            frame.add(items=np.array(items, ITEM_DTYPE))
        if plan.prompt_runs:
            runs = [(row, first - 1, num, k) for row, first, num, k in plan.prompt_runs]
            targets = [table.tokens[row, first : first + num] for row, first, num, _ in plan.prompt_runs]
            frame.add(prompt_runs=np.array(runs, PROMPT_LOGPROBS_DTYPE), prompt_targets=np.concatenate(targets))

    def check_integrity(self, running_ids: set[int]) -> set[int]:
        """Returns the ids of the waiting requests. Raises AssertionError if queue, prefills and rows do not match."""
        table = self._rows
        prefilling = np.flatnonzero(table.live & (table.num_computed < table.num_prefill))
        assert sorted(self.prefilling) == prefilling.tolist(), "the list of prefills is wrong"
        waiting = self.waiting.check_integrity()
        assert running_ids.isdisjoint(waiting), "a request runs and waits"
        return waiting

    # Admission

    def _admit(self, plan: PrefillPlan, shares: Shares | None, early_budget: int | None = None) -> None:
        """Admits waiting requests in turn. Requests that cannot be admitted now keep their position in the queue.

        Args:
            shares: the shares of the clients. None if there is only one client.
            early_budget: total number of tokens for requests that are admitted ahead of the prompts in progress. Such a
                request must fit as a whole, unless another client's prompt in progress has more tokens left. None: the
                prompts in progress already have their chunks.
        """
        waiting = self.waiting
        if self._is_blocked or not waiting:
            return
        budget = plan.budget if early_budget is None else early_budget
        num_left: dict[str, int] = {}  # client -> tokens left of its prompt in progress
        if shares is not None and early_budget is not None:
            num_left = {self._rows.request(row).terms.client: self._num_left(row) for row in self.prefilling}

        def comes_last(client: str) -> bool:
            return shares is not None and (client in num_left or shares.has_its_share(client))

        lacking: list[Request] = []
        num_waits = 0
        while min(budget, plan.budget) > 0 and self._may_admit(plan):
            request = waiting.first(comes_last, is_oldest=not self.admits_new)  # preempted requests are the oldest
            if request is None or len(lacking) + num_waits > _LOOKAHEAD:
                self._is_blocked = bool(lacking) and not num_waits
                break
            if self._leaves_last_row(request.terms.client, plan.now) or (
                not self.admits_new and request.admission_s is None
            ):
                break
            # While a longer prompt of another client is in progress, a request may begin with a part of its prompt.
            most = max(num_left.values(), default=0) if request.terms.client not in num_left else 0
            if early_budget is not None and len(request.tokens) > max(budget, most):
                break
            before = plan.budget
            plan.budget = min(before, budget)
            outcome = self._try_admit(request, plan)
            plan.budget += before - min(before, budget)
            if outcome is _Outcome.ADMITTED:
                waiting.pop(request)
                if shares is not None:
                    shares.add(request.terms.client, self._pages.num_row_pages(request.row))
                budget -= before - plan.budget
                for other in lacking:
                    other.num_overtaken += 1
                continue
            waiting.set_aside(request)
            if outcome is _Outcome.WAITS:
                num_waits += 1
                continue
            lacking.append(request)
            if request.num_overtaken >= MAX_OVERTAKEN:
                self._is_blocked = not num_waits
                break
        self.lacks_pages = lacking[0] if lacking else None
        waiting.put_back()

    def _may_admit(self, plan: PrefillPlan) -> bool:
        """Whether a row is free and the frame has space for another prefix. Pages are not checked."""
        return self.has_rows and plan.num_prefix_deltas < MAX_PREFIX_DELTAS

    def _leaves_last_row(self, client: str, now: float) -> bool:
        """Whether a client leaves the last free row to other clients. It does if it has more than half of the rows and
        another client was active lately, so that the other client's next request needs no preemption."""
        table, most = self._rows, self._limits.max_num_running
        is_last = table.num_taken + 1 == most and 2 * table.clients[client] > most
        return is_last and now - self._shared_s < _LAST_ROW_S

    def _try_admit(self, request: Request, plan: PrefillPlan) -> _Outcome:
        """Gives a request a row and its first chunk, or changes nothing if that is impossible."""
        limits, pages, num_running = self._limits, self._pages, self._rows.num_taken
        if plan.num_adjustment_bytes + request.num_adjustment_bytes > limits.max_adjustment_bytes:
            return _Outcome.WAITS
        if not self.chunks.has_room(request, plan):
            return _Outcome.WAITS
        row = self._rows.take(request)
        pages.open(row, request.terms.cache_salt)
        request.num_cached_tokens = 0
        num_deltas, num_prefix_deltas = len(plan.deltas), plan.num_prefix_deltas
        prefix = self.chunks.find_prefix(row, plan)
        key = self.chunks.next_page_key(row, prefix)
        if self.chunks.is_computed_by_another(row, prefix, key, plan):
            self._give_back(row)
            return _Outcome.WAITS
        self.chunks.adopt_prefix(row, prefix, plan)
        # The sum counts the pages that rows in prefill still need, and one page for each running request's next tokens.
        # A request alone always fits: `Request.reason_never_fits`.
        missing = [self.chunks.num_pages_missing(each) for each in (row, *self.prefilling)]
        if num_running > 0 and not pages.has_room(missing, num_running):
            self.chunks.total_prefix_hit_tokens -= request.num_cached_tokens
            del plan.deltas[num_deltas:]
            plan.num_prefix_deltas = num_prefix_deltas
            self._give_back(row)
            return _Outcome.LACKS_PAGES
        self.total_prompt_tokens += len(request.tokens)
        self.chunks.total_missed.update(prefix.missed)
        request.missed = prefix.missed
        self.rate.add(len(request.tokens), plan.now)
        if request.admission_s is None:
            request.admission_s = plan.now
        plan.admitted.append(request)
        plan.num_adjustment_bytes += request.num_adjustment_bytes
        self.prefilling.append(row)
        has_chunk = self.chunks.add(row, key, plan)
        assert has_chunk, "a request was admitted without pages for its first chunk"
        return _Outcome.ADMITTED

    def _give_back(self, row: int) -> None:
        self._pages.release(row)
        self._rows.give_back(row)
