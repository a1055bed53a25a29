"""An engine on GPUs without Ray: every rank a process of its own, the scheduler called directly.

The same ranks, frames and scheduler as behind Ray; used by the tests of the GPU suite.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing as mp
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.messages.engine import FinishReason, GenerateRequest, SamplingParams, SchedulerStats
from cluster.scheduling.limits import SchedulerLimits, max_item_tokens
from cluster.scheduling.scheduler import Scheduler
from configs.kv_pages import PoolRule, pool_bytes
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.resolve import HostFacts, resolve
from configs.schema import EngineConfig
from tests.conftest import SHARE_GPUS
from worker.device.card import node_card
from worker.protocol import FrameKind, StepFrame, StepResult

# Longer than a start with a cold Triton cache takes, shorter than what a step runner is given for a test.
_ANSWER_TIMEOUT_S = 90.0
_LEAVE_TIMEOUT_S = 20.0


def write_shape(path: Path, model: str = "qwen3-0.6b") -> Path:
    """Makes of the directory `path` a model of a shape in benchmarks/models with four layers, for random weights;
    returns it."""
    source = Path(__file__).resolve().parents[2] / f"benchmarks/models/{model}/config.json"
    config = json.loads(source.read_text())
    config["num_hidden_layers"] = 4
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    return path


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    """For each token, the log probabilities of the likeliest ids, where they were asked for."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """Likewise, in the order they came."""
    logprobs: list[float] = field(default_factory=list)
    """For each token, where they were asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """For each prompt token but the first, where they were asked for."""
    reason: FinishReason | None = None


def _must_share_gpus(size: int) -> bool:
    """Whether so many ranks have to share GPUs; skips the test where they may not."""
    import torch

    found = torch.cuda.device_count()
    if found < size and SHARE_GPUS not in os.environ:
        pytest.skip(f"needs {size} CUDA devices, found {found}; {SHARE_GPUS}=1 lets ranks share them")
    return found < size


class GpuEngine:
    """Ranks on GPUs 0 to tensor_parallel_size - 1; on fewer GPUs, where SHARE_GPUS is set, in turns.

    Args:
        model_path: a directory; weights are random with `load_format: dummy` in `changes`.
        num_pages: of the KV pool.
        eager_drafts: a draft head's passes are not to be captured.
        changes: settings of EngineConfig.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        num_pages: int,
        max_model_len: int = 1024,
        eager_drafts: bool = False,
        **changes: Any,
    ) -> None:
        config = EngineConfig(**{"model": str(model_path), "device": "cuda", **changes})
        self.model: ModelConfig = with_draft_head(read_model_config(model_path), config)
        size = config.tensor_parallel_size
        if _must_share_gpus(size):
            config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"all_reduce": "nccl"})})
        self.config = resolve(config, self.model, HostFacts(8 * size, size, node_card())).config
        self._num_pages, self._max_model_len = num_pages, max_model_len
        self._rule = PoolRule.of(self.config, self.model)
        context = mp.get_context("spawn")
        self._results: Any = context.Queue()
        self._frames: list[Any] = [context.Queue() for _ in range(size)]
        self._controls = [context.Pipe() for _ in range(size)]
        self._store = _store(None)
        pages = (num_pages, max_model_len)
        arguments = (size, self.config, self.model, model_path, self._store.port, *pages, eager_drafts)
        self._processes = [
            context.Process(
                target=_rank_main,
                args=(rank, *arguments, self._frames[rank], self._results, self._controls[rank][1]),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self._processes:
            process.start()
        self._stopped = 0
        for _ in self._processes:
            assert self._answer() == "ready"
        self.scheduler = self._new_scheduler(generation=1)
        self._generation = 1
        self.answers: dict[int, Answer] = {}

    def add(self, request_id: int, prompt: Iterable[int], **sampling: Any) -> None:
        """Queues a request; `sampling` are SamplingParams."""
        self.answers[request_id] = Answer()
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        encoded = np.array(list(prompt), np.int32).tobytes()
        assert not self.scheduler.add([GenerateRequest(id=request_id, prompt=encoded, sampling=params)])

    def step(self) -> None:
        """Launches what may be launched and retires one step."""
        self._take(self.scheduler.drain_finished())
        while (frame := self.scheduler.next_step()) is not None:
            for frames in self._frames:
                frames.put(frame.encode())
        if self.scheduler.num_in_flight:
            self._take(self.scheduler.retire(StepResult.decode(self._answer())))
        self._take(self.scheduler.drain_finished())

    def run(self) -> dict[int, Answer]:
        """Steps until nothing is left; the answers of all requests since the last call."""
        while self.scheduler.has_work or self.scheduler.num_in_flight:
            self.step()
        answers, self.answers = self.answers, {}
        return answers

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Answer]:
        """The answers to prompts sent at once."""
        for index, prompt in enumerate(prompts):
            self.add(index + 1, prompt, **sampling)
        answers = self.run()
        return [answers[index + 1] for index in range(len(prompts))]

    def restart_loops(self) -> list[int]:
        """Ends every rank's step loop and starts it again with a new scheduler; bytes in use on each device."""
        self._send_close()
        free = [self._answer() for _ in self._processes]
        self._generation += 1
        self.scheduler = self._new_scheduler(self._generation)
        return sorted(free)

    def stage(self, revision: str | None, *, on_host: bool) -> None:
        """Begins to read the random weights of `revision` on every rank, beside the steps; `take_staged` awaits it.

        Args:
            on_host: to the host's memory, whatever is free on the devices.
        """
        for here, _ in self._controls:
            here.send((revision, on_host))

    def take_staged(self, *, recompute: bool = False) -> float:
        """Has every rank serve with them, between two steps; returns for how many seconds no step ran."""
        for here, _ in self._controls:
            assert here.poll(_ANSWER_TIMEOUT_S), "a rank does not get done with its weights"
            assert here.recv() is True
        while self.scheduler.num_in_flight:
            self._take(self.scheduler.retire(StepResult.decode(self._answer())))
        began = time.monotonic()
        self.scheduler.change_weights(recompute=recompute)
        for here, _ in self._controls:
            here.send(None)
        for here, _ in self._controls:
            assert here.poll(_ANSWER_TIMEOUT_S), "a rank does not exchange its weights"
            assert here.recv() is None
        return time.monotonic() - began

    def stats(self) -> SchedulerStats:
        self.scheduler.check_integrity()
        return self.scheduler.stats()

    def close(self) -> None:
        """Ends the processes. Raises AssertionError if one of them would not end."""
        for frames in self._frames:
            frames.put(None)
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
        if stuck:
            self._show_stacks()
        assert not stuck, f"ranks {stuck} did not end within {_LEAVE_TIMEOUT_S:g} s"

    def __enter__(self) -> GpuEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_close(self) -> None:
        last = StepFrame(self.scheduler.generation, self.scheduler.last_step + 1, kind=FrameKind.CLOSE)
        for frames in self._frames:
            frames.put(last.encode())

    def _new_scheduler(self, generation: int) -> Scheduler:
        limits = SchedulerLimits(
            num_pages=self._num_pages,
            page_size=self.config.kv_cache.page_size,
            max_model_len=self._max_model_len,
            max_item_tokens=max_item_tokens(self.config, self.model),
            vocab_size=self.model.vocab_size,
            enable_prefix_caching=self.config.kv_cache.enable_prefix_caching,
            eos_token_ids=self.model.eos_token_ids,
            num_window_pages=self._rule.num_window_pages(self._num_pages),
            window=1 if self._rule.window is None else self._rule.window.window,
            num_states=self._rule.num_states(self._num_pages),
            speculation=self.config.speculation,
            **self.config.scheduler.model_dump(),
        )
        return Scheduler(limits, generation)

    def _answer(self) -> Any:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while True:
            try:
                answer = self._results.get(timeout=1.0)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
                if dead or time.monotonic() > deadline:
                    self._show_stacks()
                    raise AssertionError(f"no answer; ranks {dead} have died") from None
                continue
            if isinstance(answer, BaseException):
                for process in self._processes:  # the others may wait for it on their GPUs
                    process.kill()
                raise answer
            return answer

    def _show_stacks(self) -> None:
        """Lets every rank that lives write to stderr what its threads do, and ends it."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        for process in self._processes:
            process.kill()

    def _take(self, output: Any) -> None:
        if output is None:
            return
        ids = np.frombuffer(output.ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
            self.answers[request_id].tokens.append(token)
        for run in output.prompt_logprobs:
            self.answers[run.id].prompt_logprobs += np.frombuffer(run.logprobs, np.float32).tolist()
        for entry in output.logprobs:
            self.answers[entry.id].logprobs.append(entry.logprob)
            self.answers[entry.id].top_logprobs.append([logprob for _, logprob in entry.top])
            self.answers[entry.id].top.append(dict(entry.top))
        for finished in output.finished:
            self.answers[finished.id].reason = finished.reason


class _Frames:
    """A FrameSource over a queue of another process."""

    def __init__(self, frames: Any) -> None:
        self._frames = frames
        self._parent = os.getppid()

    def recv(self, timeout_s: float) -> bytes:
        while (frame := self.poll(1.0)) is None:
            if os.getppid() != self._parent:  # a killed test leaves no ranks behind
                raise SystemExit
        return frame

    def poll(self, timeout_s: float = 0.0) -> bytes | None:
        try:
            frame = self._frames.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return None
        if frame is None:
            raise SystemExit
        return bytes(frame)


def _control(worker: Any, model: ModelConfig, model_path: Path, controls: Any) -> None:
    """Does beside the steps what `GpuEngine.stage` and `take_staged` ask a rank for, as calls of an actor do."""
    from unittest.mock import patch

    while True:
        try:
            asked = controls.recv()
            if asked is None:
                controls.send(worker.shard.take_staged())
                worker.shard.drop_staged()
                continue
            revision, on_host = asked
            with patch("worker.weights.host_memory._free_bytes", return_value=0 if on_host else 1 << 50):
                controls.send(worker.shard.stage(model, model_path, revision) is on_host)
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - handed to the test's own process, which sees that it is no answer
            controls.send(repr(error))


def _store(port: int | None) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False)


def _rank_main(
    rank: int,
    size: int,
    config: EngineConfig,
    model: ModelConfig,
    model_path: Path,
    port: int,
    num_pages: int,
    max_model_len: int,
    eager_drafts: bool,
    frames: Any,
    results: Any,
    controls: Any,
) -> None:
    from parallel.environment import RANK_ENVIRONMENT

    os.environ.update(RANK_ENVIRONMENT)
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        # NCCL refuses two ranks on one GPU of a host, so each says that its host is another, and they talk over TCP.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")

    from attention.backend import AttentionBackend
    from parallel.collectives.group import TensorParallelGroup
    from parallel.plan import ShardPlan
    from worker.tp_worker import TPWorker, peer_sizes

    AttentionBackend.plans_on_host = eager_drafts  # of those that do not plan in any case
    faulthandler.register(signal.SIGUSR1)
    try:
        device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(device)
        plan = ShardPlan.create(model, size, exact=config.is_exact)
        group = TensorParallelGroup.create(
            rank=rank,
            size=size,
            store=None if size == 1 else _store(port),
            device=device,
            strategy=config.parallel.all_reduce,  # type: ignore[arg-type]  # resolved, so never auto
            timeout_s=120.0,
            sizes=peer_sizes(config, model, plan),
        )
        worker = TPWorker(config=config, model=model, model_path=model_path, plan=plan, group=group)
        worker.shard.load()
        expected = worker.profile()
        free = torch.cuda.mem_get_info(device)[0]
        rule = PoolRule.of(config, model)
        worker.allocate(num_pages, max_model_len, rule.num_window_pages(num_pages), rule.num_states(num_pages))
        taken = free - torch.cuda.mem_get_info(device)[0]
        own = expected.activation_bytes + expected.graph_bytes + expected.table_bytes
        if num_gpus >= size:  # else others take from the same device
            pools = pool_bytes(num_pages, worker.kv_page_bytes(), rule)
            assert taken <= own + pools, f"{taken} bytes taken, {expected} said"
        threading.Thread(target=_control, args=(worker, model, model_path, controls), daemon=True).start()
        results.put("ready")
        while True:  # one run of the loop for each scheduler
            worker.run(_Frames(frames), results.put if rank == 0 else None)
            torch.cuda.synchronize(device)
            results.put(torch.cuda.memory_allocated(device))
    except SystemExit:
        group.barrier()
        # In this order: the end of the group's communicator waits for every graph that holds it.
        worker.close()
        group.close()
    except BaseException as error:  # noqa: BLE001 - handed to the test's own process, which raises it
        results.put(error)
        results.close()
        results.join_thread()
        os._exit(1)  # the error's traceback keeps the graphs
