"""What of the graphs of steps needs no GPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from parallel.group import TensorParallelGroup
from worker.cuda_graph_runner import CudaGraphRunner, StepOutput
from worker.step_layout import StepShape, decode_shapes, prompt_shapes


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        """Nothing to queue."""


class Capture:
    """Stands for torch.cuda.graph."""

    def __init__(self, graph: Graph, **_: object) -> None:
        """Captures nothing."""

    def __enter__(self) -> None:
        """Nothing to begin."""

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)


def output_of(shape: StepShape) -> StepOutput:
    return StepOutput(torch.zeros(shape.num_sampled), torch.zeros(shape.num_sampled, 1))


def test_graphs_go_before_the_group_whose_communicator_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []

    def graph() -> Graph:
        made = Graph()
        weakref.finalize(made, dropped.append, "graph")
        return made

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    group = TensorParallelGroup.single()
    weakref.finalize(group, dropped.append, "group")
    runner = CudaGraphRunner(group)
    runner.capture(output_of, decode_shapes(2), prepare=lambda shape: None)
    del group  # as when a rank ends: what it captured is the last to hold the group
    assert dropped == []
    del runner
    assert dropped == ["graph", "graph", "group"]


def test_a_step_gets_the_smallest_graph_of_its_kind_that_holds_it() -> None:
    runner, shares, prepared = CudaGraphRunner(TensorParallelGroup.single()), list[float](), list[StepShape]()
    shapes = decode_shapes(20) + prompt_shapes(20, 96, 1000)
    runner.capture(output_of, shapes, prepare=prepared.append, on_progress=shares.append)
    assert prepared == sorted(shapes, reverse=True)  # the largest first, which takes the most memory
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for step, expected in (
        (StepShape(1, 1, 1, 9), StepShape(1, 1, 1)),
        (StepShape(17, 17, 17, 999), StepShape(20, 20, 20)),
        (StepShape(3, 1, 1, 3), StepShape(16, 9, 8)),
        (StepShape(3, 3, 0, 999), StepShape(16, 9, 8)),
        (StepShape(16, 9, 9, 128), StepShape(16, 16, 15, 128)),
        (StepShape(16, 9, 9, 129), StepShape(16, 16, 15)),
        (StepShape(17, 1, 0, 17), StepShape(32, 9, 8)),
        (StepShape(17, 16, 16, 256), StepShape(32, 21, 20, 256)),
        (StepShape(96, 20, 20, 999), StepShape(96, 21, 20)),
    ):
        shape = runner.smallest(step)
        assert shape == expected
        assert len(runner.replay(expected).tokens) == expected.num_sampled
    assert runner.smallest(StepShape(97, 1, 1)) is None
    assert runner.smallest(StepShape(21, 21, 21)) is None
