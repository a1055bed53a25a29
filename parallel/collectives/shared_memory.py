"""Collectives of CPU ranks on one node, through a segment that all of them have mapped."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from math import prod

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from configs.errors import EngineError
from parallel.collectives.interface import Collectives, late, sum_in_rank_order
from parallel.shm import FIRST_WORD, LINE_WORDS, Segment
from parallel.tree import SumTree

# Total size from which on the ranks split the adding of a shared-memory all-reduce. Measured on 2 cores: the second
# synchronisation pays off from 1 MB per rank with 3 ranks, 0.6 MB with 5, 0.35 MB with 9.
_SLICED_BYTES = 3 << 20
_MAX_CACHED_VIEWS = 256
_Shape = tuple[int, ...]  # torch.Size is such a tuple


class SharedMemoryCollectives(Collectives):
    """Collectives of CPU ranks on one node, through one shared segment, with the same bits on every rank and in every
    run.

    Each rank has an epoch word, which counts its exchanges, and two buffers. In one exchange, a rank copies its
    contribution into the buffer of the epoch's parity, publishes the epoch, and waits for every peer's epoch.

    One synchronisation is enough because there are two buffers: a rank writes buffer p again at epoch e + 2. Before
    that it has waited for every peer's epoch e + 1, and a peer publishes e + 1 only after it has read the buffers of
    epoch e.
    """

    def __init__(self, segment: Segment, *, rank: int, size: int, timeout_s: float, spin_us: int, buffer_bytes: int):
        super().__init__(size)
        self._segment = segment
        self._rank = rank
        self._timeout_s = timeout_s
        self._spin_s = spin_us * 1e-6
        self._buffer_bytes = buffer_bytes
        self._epoch = 0
        self._first_buffer = _first_buffer(size)
        self._sleepers = segment.words[FIRST_WORD : FIRST_WORD + size]
        self._peers = [peer for peer in range(size) if peer != rank]
        # Cached tensors over the buffers: (parity, dtype, shapes of all ranks) to one tensor per rank.
        self._views: dict[tuple[int, torch.dtype, tuple[_Shape, ...]], list[Tensor]] = {}

    @classmethod
    def create(
        cls, *, rank: int, size: int, store: Store, timeout_s: float, spin_us: int, buffer_bytes: int = 4 << 20
    ) -> SharedMemoryCollectives:
        """Rank 0 creates the segment and publishes it in `store`. Returns when every rank has mapped it.

        Args:
            buffer_bytes: largest size of one exchange. Larger tensors are sent in pieces.

        Raises:
            ConfigError: this processor is not supported.
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: the ranks are on different nodes.
        """
        if rank == 0:
            segment = Segment.create(_first_buffer(size) + 2 * size * buffer_bytes)
            store.set("segment", segment.address)
        else:
            try:
                store.wait(["segment"], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise late(rank, "rank 0", "the start of shared memory", timeout_s) from error
            segment = Segment.attach(store.get("segment").decode())
        self = cls(segment, rank=rank, size=size, timeout_s=timeout_s, spin_us=spin_us, buffer_bytes=buffer_bytes)
        try:
            self.barrier()
        except EngineError:
            self.close()
            raise
        segment.forget_address()
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        nbytes = x.numel() * x.element_size()
        if nbytes > self._buffer_bytes:
            self._in_pieces(x)
        elif self._size > 2 and self._size * nbytes >= _SLICED_BYTES:
            self._all_reduce_sliced(x.view(-1))
        elif nbytes:
            sum_in_rank_order(self._exchange("all_reduce", x), x)
        return x

    def node_buffer(self, shape: tuple[int, int, int]) -> Tensor | None:
        # No rank reads this buffer any more: it belongs to the exchange before the last one, which all ranks have left.
        if 4 * prod(shape) > self._buffer_bytes:
            return None
        return self._buffers(self._epoch + 1, torch.float32, (shape,) * self._size)[self._rank]

    def sum_nodes(self, nodes: Tensor, tree: SumTree) -> Tensor:
        _, num_rows, row_size = nodes.shape
        total = torch.empty(num_rows, row_size)
        most = max(tree.counts)
        step = max(1, self._buffer_bytes // (4 * most * row_size))
        if step < num_rows:
            nodes = nodes.clone()  # The contributions may lie in the buffer that the first piece overwrites.
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            self._sum_nodes(nodes if step >= num_rows else nodes[:, rows].contiguous(), tree, total[rows])
        return total

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        out, x = out.view(self._size, -1), x.view(-1)
        step = self._buffer_bytes // x.element_size()
        for start in range(0, x.numel(), step):
            piece = x[start : start + step]
            views = self._exchange("all_gather", piece)
            for row, view in zip(out, views, strict=True):
                row[start : start + step] = view

    def barrier(self) -> None:
        self._synchronise("barrier")

    def check_alive(self) -> None:
        self._segment.check_alive()

    def abort(self, reason: str) -> None:
        self._segment.declare_dead(reason, [self._epoch_word(rank) for rank in range(self._size)])

    def close(self) -> None:
        self._views.clear()
        self._segment.close()

    def _in_pieces(self, x: Tensor) -> None:
        flat = x.view(-1)
        step = self._buffer_bytes // x.element_size()
        for start in range(0, flat.numel(), step):
            self.all_reduce(flat[start : start + step])

    def _all_reduce_sliced(self, x: Tensor) -> None:
        """All-reduces 1-D `x` in two exchanges: every rank sums one slice, then the ranks exchange the sums. So each
        rank reads the tensor twice, instead of `size` times."""
        count, size = x.numel(), self._size
        bounds = [count * rank // size for rank in range(size + 1)]
        views = self._exchange("all_reduce", x)
        sums = self._buffers(self._epoch + 1, x.dtype, (x.shape,) * size)
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        sum_in_rank_order([view[own] for view in views], sums[self._rank][own])
        self._synchronise("all_reduce")
        for rank in range(size):
            part = slice(bounds[rank], bounds[rank + 1])
            x[part] = sums[rank][part]

    def _sum_nodes(self, nodes: Tensor, tree: SumTree, total: Tensor) -> None:
        """Implements `sum_nodes` for rows that fit in the buffer. Writes `total`."""
        parts = [part for view in self._exchange("sum_nodes", nodes, tree.shapes(total.shape)) for part in view]
        if self._size <= 2 or len(parts) * total.nbytes < _SLICED_BYTES:
            tree.finish(parts, total)
            return
        # Each rank sums one slice, as in _all_reduce_sliced.
        num_rows, size = len(total), self._size
        slices = [slice(num_rows * rank // size, num_rows * (rank + 1) // size) for rank in range(size)]
        sums, own = self._buffers(self._epoch + 1, total.dtype, (total.shape,) * size), slices[self._rank]
        tree.finish([part[own] for part in parts], sums[self._rank][own])
        self._synchronise("sum_nodes")
        for rank, rows in enumerate(slices):
            total[rows] = sums[rank][rows]

    def _exchange(self, name: str, x: Tensor, shapes: tuple[_Shape, ...] | None = None) -> list[Tensor]:
        """Exchanges contributions. Returns every rank's, in rank order: views of the buffers, valid until this rank's
        next exchange.

        Args:
            x: contiguous. It may already be in this rank's buffer.
            shapes: shape of each rank's contribution. If None, all have x's shape.
        """
        views = self._buffers(self._epoch + 1, x.dtype, shapes or (x.shape,) * self._size)
        own = views[self._rank].data_ptr()
        if x.data_ptr() != own:
            ctypes.memmove(own, x.data_ptr(), x.nbytes)
        self._synchronise(name)
        return views

    def _synchronise(self, name: str) -> None:
        segment = self._segment
        segment.check_alive()
        self._epoch += 1
        segment.publish(self._epoch_word(self._rank), self._epoch, self._sleepers)
        for peer in self._peers:
            if not segment.wait_at_least(
                self._epoch_word(peer),
                self._epoch,
                sleeper=FIRST_WORD + self._rank,
                timeout_s=self._timeout_s,
                spin_s=self._spin_s,
            ):
                error = late(self._rank, f"rank {peer}", name, self._timeout_s)
                # An exchange cannot be repeated, so the generation ends for all ranks.
                self.abort(str(error))
                raise error

    def _buffers(self, epoch: int, dtype: torch.dtype, shapes: tuple[_Shape, ...]) -> list[Tensor]:
        key = (epoch & 1, dtype, shapes)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            views = self._views[key] = [self._view(rank, epoch & 1, dtype, shape) for rank, shape in enumerate(shapes)]
        return views

    def _view(self, rank: int, parity: int, dtype: torch.dtype, shape: _Shape) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        offset = self._first_buffer + (2 * rank + parity) * self._buffer_bytes
        return torch.frombuffer(self._segment.view(offset, nbytes), dtype=dtype).view(shape)

    def _epoch_word(self, rank: int) -> int:
        return _sleeper_words(self._size) + rank * LINE_WORDS


def _sleeper_words(size: int) -> int:
    """Index of the first word after the ranks' sleep marks, on its own cache line."""
    return FIRST_WORD + -(-size // LINE_WORDS) * LINE_WORDS


def _first_buffer(size: int) -> int:
    """Offset of rank 0's first buffer: after the epoch words, at a page boundary."""
    end = 8 * (_sleeper_words(size) + size * LINE_WORDS)
    return -(-end // 4096) * 4096
