"""CUDA graphs of whole steps, and of the draft head's passes after them. Each step graph has one shape of a ladder. It
is captured before the first step, between two steps, or when its shape is needed for the second time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attention.step_shape import StepShape
from parallel.collectives.group import TensorParallelGroup
from worker.step.step_layout import smallest

_log = logging.getLogger(__name__)

_NUM_WARM_UPS = 2
_OutputT = TypeVar("_OutputT")


@dataclass(frozen=True, slots=True)
class DeviceOutput:
    """The results of a step on the device."""

    tokens: torch.Tensor
    """[num_sampled] int64; -1 for a row with a NaN in its logits."""
    logits: torch.Tensor
    """[num_sampled, columns of this rank] fp32. After a replay, valid until the next replay of any graph."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Any  # torch.cuda.CUDAGraph, which torch does not annotate
    output: DeviceOutput


class CudaGraphRunner:
    """Captures a step once for each shape, and replays the smallest captured shape that holds it.

    Graphs share one memory pool, since no two run at once. The largest comes first, so all others fit in its memory.

    Args:
        group: the ranks that capture and replay in step with each other.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        # Python drops these in order. The graphs must be gone before the group's NCCL communicator is destroyed,
        # because its destruction waits for the graphs that hold it. Dropping them later would hang.
        self._captured: dict[StepShape, _Captured] = {}
        self._passes: dict[tuple[str, StepShape], Any] = {}
        self._decodes: list[StepShape] = []
        self._prompts: list[StepShape] = []
        self._seen: set[StepShape] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._group = group

    def capture(
        self,
        step: Callable[[StepShape], DeviceOutput],
        shapes: Sequence[StepShape],
        *,
        prepare: Callable[[StepShape], None],
    ) -> None:
        """Captures `step` at each of `shapes`, which `offer` got before, and logs the duration and the memory.

        Args:
            step: runs a step of that shape, padding included, over static buffers, with the same launches at each call.
                It is not stored: its owner owns this object, and a cycle would prevent the KV pool from being freed.
            prepare: fills the static buffers with valid inputs of a shape, for its warm-ups.
        """
        began, free = time.monotonic(), torch.cuda.mem_get_info(self._group.device)[0]
        for shape in sorted(shapes, reverse=True):
            self.capture_one(step, shape, prepare=prepare)
        _log.info(
            "rank %d: captured %d of %d CUDA graphs, for decodes of up to %d rows and prompts of up to %d tokens, in "
            "%.1f s, %.2f GiB; the others follow while the engine is idle",
            self._group.rank,
            len(shapes),
            len(self._decodes) + len(self._prompts),
            self._decodes[-1].num_rows if self._decodes else 0,
            self._prompts[-1].num_tokens if self._prompts else 0,
            time.monotonic() - began,
            (free - torch.cuda.mem_get_info(self._group.device)[0]) / (1 << 30),
        )

    def offer(self, shapes: Sequence[StepShape]) -> None:
        """Sets the ladder: the shapes that may be captured and replayed. None of them is captured yet."""
        self._decodes = sorted(shape for shape in shapes if shape.is_decode)
        self._prompts = sorted(shape for shape in shapes if not shape.is_decode)

    @property
    def largest(self) -> list[StepShape]:
        """The largest shapes of prompts and of decodes. The smaller graphs use their memory too."""
        return [*self._prompts[-1:], *self._decodes[-1:]]

    @property
    def missing(self) -> list[StepShape]:
        """Shapes of the ladder that are not captured, in the order of capture: the largest shapes, then the others by
        number of rows. The first request runs alone and needs the decode of one row and prompts with few rows."""
        ladder = sorted((*self._decodes, *self._prompts), key=lambda shape: (shape.num_rows, shape))
        shapes = dict.fromkeys((*self.largest, *ladder))
        return [shape for shape in shapes if shape not in self._captured]

    def capture_one(
        self, step: Callable[[StepShape], DeviceOutput], shape: StepShape, *, prepare: Callable[[StepShape], None]
    ) -> None:
        """Captures `step` at one shape, also between two steps. The arguments are as in `capture`."""
        prepare(shape)
        self._captured[shape] = _Captured(*self._record(lambda: step(shape)))

    def capture_pass(self, name: str, shape: StepShape, run: Callable[[], None]) -> None:
        """Captures a draft pass over static buffers that are filled for `shape`. `replay_pass` runs it."""
        self._passes[name, shape], _ = self._record(run)

    def has_pass(self, name: str, shape: StepShape) -> bool:
        """Whether this pass is captured, so that `replay_pass` can run it."""
        return (name, shape) in self._passes

    def replay_pass(self, name: str, shape: StepShape) -> None:
        """Queues the pass captured with that name and shape."""
        self._passes[name, shape].replay()

    def is_captured(self, shape: StepShape) -> bool:
        """Whether `replay` has a graph of that shape."""
        return shape in self._captured

    def is_due(self, shape: StepShape) -> bool:
        """Whether a shape that is not captured was requested before. A shape needed only once is not worth a graph."""
        is_due = shape in self._seen
        self._seen.add(shape)
        return is_due

    def close(self) -> None:
        """Drops the graphs, which may be running, even if a traceback still refers to this object. The abort of the
        group's NCCL communicator waits until they are gone."""
        for graph in (*(captured.graph for captured in self._captured.values()), *self._passes.values()):
            graph.reset()
        self._captured.clear()
        self._passes.clear()

    def smallest(self, step: StepShape) -> StepShape | None:
        """The shape of the ladder with the fewest tokens that holds `step`. None if no shape does."""
        return smallest(self._decodes if step.is_decode else self._prompts, step)

    def replay(self, shape: StepShape) -> DeviceOutput:
        """Queues the graph of exactly that shape, which `smallest` returned."""
        captured = self._captured[shape]
        captured.graph.replay()
        return captured.output

    def _record(self, run: Callable[[], _OutputT]) -> tuple[Any, _OutputT]:
        """A graph of `run`, and the output of `run`."""
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            # torch's own stream is on the GPU of the first graph of the process, which may be another GPU.
            self._stream = torch.cuda.Stream(self._group.device)  # type: ignore[no-untyped-call]  # it has no types
        for _ in range(_NUM_WARM_UPS):
            run()
            torch.cuda.synchronize(self._group.device)
            self._group.barrier()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (Ray's, a test's other ranks) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()
        torch.cuda.synchronize(self._group.device)
        return graph, output
