"""Which requests run in the next step: admission, chunked prefill, paging, preemption, and the end of each request.

Owns the order of requests and, through `RowTable` and `RowPages`, rows and pages. Touches no device and no network:
frames go out by `next_step`, results come back by `retire`. The same calls give the same frames.

A step is decided when it is launched: finishes by length are known then, and so is everything `retire` needs, in the
step's snapshot. A finish by token is seen at `retire`, when one more step may be in flight: its token is dropped.
A row and its pages are reused once the last step that names the row has retired.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.messages import Finished, FinishReason, GenerateRequest, StepOutput, TokenLogprobs
from cluster.scheduling.limits import MAX_PREFIX_DELTAS, SchedulerLimits, SchedulerStats
from cluster.scheduling.request import Request, reason_never_fits, refused
from cluster.scheduling.row_pages import RowPages
from cluster.scheduling.row_table import RowTable
from configs.errors import EngineError
from worker.protocol import PARAMS_DTYPE, Int32Array, RowFlag, StepFrame, StepResult

__all__ = ["Scheduler", "SchedulerLimits", "SchedulerStats"]

_NO_DELTAS = np.empty((0, 3), np.int32)


@dataclass(slots=True, eq=False)
class _Launched:
    """What `retire` may know of a step: as it was at launch."""

    step: int
    rows: Int32Array
    """Every row the frame names."""
    sampled: Int32Array
    """[num_sampled] rows that get a token."""
    positions: Int32Array
    """[num_sampled] place of that token in its sequence."""
    is_last: npt.NDArray[np.bool_]
    """[num_sampled] the token uses up the request's length."""
    prefilled: list[int]
    """Rows among `sampled` that end their prefill here."""


@dataclass(slots=True, eq=False)
class _Chunks:
    """The prefill part of a frame under construction."""

    budget: int
    rows: list[int]
    starts: list[int]
    lens: list[int]
    deltas: list[Int32Array]
    admitted: list[Request]
    num_prefix_deltas: int = 0


class Scheduler:
    """Continuous batching over one engine. One owner, one thread; no method blocks.

    Raises EngineError from `add` for an id that is in use, and from `retire` for a result that is not the oldest step's.
    """

    def __init__(self, limits: SchedulerLimits, generation: int = 1) -> None:
        self._limits = limits
        self._generation = generation
        self._eos = np.array(limits.eos_token_ids, np.int32)
        self._step = 0
        self._total_prefix_hit_tokens = 0
        self._total_prompt_tokens = 0
        self._total_preemptions = 0
        self._pending: list[Finished] = []
        self._reset()

    def _reset(self) -> None:
        self._rows = RowTable(self._limits)
        self._pages = RowPages(self._limits)
        self._by_id: dict[int, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._num_waiting_tokens = 0
        self._prefilling: list[int] = []  # rows, in order of admission
        self._num_draining = 0  # rows that are taken but no longer live
        self._in_flight: deque[_Launched] = deque()

    # Requests in and out

    def add(self, request: GenerateRequest) -> Finished | None:
        """Queues a request and returns None, or its finish if it can never fit or the queue is full."""
        if request.id in self._by_id:
            raise EngineError(f"request id {request.id} is in use")
        entry = Request.create(request, self._limits)
        if (reason := reason_never_fits(entry, self._limits)) is not None:
            return refused(request.id, reason, "context_length_exceeded")
        limits = self._limits
        if len(self._waiting) >= limits.max_num_queued_requests:
            return refused(
                request.id, f"max_num_queued_requests={limits.max_num_queued_requests} is reached", "engine_overloaded"
            )
        # A prompt longer than the limit may still wait alone.
        if self._waiting and self._num_waiting_tokens + len(entry.tokens) > limits.max_num_queued_tokens:
            return refused(
                request.id, f"max_num_queued_tokens={limits.max_num_queued_tokens} is reached", "engine_overloaded"
            )
        self._by_id[entry.id] = entry
        self._waiting[entry.id] = entry
        self._num_waiting_tokens += len(entry.tokens)
        return None

    def abort(self, ids: Iterable[int]) -> None:
        """Ends requests: no token after this call, one Finished each in a later output. Unknown ids are ignored."""
        for request_id in ids:
            request = self._by_id.pop(request_id, None)
            if request is None:
                continue
            self._pending.append(Finished(id=request_id, reason=FinishReason.ABORT))
            if request.row:
                self._end_row(request.row)
            else:
                del self._waiting[request_id]
                self._num_waiting_tokens -= len(request.tokens)

    def drain_finished(self) -> StepOutput | None:
        """Finishes that wait for no step; None if there are none."""
        return StepOutput(finished=self._take_pending()) if self._pending else None

    def fail_all(self, error: str) -> StepOutput:
        """Ends every request with ERROR and forgets steps in flight, rows, pages and the prefix cache."""
        finished = self._take_pending()
        for request_id in self._by_id:
            finished.append(
                Finished(id=request_id, reason=FinishReason.ERROR, error=error, error_code="engine_error")
            )
        self._reset()
        return StepOutput(finished=finished)

    # Steps

    def next_step(self) -> StepFrame | None:
        """The next step to launch; None if there is nothing to launch before the next `add` or `retire`."""
        if len(self._in_flight) >= self._limits.steps_in_flight:
            return None
        while True:
            rows = np.flatnonzero(self._rows.ready).astype(np.int32)
            needy = self._pages.rows_without_room(rows, self._rows.num_computed[rows])
            deltas = self._pages.append_page(needy) if len(needy) else None
            if len(needy) and deltas is None:
                if self._in_flight:
                    return None  # A retire may free pages; and only a row no step names can be preempted.
                self._preempt_newest()
                continue
            chunks = self._plan_chunks(len(rows))
            if len(rows) or chunks.rows:
                if deltas is not None:
                    chunks.deltas.insert(0, deltas)
                return self._launch(rows, chunks)
            if self._in_flight or not self._prefilling:
                return None
            # Every running request is a prefill that lacks pages.
            self._preempt_newest()

    def retire(self, result: StepResult) -> StepOutput:
        """Takes the oldest step's result and returns the tokens and finishes it brings."""
        launched = self._take_launched(result)
        table = self._rows
        table.in_flight[launched.rows] -= 1
        rows, positions, tokens, is_last = launched.sampled, launched.positions, result.tokens, launched.is_last
        kept: npt.NDArray[np.intp] | None = None
        live = table.live[rows]
        if not live.all():
            kept = np.flatnonzero(live)
            rows, positions, tokens, is_last = rows[kept], positions[kept], tokens[kept], is_last[kept]
        table.tokens[rows, positions] = tokens
        table.num_known[rows] = positions + 1
        prefilled = self._take_prefilled(launched.prefilled)
        logprobs = self._take_logprobs(launched.sampled, live, result) if len(result.logprob_rows) else []
        ids = table.ids[rows].tobytes()
        stopped = self._find_stopped(rows, tokens)
        for index in np.flatnonzero(stopped | is_last):
            self._finish(int(rows[index]), int(tokens[index]) if stopped[index] else None)
        if self._num_draining:
            named = launched.rows
            drained = ~table.live[named] & (table.in_flight[named] == 0) & (table.admission[named] > 0)
            for row in named[drained].tolist():
                self._num_draining -= 1
                self._release(row)
        return StepOutput(
            ids=ids, tokens=tokens.tobytes(), logprobs=logprobs, prefilled=prefilled, finished=self._take_pending()
        )

    # State

    @property
    def has_work(self) -> bool:
        """Something waits, runs, is in flight, or has finished and not been told."""
        return bool(self._by_id or self._in_flight or self._pending)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def last_step(self) -> int:
        """Id of the step launched last; ids count from 1."""
        return self._step

    def stats(self) -> SchedulerStats:
        """Gauges and counters. Costs a walk over the page owners' counts only."""
        allocator, cache = self._pages.allocator, self._pages.cache
        return SchedulerStats(
            num_running=self._rows.num_taken - self._num_draining,
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._num_waiting_tokens,
            num_free_pages=allocator.num_free,
            num_cached_pages=cache.num_pages,
            num_evictable_pages=cache.num_evictable_pages,
            num_owned_pages=allocator.num_pages - allocator.num_free - cache.num_pages,
            total_prefix_hit_tokens=self._total_prefix_hit_tokens,
            total_prompt_tokens=self._total_prompt_tokens,
            total_preemptions=self._total_preemptions,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages, rows, queue and steps in flight agree. Costs a walk over everything."""
        self._pages.check_integrity()
        table = self._rows
        table.check_integrity()
        in_flight = np.zeros(len(table.in_flight), np.int32)
        for launched in self._in_flight:
            in_flight[launched.rows] += 1
        assert np.array_equal(in_flight, table.in_flight), "steps in flight per row are miscounted"
        taken = [request for request in table.requests if request is not None]
        draining = [request.row for request in taken if not table.live[request.row]]
        assert len(draining) == self._num_draining, "draining rows are miscounted"
        assert table.in_flight[draining].all(), "an ended row that no step names was not released"
        running = {request.id for request in taken if table.live[request.row]}
        assert running.isdisjoint(self._waiting), "a request runs and waits"
        assert running | set(self._waiting) == set(self._by_id), "a request neither runs nor waits"
        num_waiting_tokens = sum(len(request.tokens) for request in self._waiting.values())
        assert num_waiting_tokens == self._num_waiting_tokens, "waiting tokens are miscounted"
        prefilling = np.flatnonzero(table.live & (table.num_computed < table.num_prefill))
        assert sorted(self._prefilling) == prefilling.tolist(), "the list of prefills is wrong"
        for row in np.flatnonzero(table.live):
            capacity = self._pages.num_row_pages(int(row)) * self._limits.page_size
            assert capacity >= table.num_computed[row], f"row {row} has computed tokens without a page"

    # Building a step

    def _plan_chunks(self, num_decodes: int) -> _Chunks:
        chunks = _Chunks(self._limits.max_num_batched_tokens - num_decodes, [], [], [], [], [])
        for row in self._prefilling:
            if chunks.budget <= 0:
                break
            self._plan_chunk(row, chunks)
        while self._waiting and chunks.budget > 0 and self._admit_next(chunks):
            pass
        return chunks

    def _plan_chunk(self, row: int, chunks: _Chunks) -> None:
        """Adds the next chunk of a prefilling row, if there are pages for it."""
        table, page_size = self._rows, self._limits.page_size
        start, end = int(table.num_computed[row]), int(table.num_prefill[row])
        has_room = self._num_missing_pages(row) <= self._pages.num_available  # Then the chunk below gets its pages.
        if has_room and start % page_size == 0 and chunks.num_prefix_deltas < MAX_PREFIX_DELTAS:
            # Others may have computed what comes next since the last chunk.
            start += self._adopt_prefix(row, start, end, chunks)
        length = min(end - start, self._limits.prefill_chunk_size, chunks.budget)
        if start + length < end and (start + length) // page_size * page_size > start:
            length = (start + length) // page_size * page_size - start  # Whole pages can be shared, partial ones not.
        deltas = self._pages.grow(row, start + length)
        if deltas is None:
            return
        if len(deltas):
            chunks.deltas.append(deltas)
        chunks.rows.append(row)
        chunks.starts.append(start)
        chunks.lens.append(length)
        chunks.budget -= length

    def _adopt_prefix(self, row: int, start: int, end: int, chunks: _Chunks) -> int:
        """Takes cached pages from token `start` of the row on; returns how many tokens they hold.

        The last token before `end` is always left to compute: its logits are wanted.
        """
        table = self._rows
        deltas = self._pages.adopt_prefix(row, table.tokens[row, start : end - 1])
        num_tokens = len(deltas) * self._limits.page_size
        if num_tokens:
            chunks.deltas.append(deltas)
            chunks.num_prefix_deltas += len(deltas)
            table.num_computed[row] += num_tokens
            table.request(row).num_cached_tokens += num_tokens
            self._total_prefix_hit_tokens += num_tokens
        return num_tokens

    def _admit_next(self, chunks: _Chunks) -> bool:
        """Gives the head of the queue a row and its first chunk. False: it has to wait."""
        table = self._rows
        num_running = table.num_taken
        if not table.num_free or num_running >= self._limits.max_num_running:
            return False
        if chunks.num_prefix_deltas >= MAX_PREFIX_DELTAS:
            return False
        request = next(iter(self._waiting.values()))
        num_tokens = len(request.tokens)
        # Pages that running prefills still need, and a page for each running request's next tokens.
        reserved = num_running + sum(self._num_missing_pages(row) for row in self._prefilling)
        num_deltas = len(chunks.deltas)
        row = table.take(request)
        request.num_cached_tokens = 0
        self._adopt_prefix(row, 0, num_tokens, chunks)
        if num_running and self._num_missing_pages(row) + reserved > self._pages.num_available:
            self._total_prefix_hit_tokens -= request.num_cached_tokens
            del chunks.deltas[num_deltas:]
            self._release(row)
            return False
        del self._waiting[request.id]
        self._num_waiting_tokens -= num_tokens
        self._total_prompt_tokens += num_tokens
        self._prefilling.append(row)
        chunks.admitted.append(request)
        self._plan_chunk(row, chunks)
        return True

    def _num_missing_pages(self, row: int) -> int:
        """Pages a prefilling row lacks for its prompt and the first token after it."""
        request = self._rows.request(row)
        num_positions = min(len(request.tokens) + 1, request.max_total_tokens - 1)
        return self._limits.num_pages_for(num_positions) - self._pages.num_row_pages(row)

    def _launch(self, decodes: Int32Array, chunks: _Chunks) -> StepFrame:
        """Builds the frame of `decodes` and `chunks`, and takes the snapshot for its retirement."""
        table = self._rows
        self._step += 1
        frame = StepFrame(generation=self._generation, step=self._step)
        starts = table.num_computed[decodes]
        frame.rows, frame.starts = decodes, starts
        frame.lens = np.ones(len(decodes), np.int32)
        frame.flags = np.full(len(decodes), RowFlag.SAMPLE, np.int32)
        sampled, positions = decodes, starts + 1
        table.num_computed[decodes] = positions
        ending: list[int] = []
        if chunks.rows:
            ending = self._put_chunks(frame, chunks)
        if ending:
            sampled = np.concatenate((decodes, np.array(ending, np.int32)))
            positions = np.concatenate((positions, table.num_prefill[ending]))
            table.ready[ending] = True
        frame.page_deltas = np.concatenate(chunks.deltas) if chunks.deltas else _NO_DELTAS
        if chunks.admitted:
            frame.params = _params(chunks.admitted)
        table.in_flight[frame.rows] += 1
        is_last = positions + 1 >= table.max_total[sampled]
        table.ready[sampled[is_last]] = False
        self._in_flight.append(_Launched(self._step, frame.rows, sampled, positions, is_last, ending))
        return frame

    def _put_chunks(self, frame: StepFrame, chunks: _Chunks) -> list[int]:
        """Appends the prefill rows to the frame, makes their pages known, and returns the rows that end here."""
        table = self._rows
        ending: list[int] = []
        tokens: list[Int32Array] = []
        flags: list[int] = []
        for row, start, length in zip(chunks.rows, chunks.starts, chunks.lens, strict=True):
            end = start + length
            tokens.append(table.tokens[row, start:end])
            is_end = end == table.num_prefill[row]
            flags.append(RowFlag.HAS_TOKENS | RowFlag.SAMPLE if is_end else RowFlag.HAS_TOKENS)
            table.num_computed[row] = end
            if is_end:
                ending.append(row)
            self._pages.publish(row, table.tokens[row], end)
        if ending:
            self._prefilling = [row for row in self._prefilling if row not in ending]
        frame.rows = np.concatenate((frame.rows, np.array(chunks.rows, np.int32)))
        frame.starts = np.concatenate((frame.starts, np.array(chunks.starts, np.int32)))
        frame.lens = np.concatenate((frame.lens, np.array(chunks.lens, np.int32)))
        frame.flags = np.concatenate((frame.flags, np.array(flags, np.int32)))
        frame.token_ids = np.concatenate(tokens)
        return ending

    def _preempt_newest(self) -> None:
        """Puts the request admitted last back to the front of the queue, with the tokens it has. No step is in flight."""
        table = self._rows
        row = int(table.admission.argmax())
        request = table.request(row)
        assert not self._in_flight, "a request may only be preempted when no step is in flight"
        request.tokens = table.tokens[row, : table.num_known[row]].copy()
        if row in self._prefilling:
            self._prefilling.remove(row)
        self._release(row)
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)
        self._num_waiting_tokens += len(request.tokens)
        self._total_preemptions += 1

    # Ending a step

    def _take_launched(self, result: StepResult) -> _Launched:
        if not self._in_flight:
            raise EngineError(f"result of step {result.step}, but no step is in flight")
        launched = self._in_flight[0]
        got = (result.generation, result.step, len(result.tokens))
        expected = (self._generation, launched.step, len(launched.sampled))
        if got != expected:
            raise EngineError(f"result has (generation, step, tokens) {got}, expected {expected}")
        return self._in_flight.popleft()

    def _find_stopped(self, rows: Int32Array, tokens: Int32Array) -> npt.NDArray[np.bool_]:
        """Which of `tokens` end their row."""
        table = self._rows
        stopped = np.zeros(len(rows), np.bool_)
        for eos in self._eos:
            stopped |= tokens == eos
        stopped &= table.ends_on_eos[rows]
        asked = table.has_stop_ids[rows]
        if asked.any():
            for index in np.flatnonzero(asked):
                if int(tokens[index]) in table.request(int(rows[index])).stop_token_ids:
                    stopped[index] = True
        return stopped

    def _take_prefilled(self, rows: list[int]) -> list[tuple[int, int]]:
        """(id, tokens from the cache) of those `rows` that got the first token of their answer."""
        prefilled: list[tuple[int, int]] = []
        for row in rows:
            request = self._rows.request(row)
            if self._rows.live[row] and not request.has_emitted:
                request.has_emitted = True
                prefilled.append((request.id, request.num_cached_tokens))
        return prefilled

    def _take_logprobs(
        self, sampled: Int32Array, live: npt.NDArray[np.bool_], result: StepResult
    ) -> list[TokenLogprobs]:
        logprobs: list[TokenLogprobs] = []
        for index, logprob, top_ids, top_logprobs in zip(
            result.logprob_rows.tolist(),
            result.logprobs.tolist(),
            result.top_ids.tolist(),
            result.top_logprobs.tolist(),
            strict=True,
        ):
            if live[index]:
                request = self._rows.request(int(sampled[index]))
                k = request.sampling.num_logprobs
                logprobs.append(TokenLogprobs(request.id, logprob, top_ids[:k], top_logprobs[:k]))
        return logprobs

    def _finish(self, row: int, stop_token_id: int | None) -> None:
        request = self._rows.request(row)
        reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        self._pending.append(Finished(id=request.id, reason=reason, stop_token_id=stop_token_id))
        del self._by_id[request.id]
        self._end_row(row)

    def _end_row(self, row: int) -> None:
        """The request of `row` has ended: frees the row now, or when the last step that names it retires."""
        table = self._rows
        table.live[row] = False
        table.ready[row] = False
        if row in self._prefilling:
            self._prefilling.remove(row)
        if table.in_flight[row]:
            self._num_draining += 1
        else:
            self._release(row)

    def _release(self, row: int) -> None:
        """Takes row and pages back; what the row has computed stays in the prefix cache."""
        table = self._rows
        # A dropped token's KV may be there, but nobody knows the token.
        num_tokens = min(int(table.num_computed[row]), int(table.num_known[row]))
        self._pages.publish(row, table.tokens[row], num_tokens)
        self._pages.release(row)
        table.give_back(row)

    def _take_pending(self) -> list[Finished]:
        pending, self._pending = self._pending, []
        return pending


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
        )
    return params
