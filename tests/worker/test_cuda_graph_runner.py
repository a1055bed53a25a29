"""What of the graphs of steps needs no GPU."""

from __future__ import annotations

import weakref

import torch

from attention.step_shape import StepShape
from parallel.collectives.group import TensorParallelGroup
from worker.step.cuda_graph_runner import CudaGraphRunner, DeviceOutput, _Captured


class Graph:
    """Stands for torch.cuda.CUDAGraph."""

    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


def test_graphs_go_before_the_group_whose_communicator_waits_for_them() -> None:
    dropped: list[str] = []
    group = TensorParallelGroup.single()
    weakref.finalize(group, dropped.append, "group")
    runner = CudaGraphRunner(group)
    for num_rows in (1, 2):
        graph = Graph()
        weakref.finalize(graph, dropped.append, "graph")
        output = DeviceOutput(torch.zeros(num_rows), torch.zeros(num_rows, 1))
        runner._captured[StepShape(num_rows, num_rows, num_rows)] = _Captured(graph, output)
    del group, graph  # as when a rank ends: what it captured is the last to hold the group
    assert dropped == []
    del runner
    assert dropped == ["graph", "graph", "group"]


def test_graphs_are_gone_once_closed_though_a_traceback_may_hold_the_runner() -> None:
    runner, graph = CudaGraphRunner(TensorParallelGroup.single()), Graph()
    runner._captured[StepShape(1, 1, 1)] = _Captured(graph, DeviceOutput(torch.zeros(1), torch.zeros(1, 1)))
    runner.close()
    assert graph.is_reset
    runner.close()
