"""Ranks of one group for the tests, each a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch
from torch.distributed import HashStore

from parallel.collectives.group import Strategy, TensorParallelGroup

Result = TypeVar("Result")


def on_ranks(
    size: int, body: Callable[[TensorParallelGroup], Result], *, strategy: Strategy = "shared_memory"
) -> list[Result]:
    """Runs `body` on every rank of a group; results in rank order.

    Raises the error of the rank that failed first.
    """
    store = HashStore()

    @torch.inference_mode()
    def run(rank: int) -> Result:
        if size == 1:
            return body(TensorParallelGroup.single())
        group = TensorParallelGroup.create(
            rank=rank, size=size, store=store, device="cpu", strategy=strategy, timeout_s=60.0
        )
        try:
            return body(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(size)]
        for rank in as_completed(ranks):
            rank.result()
    return [rank.result() for rank in ranks]
