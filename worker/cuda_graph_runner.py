"""CUDA graphs of the whole decode step, one for each batch size of a ladder."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel.group import TensorParallelGroup

_log = logging.getLogger(__name__)

_NUM_WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step leaves on the device."""

    tokens: torch.Tensor
    """[num_rows] int64."""
    logits: torch.Tensor
    """[num_rows, columns of this rank] fp32; of a graph, valid until the next replay of any."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Any  # torch.cuda.CUDAGraph, which torch does not annotate
    output: StepOutput


class CudaGraphRunner:
    """Captures `step` once for each number of rows, and replays the smallest that fits.

    All graphs share one memory pool: none runs beside another, and what the largest needs, captured first, the
    others find there.

    Args:
        group: its ranks capture and replay in step with each other.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        # Python drops these in order. The graphs must be gone before the group's NCCL communicator, whose end waits for
        # the graphs that hold it: forever, were they dropped by the same thread afterwards.
        self._captured: dict[int, _Captured] = {}
        self._sizes: list[int] = []
        self._group = group

    def capture(
        self,
        step: Callable[[int], StepOutput],
        sizes: Sequence[int],
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Captures `step` at each of `sizes`; logs what that took.

        Args:
            step: runs the decode step of so many rows, padding included, over static buffers; the same launches at
                each call. Not kept: its owner owns this object, and a cycle would keep the KV pool alive.
            on_progress: gets the share done, 0 to 1.
        """
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._group.device)[0]
        pool = torch.cuda.graph_pool_handle()
        for num_rows in sorted(sizes, reverse=True):
            self._captured[num_rows] = self._capture(step, num_rows, pool)
            if on_progress is not None:
                on_progress(len(self._captured) / len(sizes))
        self._sizes = sorted(self._captured)
        _log.info(
            "rank %d: %d CUDA graphs for 1 to %d rows in %.1f s, %.2f GiB",
            self._group.rank,
            len(self._sizes),
            self._sizes[-1] if self._sizes else 0,
            time.monotonic() - began,
            (free - torch.cuda.mem_get_info(self._group.device)[0]) / (1 << 30),
        )

    def padded(self, num_rows: int) -> int | None:
        """Rows of the smallest graph that holds `num_rows`; None when none does."""
        index = bisect.bisect_left(self._sizes, num_rows)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, padded_rows: int) -> StepOutput:
        """Queues the graph of exactly `padded_rows`, one of `padded`'s answers."""
        captured = self._captured[padded_rows]
        captured.graph.replay()
        return captured.output

    def _capture(self, step: Callable[[int], StepOutput], num_rows: int, pool: Any) -> _Captured:
        for _ in range(_NUM_WARM_UPS):
            step(num_rows)
            torch.cuda.synchronize(self._group.device)
            self._group.barrier()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (Ray's, a test's other ranks) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = step(num_rows)
        torch.cuda.synchronize(self._group.device)
        return _Captured(graph, output)


def graph_batch_sizes(max_rows: int) -> list[int]:
    """The ladder: fine where a step's cost grows with each row, coarser above; always with `max_rows` itself.

    Padding costs at most 7 rows up to 256 and 31 above.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, max_rows + 1, 32)]
    return sorted({size for size in sizes if size < max_rows} | {max_rows})
