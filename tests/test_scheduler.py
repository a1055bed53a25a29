"""The scheduler against a fake model whose next token is a function of all the tokens it reads back from its KV pool.

The fake worker keeps (page, offset) -> token and a page table built from frames only, so a stale page, a wrong start or
a row reused too early gives a wrong token.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from cluster.messages import Finished, FinishReason, GenerateRequest, SamplingParams, StepOutput
from cluster.scheduling.scheduler import Scheduler, SchedulerLimits
from configs.errors import ConfigError, EngineError
from worker.protocol import RowFlag, StepFrame, StepResult

EOS = 7
VOCAB = 40
LIMITS = SchedulerLimits(
    num_pages=64,
    page_size=4,
    max_num_seqs=8,
    max_num_batched_tokens=16,
    prefill_chunk_size=8,
    max_model_len=64,
    max_num_queued_requests=100,
    max_num_queued_tokens=10_000,
    steps_in_flight=2,
    enable_prefix_caching=True,
    eos_token_ids=(EOS,),
)


def next_token(tokens: list[int] | np.ndarray, seed: int) -> int:
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), seed) % VOCAB


def reference(prompt: list[int], sampling: SamplingParams, limits: SchedulerLimits) -> tuple[list[int], FinishReason]:
    """What a request must get, with nothing else in the engine."""
    tokens = list(prompt)
    while True:
        token = next_token(tokens, sampling.seed)
        tokens.append(token)
        answer = tokens[len(prompt) :]
        if (token in limits.eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return answer, FinishReason.STOP
        if len(answer) == sampling.max_tokens or len(tokens) == limits.max_model_len:
            return answer, FinishReason.LENGTH


class FakeWorker:
    """Runs frames one after the other on an array of pages."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.page_size = limits.page_size
        self.kv = np.full((limits.num_pages + 1, limits.page_size), -1, np.int64)
        self.table = np.zeros((limits.max_num_seqs + 1, limits.max_pages_per_row), np.int64)
        self.last_token = np.zeros(limits.max_num_seqs + 1, np.int64)
        self.seeds: dict[int, int] = {}
        self.num_computed = 0

    def run(self, encoded: bytes) -> bytes:
        frame = StepFrame.decode(encoded)
        for row, index, page in frame.page_deltas.tolist():
            self.table[row, index] = page
        for record in frame.params:
            self.seeds[int(record["row"])] = int(record["seed"])
        plan = []
        offset = 0
        for row, start, num, flags in zip(
            frame.rows.tolist(), frame.starts.tolist(), frame.lens.tolist(), frame.flags.tolist(), strict=True
        ):
            inputs = self.last_token[[row]]
            if flags & RowFlag.HAS_TOKENS:
                inputs = frame.token_ids[offset : offset + num]
                offset += num
            positions = np.arange(start, start + num)
            self.kv[self.table[row, positions // self.page_size], positions % self.page_size] = inputs
            plan.append((row, start + num, flags))
        assert offset == len(frame.token_ids)
        self.num_computed += int(frame.lens.sum())
        tokens = []
        for row, num_tokens, flags in plan:
            if flags & RowFlag.SAMPLE:
                positions = np.arange(num_tokens)
                history = self.kv[self.table[row, positions // self.page_size], positions % self.page_size]
                self.last_token[row] = next_token(history, self.seeds[row])
                tokens.append(self.last_token[row])
        return StepResult(frame.generation, frame.step, np.array(tokens, np.int32)).encode()


@dataclass
class Answer:
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    cached: int | None = None
    aborted: bool = False


class Engine:
    """Scheduler and fake worker; checks every frame and every output against the rules."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.worker = FakeWorker(limits)
        self.answers: dict[int, Answer] = {}
        self.frames: deque[StepFrame] = deque()
        self.results: deque[bytes] = deque()
        self.lengths: dict[int, int] = {}
        self.log: list[bytes] = []

    def add(self, prompt: list[int], **sampling: object) -> int:
        request_id = len(self.answers) + 1
        params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
        self.answers[request_id] = Answer(prompt, params)
        request = GenerateRequest(id=request_id, prompt=np.array(prompt, np.int32).tobytes(), sampling=params)
        refusal = self.scheduler.add(request)
        if refusal is not None:
            self.answers[request_id].finished = refusal
        self.scheduler.check_integrity()
        return request_id

    def abort(self, *ids: int) -> None:
        for request_id in ids:
            answer = self.answers.get(request_id)
            if answer is not None and answer.finished is None:
                answer.aborted = True
        self.scheduler.abort(ids)
        self.scheduler.check_integrity()

    def launch(self) -> StepFrame | None:
        frame = self.scheduler.next_step()
        self.scheduler.check_integrity()
        if frame is not None:
            self._check_frame(frame)
            encoded = frame.encode()
            assert len(encoded) <= self.limits.max_frame_bytes
            self.log.append(encoded)
            self.frames.append(frame)
            self.results.append(self.worker.run(encoded))
        return frame

    def retire(self) -> StepOutput:
        self.frames.popleft()
        output = self.scheduler.retire(StepResult.decode(self.results.popleft()))
        self.scheduler.check_integrity()
        self.take(output)
        return output

    def take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        for request_id, cached in output.prefilled:
            answer = self.answers[request_id]
            assert answer.cached is None and not answer.tokens and answer.finished is None
            answer.cached = cached
        ids = np.frombuffer(output.ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
            answer = self.answers[request_id]
            assert answer.finished is None, "a token after the finish"
            assert not answer.aborted, "a token after the abort"
            assert answer.cached is not None, "a token before `prefilled`"
            answer.tokens.append(token)
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
        for answer in self.answers.values():
            assert answer.finished is not None, "a request never ended"
            if answer.finished.reason is FinishReason.ERROR:
                continue
            tokens, reason = reference(answer.prompt, answer.sampling, self.limits)
            if answer.finished.reason is FinishReason.ABORT:
                assert answer.aborted
                assert answer.tokens == tokens[: len(answer.tokens)]
                continue
            assert (answer.tokens, answer.finished.reason) == (tokens, reason)
            assert answer.finished.stop_token_id == (tokens[-1] if reason is FinishReason.STOP else None)
            assert answer.cached is not None and answer.cached < len(answer.prompt)

    def _check_frame(self, frame: StepFrame) -> None:
        limits = self.limits
        assert frame.lens.sum() <= limits.max_num_batched_tokens
        assert len(np.unique(frame.rows)) == len(frame.rows) > 0
        assert 1 <= frame.rows.min() and frame.rows.max() <= limits.max_num_seqs
        assert set(frame.page_deltas[:, 0]) <= set(frame.rows)
        assert set(frame.params["row"]) <= set(frame.rows)
        given = set(frame.params["row"].tolist())
        for earlier in self.frames:
            assert given.isdisjoint(earlier.rows.tolist()), "a row was given away while a step names it"
        table = self.worker.table.copy()
        for row, index, page in frame.page_deltas.tolist():
            assert 1 <= page <= limits.num_pages
            table[row, index] = page
        written: dict[int, int] = {}
        for row, start, num, flags in zip(
            frame.rows.tolist(), frame.starts.tolist(), frame.lens.tolist(), frame.flags.tolist(), strict=True
        ):
            assert num == 1 or flags & RowFlag.HAS_TOKENS
            assert num <= limits.prefill_chunk_size or num == 1
            self.lengths[row] = start + num
            for page in set(table[row, start // limits.page_size : -(-(start + num) // limits.page_size)].tolist()):
                assert page != 0 and written.setdefault(page, row) == row, "two rows write one page"
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


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_one_request_gets_the_reference_answer(steps_in_flight: int) -> None:
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight))
    engine.add(prompt_of(21), max_tokens=9)
    engine.run()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_every_answer_equals_the_reference_under_random_load(seed: int, steps_in_flight: int) -> None:
    run_random_load(seed, steps_in_flight)


def run_random_load(seed: int, steps_in_flight: int) -> Engine:
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    max_model_len = rng.choice([24, 48])
    limits = replace(
        LIMITS,
        page_size=page_size,
        num_pages=rng.choice([1, 2, 4]) * max_model_len // page_size,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 40]),
        prefill_chunk_size=rng.choice([1, 5, 8, 40]),
        max_model_len=max_model_len,
        steps_in_flight=steps_in_flight,
        enable_prefix_caching=rng.random() < 0.8,
    )
    engine = Engine(limits)
    stems = [prompt_of(rng.randrange(1, max_model_len - 2), stem) for stem in range(3)]
    for _ in range(150):
        event = rng.random()
        if event < 0.25:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, len(stem) + 1)] + prompt_of(rng.randrange(3), rng.randrange(4))
            for _ in range(rng.choice([1, 1, 3])):
                engine.add(
                    prompt[: max_model_len - 1],
                    max_tokens=rng.choice([1, 2, 3, 10, 100]),
                    ignore_eos=rng.random() < 0.5,
                    stop_token_ids=rng.choice([(), (), (3, 5)]),
                    seed=rng.randrange(2),
                )
        elif event < 0.32 and engine.answers:
            engine.abort(*rng.choices(range(1, len(engine.answers) + 3), k=rng.randrange(1, 4)))
        elif event < 0.35:
            engine.take(engine.scheduler.drain_finished())
        elif event < 0.7:
            engine.launch()
        elif engine.frames:
            engine.retire()
    engine.run()
    return engine
