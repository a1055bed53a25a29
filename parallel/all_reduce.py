"""How the ranks of one group add and gather tensors: the strategies behind TensorParallelGroup.

    LibraryCollectives          gloo or NCCL through torch's process group objects
    SharedMemoryCollectives     CPU ranks of one node, through a segment of shm.py
    SymmetricMemoryCollectives  CUDA ranks of one node, through each other's memory: symmetric_memory.py

A strategy owns its connections and nothing else; which one a group uses is the group's choice.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import ConfigError, DeadlineError, EngineError
from parallel.fused_sum import FusedSum
from parallel.numerics.tree import SumTree
from parallel.shm import FIRST_WORD, LINE_WORDS, Segment

# A blocked rank looks for an abort this often.
_SLICE_S = 0.02
# Shared-memory all-reduces split the adding among the ranks when their contributions together reach this size.
# Measured on 2 cores: the second synchronisation pays from 1 MB a rank with 3 ranks, 0.6 MB with 5, 0.35 MB with 9.
_SLICED_BYTES = 3 << 20
_MAX_CACHED_VIEWS = 256
_Shape = tuple[int, ...]  # torch.Size is one


class Collectives(ABC):
    """Operations of a strategy over `size` ranks. Every rank makes the same calls in the same order, from one thread at
    a time."""

    def __init__(self, size: int) -> None:
        self._size = size

    def partial_sum(self, shape: tuple[int, int], of: torch.dtype | SumTree) -> FusedSum | None:
        """The next sum of that shape, if it is best left to the norm that follows it.

        Args:
            of: the dtype of the summands, or the tree whose nodes they are.
        """
        return None

    def look_up(self, ids: Tensor, row_of: Tensor, rows: Tensor) -> Tensor | None:
        """The rows of `ids`, each from the rank that holds it; None where the strategy has no way of its own."""
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Contiguous `x`, summed over the ranks in place."""
        contributions = x.new_empty((self._size, *x.shape))
        self.all_gather(contributions, x)
        sum_in_rank_order(contributions.unbind(), x)
        return x

    def node_buffer(self, shape: tuple[int, int, int]) -> Tensor | None:
        """fp32 memory from which `sum_nodes` sums fastest, valid until the next call of any other; None for any."""
        return None

    def sum_nodes(self, nodes: Tensor, tree: SumTree) -> Tensor:
        """The root of `tree` [num_rows, row_size], of which contiguous `nodes` are this rank's."""
        shape = nodes.shape[1:]
        most = max(tree.counts)
        sent = nodes.new_empty((most, *shape))  # equal messages: what a rank lacks, nobody reads
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
        """Raises what the calls would raise because of an abort, or of a deadline that has passed on the device."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends blocked and later calls with EngineError(reason). Safe from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Releases the strategy's resources."""


def sum_in_rank_order(contributions: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of two or more `contributions`, each of `out`'s shape, to `out`, the first one first.

    Half-width floats are added in float32 and rounded once, so the bits depend on the contributions alone.
    """
    if out.dtype in (torch.bfloat16, torch.float16):
        total = contributions[0].float()
        for part in contributions[1:]:
            total += part
        out.copy_(total)
        return
    torch.add(contributions[0], contributions[1], out=out)
    for part in contributions[2:]:
        out += part


class LibraryCollectives(Collectives):
    """Collectives of a torch process group object, gloo or NCCL.

    gloo gathers the contributions and adds them in rank order: the same bits as the shared-memory strategy. NCCL adds
    in its own order, the same one on all ranks. Its calls only queue work on the current stream, and may be captured in
    a CUDA graph.
    """

    def __init__(self, backend: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        super().__init__(size)
        self._backend = backend  # ProcessGroupGloo or ProcessGroupNCCL: untyped classes of torch's C extension
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._abort_reason: str | None = None
        self._pending: Any = None
        # Not asynchronous: on the current stream, without events to and from one of NCCL's own.
        self._reduce_options, self._gather_options = AllreduceOptions(), AllgatherOptions()
        self._reduce_options.asyncOp = self._gather_options.asyncOp = device.type != "cuda"

    @classmethod
    def create(
        cls, *, strategy: str, rank: int, size: int, store: Store, device: torch.device, timeout_s: float
    ) -> LibraryCollectives:
        """Connects to the other ranks through `store`, whose keys nobody else may use.

        Raises:
            ConfigError: this build of torch has no such backend.
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: NCCL could not connect them.
        """
        make = _gloo_backend if strategy == "gloo" else _nccl_backend
        try:
            backend = make(rank=rank, size=size, store=store, device=device, timeout_s=timeout_s)
        except EngineError:
            raise
        except RuntimeError as error:  # torch's DistStoreError among them
            raise DeadlineError(
                f"rank {rank} could not meet the other {size - 1} ranks over {strategy} within "
                f"parallel.step_timeout_s={timeout_s:g}: {_first_line(error)}"
            ) from error
        return cls(backend, rank=rank, size=size, device=device, timeout_s=timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return super().all_reduce(x)
        self.check_alive()
        self._finish(self._backend.allreduce([x], self._reduce_options), "all_reduce")
        return x

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self.check_alive()
        # Bytes, because gloo does not know every type.
        out_bytes, x_bytes = out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)
        self._finish(self._backend._allgather_base(out_bytes, x_bytes, self._gather_options), "all_gather")

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self.all_gather(torch.empty(self._size, dtype=torch.uint8, device=self._device), token)
        if self._device.type == "cuda":
            self._await_stream("barrier")

    def abort(self, reason: str) -> None:
        """See Collectives. NCCL's abort returns once no CUDA graph that holds its communicator is left."""
        if self._abort_reason is not None:
            return  # NCCL is aborted once
        self._abort_reason = reason
        backend = self._backend
        if self._device.type == "cuda" and backend is not None:
            backend.abort()

    def close(self) -> None:
        backend, pending = self._backend, self._pending
        aborted = self._abort_reason is not None
        self._backend = self._pending = None
        self._abort_reason = self._abort_reason or "the group is closed"
        if self._device.type == "cuda":
            if not aborted and backend is not None:
                backend.abort()  # an orderly end would wait for the peers
        elif pending is not None:
            # gloo cannot cancel: destroying it now would block on the unfinished call for up to the deadline.
            threading.Thread(target=_outlive, args=(backend, pending), name="gloo-reaper", daemon=True).start()

    def check_alive(self) -> None:
        """Raises EngineError with the reason of the abort, if there was one."""
        if self._abort_reason is not None:
            raise EngineError(self._abort_reason)

    def _finish(self, work: Any, name: str) -> None:
        if self._device.type == "cuda":
            return  # queued on the current stream; there is no work object
        deadline = time.monotonic() + self._timeout_s
        while not _done_within_slice(work):
            if self._abort_reason is not None:
                self._pending = work
                raise EngineError(self._abort_reason)
            if time.monotonic() > deadline:
                self._pending = work
                raise late(self._rank, "the other ranks", name, self._timeout_s)
        try:
            work.wait()
        except RuntimeError as error:
            # An aborted peer breaks its connections: the abort is then the cause to tell.
            self.check_alive()
            raise EngineError(f"rank {self._rank}: {name} over gloo failed: {_first_line(error)}") from error

    def _await_stream(self, name: str) -> None:
        deadline = time.monotonic() + self._timeout_s

        def look() -> None:
            self.check_alive()
            if time.monotonic() > deadline:
                raise late(self._rank, "the other ranks", name, self._timeout_s)

        await_stream(self._device, look)
        self.check_alive()  # an aborted collective also lets its stream go on


class SharedMemoryCollectives(Collectives):
    """Collectives of CPU ranks on one node, through one shared segment; the same bits on every rank and every run.

    Each rank has an epoch word, which counts its exchanges, and two buffers. One exchange: copy the own contribution
    into the buffer of the epoch's parity, publish the epoch, wait for every peer's.

    Why two buffers make one synchronisation enough: a rank writes buffer p again at epoch e + 2. Before that it has
    waited for every peer's epoch e + 1, and a peer publishes e + 1 only after it has finished reading the buffers of
    epoch e. So nobody still reads what is overwritten.
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
        # Tensors over the buffers, made once: (parity, dtype, shape of each rank's) to one tensor per rank.
        self._views: dict[tuple[int, torch.dtype, tuple[_Shape, ...]], list[Tensor]] = {}

    @classmethod
    def create(
        cls, *, rank: int, size: int, store: Store, timeout_s: float, spin_us: int, buffer_bytes: int = 4 << 20
    ) -> SharedMemoryCollectives:
        """Rank 0 makes the segment and publishes it in `store`; returns when every rank has mapped it.

        Args:
            buffer_bytes: the most one exchange carries; larger tensors go in pieces.

        Raises:
            ConfigError: this processor is not supported.
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: the ranks do not share a node.
        """
        if rank == 0:
            segment = Segment.create(_first_buffer(size) + 2 * size * buffer_bytes)
            store.set("segment", segment.address)
        else:
            try:
                store.wait(["segment"], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise late(rank, "rank 0", "the meeting of the ranks", timeout_s) from error
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
        # Nobody reads it any more: it is that of the exchange before the last, which all have left.
        if 4 * prod(shape) > self._buffer_bytes:
            return None
        return self._buffers(self._epoch + 1, torch.float32, (shape,) * self._size)[self._rank]

    def sum_nodes(self, nodes: Tensor, tree: SumTree) -> Tensor:
        _, num_rows, row_size = nodes.shape
        total = torch.empty(num_rows, row_size)
        most = max(tree.counts)
        step = max(1, self._buffer_bytes // (4 * most * row_size))
        if step < num_rows:
            nodes = nodes.clone()  # they may lie in the buffer that the first piece goes to
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
        """Every rank sums one slice of 1-D `x`; the sums are the contributions of a second exchange.

        With all summing everything each rank would read `size` times the tensor; so it reads it twice.
        """
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
        """Does sum_nodes for rows that fit the buffer; `total` is written."""
        parts = [part for view in self._exchange("sum_nodes", nodes, tree.shapes(total.shape)) for part in view]
        if self._size <= 2 or len(parts) * total.nbytes < _SLICED_BYTES:
            tree.finish(parts, total)
            return
        # Each rank sums a slice, see _all_reduce_sliced.
        num_rows, size = len(total), self._size
        slices = [slice(num_rows * rank // size, num_rows * (rank + 1) // size) for rank in range(size)]
        sums, own = self._buffers(self._epoch + 1, total.dtype, (total.shape,) * size), slices[self._rank]
        tree.finish([part[own] for part in parts], sums[self._rank][own])
        self._synchronise("sum_nodes")
        for rank, rows in enumerate(slices):
            total[rows] = sums[rank][rows]

    def _exchange(self, name: str, x: Tensor, shapes: tuple[_Shape, ...] | None = None) -> list[Tensor]:
        """Every rank's contribution, in rank order: views of the buffers, valid until this rank's next exchange.

        Args:
            x: contiguous; perhaps already where it is to be.
            shapes: of each rank's. None: that of x.
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
                self.abort(str(error))  # this rank's epoch is lost to the others: the generation ends for all
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
    """Index of the first word after the ranks' sleep marks, on a line of its own."""
    return FIRST_WORD + -(-size // LINE_WORDS) * LINE_WORDS


def _first_buffer(size: int) -> int:
    """Offset of rank 0's first buffer: after the epoch words, on a page border."""
    end = 8 * (_sleeper_words(size) + size * LINE_WORDS)
    return -(-end // 4096) * 4096


def await_stream(device: torch.device, look: Callable[[], None] = lambda: None) -> None:
    """Returns once what is queued on `device`'s current stream is done; calls `look` meanwhile, which may raise."""
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
    done.record(torch.cuda.current_stream(device))
    while not done.query():
        look()
        time.sleep(1e-4)


def late(rank: int, who: str, what: str, timeout_s: float) -> DeadlineError:
    """The error of `rank`, which waited in vain."""
    return DeadlineError(
        f"rank {rank} waited for {who} in {what} longer than parallel.step_timeout_s={timeout_s:g}; "
        f"see what holds them up, or raise it"
    )


def _gloo_backend(*, rank: int, size: int, store: Store, device: torch.device, timeout_s: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
    options._timeout = timedelta(seconds=timeout_s + 1.0)  # later than ours, which names its setting
    options._threads = 2
    address = _own_address(rank=rank, size=size, store=store, timeout_s=timeout_s)
    options._devices = [
        ProcessGroupGloo.create_device(hostname=address) if address else ProcessGroupGloo.create_default_device()
    ]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl_backend(*, rank: int, size: int, store: Store, device: torch.device, timeout_s: float) -> Any:
    if not torch.distributed.is_nccl_available():
        raise ConfigError("parallel.all_reduce=nccl needs a CUDA build of torch; choose gloo or shared_memory")
    from torch.distributed import ProcessGroupNCCL  # a CPU build of torch has none

    # NCCL's own meeting has no deadline of ours.
    keys = [f"here/{peer}" for peer in range(size)]
    store.set(keys[rank], "1")
    store.wait(keys, timedelta(seconds=timeout_s))
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    try:
        backend = ProcessGroupNCCL(store, rank, size, options)
        backend.eager_connect_single_device(device)
    except RuntimeError as error:
        raise EngineError(
            f"rank {rank} on {device}: NCCL could not connect the {size} ranks: {_first_line(error)}; "
            f"set NCCL_DEBUG=INFO to see why"
        ) from error
    return backend


def _own_address(*, rank: int, size: int, store: Store, timeout_s: float) -> str | None:
    """The address this rank's peers reach it by; None when only the host's name can tell."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        network = f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    keys = [f"network/{peer}" for peer in range(size)]
    store.set(keys[rank], network)
    store.wait(keys, timedelta(seconds=timeout_s))
    if {store.get(key).decode() for key in keys} == {network}:
        return "127.0.0.1"
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, torch.distributed.TCPStore):  # type: ignore[attr-defined]  # not in its `__all__`
        return None
    # The interface that reaches the store is the one the ranks share. Connecting UDP sends nothing.
    family, kind, _, _, store_address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(store_address)
        address: str = probe.getsockname()[0]
    return address


def _done_within_slice(work: Any) -> bool:
    """Whether the gloo call has ended, well or badly, within _SLICE_S."""
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError:
        # Either the slice passed or the call failed. It may also have ended well since: only the work itself knows.
        return bool(work.is_completed())
    return True


def _outlive(backend: Any, pending: Any) -> None:
    try:
        pending.wait()
    except RuntimeError:
        return  # the call ended with its peers or at the deadline, and `backend` may go


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
