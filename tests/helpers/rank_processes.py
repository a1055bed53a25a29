"""Ranks of one node for the tests, each a process that lives through several groups.

What a rank is asked is a function of a test module, because it travels to a spawned process.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from parallel.collectives.group import Strategy, TensorParallelGroup
from parallel.environment import RANK_ENVIRONMENT


@dataclass(frozen=True)
class Job:
    """One group, and what its ranks do in it."""

    size: int
    strategy: Strategy
    port: int
    generation: int
    body: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)


def serve(rank: int, pipe: Connection) -> None:
    """A rank's process: answers each job with (whether it went well, its result or the traceback)."""
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        try:
            pipe.send((True, _enter(rank, job)))
        except BaseException:  # noqa: BLE001 - told to the test
            pipe.send((False, traceback.format_exc()))


def _enter(rank: int, job: Job) -> Any:
    device = "cpu" if job.strategy == "shared_memory" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(device)
    group = TensorParallelGroup.create(
        rank=rank,
        size=job.size,
        store=TCPStore("127.0.0.1", job.port, is_master=False, wait_for_workers=False),
        device=device,
        strategy=job.strategy,
        generation=job.generation,
        **{"timeout_s": 60.0, **job.options},
    )
    try:
        return job.body(group, *job.args)
    finally:
        group.close()


class Ranks:
    """Up to `count` ranks, started when they are first needed."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation = 0
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}

    def run(self, size: int, strategy: Strategy, body: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """`body(group, *args)` on every rank of a new group; results in rank order."""
        if size > self.count:
            pytest.skip(f"needs {size} CUDA devices, found {self.count}")
        self._generation += 1
        for rank in range(size):
            if rank not in self._processes:
                self._start(rank)
        for rank in range(size):
            self._pipes[rank].send(Job(size, strategy, self._store.port, self._generation, body, args, options))
        answers = []
        for rank in range(size):
            if not self._pipes[rank].poll(120):
                self.close()
                pytest.fail(f"rank {rank} does not answer")
            answers.append(self._pipes[rank].recv())
        for rank, (went_well, result) in enumerate(answers):
            assert went_well, f"rank {rank}: {result}"
        return [result for _, result in answers]

    def replace(self, rank: int) -> None:
        """Ends the rank's process; its next job starts another."""
        process = self._processes.pop(rank)
        process.kill()
        process.join()
        self._pipes.pop(rank).close()

    def close(self) -> None:
        for rank in list(self._processes):
            self.replace(rank)

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes[rank], theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, theirs), daemon=True)
        # Else NCCL's watchdog may end the process while it leaves a group.
        with mock.patch.dict(os.environ, RANK_ENVIRONMENT):
            process.start()
        self._processes[rank] = process
        theirs.close()


def part_of(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What rank `rank` brings: the same on whoever asks."""
    generator = torch.Generator().manual_seed(1000 * rank + shape[0])
    return torch.randn(shape, generator=generator).to(dtype)


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
