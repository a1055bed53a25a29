"""The interface of a group's collectives, and their implementations:

    LibraryCollectives           gloo or NCCL, through torch's process groups: library_collectives.py
    SharedMemoryCollectives      CPU ranks on one node, through a shared segment: shared_memory.py
    SymmetricMemoryCollectives   CUDA ranks on one node, through each other's memory: symmetric_memory.py

An implementation owns its connections and nothing else. The group chooses one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from configs.errors import DeadlineError
from parallel.tree import SumTree


class PartialSum:
    """A pending sum [num_rows, size], which the norm's kernel finishes."""

    __slots__ = ()
    num_rows: int

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum to `residual` [num_rows, size] in place, and returns the RMS norm of the result.

        Args:
            weight: [size] in the residual's dtype or fp32.
        """
        raise NotImplementedError


class FusedSum(PartialSum):
    """A pending sum over the ranks. Its producer writes `summand`, then the norm after it adds the ranks' summands.

    Summands are added in fp32 in rank order (nodes in the order of their tree), then the residual, and the result is
    rounded to bf16 once: the same bits on every rank. The next sum may be requested only after `add_norm`.

    Args:
        summand: this rank's part, with undefined contents: [num_rows, size] bf16, contiguous, or for a tree [nodes of
            the rank, num_rows, size] fp32. Valid until `add_norm`.
        finish: what `add_norm` calls. It raises DeadlineError if an earlier call gave up because a rank did not come in
            time, and EngineError if the group was aborted.
    """

    __slots__ = ("_finish", "num_rows", "summand")

    def __init__(self, summand: Tensor, finish: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        self.summand = summand
        self.num_rows = summand.shape[-2]
        self._finish = finish

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._finish(residual, weight, eps)


class Collectives(ABC):
    """Collectives of `size` ranks. Every rank must make the same calls in the same order, from one thread at a time."""

    def __init__(self, size: int) -> None:
        self._size = size

    def partial_sum(self, shape: tuple[int, int], of: torch.dtype | SumTree) -> FusedSum | None:
        """A pending sum of this shape, which the next norm's kernel finishes. None if another way to sum is better.

        Args:
            of: the dtype of the summands, or the tree of the summed nodes.
        """
        return None

    def look_up(self, ids: Tensor, row_of: Tensor, rows: Tensor) -> Tensor | None:
        """The rows of `ids`, each from the rank that holds it. None if this implementation has no lookup."""
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums contiguous `x` over the ranks in place."""
        contributions = x.new_empty((self._size, *x.shape))
        self.all_gather(contributions, x)
        sum_in_rank_order(contributions.unbind(), x)
        return x

    def node_buffer(self, shape: tuple[int, int, int]) -> Tensor | None:
        """fp32 memory from which `sum_nodes` is fastest, valid until another call. None if any memory is as fast."""
        return None

    def sum_nodes(self, nodes: Tensor, tree: SumTree) -> Tensor:
        """Adds all ranks' nodes by `tree`. Returns the root [num_rows, row_size]. `nodes`: this rank's, contiguous."""
        shape = nodes.shape[1:]
        most = max(tree.counts)
        sent = nodes.new_empty((most, *shape))  # Messages have equal sizes; the unused part is never read.
        sent[: len(nodes)] = nodes
        gathered = nodes.new_empty((self._size, most, *shape))
        self.all_gather(gathered, sent)
        parts = [part for of_rank, cover in zip(gathered, tree.covers, strict=True) for part in of_rank[: len(cover)]]
        return tree.finish(parts, nodes.new_empty(shape))

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fills contiguous `out` [size, *x.shape] with every rank's contiguous `x`."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raises the error of an abort, or of a deadline that passed on the device."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Makes blocked and later calls raise EngineError(reason). Any thread may call this."""

    @abstractmethod
    def close(self) -> None:
        """Releases the connections."""


def sum_in_rank_order(contributions: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of two or more `contributions` of `out`'s shape to `out`, in order. Half-width floats are added in
    float32 and rounded once, so the bits depend only on the contributions."""
    if out.dtype in (torch.bfloat16, torch.float16):
        total = contributions[0].float()
        for part in contributions[1:]:
            total += part
        out.copy_(total)
        return
    torch.add(contributions[0], contributions[1], out=out)
    for part in contributions[2:]:
        out += part


def await_stream(device: torch.device, look: Callable[[], None] = lambda: None) -> None:
    """Waits for the work queued on `device`'s current stream, and calls `look` meanwhile, which may raise."""
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        look()
        time.sleep(1e-4)


def late(rank: int, who: str, what: str, timeout_s: float) -> DeadlineError:
    """The error of `rank` after its wait timed out."""
    return DeadlineError(
        f"rank {rank} waited for {who} in {what} longer than parallel.step_timeout_s={timeout_s:g}; "
        f"see what holds them up, or raise it"
    )
