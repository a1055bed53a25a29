"""A tensor-parallel group without Ray: ranks are threads of this process and the scheduler is called directly."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.distributed import TCPStore

from cluster.messages.engine import (
    Finished,
    GenerateRequest,
    PromptLogprobs,
    SamplingParams,
    SchedulerStats,
    TokenLogprobs,
)
from cluster.requests.engine_client import WholePromptLogprobs
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.request import Guide
from cluster.scheduling.scheduler import Scheduler
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.resolve import HostFacts, resolve
from configs.schema import (
    NO_SPECULATION,
    AttentionConfig,
    EngineConfig,
    KVCacheConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculationConfig,
)
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.protocol import FrameKind, StepFrame, StepResult
from worker.tp_worker import TPWorker

PAGE_SIZE = 16
MAX_CHUNK = 2048
MAX_STATES = 64


@dataclass(frozen=True)
class Limits:
    """What a case varies."""

    num_pages: int = 2048
    chunk: int = 512
    """At most MAX_CHUNK."""
    max_num_seqs: int = 32
    prefix_caching: bool = False
    num_window_pages: int | None = None
    """At most the group's; None where it has none."""
    num_states: int = 8
    """Number of slots for states of recurrent layers in the prefix cache; at most MAX_STATES."""
    window: int = 1
    max_item_tokens: int = 0
    speculation: SpeculationConfig = NO_SPECULATION
    """With no more drafts than the group's."""


@dataclass(frozen=True)
class Answers:
    """What the requests of one call got, by their place in it."""

    tokens: list[list[int]]
    scores: list[WholePromptLogprobs]
    """Log probabilities of prompts; of no token where they were not asked for."""
    stats: SchedulerStats
    logprobs: list[list[TokenLogprobs]]
    ends: list[Finished]


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

    def __init__(
        self,
        model_path: Path,
        tp_size: int,
        num_pages: int,
        max_model_len: int = 1024,
        num_window_pages: int | None = None,
        kv_dtype: Literal["auto", "fp8_e4m3"] = "auto",
        attention: AttentionConfig | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        numerics: Literal["auto", "fast"] = "auto",
        strategy: Literal["shared_memory", "gloo"] = "shared_memory",
        speculation: SpeculationConfig = NO_SPECULATION,
        on_frame: Callable[[StepFrame, Scheduler], None] = lambda _frame, _scheduler: None,
    ) -> None:
        self.max_model_len = max_model_len
        self._on_frame = on_frame
        self.model: ModelConfig = read_model_config(model_path)
        config = EngineConfig(
            model=str(model_path),
            tensor_parallel_size=tp_size,
            device="cpu",
            dtype=dtype,
            numerics=numerics,
            attention=attention or AttentionConfig(),
            kv_cache=KVCacheConfig(dtype=kv_dtype),
            parallel=ParallelConfig(threads_per_rank=1),
            scheduler=SchedulerConfig(max_num_batched_tokens=MAX_CHUNK),
            speculation=speculation,
            server=ServerConfig(max_logprobs=min(20, self.model.vocab_size)),
        )
        self.model = with_draft_head(self.model, config)
        resolved = resolve(config, self.model, HostFacts(num_cores=2, num_gpus=0)).config
        plan = ShardPlan.create(self.model, tp_size, exact=resolved.is_exact)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.frames: list[queue.Queue[bytes]] = [queue.Queue() for _ in range(tp_size)]
        self.results: queue.Queue[bytes | BaseException] = queue.Queue()
        self.closing = threading.Event()
        self.workers: dict[int, TPWorker] = {}
        """By rank, once it has a KV pool."""

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
                        strategy=strategy,
                        timeout_s=120.0,
                    )
                worker = TPWorker(config=resolved, model=self.model, model_path=model_path, plan=plan, group=group)
                worker.shard.load()
                worker.allocate(num_pages, max_model_len, num_window_pages, MAX_STATES)
                self.workers[rank] = worker
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
            self.results.put(answer)  # for the tests that share the group: they would wait for a result in vain
            raise answer
        return StepResult.decode(answer)

    def close(self) -> None:
        self.closing.set()
        self.send(StepFrame(1, 1, kind=FrameKind.CLOSE))
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank did not leave its loop"

    def generate(
        self,
        requests: Sequence[tuple[list[int], SamplingParams]],
        limits: Limits,
        *,
        at_once: bool,
        make_guide: Callable[[GenerateRequest], Guide | None] = lambda _request: None,
    ) -> Answers:
        """The answers to (prompt, sampling) each, sent at once or one after the other. The scheduler, and with it the
        prefix cache, lives as long as the call."""
        scheduler = Scheduler(
            SchedulerLimits(
                num_pages=limits.num_pages,
                page_size=PAGE_SIZE,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=max(limits.chunk, limits.max_num_seqs),
                prefill_chunk_size=limits.chunk,
                max_model_len=self.max_model_len,
                vocab_size=self.model.vocab_size,
                max_num_queued_requests=10_000,
                max_num_queued_tokens=10_000_000,
                steps_in_flight=2,
                enable_prefix_caching=limits.prefix_caching,
                eos_token_ids=self.model.eos_token_ids,
                num_window_pages=limits.num_window_pages,
                num_states=limits.num_states if self.model.has_states else None,
                window=limits.window,
                max_item_tokens=limits.max_item_tokens,
                speculation=limits.speculation,
            ),
            make_guide=make_guide,
        )
        tokens: list[list[int]] = [[] for _ in requests]
        runs: list[list[PromptLogprobs]] = [[] for _ in requests]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
        ends: dict[int, Finished] = {}
        waves = [list(enumerate(requests))] if at_once else [[item] for item in enumerate(requests)]
        for wave in waves:
            for index, (prompt, sampling) in wave:
                encoded = np.array(prompt, np.int32).tobytes()
                assert not scheduler.add([GenerateRequest(id=index + 1, prompt=encoded, sampling=sampling)])
            while scheduler.has_work or scheduler.num_in_flight:
                while (frame := scheduler.next_step()) is not None:
                    self._on_frame(frame, scheduler)
                    self.send(frame)
                if not scheduler.num_in_flight:
                    # A guide that is complete ends its request between steps.
                    ends |= {end.id: end for end in getattr(scheduler.drain_finished(), "finished", ())}
                    continue
                output = scheduler.retire(self.result())
                for run in output.prompt_logprobs:
                    runs[run.id - 1].append(run)
                for logprob in output.logprobs:
                    logprobs[logprob.id - 1].append(logprob)
                ends |= {end.id: end for end in output.finished}
                ids = np.frombuffer(output.ids, np.int64)
                for request_id, token in zip(ids, np.frombuffer(output.tokens, np.int32), strict=True):
                    tokens[int(request_id) - 1].append(int(token))
        scheduler.check_integrity()
        self.send(StepFrame(1, scheduler.last_step + 1, kind=FrameKind.CLOSE))
        scores = [
            WholePromptLogprobs.join(of_one, max(sampling.prompt_logprobs, 0))
            for of_one, (_, sampling) in zip(runs, requests, strict=True)
        ]
        return Answers(tokens, scores, scheduler.stats(), logprobs, [ends[i + 1] for i in range(len(requests))])


def assert_scores_equal(scores: WholePromptLogprobs, prompt: list[int], expected: torch.Tensor) -> None:
    """Checks a prompt's scores.

    Args:
        expected: [len(prompt) - 1, vocab_size] fp32: log probabilities at every position but the last.
    """
    own = expected.gather(1, torch.tensor(prompt[1:], dtype=torch.int64).view(-1, 1)).squeeze(1)
    torch.testing.assert_close(torch.from_numpy(scores.logprobs.copy()), own, atol=1e-4, rtol=0)
    top, ids = torch.from_numpy(scores.top_logprobs.copy()), torch.from_numpy(scores.top_ids.astype(np.int64))
    torch.testing.assert_close(top, expected.topk(top.shape[1]).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(top, expected.gather(1, ids), atol=1e-4, rtol=0)
