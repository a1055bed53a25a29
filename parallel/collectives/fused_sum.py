"""PeerMemory: memory by which CUDA ranks on one node sum and exchange rows, for SymmetricMemoryCollectives.

This module owns the layout of the memory, the alternation of its small buffers, and the words by which kernel and host
tell each other to give up. The kernels are in kernels/all_reduce_norm.py, which is imported only when a group is
created.

A small sum needs one meeting of the ranks, because there are two small buffers: a rank writes buffer p again for the
sum after next. Before that, its next sum has waited for all other ranks, and they came to that sum only after reading
buffer p. A large sum needs two meetings, and no rank leaves before all have read, so one buffer is enough. Exchanged
rows use two halves, which each program alternates for itself like the small buffers. Any other collective between two
small sums is such a meeting too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from configs.errors import DeadlineError, EngineError
from parallel.kernels.flags import FLAG_BYTES, MAX_PROGRAMS, MAX_RANKS
from parallel.tree import SumTree

# Up to this many bytes of the other ranks' summands, one kernel reads all of them. Above, each rank sums its share of
# the rows.
_MAX_READ_BYTES = 1536 << 10
_MAX_ROW_ELEMENTS = 16384
_ROW_ALIGNMENT = 16  # bytes per load
_MAX_CACHED_SUMS = 256
_MAX_SMALL_ROWS = 128  # One program per row, at most one per SM, so that all run at once.
_SMALL_BYTES = 2 << 20  # size of a buffer for a small sum's summands, at least _MAX_READ_BYTES
_MIN_SHARED_BYTES = 8 << 20  # the memory for exchanged rows has two halves, each at least this large
_SHARED_UNIT = 1 << 16  # a multiple of 256 bytes for each program


@dataclass(frozen=True, slots=True)
class PeerSizes:
    """Upper bounds of one step's collectives. Larger sums and lookups are sent in pieces, or use gathers."""

    rows: int = 0
    """Rows of a sum, or ids of a lookup."""
    row_bytes: int = 0
    """Bytes per row of a lookup."""
    sum_bytes: int = 0
    """Bytes of one rank's summands."""


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

    Attributes:
        summand: this rank's part, with undefined contents: [num_rows, size] bf16, contiguous, or for a tree [nodes of
            the rank, num_rows, size] fp32. Valid until `add_norm`.
    """

    __slots__ = ("_is_small", "_memory", "_offset", "_tree", "num_rows", "summand")

    def __init__(
        self, memory: PeerMemory, offset: int, summand: Tensor, tree: SumTree | None, *, is_small: bool
    ) -> None:
        self._memory = memory
        self._offset = offset
        self._tree = tree
        self._is_small = is_small
        self.summand = summand
        self.num_rows = summand.shape[-2]

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Implements PartialSum. The next `partial_sum` may be requested only after this call.

        Summands are added in fp32 in rank order (nodes in the order of their tree), then the residual, and the result
        is rounded to bf16 once: the same bits on every rank.

        Raises:
            DeadlineError: an earlier call gave up because a rank did not come in time.
            EngineError: the group was aborted.
        """
        return self._memory.add_norm(self._offset, residual, weight, eps, self._tree, is_small=self._is_small)


class PeerMemory:
    """Sums, gathers and lookups in mapped memory, queued on the current stream. CUDA graphs can capture them.

    The two small buffers alternate from call to call, and a graph always uses the buffers with which it was captured.
    So each step, replayed or not, must begin with another collective (a decoder's embedding lookup), or all steps must
    have an even number of small sums.

    A wait for a rank ends after `timeout_s` or at `abort`. After that, nothing waits any more: all queued work finishes
    with meaningless results, and `check_alive` raises.

    Args:
        memory: [bytes_of(sizes)] uint8, zeros, mapped by every rank before the first call.
        addresses: address of every rank's memory in this rank's address space.
    """

    def __init__(
        self,
        memory: Tensor,
        addresses: Sequence[int],
        sizes: PeerSizes = PeerSizes(),
        *,
        rank: int,
        timeout_s: float,
    ) -> None:
        from parallel.kernels import all_reduce_norm as kernels

        assert addresses[rank] == memory.data_ptr(), "the ranks' addresses are of another tensor"
        self._kernels = kernels
        self._memory: Tensor | None = memory
        self._sizes = sizes
        self._size = len(addresses)
        self._rank = rank
        self._timeout_s = timeout_s
        # Pinned memory has the same address on host and device. The host writes the first word, the device the second.
        self._pinned = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._words: Any = self._pinned.numpy()
        self._peers = kernels.Peers(
            tuple(addresses),
            rank,
            torch.zeros(kernels.STATE_WORDS, dtype=torch.int32, device=memory.device),
            self._pinned.data_ptr(),
            int(timeout_s * 1e9),
            torch.cuda.get_device_properties(memory.device).multi_processor_count,
        )
        self._abort_reason = ""
        self._turn = 0
        self._sums: dict[tuple[tuple[int, int], torch.dtype | SumTree, int], FusedSum] = {}
        # Offsets of flags, two small buffers, two halves for exchanged rows, norm scales, and the large buffer.
        self._small = FLAG_BYTES
        self._shared = self._small + 2 * _SMALL_BYTES
        self._half_bytes = _half_bytes(sizes)
        self._scales = self._shared + 2 * self._half_bytes
        self._large = self._scales + _scales_bytes(sizes)

    @staticmethod
    def bytes_of(sizes: PeerSizes) -> int:
        """Bytes of memory that every rank must map."""
        return FLAG_BYTES + 2 * _SMALL_BYTES + 2 * _half_bytes(sizes) + _scales_bytes(sizes) + sizes.sum_bytes

    def partial_sum(self, shape: tuple[int, int], of: torch.dtype | SumTree) -> FusedSum | None:
        """The next sum, of summands of a dtype or of a tree's nodes. None if no kernel supports it."""
        way = way_of(self._size, shape, of, self._sizes, self._peers.num_sms)
        if way is None:
            return None
        tree = of if isinstance(of, SumTree) else None
        dtype = torch.bfloat16 if tree is None else torch.float32
        whole = shape if tree is None else (tree.counts[self._rank], *shape)
        is_small = way == "small"
        turn = self._turn if is_small else 2
        key = (shape, of, turn)
        partial_sum = self._sums.get(key)
        if partial_sum is None:
            assert self._memory is not None, "a sum of a closed group"
            if len(self._sums) >= _MAX_CACHED_SUMS:
                self._sums.clear()
            offset = self._small + turn * _SMALL_BYTES if is_small else self._large
            num_bytes = math.prod(whole) * dtype.itemsize
            summand = self._memory[offset : offset + num_bytes].view(dtype).view(whole)
            partial_sum = self._sums[key] = FusedSum(self, offset, summand, tree, is_small=is_small)
        return partial_sum

    def add_norm(
        self, offset: int, residual: Tensor, weight: Tensor, eps: float, tree: SumTree | None, *, is_small: bool
    ) -> Tensor:
        """Runs the kernel of a FusedSum. The summands start `offset` bytes into the memory."""
        self.check_alive()
        if is_small:
            self._turn ^= 1
        return self._kernels.all_reduce_add_norm(
            residual,
            weight,
            eps,
            self._peers,
            data_offset=offset,
            counts=() if tree is None else tree.counts,
            adds=() if tree is None else tree.additions,
            scales_offset=None if is_small else self._scales,
        )

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fills contiguous `out` [size, *x.shape] with every rank's contiguous `x`."""
        self.check_alive()
        if x.numel() == 0:
            return
        flat = x.view(-1).view(torch.uint8)
        padding = -len(flat) % 4
        if padding:
            words = torch.nn.functional.pad(flat, (0, padding)).view(torch.int32)
            into = torch.empty(self._size, len(words), dtype=torch.int32, device=x.device)
        else:
            words, into = flat.view(torch.int32), out.view(self._size, -1).view(torch.uint8).view(torch.int32)
        self._kernels.gather(into, words, self._peers, area_offset=self._shared, half_bytes=self._half_bytes)
        if padding:
            out.view(self._size, -1).view(torch.uint8).copy_(into.view(torch.uint8)[:, : len(flat)])

    def look_up(self, ids: Tensor, row_of: Tensor, rows: Tensor) -> Tensor | None:
        """The rows of `ids`, found by the kernel `look_up`. None if the memory is too small for them."""
        sizes, row_bytes = self._sizes, rows.shape[1] * rows.element_size()
        if len(ids) > sizes.rows or row_bytes > sizes.row_bytes or row_bytes % _ROW_ALIGNMENT:
            return None
        self.check_alive()
        return self._kernels.look_up(
            ids, row_of, rows, self._peers, area_offset=self._shared, half_bytes=self._half_bytes
        )

    def give_up(self) -> None:
        """Stops all signals and waits from now on, as after a wait that timed out, but without an error."""
        self._peers.state[-1] = 1

    def abort(self, reason: str) -> None:
        """Ends this rank's running and later waits. Any thread may call this."""
        self._abort_reason = reason
        self._words[0] = 1

    def check_alive(self) -> None:
        """Raises EngineError(reason) after `abort`, and DeadlineError after a call that gave up. Later results are
        wrong."""
        if self._words[0]:
            raise EngineError(self._abort_reason)
        if self._words[1] == self._kernels.LATE:
            raise DeadlineError(
                f"rank {self._rank} waited for another in a collective longer than parallel.step_timeout_s="
                f"{self._timeout_s:g}; see what holds it up, or raise it"
            )

    def close(self) -> None:
        """Releases the memory. No call may be running."""
        self._sums.clear()
        self._memory = None


def way_of(
    size: int, shape: tuple[int, int], of: torch.dtype | SumTree, sizes: PeerSizes, num_sms: int = _MAX_SMALL_ROWS
) -> Literal["small", "large"] | None:
    """How `size` ranks compute a sum, of summands of a dtype or of a tree's nodes. None if this memory cannot hold it.
    The result is the same on all ranks."""
    (num_rows, row_elements), is_tree = shape, isinstance(of, SumTree)
    if not (
        (is_tree or of is torch.bfloat16)
        and 2 <= size <= MAX_RANKS
        and num_rows >= 1
        and 1 <= row_elements <= _MAX_ROW_ELEMENTS
        and row_elements * torch.bfloat16.itemsize % _ROW_ALIGNMENT == 0
    ):
        return None
    most = max(1, *of.counts) if isinstance(of, SumTree) else 1
    num_bytes = most * num_rows * row_elements * (torch.float32 if is_tree else torch.bfloat16).itemsize
    if num_rows <= min(_MAX_SMALL_ROWS, num_sms) and (size - 1) * num_bytes <= _MAX_READ_BYTES:
        return "small"
    return "large" if num_rows <= sizes.rows and num_bytes <= sizes.sum_bytes else None


def _half_bytes(sizes: PeerSizes) -> int:
    """Bytes of each half for exchanged rows. All programs have equal areas, each for the most rows of a program."""
    rows = -(-sizes.rows // MAX_PROGRAMS) * MAX_PROGRAMS
    return max(-(-rows * sizes.row_bytes // _SHARED_UNIT) * _SHARED_UNIT, _MIN_SHARED_BYTES)


def _scales_bytes(sizes: PeerSizes) -> int:
    return -(-4 * sizes.rows // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
