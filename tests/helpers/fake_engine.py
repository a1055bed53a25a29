"""The scheduler against a fake model whose next token is a function of all the tokens it reads back from its KV pool.

The fake worker keeps (page, offset) -> token and a page table built from frames only, so a stale page, a wrong start or
a row reused too early gives a wrong token. Every frame and every output is checked against the rules.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from cluster.messages.engine import (
    Finished,
    FinishReason,
    GenerateRequest,
    Prefilled,
    Running,
    SamplingParams,
    StepOutput,
    Terms,
    TokenLogprobs,
)
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from configs.errors import GuideError
from worker.frame_checks import FrameLimits, check_frame
from worker.protocol import RowFlag, StepFrame, StepResult, UInt32Array, mask_words

EOS = 7
VOCAB = 40
WRONG_DRAFT = -2
LIMITS = SchedulerLimits(
    num_pages=64,
    page_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    prefill_chunk_size=8,
    max_model_len=64,
    vocab_size=VOCAB,
    max_num_queued_requests=100,
    max_num_queued_tokens=10_000,
    steps_in_flight=2,
    enable_prefix_caching=True,
    eos_token_ids=(EOS,),
)


def next_token(tokens: list[int] | npt.NDArray[np.int64], seed: int) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), seed) % VOCAB


def allows(answer: Sequence[int], token: int) -> bool:
    """The grammar of the requests that have one: what may come next depends on all that came before."""
    return (token + sum(answer)) % 3 == 0


def is_complete(answer: Sequence[int]) -> bool:
    return len(answer) > 0 and sum(answer) % 11 == 0


def goes_wrong(answer: Sequence[int]) -> bool:
    """The grammar has no way on, or so it says."""
    return sum(answer) % 37 == 36


def first_allowed(token: int, mask: npt.NDArray[np.bool_]) -> int:
    """The token drawn where `token` would be without a mask [VOCAB]."""
    return int(np.roll(mask, -token).argmax() + token) % VOCAB


class RuleGuide:
    """Follows the grammar; each mask is there after two polls at most."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._answer: list[int] = []
        self._delay = 0
        self.is_closed = False
        self.accept(())

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        assert not self.is_closed
        assert not self._delay, "a token without a mask"
        self._answer += tokens
        self._drafts = list(drafts)
        self._delay = self._random.randint(0, 2)

    def poll(self) -> UInt32Array | None:
        assert not self.is_closed
        if self._delay:
            self._delay -= 1
            return None
        if goes_wrong(self._answer):
            raise GuideError("no way on")
        return self._mask(self._answer)

    @property
    def ahead(self) -> list[UInt32Array]:
        answer, masks = list(self._answer), []
        for token in self._drafts:
            if not allows(answer, token):
                break
            answer.append(token)
            if is_complete(answer) or goes_wrong(answer):
                break
            masks.append(self._mask(answer))
        return masks

    def _mask(self, answer: list[int]) -> UInt32Array:
        bits = np.zeros(32 * mask_words(VOCAB), np.uint8)
        bits[:VOCAB] = [allows(answer, token) for token in range(VOCAB)]
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @property
    def is_finished(self) -> bool:
        return not self._delay and is_complete(self._answer)

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True


def reference(prompt: list[int], sampling: SamplingParams, limits: SchedulerLimits) -> tuple[list[int], FinishReason]:
    """What a request must get, with nothing else in the engine and one token a step."""
    tokens = list(prompt)
    ends = [*sampling.stop_token_ids, *limits.eos_token_ids]
    while True:
        answer = tokens[len(prompt) :]
        token = next_token(tokens, sampling.seed)
        if sampling.grammar is not None:
            token = first_allowed(token, np.array([allows(answer, i) for i in range(VOCAB)]))
        if len(answer) < sampling.min_tokens:
            token = first_allowed(token, ~np.isin(np.arange(VOCAB), ends))
        tokens.append(token)
        answer.append(token)
        if (token in limits.eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return answer, FinishReason.STOP
        if sampling.grammar is not None and goes_wrong(answer):
            return answer, FinishReason.ERROR
        if sampling.grammar is not None and is_complete(answer):
            return answer, FinishReason.STOP
        if len(answer) == sampling.max_tokens or len(tokens) == limits.max_model_len:
            return answer, FinishReason.LENGTH


def prompt_score(tokens: list[int] | npt.NDArray[np.int64], target: int, k: int) -> tuple[float, list[int]]:
    """Log probability of `target` after `tokens`, and the likeliest tokens in its place."""
    return -float(VOCAB * next_token(tokens, 1) + target), [next_token(tokens, 2 + i) for i in range(k)]


def item_scores(prompt: Sequence[int], item_lens: Sequence[int], label_ids: Sequence[int]) -> list[list[float]]:
    """For each item that the prompt ends with, what there is of each label after the query and that item alone."""
    bounds = list(itertools.accumulate(item_lens, initial=len(prompt) - sum(item_lens)))
    texts = [[*prompt[: bounds[0]], *prompt[first:last]] for first, last in itertools.pairwise(bounds)]
    return [[-float(next_token(text, label)) for label in label_ids] for text in texts]


class FakeWorker:
    """Runs frames one after the other on an array of pages. One that drafts knows where its rows are.

    Where several inputs of a row are sampled, any number of drafts was right, and the others leave what they are in the
    pool. The window pool, if there is one, must hold the same wherever a query sees it there.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self.page_size = limits.page_size
        self.kv = np.full((limits.num_pages + 1, limits.page_size), -1, np.int64)
        self.window = limits.window if limits.num_window_pages is not None else 0
        self.window_kv = np.full(((limits.num_window_pages or 0) + 1, limits.page_size), -1, np.int64)
        self.window_page_of = np.zeros(limits.num_pages + 1, np.int64)
        self.table = np.zeros((limits.max_num_seqs + 1, limits.max_pages_per_row), np.int64)
        self.last_token = np.zeros(limits.max_num_seqs + 1, np.int64)
        self.seeds: dict[int, int] = {}
        self.num_logprobs: dict[int, int] = {}
        self.requested: dict[int, list[int]] = {}
        self.masks: dict[int, list[npt.NDArray[np.bool_]]] = {}  # one for each draw of the step, at least one
        self.bans: dict[int, list[tuple[int, int]]] = {}
        """(token id, position from which it may be drawn) by row."""
        self.num_computed = 0
        self.next_starts: dict[int, int] | None = {} if limits.speculation.is_by_ranks else None
        self.drafts: dict[int, list[int]] = {}
        self.num_ahead = 0
        """Rows with drafts that it alone knows."""

    def run(self, encoded: bytes) -> bytes:
        frame = StepFrame.decode(encoded)
        for row, index, page in frame.page_deltas.tolist():
            self.table[row, index] = page
        for page, place in frame.window_pages.tolist():
            self.window_page_of[page] = place
        for record in frame.params:
            self.seeds[int(record["row"])] = int(record["seed"])
            self.num_logprobs[int(record["row"])] = int(record["num_logprobs"])
            self.requested[int(record["row"])] = []
            self.masks.pop(int(record["row"]), None)
            self.bans[int(record["row"])] = []
        for row, token, value, until in frame.biases.tolist():
            assert value == -np.inf
            self.bans[row].append((token, until))
        for row, token in frame.requested.tolist():
            self.requested[row].append(token)
        self.masks |= {row: [] for row in frame.mask_rows.tolist()}
        for row, mask in zip(frame.mask_rows.tolist(), frame.masks, strict=True):
            self.masks[row].append(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(np.bool_))
        plan = []
        offset = 0
        rows = zip(
            *(part.tolist() for part in (frame.rows, frame.starts, frame.lens, frame.flags, frame.samples_per_row)),
            strict=True,
        )
        starts = []
        for row, start, num, flags, num_samples in rows:
            drafts = frame.token_ids[offset + num - num_samples + 1 : offset + num].tolist()
            if not flags & RowFlag.HAS_TOKENS and self.next_starts is not None:
                assert start >= self.next_starts[row], "a row is further on than it can be"
                self.num_ahead += num > 1
                start, drafts = self.next_starts[row], self.drafts.get(row, [])[: num - 1]
                assert len(drafts) == num - 1, "drafts that were never made"
            starts.append(start)
            positions = np.arange(start, start + num)
            if flags & RowFlag.HAS_TOKENS:
                self._write(row, positions, frame.token_ids[offset : offset + num])
                offset += num
            elif self.next_starts is not None:
                self._write(row, positions, [self.last_token[row], *drafts])
            else:
                self._write(row, positions, self.last_token[row])
            plan.append((row, start + num - max(num_samples, 1) + 1, num_samples, drafts))
        assert offset == len(frame.token_ids)
        for row, start, num in zip(frame.rows.tolist(), starts, frame.lens.tolist(), strict=True):
            seen = self._slots(row, np.arange(max(start - (self.window - 1), 0), start + num))
            pages = self.window_page_of[seen[0]]
            assert not self.window or pages.all(), "a window lacks a page"
            assert not self.window or (self.window_kv[pages, seen[1]] == self.kv[seen]).all(), "a window reads others"
        self.num_computed += int(frame.lens.sum())
        tokens: list[int] = []
        counts: list[int] = []
        requested: list[int] = []
        for row, num_tokens, num_samples, drafts in plan:
            if not num_samples:
                continue
            counts.append(0)
            for index in range(num_tokens, num_tokens + num_samples):
                if index > num_tokens:  # the draft was right
                    self._write(row, np.array([index - 1]), self.last_token[row])
                self.last_token[row] = self._draw(row, index, index - num_tokens)
                if self.num_logprobs[row] >= 0:
                    requested.append(len(tokens))
                tokens.append(int(self.last_token[row]))
                counts[-1] += 1
                if drafts[index - num_tokens : index - num_tokens + 1] != [self.last_token[row]]:
                    break
        lens: dict[int, list[int]] = {}
        for row, length in frame.items.tolist():
            lens.setdefault(row, []).append(length)
        ends = dict(zip(frame.rows.tolist(), (frame.starts + frame.lens).tolist(), strict=True))
        most = max((len(self.requested[row]) for row in lens), default=0)
        items = [
            scores + [0.0] * (most - len(scores))
            for row in lens
            for scores in item_scores(self._history(row, ends[row]).tolist(), lens[row], self.requested[row])
        ]
        sampled = [row for row, _, num_samples, _ in plan if num_samples]
        known = [num_tokens for _, num_tokens, num_samples, _ in plan if num_samples]
        drafts = [
            self._drafts(row, num_tokens + count, wanted)
            for row, num_tokens, count, wanted in zip(sampled, known, counts, frame.num_wanted.tolist(), strict=False)
        ]
        most_drafts = max(map(len, drafts), default=0)
        if self.next_starts is not None:
            self.next_starts |= {row: end + count - 1 for row, end, count in zip(sampled, known, counts, strict=True)}
            self.drafts |= dict(zip(sampled, drafts, strict=False))
        k = max(self.num_logprobs.values(), default=0) if requested else 0
        target_k = int(frame.prompt_runs["k"].max(initial=0))
        scores: list[tuple[float, list[int]]] = []
        for row, start, num, _ in frame.prompt_runs.tolist():
            for index in range(start, start + num):
                history = self._history(row, index + 1)
                scores.append(prompt_score(history, int(frame.prompt_targets[len(scores)]), target_k))
        return StepResult(
            frame.generation,
            frame.step,
            np.array(tokens, np.int32),
            num_tokens=np.array(counts if len(frame.num_samples) else [], np.int32),
            drafts=np.array([it + [-1] * (most_drafts - len(it)) for it in drafts if most_drafts], np.int32).reshape(
                -1, most_drafts or 1
            ),
            logprob_rows=np.array(requested, np.int32),
            logprobs=-np.array([tokens[index] for index in requested], np.float32),
            top_ids=np.tile(np.arange(k, dtype=np.int32), (len(requested), 1)),
            top_logprobs=np.zeros((len(requested), k), np.float32),
            requested_logprobs=np.zeros((len(requested), 0), np.float32),
            prompt_logprobs=np.array([logprob for logprob, _ in scores], np.float32),
            prompt_top_ids=np.array([ids for _, ids in scores], np.int32).reshape(len(scores), target_k),
            prompt_top_logprobs=np.zeros((len(scores), target_k), np.float32),
            item_logprobs=np.array(items, np.float32).reshape(len(items), most),
        ).encode()

    def _drafts(self, row: int, num_known: int, count: int) -> list[int]:
        """Drafts behind `num_known` tokens, of which four of five are right. They are left in the row's pages."""
        history = [*self._history(row, num_known - 1).tolist(), int(self.last_token[row])]
        for _ in range(count):
            token = next_token(history, self.seeds[row])
            history.append((token + (next_token(history, 98) < VOCAB // 5)) % VOCAB)
        if count > 1:
            self.kv[self._slots(row, np.arange(num_known - 1, num_known + count - 2))] = WRONG_DRAFT
        return history[num_known:]

    def lose(self, frame: StepFrame) -> None:
        """Nothing of what the frame had written is there."""
        for row, start, num, given in zip(
            frame.rows.tolist(), frame.starts.tolist(), frame.lens.tolist(), frame.has_tokens.tolist(), strict=True
        ):
            first = start if given or self.next_starts is None else self.next_starts[row]
            self._write(row, np.arange(first, start + num), -1)

    def _history(self, row: int, num_tokens: int) -> npt.NDArray[np.int64]:
        return self.kv[self._slots(row, np.arange(num_tokens))]

    def _slots(self, row: int, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return self.table[row, positions // self.page_size], positions % self.page_size

    def _write(self, row: int, positions: npt.NDArray[np.int64], tokens: npt.ArrayLike) -> None:
        pages, offsets = self._slots(row, positions)
        self.kv[pages, offsets] = tokens
        if self.window:
            assert self.window_page_of[pages].all(), "a page without a place is written"
            self.window_kv[self.window_page_of[pages], offsets] = tokens

    def _draw(self, row: int, position: int, place: int) -> int:
        token = next_token(self._history(row, position), self.seeds[row])
        if row in self.masks:
            token = first_allowed(token, self.masks[row][place if len(self.masks[row]) > 1 else 0])
        banned = [token_id for token_id, until in self.bans[row] if position < until]
        return first_allowed(token, ~np.isin(np.arange(VOCAB), banned)) if banned else token


@dataclass
class Answer:
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    prefilled: Prefilled | None = None
    aborted: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def cached(self) -> int | None:
        """Prompt tokens from the prefix cache; None before the first token."""
        return None if self.prefilled is None else self.prefilled.num_cached_tokens

    def expected_scores(self) -> list[tuple[float, list[int]]]:
        """What comes before its first token."""
        k = self.sampling.prompt_logprobs
        return [prompt_score(self.prompt[:i], self.prompt[i], k) for i in range(1, len(self.prompt)) if k >= 0]


class Engine:
    """Scheduler and fake worker; checks every frame and every output against the rules.

    Args:
        check_every: after how many calls of the scheduler its pages, rows and queues are looked at, which takes most of
            the time where there are many.
    """

    def __init__(self, limits: SchedulerLimits, check_every: int = 1) -> None:
        self.limits = limits
        self._check_every, self._num_calls = check_every, 0
        self.guides: list[RuleGuide] = []
        self.now = 0.0
        """Seconds; a launch takes a hundredth."""
        self.scheduler = Scheduler(limits, make_guide=self._make_guide, clock=lambda: self.now)
        self.worker = FakeWorker(limits)
        self.answers: dict[int, Answer] = {}
        self.frames: deque[StepFrame] = deque()
        self.results: deque[bytes] = deque()
        self.lengths: dict[int, int] = {}
        self.salts: dict[int, tuple[int, bytes]] = {}
        """Era and salt of the request that wrote a page last."""
        self.num_kept_pages = 0
        """Pages of lost ranks that the next ones went on with."""
        self.num_changes = 0
        self.eras: dict[int, int] = {}
        """By row, how often the weights had changed when its request was admitted."""
        self.is_holding = False
        self.log: list[bytes] = []
        self.sent: list[bytes] = []
        """All results."""

    def add(
        self,
        prompt: list[int],
        *,
        level: int = 0,
        priority: int = 0,
        client: str = "",
        cache_salt: bytes = b"",
        deadline_s: float = 0.0,
        **sampling: object,
    ) -> int:
        request_id = len(self.answers) + 1
        params = msgspec.convert({"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **sampling}, SamplingParams)
        self.answers[request_id] = Answer(prompt, params)
        request = GenerateRequest(
            id=request_id,
            prompt=np.array(prompt, np.int32).tobytes(),
            sampling=params,
            terms=Terms(level=level, priority=priority, client=client, cache_salt=cache_salt, deadline_s=deadline_s),
        )
        for refusal in self.scheduler.add([request]):
            self.answers[request_id].finished = refusal
        self._check()
        return request_id

    def _check(self) -> None:
        self._num_calls += 1
        if self._num_calls % self._check_every == 0:
            self.scheduler.check_integrity()

    def _make_guide(self, request: GenerateRequest) -> RuleGuide | None:
        if request.sampling.grammar is None:
            return None
        self.guides.append(RuleGuide(request.id))
        return self.guides[-1]

    def abort(self, *ids: int) -> None:
        for request_id in ids:
            answer = self.answers.get(request_id)
            if answer is not None and answer.finished is None:
                answer.aborted = True
        self.scheduler.abort(ids)
        self._check()

    def launch(self) -> StepFrame | None:
        frame = self.scheduler.next_step()
        self._check()
        if frame is not None:
            self.now += 0.01
            self._check_frame(frame)
            encoded = frame.encode()
            assert len(encoded) <= self.limits.max_frame_bytes
            self.log.append(encoded)
            self.frames.append(frame)
            self.results.append(self.worker.run(encoded))
            self.sent.append(self.results[-1])
        elif not self.frames:
            self.take(self.scheduler.drain_finished())
            stands = self.scheduler.is_awaiting_masks or not self.scheduler.has_work
            assert stands or self.is_holding, "the engine stands still"
        return frame

    def retire(self) -> StepOutput:
        self.frames.popleft()
        output = self.scheduler.retire(StepResult.decode(self.results.popleft()))
        self._check()
        self.take(output)
        return output

    def change_weights(self, running: Running) -> None:
        """Ranks get other weights, in the midst of what runs or, to finish, after it."""
        begun = {it.id for it in self.scheduler._life.live.values() if it.admission_s is not None}
        if running == "finish":
            self.scheduler.pause_admission()
            self.is_holding = True
            while self.scheduler.has_begun:
                self.step()
                assert {it.id for it in self.scheduler._rows.requests if it is not None} <= begun, "a new one began"
            self.is_holding = False
        while self.frames:
            self.retire()
        self.scheduler.change_weights(recompute=running == "recompute")
        self.num_changes += 1
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_evictable_pages == 0
        assert running == "continue" or stats.num_free_pages == self.limits.num_pages

    def requeue_all(self, limits: SchedulerLimits | None = None, *, keeps_kv: bool = False) -> None:
        """The ranks are lost, with the steps in flight and, unless `keeps_kv`, all they held; the next ones have the
        pools of `limits`."""
        in_flight = {row for frame in self.frames for row in frame.rows.tolist()}
        table = self.scheduler._rows
        named = {int(table.ids[row]) for row in in_flight if table.live[row]}
        lost = self.scheduler.requeue_all(self.scheduler.generation + 1, keeps_kv=keeps_kv)
        assert {request_id for request_id, _ in lost} == named
        for request_id, num_tokens in lost:
            answer = self.answers[request_id]
            assert num_tokens == len(answer.prompt) + len(answer.tokens)
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_free_pages + stats.num_cached_pages) == (0, self.limits.num_pages)
        assert keeps_kv or not stats.num_cached_pages
        self.num_kept_pages += stats.num_cached_pages
        if limits is not None:
            self.limits = limits
            self.scheduler.set_pool(limits.num_pages, limits.num_window_pages, limits.num_states)
        kept = self.worker.kv
        for frame in self.frames:
            self.worker.lose(frame)
        self.worker = FakeWorker(self.limits)
        if keeps_kv:
            self.worker.kv = kept
        else:
            self.salts.clear()
        self.frames.clear()
        self.results.clear()

    def take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        for prefilled in output.prefilled:
            answer = self.answers[prefilled.id]
            assert answer.cached is None, "prefilled twice"
            assert not answer.tokens
            assert answer.finished is None
            answer.prefilled = prefilled
        for run in output.prompt_logprobs:
            answer = self.answers[run.id]
            assert not answer.tokens, "a prompt's score after the first token"
            assert answer.finished is None
            assert run.start == 1 + len(answer.scores), "a prompt token's score is missing, or comes twice"
            logprobs = np.frombuffer(run.logprobs, np.float32).tolist()
            shape = len(logprobs), answer.sampling.prompt_logprobs
            top_ids = np.frombuffer(run.top_ids, np.int32).reshape(shape).tolist()
            assert len(run.top_logprobs) == len(run.top_ids)
            answer.scores += zip(logprobs, top_ids, strict=True)
        ids = np.frombuffer(output.ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
            answer = self.answers[request_id]
            assert answer.finished is None, "a token after the finish"
            assert not answer.aborted, "a token after the abort"
            assert answer.cached is not None, "a token before `prefilled`"
            if not answer.tokens:
                assert answer.scores == answer.expected_scores()
            answer.tokens.append(token)
        for logprob in output.logprobs:
            answer = self.answers[logprob.id]
            answer.logprobs.append(logprob)
            if lens := answer.sampling.item_lens:
                labels = answer.sampling.logprob_token_ids
                scores = itertools.chain(*item_scores(answer.prompt, lens, labels))
                assert logprob.top == [*zip(labels * len(lens), scores, strict=True)]
        for finished in output.finished:
            answer = self.answers[finished.id]
            assert answer.finished is None, "two finishes"
            answer.finished = finished

    def step(self) -> bool:
        """Launches what may be launched, then retires one step. False: nothing was left to do."""
        while self.launch() is not None:
            pass
        self.take(self.scheduler.drain_finished())
        if self.frames:
            self.retire()
        return self.scheduler.has_work

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.step():
                break
        self.check_idle()

    def check_idle(self) -> None:
        assert not self.scheduler.has_work
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_waiting_tokens == stats.num_owned_pages == 0
        assert stats.num_free_pages + stats.num_cached_pages == self.limits.num_pages
        assert stats.num_evictable_pages == stats.num_cached_pages
        assert all(guide.is_closed for guide in self.guides)
        for answer in self.answers.values():
            assert answer.finished is not None, "a request never ended"
            is_late = answer.finished.error_code == "deadline_exceeded"
            is_astray = answer.finished.error_code == "grammar_error"
            if answer.finished.reason is FinishReason.ERROR and not (is_late or is_astray):
                continue
            tokens, reason = reference(answer.prompt, answer.sampling, self.limits)
            if is_late:
                assert answer.tokens == tokens[: len(answer.tokens)]
                continue
            if answer.finished.reason is FinishReason.ABORT:
                assert answer.aborted
                assert answer.tokens == tokens[: len(answer.tokens)]
                continue
            assert (answer.tokens, answer.finished.reason) == (tokens, reason)
            if answer.finished.stop_token_id is not None or answer.sampling.grammar is None:
                assert answer.finished.stop_token_id == (tokens[-1] if reason is FinishReason.STOP else None)
            assert answer.cached is not None
            assert answer.cached < len(answer.prompt)
            assert answer.cached <= len(answer.prompt) - sum(answer.sampling.item_lens), "an item was in the cache"
            assert len(answer.logprobs) == (len(answer.tokens) if answer.sampling.num_logprobs >= 0 else 0)

    def _check_frame(self, frame: StepFrame) -> None:
        limits = self.limits
        assert frame.lens.sum() <= limits.max_num_batched_tokens
        assert len(frame.prompt_targets) <= limits.max_prompt_logprobs
        assert (frame.lens[np.isin(frame.rows, frame.items["row"])] <= limits.max_item_tokens).all()
        check_frame(frame, FrameLimits(limits.max_num_seqs + 1, VOCAB, limits.max_model_len, limits.max_row_tokens))
        assert len(np.unique(frame.rows)) == len(frame.rows) > 0
        assert frame.rows.min() >= 1
        assert frame.rows.max() <= limits.max_num_seqs
        assert set(frame.page_deltas[:, 0]) <= set(frame.rows)
        assert set(frame.params["row"]) <= set(frame.rows)
        given = set(frame.params["row"].tolist())
        for earlier in self.frames:
            assert given.isdisjoint(earlier.rows.tolist()), "a row was given away while a step names it"
        for ids, most in zip(frame.window_pages.T, (limits.num_pages, limits.num_window_pages or 0), strict=True):
            assert len(np.unique(ids)) == len(ids), "a page or a place comes twice"
            assert 1 <= ids.min(initial=1) <= ids.max(initial=1) <= max(most, 1)
        table = self.worker.table.copy()
        for row, index, page in frame.page_deltas.tolist():
            assert 1 <= page <= limits.num_pages
            table[row, index] = page
        written: dict[int, int] = {}
        rows = zip(
            *(part.tolist() for part in (frame.rows, frame.starts, frame.lens, frame.flags, frame.samples_per_row)),
            strict=True,
        )
        for row, start, num, flags, num_samples in rows:
            assert num == num_samples or flags & RowFlag.HAS_TOKENS
            assert num <= limits.prefill_chunk_size or num == num_samples
            self.lengths[row] = start + num
            if row in given:
                self.eras[row] = self.num_changes
            salt = self.eras[row], self.scheduler._rows.request(row).terms.cache_salt
            num_read = -(-start // limits.page_size)
            assert {self.salts[page] for page in table[row, :num_read].tolist()} <= {salt}, (
                "a page of another salt or era"
            )
            for page in set(table[row, start // limits.page_size : -(-(start + num) // limits.page_size)].tolist()):
                assert page != 0, "a position without a page is written"
                self.salts[page] = salt
                assert written.setdefault(page, row) == row, "two rows write one page"
        for step in (*self.frames, frame):
            for row in step.rows.tolist():
                used = -(-self.lengths[row] // limits.page_size)
                for page in table[row, :used].tolist():
                    assert written.get(page, row) == row, "a page is written while another row in flight uses it"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(VOCAB) for i in range(length)]


def prompt_stopping_at(index: int) -> tuple[list[int], int]:
    """A prompt and a seed whose answer has its first EOS at `index`."""
    for seed in range(10_000):
        prompt = prompt_of(6, seed)
        tokens, reason = reference(prompt, SamplingParams(max_tokens=index + 1, seed=seed), LIMITS)
        if len(tokens) == index + 1 and reason is FinishReason.STOP:
            return prompt, seed
    raise AssertionError("no such prompt")
