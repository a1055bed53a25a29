"""How long kernels take on a GPU when nothing of the host is in their way: inside a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_us(run: Callable[[], None], count: int) -> float:
    """Microseconds over `count`: the median of 3 measurements of two replays of a captured graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the GPU is busy while the rest is queued
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / 2 / count)
    return statistics.median(times)
