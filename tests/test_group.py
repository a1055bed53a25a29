"""TensorParallelGroup over every strategy: ranks are threads or forked processes of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from parallel.group import Strategy, TensorParallelGroup


def run_threads(size: int, strategy: Strategy, body: Callable[[TensorParallelGroup], Any], **options: Any) -> list[Any]:
    """Runs `body` once per rank, each rank a thread; returns their results in rank order."""
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        store = TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)
        try:
            group = TensorParallelGroup.create(
                rank=rank, size=size, store=store, device="cpu", strategy=strategy, **{"timeout_s": 20.0, **options}
            )
            try:
                results[rank] = body(group)
            finally:
                group.close()
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_group_of_one_is_the_identity() -> None:
    group = TensorParallelGroup.single()
    x = torch.arange(4.0)
    assert group.all_reduce(x) is x
    assert torch.equal(group.all_gather(x), x[None])
    group.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_sums_in_rank_order(size: int) -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    results = run_threads(size, "gloo", lambda group: group.all_reduce(parts[group.rank].clone()))
    for result in results:
        assert torch.equal(result, expected)
