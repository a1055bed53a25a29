"""The answers: greedy tokens of SmolLM2 equal those of transformers in fp32, however they are computed.

Ranks are threads of this process and the scheduler is called directly: the same code as behind Ray, without Ray.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore

from cluster.messages import GenerateRequest, SamplingParams
from cluster.scheduling.scheduler import Scheduler, SchedulerLimits
from configs.model_config import ModelConfig, read_model_config
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig
from parallel.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.protocol import FrameKind, StepFrame, StepResult
from worker.tp_worker import TPWorker

PAGE_SIZE = 16
NUM_NEW_TOKENS = 64
MAX_MODEL_LEN = 1024


@dataclass(frozen=True)
class Limits:
    """What a case varies."""

    num_pages: int = 2048
    chunk: int = 512
    max_num_seqs: int = 32
    prefix_caching: bool = False


class FrameQueue:
    """A FrameSource over a queue."""

    def __init__(self, frames: queue.Queue[bytes]) -> None:
        self._frames = frames

    def recv(self, timeout_s: float) -> bytes:
        return self._frames.get()

    def poll(self) -> bytes | None:
        try:
            return self._frames.get_nowait()
        except queue.Empty:
            return None


class LocalGroup:
    """Ranks as threads: frames go in through queues, rank 0's results come out of one."""

    def __init__(self, model_path: Path, tp_size: int, num_pages: int) -> None:
        self.model: ModelConfig = read_model_config(model_path)
        config = EngineConfig(model=str(model_path), tensor_parallel_size=tp_size, device="cpu", dtype="float32")
        resolved = resolve(config, self.model, HostFacts(num_cores=2, num_gpus=0)).config
        plan = ShardPlan.create(self.model, tp_size)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.frames: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(tp_size)]
        self.results: queue.Queue[bytes | BaseException] = queue.Queue()
        self.closing = threading.Event()

        def rank_main(rank: int) -> None:
            try:
                if tp_size == 1:
                    group = TensorParallelGroup.single()
                else:
                    group = TensorParallelGroup.create(
                        rank=rank,
                        size=tp_size,
                        store=TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False),
                        device=torch.device("cpu"),
                        strategy="shared_memory",
                        timeout_s=120.0,
                    )
                torch.set_num_threads(2 if tp_size == 1 else 1)
                worker = TPWorker(config=resolved, model=self.model, model_path=model_path, plan=plan, group=group)
                worker.load()
                worker.allocate(num_pages, MAX_MODEL_LEN)
                while not self.closing.is_set():  # one run of the loop for each scheduler
                    worker.run(FrameQueue(self.frames[rank]), self.results.put if rank == 0 else None)
                worker.close()
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread, which raises it
                self.results.put(error)

        self.threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(tp_size)]
        for thread in self.threads:
            thread.start()
        self._store = store

    def send(self, frame: StepFrame) -> None:
        for frames in self.frames:
            frames.put(frame.encode())

    def result(self) -> StepResult:
        answer = self.results.get(timeout=300)
        if isinstance(answer, BaseException):
            raise answer
        return StepResult.decode(answer)

    def close(self) -> None:
        self.closing.set()
        self.send(StepFrame(1, 1, kind=FrameKind.CLOSE))
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank did not leave its loop"

    def generate(self, prompts: list[list[int]], limits: Limits, *, at_once: bool) -> tuple[list[list[int]], Any]:
        """Greedy tokens of every prompt, and the scheduler's figures; the scheduler lives as long as the call."""
        scheduler = Scheduler(
            SchedulerLimits(
                num_pages=limits.num_pages,
                page_size=PAGE_SIZE,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=max(limits.chunk, limits.max_num_seqs),
                prefill_chunk_size=limits.chunk,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=self.model.vocab_size,
                max_num_queued_requests=10_000,
                max_num_queued_tokens=10_000_000,
                steps_in_flight=2,
                enable_prefix_caching=limits.prefix_caching,
                eos_token_ids=self.model.eos_token_ids,
            )
        )
        tokens: dict[int, list[int]] = {}
        waves = [list(enumerate(prompts))] if at_once else [[item] for item in enumerate(prompts)]
        for wave in waves:
            for index, prompt in wave:
                tokens[index] = []
                sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
                request = GenerateRequest(id=index + 1, prompt=np.array(prompt, np.int32).tobytes(), sampling=sampling)
                assert scheduler.add(request) is None
            while scheduler.has_work or scheduler.num_in_flight:
                while (frame := scheduler.next_step()) is not None:
                    self.send(frame)
                output = scheduler.retire(self.result())
                ids = np.frombuffer(output.ids, np.int64)
                for request_id, token in zip(ids, np.frombuffer(output.tokens, np.int32), strict=True):
                    tokens[int(request_id) - 1].append(int(token))
        scheduler.check_integrity()
        self.send(StepFrame(1, scheduler.last_step + 1, kind=FrameKind.CLOSE))
        return [tokens[index] for index in range(len(prompts))], scheduler.stats()


def make_prompts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    """Random tokens of the given lengths, none of them special; the same at every run."""
    generator = np.random.default_rng(7)
    return [generator.integers(100, vocab_size, length).tolist() for length in lengths]


SHORT_LENGTHS = [1, 2, 17, 40, 130, 300]
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 20, 24, 31, 32, 33, 40, 47, 48, 55, 64, 65, 80]
LENGTHS += [96, 100, 127, 128, 129, 150, 200, 255, 300, 400, 513, 600]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Callable[[list[list[int]]], list[list[int]]]:
    """transformers' greedy tokens in fp32, one prompt at a time."""
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    )
    known: dict[tuple[int, ...], list[int]] = {}

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        for prompt in prompts:
            if tuple(prompt) not in known:
                ids = torch.tensor([prompt])
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NUM_NEW_TOKENS,
                    min_new_tokens=None,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
                known[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return [known[tuple(prompt)] for prompt in prompts]

    return generate


@pytest.fixture
def group(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LocalGroup]:
    group = LocalGroup(smollm2_path, request.param, Limits().num_pages)
    yield group
    group.close()


@pytest.mark.parametrize("group", [1, 2, 3], indirect=True, ids=lambda size: f"tp{size}")
def test_batched_answers_equal_transformers(group: LocalGroup, reference: Any) -> None:
    prompts = make_prompts(SHORT_LENGTHS, group.model.vocab_size)
    tokens, _ = group.generate(prompts, Limits(chunk=64), at_once=True)
    assert tokens == reference(prompts)


@pytest.mark.parametrize("group", [5, 9], indirect=True, ids=lambda size: f"tp{size}")
def test_more_ranks_than_kv_heads_give_the_same_answers(group: LocalGroup, reference: Any) -> None:
    prompts = make_prompts(SHORT_LENGTHS, group.model.vocab_size)[:3]
    tokens, _ = group.generate(prompts, Limits(), at_once=True)
    assert tokens == reference(prompts)


@pytest.mark.parametrize("group", [2], indirect=True, ids=lambda size: f"tp{size}")
def test_preemption_and_prefix_hits_change_no_answer(group: LocalGroup, reference: Any) -> None:
    prompts = make_prompts(SHORT_LENGTHS, group.model.vocab_size)
    # Six requests end at 874 tokens in 58 pages: 40 pages force some of them out on the way.
    tokens, stats = group.generate(prompts, Limits(num_pages=40), at_once=True)
    assert stats.total_preemptions > 0
    assert tokens == reference(prompts)
    tokens, stats = group.generate([*prompts, *prompts], Limits(prefix_caching=True), at_once=False)
    assert stats.total_prefix_hit_tokens > 0
    assert tokens == reference([*prompts, *prompts])


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 9], indirect=True, ids=lambda size: f"tp{size}")
def test_thirty_two_answers_equal_transformers_whatever_the_way(group: LocalGroup, reference: Any) -> None:
    prompts = make_prompts(LENGTHS, group.model.vocab_size)
    expected = reference(prompts)
    for chunk in (16, 512):
        tokens, _ = group.generate(prompts, Limits(chunk=chunk), at_once=True)
        assert tokens == expected, f"all at once, chunks of {chunk}"
    # Each alone; the second time its prompt is in the prefix cache, the first time nothing like it is.
    tokens, stats = group.generate([*prompts, *prompts], Limits(prefix_caching=True), at_once=False)
    assert stats.total_prefix_hit_tokens > 0
    assert tokens == [*expected, *expected], "alone, then again from the prefix cache"
    tokens, stats = group.generate(prompts, Limits(num_pages=150), at_once=True)
    assert stats.total_preemptions > 0
    assert tokens == expected, "after preemption"
