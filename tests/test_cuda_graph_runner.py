"""What of the graphs of decode steps needs no GPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from parallel.group import TensorParallelGroup
from worker.cuda_graph_runner import CudaGraphRunner, StepOutput, graph_batch_sizes


class Graph:
    """Stands for torch.cuda.CUDAGraph."""


def test_graphs_go_before_the_group_whose_communicator_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []

    def graph() -> Graph:
        made = Graph()
        weakref.finalize(made, dropped.append, "graph")
        return made

    class Capture:
        def __init__(self, graph: Graph, **_: object) -> None:
            """Captures nothing."""

        def __enter__(self) -> None:
            """Nothing to begin."""

        def __exit__(self, *_: object) -> None:
            """Nothing to end."""

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    group = TensorParallelGroup.single()
    weakref.finalize(group, dropped.append, "group")
    runner = CudaGraphRunner(group)
    runner.capture(lambda num_rows: StepOutput(torch.zeros(num_rows), torch.zeros(num_rows, 1)), [1, 2])
    del group  # as when a rank ends: what it captured is the last to hold the group
    assert dropped == []
    del runner
    assert dropped == ["graph", "graph", "group"]


@pytest.mark.parametrize("max_rows", [1, 3, 7, 8, 16, 250, 256, 257, 300, 4096])
def test_the_ladder_of_graphs_pads_little_and_reaches_the_largest_step(max_rows: int) -> None:
    sizes = graph_batch_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    for num_rows in range(1, max_rows + 1):
        padding = min(size for size in sizes if size >= num_rows) - num_rows
        assert padding <= (7 if num_rows <= 256 else 31), num_rows
