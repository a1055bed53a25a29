"""Sums over CUDA ranks of one node that the kernel of the next norm does: FusedSums, for SymmetricMemoryCollectives.

Owns the memory that the summands lie in, its two buffers' taking turns, and the words by which kernel and host tell
each other to give up. The kernel is kernels/all_reduce_norm.py, imported when a group is made: a CPU install has no
Triton.

One synchronisation a sum is enough because the sums take turns with two buffers: a rank writes buffer p again for the
sum after next. Before that its next sum has waited for all others, and they came to that sum only after they had read
buffer p. An all-reduce, gather or barrier between two sums separates them as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from configs.errors import DeadlineError, EngineError
from parallel.numerics.tree import SumTree

# The one kernel is used up to so many bytes that a rank reads from the others; above, the ranks share the adding. On
# H200, one kernel against two: 1 MB over 2 ranks 7.9 and 12.3 us, 512 KB over 3 8.1 and 10.9, over 4 10.8 and 11.3.
_MAX_READ_BYTES = 1536 << 10
_MAX_ROW_ELEMENTS = 16384
_ROW_ALIGNMENT = 16  # bytes of one load
_MAX_CACHED_SUMS = 256
_MAX_RANKS = 8
_MAX_ROWS = 128  # fewer than the 132 SMs: all programs of a launch must run at once
_FLAG_BYTES = 4 * _MAX_RANKS * _MAX_ROWS
_BUFFER_BYTES = 1 << 20  # for the summands of each of the two, in bf16
_TREE_BUFFER_BYTES = 4 << 20  # for each of the two: 128 rows of 4096 with two nodes
MEMORY_BYTES = _FLAG_BYTES + 2 * _TREE_BUFFER_BYTES
"""Memory that every rank maps."""


def fuses(size: int, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the one kernel is the fastest for a sum of that shape over `size` ranks: the same on all of them."""
    num_rows, row_elements = shape
    return fits(size, shape, dtype) and (size - 1) * num_rows * row_elements * dtype.itemsize <= _MAX_READ_BYTES


def fits(size: int, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the kernel can do a sum of that shape at all."""
    num_rows, row_elements = shape
    row_bytes = row_elements * dtype.itemsize
    return (
        dtype is torch.bfloat16
        and 2 <= size <= _MAX_RANKS
        and 1 <= num_rows <= _MAX_ROWS
        and 1 <= row_elements <= _MAX_ROW_ELEMENTS
        and row_bytes % _ROW_ALIGNMENT == 0
        and num_rows * row_bytes <= _BUFFER_BYTES
    )


def fits_nodes(tree: SumTree, shape: tuple[int, int]) -> bool:
    """Whether the kernel can finish a tree whose sum has that shape, to be added to a bf16 residual stream."""
    num_rows, row_elements = shape
    num_bytes = max(tree.counts) * num_rows * row_elements * torch.float32.itemsize
    return fits(len(tree.counts), (num_rows, 16), torch.bfloat16) and (
        1 <= row_elements <= _MAX_ROW_ELEMENTS and row_elements % 8 == 0 and num_bytes <= _TREE_BUFFER_BYTES
    )


class PartialSum:
    """A sum [num_rows, size] that is still to be done, by the norm that follows it."""

    __slots__ = ()
    num_rows: int

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum to `residual` [num_rows, size] in place, and returns the RMS norm of that.

        Args:
            weight: [size], of the residual's dtype or fp32.
        """
        raise NotImplementedError


class FusedSum(PartialSum):
    """One over the ranks: its producer writes `summand`, then the norm after it sums.

    Attributes:
        summand: [num_rows, size] bf16, contiguous, contents undefined; this rank's part. Of a tree [nodes of the
            rank, num_rows, size] fp32. Valid until `add_norm`.
    """

    __slots__ = ("_offset", "_sums", "_tree", "num_rows", "summand")

    def __init__(self, sums: FusedSums, offset: int, summand: Tensor, tree: SumTree | None = None) -> None:
        self._sums = sums
        self._offset = offset
        self._tree = tree
        self.summand = summand
        self.num_rows = summand.shape[-2]

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See PartialSum.

        Summands are added in fp32 in rank order, or nodes as their tree says, then the residual, and rounded to bf16
        once: the same bits on every rank. The next partial_sum may be asked for then, not before.

        Raises:
            DeadlineError: an earlier sum gave up because a rank did not come in time.
            EngineError: the group was aborted.
        """
        return self._sums.add_norm(self._offset, residual, weight, eps, self._tree)


class FusedSums:
    """Sums of partial_sum's buffers, queued on the current stream; they may be captured in CUDA graphs.

    The two buffers alternate from call to call, and a graph keeps those it was captured with. So each step, replayed or
    not, begins with another collective, as a decoder's does with the sum of its embedding; or else all of them hold an
    even number of sums.

    A wait for a rank ends after `timeout_s`, or once `abort` was called. From then on no sum waits any more: all that
    is queued runs to its end with useless results, and `check_alive` raises.

    Args:
        memory: [MEMORY_BYTES] uint8, zeros, mapped by every rank before the first sum.
        addresses: of every rank's memory in this rank's address space.
    """

    def __init__(self, memory: Tensor, addresses: Sequence[int], *, rank: int, timeout_s: float) -> None:
        from parallel.kernels.all_reduce_norm import LATE, all_reduce_add_norm  # a CPU install has no Triton

        assert addresses[rank] == memory.data_ptr(), "the ranks' addresses are of another tensor"
        self._kernel, self._late = all_reduce_add_norm, LATE
        self._memory: Tensor | None = memory
        self._bases = tuple(addresses)
        self._rank = rank
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * 1e9)
        self._state = torch.zeros(_MAX_ROWS + 1, dtype=torch.int32, device=memory.device)
        # Pinned memory has one address on host and device. The host writes the first word, the device the second.
        self._pinned = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._words: Any = self._pinned.numpy()
        self._abort_reason = ""
        self._turn = 0
        self._sums: dict[tuple[tuple[int, int], SumTree | None, int], FusedSum] = {}

    def partial_sum(self, shape: tuple[int, int], tree: SumTree | None = None) -> FusedSum:
        """The next sum, of a shape and dtype that `fits`, or of a tree that `fits_nodes`."""
        key = (shape, tree, self._turn)
        partial_sum = self._sums.get(key)
        if partial_sum is None:
            assert self._memory is not None, "a sum of a closed group"
            if len(self._sums) >= _MAX_CACHED_SUMS:
                self._sums.clear()
            offset = _FLAG_BYTES + self._turn * _TREE_BUFFER_BYTES
            dtype = torch.bfloat16 if tree is None else torch.float32
            whole = shape if tree is None else (tree.counts[self._rank], *shape)
            num_bytes = math.prod(whole) * dtype.itemsize
            summand = self._memory[offset : offset + num_bytes].view(dtype).view(whole)
            partial_sum = self._sums[key] = FusedSum(self, offset, summand, tree)
        return partial_sum

    def add_norm(
        self, offset: int, residual: Tensor, weight: Tensor, eps: float, tree: SumTree | None = None
    ) -> Tensor:
        """Does what FusedSum does, with the summands `offset` bytes into the memory."""
        self.check_alive()
        self._turn ^= 1
        return self._kernel(
            residual,
            weight,
            eps,
            bases=self._bases,
            rank=self._rank,
            data_offset=offset,
            state=self._state,
            host_words=self._pinned.data_ptr(),
            timeout_ns=self._timeout_ns,
            counts=() if tree is None else tree.counts,
            adds=() if tree is None else tree.additions,
        )

    def abort(self, reason: str) -> None:
        """Ends the waits of this rank, running and later ones. Safe from any thread."""
        self._abort_reason = reason
        self._words[0] = 1

    def check_alive(self) -> None:
        """Raises EngineError(reason) after `abort`, DeadlineError once a sum gave up: what came since is wrong."""
        if self._words[0]:
            raise EngineError(self._abort_reason)
        if self._words[1] == self._late:
            raise DeadlineError(
                f"rank {self._rank} waited for another in all_reduce longer than parallel.step_timeout_s="
                f"{self._timeout_s:g}; see what holds it up, or raise it"
            )

    def close(self) -> None:
        """Drops the memory. Nothing may be running."""
        self._sums.clear()
        self._memory = None
