"""What is prefilled next: admission of waiting requests, beside the chunks of those that are in prefill.

Decodes come first and are not known here. Then prefills in progress, then the queue in its order (`FairQueue`), with
two exceptions, so that one huge prompt does not hold up all others:
- While a prefill is in progress, requests whose whole prompts fit into half of what decodes leave need not wait for it.
- A head of the queue that lacks pages is overtaken by those of the next few that have enough, `_MAX_OVERTAKEN` times:
  then it is waited for. What was preempted is never overtaken.
"""

from __future__ import annotations

from enum import Enum, auto

from cluster.scheduling.chunks import PrefillChunks, PrefillPlan
from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import MAX_PREFIX_DELTAS, SchedulerLimits
from cluster.scheduling.recent_rate import RecentRate
from cluster.scheduling.request import Request
from cluster.scheduling.row_pages import RowPages
from cluster.scheduling.row_table import RowTable

_MAX_OVERTAKEN = 16
_RATE_WINDOW_S = 10.0
_LOOKAHEAD = 4
"""Requests behind a head that cannot be admitted of which it is tried in one step."""


class _Outcome(Enum):
    """What came of trying to admit a request."""

    ADMITTED = auto()
    LACKS_PAGES = auto()
    WAITS = auto()
    """Till the next step: for what another row computes in this one, or for room in the frame."""


class PrefillQueue:
    """Waiting requests, and rows in prefill."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, pages: RowPages) -> None:
        self._limits = limits
        self._max_num_running = limits.max_num_running
        self._rows = rows
        self._pages = pages
        self._waiting = FairQueue()
        self._chunks = PrefillChunks(limits, rows, pages)
        # All that were tried lacked pages, and nothing has happened since that could change it: spares their matches.
        self._is_blocked = False
        self._rate = RecentRate(_RATE_WINDOW_S)
        self._total_prompt_tokens = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    def tokens_per_s(self, now: float) -> float | None:
        """Waiting tokens that were admitted each second lately; None while too little is known."""
        return self._rate.per_second(now)

    @property
    def oldest_arrival_s(self) -> float | None:
        """When the request that waits longest came; None if none waits."""
        oldest = self._waiting.oldest
        return None if oldest is None else oldest.arrival_s

    @property
    def is_prefilling(self) -> bool:
        """Some row is in prefill."""
        return bool(self._chunks.rows)

    @property
    def total_prefix_hit_tokens(self) -> int:
        return self._chunks.total_prefix_hit_tokens

    @property
    def total_prompt_tokens(self) -> int:
        return self._total_prompt_tokens

    def push(self, request: Request) -> None:
        """Lets a new or a preempted request wait."""
        if request.num_preemptions:
            request.num_overtaken = _MAX_OVERTAKEN
        self._waiting.push(request)
        self._is_blocked = False

    def remove(self, request: Request) -> None:
        """Forgets a waiting request."""
        self._waiting.remove(request)
        self._is_blocked = False

    def charge(self, request: Request, num_tokens: int) -> None:
        """Counts the tokens of an answer that ended as service to its client."""
        self._waiting.charge(request, num_tokens)

    def forget_row(self, row: int) -> None:
        """Row and pages of a request that ended or was preempted are free again, in prefill or not."""
        self._is_blocked = False
        self._chunks.forget(row)

    def plan(self, budget: int, now: float) -> PrefillPlan:
        """Chunks of at most `budget` tokens in all, with their pages; admits requests."""
        plan = PrefillPlan(budget, now)
        if in_progress := self._chunks.rows:
            self._admit(plan, longest=budget // 2)
        for row in in_progress:
            if plan.budget <= 0:
                break
            self._chunks.go_on(row, plan)
        self._admit(plan)
        return plan

    def commit(self, plan: PrefillPlan, frame: FrameBuilder) -> list[int]:
        """Adds the plan to the frame, makes its whole pages known, and returns the rows whose prefill ends."""
        ending = self._chunks.commit(plan, frame)
        if ending or self._limits.num_window_pages is not None:
            # Their pages, or what any chunk is about to leave in the window pool, may be what the head needs.
            self._is_blocked = False
        return ending

    def check_integrity(self, running_ids: set[int]) -> set[int]:
        """Ids of the waiting requests. Raises AssertionError unless queue, prefills and the row table agree."""
        self._chunks.check_integrity()
        waiting = self._waiting.check_integrity()
        assert running_ids.isdisjoint(waiting), "a request runs and waits"
        return waiting

    def _admit(self, plan: PrefillPlan, longest: int | None = None) -> None:
        """Admits waiting requests in turn; with `longest` only whole prompts, as long as they have so many tokens in
        all. Those that cannot be admitted now keep their place.
        """
        waiting = self._waiting
        if self._is_blocked or not waiting:
            return
        budget = plan.budget if longest is None else longest
        lacking: list[Request] = []
        num_waits = 0
        while min(budget, plan.budget) > 0 and self._has_room(plan):
            request = waiting.first() if len(lacking) + num_waits <= _LOOKAHEAD else None
            if request is None:
                self._is_blocked = bool(lacking) and not num_waits
                break
            if longest is not None and len(request.tokens) > budget:
                break
            before = plan.budget
            outcome = self._try_admit(request, plan)
            if outcome is _Outcome.ADMITTED:
                waiting.pop(request)
                budget -= before - plan.budget
                for other in lacking:
                    other.num_overtaken += 1
                continue
            waiting.set_aside(request)
            if outcome is _Outcome.WAITS:
                num_waits += 1
                continue
            lacking.append(request)
            if request.num_overtaken >= _MAX_OVERTAKEN:
                self._is_blocked = not num_waits
                break
        waiting.put_back()

    def _has_room(self, plan: PrefillPlan) -> bool:
        """Whether one more request may be admitted, pages aside."""
        return self._rows.num_taken < self._max_num_running and plan.num_prefix_deltas < MAX_PREFIX_DELTAS

    def _try_admit(self, request: Request, plan: PrefillPlan) -> _Outcome:
        """Gives a request a row and its first chunk, or leaves everything as it was."""
        if plan.num_adjustment_bytes + request.num_adjustment_bytes > self._limits.max_adjustment_bytes:
            return _Outcome.WAITS
        if not self._chunks.has_room(request, plan):
            return _Outcome.WAITS
        chunks, num_running = self._chunks, self._rows.num_taken
        # Pages that rows in prefill still need, and a page for each running request's next tokens.
        missing, num_next = (
            chunks.num_missing_pages,
            num_running * self._limits.num_pages_for(self._limits.max_row_tokens),
        )
        row = self._rows.take(request)
        self._pages.open(row, request.cache_salt)
        request.num_cached_tokens = 0
        num_deltas, num_prefix_deltas = len(plan.deltas), plan.num_prefix_deltas
        prefix = chunks.find_prefix(row, plan)
        key = chunks.next_page_key(row, prefix)
        if chunks.is_computed_by_another(row, prefix, key, plan):
            self._give_back(row)
            return _Outcome.WAITS
        chunks.adopt_prefix(row, prefix, plan)
        # Alone it always fits: `Request.reason_never_fits`.
        if num_running > 0 and not self._pages.has_room([chunks.num_pages_missing(row), *missing], num_next):
            chunks.total_prefix_hit_tokens -= request.num_cached_tokens
            del plan.deltas[num_deltas:]
            plan.num_prefix_deltas = num_prefix_deltas
            self._give_back(row)
            return _Outcome.LACKS_PAGES
        self._total_prompt_tokens += len(request.tokens)
        self._rate.add(len(request.tokens), plan.now)
        if request.admission_s is None:
            request.admission_s = plan.now
        plan.admitted.append(request)
        plan.num_adjustment_bytes += request.num_adjustment_bytes
        chunks.begin(row, key, plan)
        return _Outcome.ADMITTED

    def _give_back(self, row: int) -> None:
        self._pages.release(row)
        self._rows.give_back(row)
