"""SymmetricMemoryCollectives: CUDA ranks on one node sum and exchange rows in memory that all of them have mapped.

This module owns the layout of the memory, the alternation of its small buffers, and the words by which kernel and host
tell each other to give up. peer_mapping.py maps the memory. The kernels are in kernels/all_reduce_norm.py, which is
imported only when a group is created. NCCL is not involved: every wait has a deadline and can be aborted, also inside
CUDA graphs, so a rank can always leave.

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
from torch.distributed.distributed_c10d import Store

from configs.errors import DeadlineError, EngineError
from parallel.collectives.interface import Collectives, FusedSum, await_stream
from parallel.collectives.peer_mapping import Registration
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


class SymmetricMemoryCollectives(Collectives):
    """Collectives by kernels that read and write the other ranks' memory. A sum has the same bits on every rank.

    All calls queue work on the current stream and can be captured in CUDA graphs, which hold the addresses of this
    group's memory. The ranks share one set of flags, so each rank must use one stream for all calls, and the thread's
    current device must be the group's.

    The two small buffers alternate from call to call, and a graph always uses the buffers with which it was captured.
    So each step, replayed or not, must begin with another collective (a decoder's embedding lookup), or all steps must
    have an even number of small sums.

    A wait for a rank ends after `timeout_s` or at `abort`. After that, nothing waits any more: all queued work finishes
    with meaningless results, and `check_alive` raises.

    Args:
        memory: [bytes_of(sizes)] uint8, zeros, mapped by every rank before the first call.
        addresses: address of every rank's memory in this rank's address space.
        mapping: torch's handle, which keeps the other ranks' memory mapped, and its registration. None if all ranks are
            in this process.
    """

    def __init__(
        self,
        memory: Tensor,
        addresses: Sequence[int],
        sizes: PeerSizes,
        *,
        rank: int,
        timeout_s: float,
        mapping: tuple[Any, Registration] | None = None,
    ) -> None:
        from parallel.kernels import all_reduce_norm as kernels

        super().__init__(len(addresses))
        assert addresses[rank] == memory.data_ptr(), "the ranks' addresses are of another tensor"
        self._kernels = kernels
        self._memory: Tensor | None = memory
        self._mapping = mapping
        self._sizes = sizes
        self._rank = rank
        self._device = memory.device
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

    @classmethod
    def create(
        cls, *, rank: int, size: int, store: Store, device: torch.device, timeout_s: float, sizes: PeerSizes
    ) -> SymmetricMemoryCollectives:
        """Connects to the other ranks, maps their memory and tests it with an exchange. Returns when all ranks have
        done so. Each rank must be a process, because torch exchanges the mappings through a socket named after the
        process.

        Args:
            store: no other code may use its keys.
            sizes: equal on every rank.

        Raises:
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: the ranks cannot map each other's memory, or would do so with multicast.
        """
        try:
            registration = Registration(rank=rank, size=size, store=store, timeout_s=timeout_s)
            memory, mapped = registration.map(cls.bytes_of(sizes), device)
        except EngineError:
            raise
        except RuntimeError as error:
            first_line = str(error).split("\n", 1)[0]
            raise EngineError(
                f"rank {rank} could not map the memory of the other ranks on {device}: {first_line}; "
                f"parallel.all_reduce=nccl needs no mapping"
            ) from error
        memory.zero_()
        torch.cuda.synchronize(device)
        registration.meet("cleared")  # A flag that another rank set before the memory was cleared would be lost.
        mapping = (mapped, registration)
        self = cls(memory, mapped.buffer_ptrs, sizes, rank=rank, timeout_s=timeout_s, mapping=mapping)
        try:
            self._check()
        except EngineError:
            self.close()
            raise
        return self

    @classmethod
    def alone(cls, *, rank: int, size: int, device: torch.device, sizes: PeerSizes) -> SymmetricMemoryCollectives:
        """Collectives of a rank that uses its own memory in place of the others'. See `TensorParallelGroup.alone`."""
        memory = torch.zeros(cls.bytes_of(sizes), dtype=torch.uint8, device=device)
        self = cls(memory, (memory.data_ptr(),) * size, sizes, rank=rank, timeout_s=1.0)
        self._peers.state[-1] = 1  # No signal and no wait from now on, as after a wait that timed out
        return self

    def partial_sum(self, shape: tuple[int, int], of: torch.dtype | SumTree) -> FusedSum | None:
        way = way_of(self._size, shape, of, self._sizes, self._peers.num_sms)
        if way is None:
            return None
        turn = self._turn if way == "small" else 2
        found = self._sums.get((shape, of, turn))
        if found is None:
            if len(self._sums) >= _MAX_CACHED_SUMS:
                self._sums.clear()
            offset = self._small + turn * _SMALL_BYTES if way == "small" else self._large
            found = self._sums[shape, of, turn] = self._sum_at(offset, shape, of, is_small=way == "small")
        return found

    def _sum_at(self, offset: int, shape: tuple[int, int], of: torch.dtype | SumTree, *, is_small: bool) -> FusedSum:
        """A sum with summands that start `offset` bytes into the memory."""
        assert self._memory is not None, "a sum of a closed group"
        counts, adds = (of.counts, of.additions) if isinstance(of, SumTree) else ((), ())
        dtype = torch.float32 if counts else torch.bfloat16
        whole = (counts[self._rank], *shape) if counts else shape
        summand = self._memory[offset : offset + math.prod(whole) * dtype.itemsize].view(dtype).view(whole)

        def finish(residual: Tensor, weight: Tensor, eps: float) -> Tensor:
            self.check_alive()
            if is_small:
                self._turn ^= 1
            return self._kernels.all_reduce_add_norm(
                residual,
                weight,
                eps,
                self._peers,
                data_offset=offset,
                counts=counts,
                adds=adds,
                scales_offset=None if is_small else self._scales,
            )

        return FusedSum(summand, finish)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
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
        """Implements Collectives. None if the memory is too small for the rows."""
        sizes, row_bytes = self._sizes, rows.shape[1] * rows.element_size()
        if len(ids) > sizes.rows or row_bytes > sizes.row_bytes or row_bytes % _ROW_ALIGNMENT:
            return None
        self.check_alive()
        return self._kernels.look_up(
            ids, row_of, rows, self._peers, area_offset=self._shared, half_bytes=self._half_bytes
        )

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.all_gather(torch.empty(self._size, dtype=torch.int32, device=self._device), token)
        await_stream(self._device)  # the kernel's own deadline ends the wait
        self.check_alive()

    def check_alive(self) -> None:
        """Implements Collectives: DeadlineError after a call that gave up. Later results are wrong."""
        if self._words[0]:
            raise EngineError(self._abort_reason)
        if self._words[1] == self._kernels.LATE:
            raise DeadlineError(
                f"rank {self._rank} waited for another in a collective longer than parallel.step_timeout_s="
                f"{self._timeout_s:g}; see what holds it up, or raise it"
            )

    def abort(self, reason: str) -> None:
        self._abort_reason = reason
        self._words[0] = 1

    def close(self) -> None:
        """Implements Collectives. Unmapping waits for the device."""
        if self._mapping is not None:
            self._mapping[1].close()
        self._sums.clear()
        self._memory = self._mapping = None

    def _check(self) -> None:
        found = torch.empty(self._size, dtype=torch.int32, device=self._device)
        self.all_gather(found, torch.full((1,), self._rank, dtype=torch.int32, device=self._device))
        self.barrier()
        if found.tolist() != list(range(self._size)):
            raise EngineError(
                f"rank {self._rank} on {self._device}: data read through symmetric memory is wrong; choose "
                f"parallel.all_reduce=nccl"
            )


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
