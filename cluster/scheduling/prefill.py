"""What is prefilled next: the queue of waiting requests, their admission, and the rows that are in prefill.

Decodes come first and are not known here. Then prefills in progress, then the queue in its order (`FairQueue`), with
two exceptions, so that one huge prompt does not hold up all others:
- While a prefill is in progress, requests whose whole prompts fit into half of what decodes leave need not wait for it.
- A head of the queue that lacks pages is overtaken by those of the next few that have enough, `_MAX_OVERTAKEN` times:
  then it is waited for. What was preempted is never overtaken.

A prompt of which another row computes the same part in the same step waits for that row: a step later the prefix cache
has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.limits import MAX_PREFIX_DELTAS, SchedulerLimits
from cluster.scheduling.prefix_cache import Node
from cluster.scheduling.recent_rate import RecentRate
from cluster.scheduling.request import Request
from cluster.scheduling.row_pages import Prefix, RowPages
from cluster.scheduling.row_table import RowTable
from worker.protocol import PARAMS_DTYPE, SCORE_DTYPE, Int32Array, RowFlag, StepFrame

_MAX_OVERTAKEN = 16
_RATE_WINDOW_S = 10.0
_LOOKAHEAD = 4
"""Requests behind a head that cannot be admitted of which it is tried in one step."""


class _Outcome(Enum):
    """Of trying to admit a request."""

    ADMITTED = auto()
    LACKS_PAGES = auto()
    WAITS = auto()
    """Till the next step: for what another row computes in this one, or for room in the frame."""


class PromptScore(NamedTuple):
    """Prompt tokens whose log probability a step finds."""

    row: int
    first: int
    """Position of the first of them; the step has the one before as an input."""
    num: int
    k: int
    """How many of the likeliest tokens are wanted too."""


@dataclass(slots=True, eq=False)
class PrefillPlan:
    """The prefill chunks of one step. Pages are taken already: a plan with rows must be launched."""

    budget: int
    """Tokens left."""
    now: float
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    deltas: list[Int32Array] = field(default_factory=list)
    """Page deltas, each [n, 3]."""
    admitted: list[Request] = field(default_factory=list)
    num_adjustment_bytes: int = 0
    """Of what the rows of `admitted` start with, besides parameters."""
    num_prefix_deltas: int = 0
    """Page deltas of pages that came from the prefix cache."""
    scores: list[PromptScore] = field(default_factory=list)
    num_targets: int = 0
    """Prompt tokens of `scores`."""
    computing: dict[tuple[Node, bytes], int] = field(default_factory=dict)
    """Index into `rows` of the chunk that begins at this end of the cached prefixes with this page."""


class PrefillQueue:
    """Waiting requests and rows in prefill. Writes `RowTable.num_computed` of the latter."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, pages: RowPages) -> None:
        self._limits = limits
        self._rows = rows
        self._pages = pages
        self._waiting = FairQueue()
        self._prefilling: list[int] = []  # in order of admission
        # All that were tried lacked pages, and nothing has happened since that could change it: spares their matches.
        self._is_blocked = False
        self._rate = RecentRate(_RATE_WINDOW_S)
        self._total_prefix_hit_tokens = 0
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
        return bool(self._prefilling)

    @property
    def total_prefix_hit_tokens(self) -> int:
        return self._total_prefix_hit_tokens

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
        if row in self._prefilling:
            self._prefilling.remove(row)

    def plan(self, budget: int, now: float) -> PrefillPlan:
        """Chunks of at most `budget` tokens in all, with their pages; admits requests."""
        plan = PrefillPlan(budget, now)
        if in_progress := list(self._prefilling):
            self._admit(plan, longest=budget // 2)
        for row in in_progress:
            if plan.budget <= 0:
                break
            self._continue(row, plan)
        self._admit(plan)
        return plan

    def commit(self, plan: PrefillPlan, frame: StepFrame) -> list[int]:
        """Appends the plan to the frame, makes its whole pages known, and returns the rows whose prefill ends."""
        table = self._rows
        ending: list[int] = []
        tokens: list[Int32Array] = []
        flags: list[int] = []
        for row, start, length in zip(plan.rows, plan.starts, plan.lens, strict=True):
            end = start + length
            tokens.append(table.tokens[row, start:end])
            table.num_computed[row] = end
            if end == table.num_prefill[row]:
                ending.append(row)
                flags.append(RowFlag.HAS_TOKENS | RowFlag.SAMPLE)
            else:
                flags.append(RowFlag.HAS_TOKENS)
            # Pages that are cached already would be kept twice while the prompt is scored, which reads no cache.
            if not table.request(row).is_scored:
                self._pages.publish(row, table.tokens[row], end)
        if ending:
            self._prefilling = [row for row in self._prefilling if row not in ending]
            self._is_blocked = False  # Its pages may be what the head needs.
        frame.rows = np.concatenate((frame.rows, np.array(plan.rows, np.int32)))
        frame.starts = np.concatenate((frame.starts, np.array(plan.starts, np.int32)))
        frame.lens = np.concatenate((frame.lens, np.array(plan.lens, np.int32)))
        frame.flags = np.concatenate((frame.flags, np.array(flags, np.int32)))
        frame.token_ids = np.concatenate(tokens)
        if plan.admitted:
            frame.params = _params(plan.admitted)
        if plan.scores:
            scores = [(row, first - 1, num, k) for row, first, num, k in plan.scores]
            frame.scores = np.array(scores, SCORE_DTYPE)
            frame.targets = np.concatenate(
                [table.tokens[row, first : first + num] for row, first, num, _ in plan.scores]
            )
        return ending

    def check_integrity(self, running_ids: set[int]) -> set[int]:
        """Ids of the waiting requests. Raises AssertionError unless queue, prefills and the row table agree."""
        table = self._rows
        waiting = self._waiting.check_integrity()
        assert running_ids.isdisjoint(waiting), "a request runs and waits"
        prefilling = np.flatnonzero(table.live & (table.num_computed < table.num_prefill))
        assert sorted(self._prefilling) == prefilling.tolist(), "the list of prefills is wrong"
        return waiting

    def _continue(self, row: int, plan: PrefillPlan) -> None:
        """Adds the next chunk of a row in prefill, if there are pages for it and no other row computes the same."""
        # Others may have computed what comes next since the last chunk.
        prefix = self._find_prefix(row, plan)
        if self._is_computed_by_another(row, prefix, plan):
            return
        if self._num_missing_pages(row) <= self._pages.num_available:
            # Only then it is sure that the chunk gets its pages, and that the deltas of the prefix are sent.
            self._adopt_prefix(row, prefix, plan)
        self._add_chunk(row, plan)

    def _add_chunk(self, row: int, plan: PrefillPlan) -> bool:
        """Takes pages for the row's next chunk and adds it to the plan; False if there are too few, or none may be."""
        start = int(self._rows.num_computed[row])
        length = self._chunk_length(row, start, plan)
        if length <= 0:
            return False
        key = self._next_page_key(row, self._pages.no_prefix(row))
        deltas = self._pages.grow(row, start + length)
        if deltas is None:
            return False
        if key is not None:
            plan.computing.setdefault(key, len(plan.rows))
        if len(deltas):
            plan.deltas.append(deltas)
        plan.rows.append(row)
        plan.starts.append(start)
        plan.lens.append(length)
        plan.budget -= length
        self._add_score(row, start, length, plan)
        return True

    def _add_score(self, row: int, start: int, length: int, plan: PrefillPlan) -> None:
        request = self._rows.request(row)
        first = max(start + 1, request.next_target)
        num = min(start + length + 1, request.num_prompt_tokens) - first
        if num > 0:
            plan.scores.append(PromptScore(row, first, num, request.sampling.prompt_logprobs))
            plan.num_targets += num

    def _chunk_length(self, row: int, start: int, plan: PrefillPlan) -> int:
        page_size, end = self._limits.page_size, int(self._rows.num_prefill[row])
        length = min(end - start, self._limits.prefill_chunk_size, plan.budget)
        request = self._rows.request(row)
        if request.is_scored:
            stop = max(start, request.next_target - 1) + self._limits.max_num_targets - plan.num_targets
            if stop < request.num_prompt_tokens - 1:
                length = min(length, stop - start)
        last_boundary = (start + length) // page_size * page_size
        if start + length < end and last_boundary > start:
            return last_boundary - start  # Whole pages can be shared, partial ones cannot.
        return length

    def _find_prefix(self, row: int, plan: PrefillPlan) -> Prefix:
        """Cached pages that go on where the row's own end. The last token is left: its logits are wanted."""
        if plan.num_prefix_deltas >= MAX_PREFIX_DELTAS:
            return self._pages.no_prefix(row)
        table = self._rows
        start, end = int(table.num_computed[row]), int(table.num_prefill[row])
        request = table.request(row)
        if request.is_scored:
            end = max(start + 1, request.next_target)  # The rest has to be computed.
        return self._pages.find_prefix(row, table.tokens[row, start : end - 1])

    def _adopt_prefix(self, row: int, prefix: Prefix, plan: PrefillPlan) -> None:
        table = self._rows
        deltas = self._pages.adopt_prefix(row, prefix)
        if len(deltas):
            num_tokens = len(deltas) * self._limits.page_size
            table.num_computed[row] += num_tokens
            table.request(row).num_cached_tokens += num_tokens
            self._total_prefix_hit_tokens += num_tokens
            plan.deltas.append(deltas)
            plan.num_prefix_deltas += len(deltas)

    def _next_page_key(self, row: int, prefix: Prefix) -> tuple[Node, bytes] | None:
        table, page_size = self._rows, self._limits.page_size
        start = int(table.num_computed[row]) + len(prefix.pages) * page_size
        tokens = table.tokens[row, start : min(start + page_size, int(table.num_prefill[row]))]
        return self._pages.next_page_key(row, prefix, tokens)

    def _is_computed_by_another(self, row: int, prefix: Prefix, plan: PrefillPlan) -> bool:
        """A chunk of the plan computes whole pages that hold at least half of what the row would compute now."""
        if self._rows.request(row).is_scored:
            return False
        key = self._next_page_key(row, prefix)
        if key is None or (index := plan.computing.get(key)) is None:
            return False
        table, page_size = self._rows, self._limits.page_size
        start = int(table.num_computed[row]) + len(prefix.pages) * page_size
        length = self._chunk_length(row, start, plan)
        shared = min(length, plan.lens[index], int(table.num_prefill[row]) - 1 - start)
        differ = table.tokens[row, start : start + shared] != table.tokens[plan.rows[index], start : start + shared]
        num_same = int(differ.argmax()) if differ.any() else shared
        num_shareable = num_same // page_size * page_size
        return num_shareable > 0 and 2 * num_shareable >= length

    def _admit(self, plan: PrefillPlan, longest: int | None = None) -> None:
        """Admits waiting requests in turn; with `longest` only whole prompts, as long as they have so many tokens in
        all. Those that cannot be admitted now keep their place.
        """
        if self._is_blocked:
            return
        budget = plan.budget if longest is None else longest
        lacking: list[Request] = []
        num_waits = 0
        while min(budget, plan.budget) > 0 and self._has_room(plan):
            request = self._waiting.take() if len(lacking) + num_waits <= _LOOKAHEAD else None
            if request is None:
                self._is_blocked = bool(lacking) and not num_waits
                break
            if longest is not None and len(request.tokens) > budget:
                break
            before = plan.budget
            outcome = self._try_admit(request, plan)
            if outcome is _Outcome.ADMITTED:
                self._waiting.admit(request)
                budget -= before - plan.budget
                for other in lacking:
                    other.num_overtaken += 1
            elif outcome is _Outcome.LACKS_PAGES:
                lacking.append(request)
                if request.num_overtaken >= _MAX_OVERTAKEN:
                    self._is_blocked = not num_waits
                    break
            else:
                num_waits += 1
        self._waiting.put_back()

    def _has_room(self, plan: PrefillPlan) -> bool:
        """Whether one more request may be admitted, pages aside."""
        table = self._rows
        return (
            table.num_free > 0
            and table.num_taken < self._limits.max_num_running
            and plan.num_prefix_deltas < MAX_PREFIX_DELTAS
        )

    def _try_admit(self, request: Request, plan: PrefillPlan) -> _Outcome:
        """Gives a request a row and its first chunk, or leaves everything as it was."""
        table = self._rows
        num_running = table.num_taken
        if plan.num_adjustment_bytes + request.num_adjustment_bytes > self._limits.max_adjustment_bytes:
            return _Outcome.WAITS
        if request.is_scored and plan.num_targets >= self._limits.max_num_targets:
            return _Outcome.WAITS
        # Pages that rows in prefill still need, and a page for each running request's next tokens.
        reserved = num_running + sum(self._num_missing_pages(row) for row in self._prefilling)
        row = table.take(request)
        self._pages.open(row, request.cache_salt)
        request.num_cached_tokens = 0
        num_deltas, num_prefix_deltas = len(plan.deltas), plan.num_prefix_deltas
        prefix = self._find_prefix(row, plan)
        if self._is_computed_by_another(row, prefix, plan):
            self._give_back(row)
            return _Outcome.WAITS
        self._adopt_prefix(row, prefix, plan)
        # Alone it always fits: `reason_never_fits`.
        if num_running > 0 and self._num_missing_pages(row) + reserved > self._pages.num_available:
            self._total_prefix_hit_tokens -= request.num_cached_tokens
            del plan.deltas[num_deltas:]
            plan.num_prefix_deltas = num_prefix_deltas
            self._give_back(row)
            return _Outcome.LACKS_PAGES
        self._total_prompt_tokens += len(request.tokens)
        self._rate.add(len(request.tokens), plan.now)
        if request.admission_s is None:
            request.admission_s = plan.now
        self._prefilling.append(row)
        plan.admitted.append(request)
        plan.num_adjustment_bytes += request.num_adjustment_bytes
        has_chunk = self._add_chunk(row, plan)
        assert has_chunk, "a request was admitted without pages for its first chunk"
        return _Outcome.ADMITTED

    def _give_back(self, row: int) -> None:
        self._pages.release(row)
        self._rows.give_back(row)

    def _num_missing_pages(self, row: int) -> int:
        """Pages a row in prefill lacks for its tokens and the first one after them."""
        request = self._rows.request(row)
        num_positions = min(len(request.tokens) + 1, request.max_total_tokens - 1)
        return self._limits.num_pages_for(num_positions) - self._pages.num_row_pages(row)


def _params(requests: list[Request]) -> npt.NDArray[np.void]:
    """PARAMS_DTYPE records of newly admitted requests."""
    params = np.zeros(len(requests), PARAMS_DTYPE)
    for index, request in enumerate(requests):
        sampling = request.sampling
        params[index] = (
            request.row,
            sampling.top_k,
            sampling.num_logprobs,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.seed,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
    return params
