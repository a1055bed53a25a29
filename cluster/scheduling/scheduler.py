"""Decides what the next step runs: admission, chunked prefill, paging, preemption, and the end of each request.

The scheduler owns the order of requests and, through `RowTable` and `RowPages`, the rows and pages. It uses no device
and no network: `next_step` returns frames, and `retire` takes results. The same calls give the same frames.

Everything about a step is decided at its launch. The launch knows which requests end by length, and stores all that
`retire` needs in a snapshot. `retire` sees an end by token (EOS, stop id) when one more step may be in flight, and the
ended row's token in that step is dropped. A row and its pages are reused once the last step that names the row has
retired.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from cluster.messages.engine import Finished, FinishReason, GenerateRequest, SchedulerStats, StepOutput
from cluster.scheduling.decodes import Decodes
from cluster.scheduling.drafter import DraftCounts, Drafter
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.launcher import Launcher
from cluster.scheduling.life_cycle import LifeCycle
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.pages import Kept, RowPages
from cluster.scheduling.prefill import MAX_OVERTAKEN, PrefillQueue
from cluster.scheduling.prefill_plan import PrefillPlan
from cluster.scheduling.request import Guide
from cluster.scheduling.row_table import RowTable
from cluster.scheduling.step_results import Launched, StepTokens, prompt_logprobs, take_prefilled, token_logprobs
from configs.errors import EngineError
from worker.protocol import StepFrame, StepResult

# Seconds that a client below its share waits before another client over its share loses a row.
_PATIENCE_S = 0.02
# Smallest interval between two checks of the shares, which iterate over the rows.
_LOOK_EVERY_S = 0.01


def _no_guide(request: GenerateRequest) -> None:
    return None


class Scheduler:
    """Continuous batching for one engine. One thread calls all methods, and no method blocks.

    Args:
        make_guide: creates a guide for a request that needs one. If it raises RequestError, the request is refused.
        clock: returns monotonic seconds. The same calls at the same times give the same frames.

    Raises:
        EngineError: from `add` if an id is in use; from `retire` if the result is not of the oldest step in flight.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        generation: int = 1,
        make_guide: Callable[[GenerateRequest], Guide | None] = _no_guide,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self.generation = generation
        self._make_guide = make_guide
        self.last_step = 0
        """Id of the last launched step. Ids count from 1."""
        self._clock = clock
        self._drafts = DraftCounts()
        self._max_step_tokens = limits.max_num_batched_tokens
        self._total_preemptions = 0
        self.num_answer_tokens = 0
        """Number of answer tokens since the start, without dropped ones."""
        self._next_look_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._rows = RowTable(self._limits)
        self._pages = RowPages(self._limits)
        self._queue = PrefillQueue(self._limits, self._rows, self._pages)
        self._guided = GuidedRows(self._limits, self._rows)
        self._life = LifeCycle(self._limits, self._rows, self._pages, self._queue, self._guided, self._make_guide)
        self._in_flight: deque[Launched] = deque()
        self._drafter = None
        if self._limits.speculation.num_drafts:
            self._drafter = Drafter(self._limits, self._rows, self._guided, self._drafts)
        self._launcher = Launcher(self._rows, self._pages, self._queue, self._guided, self._drafter)

    # Requests in and out

    def add(self, requests: Sequence[GenerateRequest]) -> list[Finished]:
        """Queues the requests of one submission, or refuses all of them if the queue is full. A request that can never
        run is refused alone.

        Returns:
            A `Finished` for each refused request.
        """
        return self._life.add(requests, self._clock())

    def abort(self, ids: Iterable[int]) -> None:
        """Ends requests: they get no more tokens, and one `Finished` each in a later output. Ignores unknown ids."""
        for request_id in ids:
            if (request := self._life.live.get(request_id)) is not None:
                self._life.finish(request, FinishReason.ABORT)

    def flush_cache(self) -> None:
        """Drops every cached prefix that no running request uses."""
        self._pages.flush()

    def drain_finished(self) -> StepOutput | None:
        """Returns each `Finished` that is ready to be sent. None if no `Finished` waits."""
        return StepOutput(finished=self._life.take_pending()) if self._life.is_pending else None

    def fail_all(self, error: str, public_message: str | None = None) -> StepOutput:
        """Ends every request with ERROR, and drops steps in flight, rows, pages and the prefix cache.

        Args:
            public_message: `Finished.public_message` of each request.
        """
        finished = self._life.take_pending()
        for request in self._life.live.values():
            finished.append(
                Finished(
                    id=request.id,
                    reason=FinishReason.ERROR,
                    error=error,
                    error_code="engine_error",
                    public_message=public_message,
                )
            )
            if request.guide is not None:
                request.guide.close()
        self._reset()
        return StepOutput(finished=finished)

    def requeue_all(
        self, generation: int, *, keeps_kv: bool = False, keeps_states: bool = False
    ) -> frozenset[tuple[int, int]]:
        """Starts `generation`, whose ranks know nothing of earlier steps. Every running request returns to the front of
        the queue, in order, with the tokens that were sent to the client. Tokens of steps in flight are sampled again.

        Args:
            keeps_kv: whether the new ranks have the KV of all retired steps. If so, the prefix cache is kept.
            keeps_states: whether they also have the recurrent states after these steps.

        Returns:
            Each request in the lost steps: (request id, number of its known tokens).
        """
        table = self._rows
        named = np.flatnonzero(table.live & (table.in_flight > 0))
        lost = frozenset(zip(table.ids[named].tolist(), table.num_known[named].tolist(), strict=True))
        computing = [
            self._pages.pages_from(row, start)
            for launched in self._in_flight
            for row, start in zip(launched.rows.tolist(), launched.starts.tolist(), strict=True)
        ]
        self._pages.lose_states(self.last_step + 1 - len(self._in_flight) if keeps_states else None)
        for launched in self._in_flight:
            for row, start in zip(launched.rows.tolist(), launched.starts.tolist(), strict=True):
                self._pages.lose_state(row, start, int(table.num_computed[row] + table.num_unverified[row]))
        self._in_flight.clear()
        table.in_flight[:] = 0
        self._life.release_drained(np.flatnonzero(table.admission > 0).astype(np.int32))
        rows = np.flatnonzero(table.live)
        # Each request is pushed to the front of the queue, so the one admitted last is pushed first.
        for row in rows[np.argsort(-table.admission[rows])].tolist():
            self._life.requeue(row, self._clock(), is_lost=True)
        if keeps_kv:
            self._pages.lose(computing)
        else:
            self._pages.flush()
        if not keeps_states:
            self._pages.lose_states(None)
        self.generation = generation
        return lost

    def pause_admission(self) -> None:
        """Admits no new requests, only preempted ones, until `change_weights` or `resume_admission`."""
        self._queue.admits_new = False

    def change_weights(self, *, recompute: bool) -> None:
        """Follows a change of the ranks' weights, while no step is in flight. Requests admitted from now on share no
        pages computed with the old weights. Also ends `pause_admission`.

        Args:
            recompute: whether running requests compute their tokens again with the new weights. The tokens that were
                sent stay.
        """
        assert not self._in_flight, "weights may only be changed when no step is in flight"
        if recompute:
            self.requeue_all(self.generation)
        self._pages.begin_weights_version()
        self.resume_admission()

    def resume_admission(self) -> None:
        """Ends `pause_admission`."""
        self._queue.admits_new = True

    def set_pool(self, num_pages: int, num_window_pages: int | None, num_states: int | None) -> None:
        """Sets the pool sizes of this generation's ranks, before its first step. The KV pool must hold `max_model_len`
        tokens. Raises ConfigError if the window pool is too small for one row."""
        limits = replace(self._limits, num_pages=num_pages, num_window_pages=num_window_pages, num_states=num_states)
        if limits != self._limits:
            self._limits = limits
            self._pages.begin(limits)

    # Steps

    def next_step(self) -> StepFrame | None:
        """Builds the next step to launch. None if nothing can be launched before the next `add`, `retire` or mask. Ends
        requests whose deadline has passed."""
        now = self._clock()
        self._life.end_expired(now)
        if len(self._in_flight) >= self._limits.steps_in_flight:
            return None
        if self.is_awaiting_masks:
            self.poll_guides()
        self._yield_row(now)
        if (decodes := self._plan_decodes(now)) is None:
            return None
        prefills = self._plan_prefills(decodes, now)
        if not (len(decodes.rows) or prefills.rows):
            return None
        self.last_step += 1
        frame, launched = self._launcher.launch(decodes, prefills, self.generation, self.last_step, self._clock())
        self._in_flight.append(launched)
        return frame

    def halve_steps(self) -> int:
        """Halves the token budget of steps, but leaves enough for all decodes and one row's items. Returns the
        budget."""
        limits = self._limits
        least = limits.max_num_seqs + limits.max_item_tokens
        self._max_step_tokens = min(self._max_step_tokens, max(self._max_step_tokens // 2, least))
        return self._max_step_tokens

    def poll_guides(self) -> bool:
        """Takes the masks that guides have made. Returns whether a running request still waits for its mask."""
        news = self._guided.poll()
        for request in news.admissible:
            self._queue.push(request)
        for request, reason, error in news.ended:
            if error is None:
                self._life.finish(request, reason)
            else:
                self._life.finish(request, reason, error=str(error), error_code=error.code)
        return bool(self._guided.num_awaiting)

    def retire(self, result: StepResult) -> StepOutput:
        """Takes the result of the oldest step in flight, and returns the tokens and ends of its requests."""
        if not self._in_flight:
            raise EngineError(f"result of step {result.step}, but no step is in flight; please report this bug")
        self._in_flight[0].check(result, self.generation)
        launched = self._in_flight.popleft()
        table = self._rows
        table.in_flight[launched.rows] -= 1
        self._pages.note_tokens(launched.sampled, result.num_tokens if len(result.num_tokens) else 1)
        new, valid = StepTokens.of(table, launched, result, self._limits.eos_token_ids)
        if broken := new.broken(table, launched, result, valid):
            self._end_broken(broken)
            valid &= table.live[new.rows]
        logprobs = (
            token_logprobs(table, new.rows, valid, launched.item_rows, result) if len(result.logprob_rows) else []
        )
        if np.count_nonzero(valid) != len(valid):
            # Rows of these tokens ended after the launch, or with the token before: the tokens are dropped.
            new = new.where(valid)
        new.write(table, launched)
        if self._drafter is not None:
            self._drafter.learn(launched, result, new.rows, self._clock())
        prefilled = take_prefilled(table, launched.prefilled, self._clock()) if launched.prefilled else []
        scored = prompt_logprobs(table, launched.prompt_runs, result) if launched.prompt_runs else []
        rows, _, tokens, stopped, is_last = new
        ids = table.ids[rows].tobytes()
        self.num_answer_tokens += len(tokens)
        if table.num_guided:
            self._guided.take_tokens(rows, tokens, stopped)
            is_last = is_last & ~table.guided[rows]
        for index in np.flatnonzero(stopped | is_last):
            request = table.request(int(rows[index]))
            if stopped[index]:
                self._life.finish(request, FinishReason.STOP, stop_token_id=int(tokens[index]))
            else:
                self._life.finish(request, FinishReason.LENGTH)
        self._life.release_drained(launched.rows)
        return StepOutput(
            ids=ids,
            tokens=tokens.tobytes(),
            logprobs=logprobs,
            prompt_logprobs=scored,
            prefilled=prefilled,
            finished=self._life.take_pending(),
        )

    # State

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, a step is in flight, or a Finished has not been sent."""
        return bool(self._life.live or self._in_flight or self._life.is_pending)

    @property
    def has_begun(self) -> bool:
        """Whether some request runs, or was preempted and waits."""
        oldest = self._queue.waiting.oldest
        return bool(self._rows.num_taken) or (oldest is not None and oldest.admission_s is not None)

    @property
    def is_awaiting_masks(self) -> bool:
        """Whether some request waits for a mask, with or without a row."""
        return bool(self._guided.num_awaiting or self._guided.num_held)

    @property
    def kept(self) -> Kept:
        """What other ranks have to take over to continue with the prefix cache."""
        return self._pages.kept

    def live_ids(self) -> list[int]:
        """Ids of the requests that wait or run, in order of arrival."""
        return list(self._life.live)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def stats(self) -> SchedulerStats:
        """Gauges and counters. Does not iterate over requests or pages."""
        allocator, cache, queue, now = self._pages.allocator, self._pages.cache, self._queue, self._clock()
        oldest = queue.waiting.oldest
        return SchedulerStats(
            num_running=self._rows.num_taken - self._life.num_draining,
            num_waiting=self._life.num_waiting,
            num_waiting_tokens=self._life.num_waiting_tokens,
            num_free_pages=allocator.num_free,
            num_cached_pages=cache.num_pages,
            num_evictable_pages=cache.num_evictable_pages,
            num_owned_pages=allocator.num_pages - allocator.num_free - cache.num_pages,
            total_prefix_hit_tokens=queue.chunks.total_prefix_hit_tokens,
            total_prompt_tokens=queue.total_prompt_tokens,
            total_preemptions=self._total_preemptions,
            total_missed=dict(queue.chunks.total_missed),
            total_dropped_states=self._pages.num_dropped_states,
            total_answer_tokens=self.num_answer_tokens,
            total_drafted=self._drafts.num_drafted,
            total_accepted=self._drafts.num_accepted,
            total_refused=self._life.total_refused,
            total_expired=self._life.total_expired,
            longest_wait_s=0.0 if oldest is None else now - oldest.arrival_s,
            admitted_tokens_per_s=queue.rate.per_second(now) or 0.0,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if pages, rows, queue and steps in flight do not match. Iterates over everything."""
        self._pages.check_integrity()
        table = self._rows
        table.check_integrity()
        in_flight = np.zeros(len(table.in_flight), np.int32)
        for launched in self._in_flight:
            in_flight[launched.rows] += 1
        assert np.array_equal(in_flight, table.in_flight), "steps in flight per row are miscounted"
        self._life.check_integrity()
        running = {request.id for request in table.requests if request is not None and table.live[request.row]}
        waiting = self._queue.check_integrity(running)
        held = self._guided.check_integrity()
        assert running | waiting | held == set(self._life.live), "a request neither runs nor waits"
        assert held.isdisjoint(running | waiting), "a request waits for a mask twice"
        for row in np.flatnonzero(table.live):
            capacity = self._pages.num_row_pages(int(row)) * self._limits.page_size
            assert capacity >= table.num_computed[row], f"row {row} has computed tokens without a page"

    # Building a step

    def _plan_decodes(self, now: float) -> Decodes | None:
        """Plans the rows that decode, possibly none, with their pages. Preempts requests if pages have run out. None if
        nothing may be launched before a step in flight retires."""
        # A step with prompts verifies no drafts: it is long already, and may fit no CUDA graph captured for drafts.
        drafter = None if self._queue.is_busy else self._drafter
        while True:
            rows = np.flatnonzero(self._rows.ready).astype(np.int32)
            decodes = Decodes.plain(rows) if drafter is None else drafter.choose(rows, self._max_step_tokens)
            if decodes is None or self._take_pages(decodes):
                return decodes
            if drafter is not None:
                drafter = None  # no request is preempted to make room for drafts
            elif self._in_flight:
                return None  # a retired step may free pages, and only a row that no step names can be preempted
            else:
                self._preempt_one(now)

    def _take_pages(self, decodes: Decodes) -> bool:
        """Takes the pages that the rows' inputs need. If pages are lacking, changes nothing and returns False."""
        table, rows = self._rows, decodes.rows
        ends = table.num_computed[rows] + table.num_unverified[rows] + decodes.num_samples
        if decodes.num_wanted > 1:  # the ranks continue from their drafts
            ends = np.maximum(ends, np.minimum(ends + decodes.num_wanted - 1, table.max_total[rows] - 1))
        decodes.deltas = self._pages.grow_rows(rows, ends)
        return decodes.deltas is not None

    def _plan_prefills(self, decodes: Decodes, now: float) -> PrefillPlan:
        """Plans a step's prompt chunks, with their pages, for the tokens that `decodes` leaves. Preempts a request if
        all running requests are prefills that lack pages."""
        budget = self._max_step_tokens - decodes.num_tokens
        plan = self._queue.plan(budget, now)
        while not (plan.rows or len(decodes.rows) or self._in_flight or self._guided.num_awaiting):
            if not self._queue.prefilling:
                break
            self._preempt_one(now)
            plan = self._queue.plan(budget, now)
        return plan

    def _preempt_one(self, now: float) -> None:
        """Preempts the request that `Shares.victim` chooses, because pages have run out. No step may be in flight."""
        assert not self._in_flight, "pages may come free when the steps in flight retire"
        victim = self._queue.shares().victim()
        assert victim is not None, "no request runs"
        self._life.requeue(victim.row, now)
        self._total_preemptions += 1

    def _yield_row(self, now: float) -> None:
        """Preempts a request of a client over its share, if another client has waited for `_PATIENCE_S`.

        Only one request is preempted at a time, because answers end and free rows meanwhile. The preempted request's
        row is free once the steps in flight have retired.
        """
        if now < self._next_look_s or not self._queue.is_kept_waiting or self._life.num_draining:
            return
        self._next_look_s = now + _LOOK_EVERY_S
        shares, queue = self._queue.shares(), self._queue
        waiting = queue.waiting.first(shares.has_its_share)
        if waiting is None or now - waiting.waits_since_s < _PATIENCE_S or shares.has_its_share(waiting.terms.client):
            return
        is_stuck = waiting is queue.lacks_pages or not queue.has_rows
        if is_stuck and (victim := shares.victim(level=waiting.terms.level)) is not None:
            waiting.num_overtaken = MAX_OVERTAKEN
            self._life.requeue(victim.row, now)
            self._total_preemptions += 1

    def _end_broken(self, rows: list[int]) -> None:
        """Ends the requests of `rows`, which had a NaN, and removes their pages from the prefix cache."""
        for row in rows:
            num_tokens = int(self._rows.num_known[row])
            error = (
                f"The model's logits hold a NaN after {num_tokens} tokens of this request, so it ended; if this "
                "recurs, check the model's weights, or set dtype."
            )
            self._rows.num_cacheable[row] = 0
            self._life.finish(self._rows.request(row), FinishReason.ERROR, error=error, error_code="not_a_number")
