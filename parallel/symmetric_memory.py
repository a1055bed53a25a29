"""SymmetricMemoryCollectives: CUDA ranks of one node sum in memory that each of them has mapped.

Owns the buffer and the choice of the kernel that sums in it; these kernels and the mapping are torch's. Small sums that
a norm follows are fused_sum.py's. What does not fit the buffer, gathers and barriers go over NCCL.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import EngineError
from parallel.all_reduce import Collectives, LibraryCollectives
from parallel.fused_sum import MEMORY_BYTES, FusedSum, FusedSums, fits_nodes, fuses
from parallel.numerics.tree import SumTree

Method = Literal["two_shot", "nccl"]

_DTYPES = (torch.bfloat16, torch.float32)  # the types that torch's kernels add
_ALIGNMENT = 16  # bytes of one load
_MAX_CACHED_VIEWS = 256


def choose_method(nbytes: int, dtype: torch.dtype, buffer_bytes: int) -> Method:
    """How the ranks sum `nbytes` bytes: a function of what every rank knows, so that all choose the same.

    two_shot, in place: each rank sums its share and writes it to all. On 2, 3 and 4 H200s the fastest of the three, or
    within 0.8 us of it, from 8 KB to 16 MB (6.2 us against NCCL's 17 at 8 KB, 58 against 84 at 16 MB and 2 ranks).
    nccl: what the kernels cannot add, or not in `buffer_bytes`.
    """
    if dtype not in _DTYPES or nbytes % _ALIGNMENT or not 0 < nbytes <= buffer_bytes:
        return "nccl"
    return "two_shot"


class SymmetricMemoryCollectives(Collectives):
    """Sums inside `reduce_buffer` by kernels that read and write the other ranks' memory; everything else is NCCL's.

    A sum adds in rank order, in bf16 with a rounding for each addition, and has the same bits on every rank. All calls
    queue work on the current stream and may be captured in CUDA graphs. The ranks share one set of signal words, so
    each rank must use one stream for all of its calls, and the thread's current device must be the group's.

    torch's kernels wait for the other ranks without a deadline, and nothing can end such a wait: if a rank dies inside
    such a sum, `abort` tells the reason to the host's calls but may itself not return, and neither may `close`. The
    process has to be ended. Waits of a partial_sum do end. Each rank is a process of its own: torch exchanges the
    mappings through a socket named after it.
    """

    def __init__(
        self,
        nccl: LibraryCollectives,
        fused: FusedSums,
        buffer: Tensor,
        mappings: Sequence[Any],
        registration: _Registration,
        *,
        size: int,
    ) -> None:
        self._nccl = nccl
        self._fused = fused
        self._buffer: Tensor | None = buffer  # [buffer_bytes] uint8, mapped by every rank
        self._mappings = mappings  # torch's handles, which keep the peers' memory mapped
        self._registration = registration
        self._size = size
        self._buffer_bytes = buffer.numel()
        self._address = buffer.data_ptr()
        self._views: dict[tuple[tuple[int, int], torch.dtype], Tensor] = {}
        self._two_shot = torch.ops.symm_mem.two_shot_all_reduce_.default

    @classmethod
    def create(
        cls, *, rank: int, size: int, store: Store, device: torch.device, timeout_s: float, buffer_bytes: int
    ) -> SymmetricMemoryCollectives:
        """Connects to the other ranks, maps their buffers and sums once; returns when all have.

        Args:
            store: whose keys nobody else may use.
            buffer_bytes: the largest sum that need not go over NCCL; the same on every rank.

        Raises:
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: the ranks cannot map each other's memory, or would do so with multicast.
        """
        assert buffer_bytes > 0, "symmetric_memory sums in a buffer"
        nccl = LibraryCollectives.create(
            strategy="nccl",
            rank=rank,
            size=size,
            store=PrefixStore("nccl", store),
            device=device,
            timeout_s=timeout_s,
        )
        try:
            registration = _Registration(
                rank=rank, size=size, store=PrefixStore("symmetric_memory", store), timeout_s=timeout_s
            )
            buffer, mapping = registration.map(-(-buffer_bytes // _ALIGNMENT) * _ALIGNMENT, device)
            fused_memory, fused_mapping = registration.map(MEMORY_BYTES, device)
        except EngineError:
            nccl.close()
            raise
        except RuntimeError as error:
            nccl.close()
            first_line = str(error).split("\n", 1)[0]
            raise EngineError(
                f"rank {rank} could not map the memory of the other ranks on {device}: {first_line}; "
                f"parallel.all_reduce=nccl needs no mapping"
            ) from error
        # No rank leaves _check_sum, whose barrier follows it, before all have cleared their flags.
        fused = FusedSums(fused_memory.zero_(), fused_mapping.buffer_ptrs, rank=rank, timeout_s=timeout_s)
        self = cls(nccl, fused, buffer, (mapping, fused_mapping), registration, size=size)
        self._check_sum(rank, device)  # if it fails nothing is closed: that could wait for a rank that never comes
        return self

    @property
    def fused(self) -> FusedSums:
        """The source of every partial_sum."""
        return self._fused

    @property
    def buffer(self) -> Tensor:
        """[buffer_bytes] uint8: the memory of every reduce_buffer."""
        assert self._buffer is not None, "the buffer of a closed group"
        return self._buffer

    def reduce_buffer(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        key = (shape, dtype)
        view = self._views.get(key)
        if view is None:
            nbytes = shape[0] * shape[1] * dtype.itemsize
            if choose_method(nbytes, dtype, self._buffer_bytes) == "nccl":
                return None
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            view = self._views[key] = self.buffer[:nbytes].view(dtype).view(shape)
        return view

    def partial_sum(self, shape: tuple[int, int], dtype: torch.dtype) -> FusedSum | None:
        return self._fused.partial_sum(shape) if fuses(self._size, shape, dtype) else None

    def node_sum(self, shape: tuple[int, int], tree: SumTree) -> FusedSum | None:
        return self._fused.partial_sum(shape, tree) if fits_nodes(tree, shape) else None

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self._address:
            return self._nccl.all_reduce(x)
        return self.all_reduce_by(choose_method(x.nbytes, x.dtype, self._buffer_bytes), x)

    def all_reduce_by(self, method: Method, x: Tensor) -> Tensor:
        """Does all_reduce by `method`. For all but nccl `x` starts where the buffer starts."""
        if method == "nccl":
            return self._nccl.all_reduce(x)
        self.check_alive()
        self._two_shot(x, "sum", self._registration.name)
        return x

    def sum_nodes(self, nodes: Tensor, tree: SumTree) -> Tensor:
        self.check_alive()
        return self._nccl.sum_nodes(nodes, tree)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self.check_alive()
        self._nccl.all_gather(out, x)

    def barrier(self) -> None:
        self.check_alive()
        self._nccl.barrier()

    def check_alive(self) -> None:
        self._nccl.check_alive()
        self._fused.check_alive()

    def abort(self, reason: str) -> None:
        self._fused.abort(reason)
        self._nccl.abort(reason)

    def close(self) -> None:
        """See Collectives. Unmapping waits for the device."""
        self._nccl.close()
        self._registration.close()
        self._fused.close()
        self._views.clear()
        self._buffer = None
        self._mappings = ()

    def _check_sum(self, rank: int, device: torch.device) -> None:
        """Sums once, within the deadline of a barrier; later sums have none."""
        x = self.reduce_buffer((1, min(self._buffer_bytes, 4096) // 4), torch.float32)
        assert x is not None, "it fits the buffer"
        total = self.all_reduce(x.fill_(rank + 1)).clone()
        self.barrier()
        if not bool((total == self._size * (self._size + 1) / 2).all()):
            raise EngineError(
                f"rank {rank} on {device}: a sum through symmetric memory is wrong; choose parallel.all_reduce=nccl"
            )


class _Registration:
    """A name by which torch's kernels find the ranks, which need no default process group for it."""

    def __init__(self, *, rank: int, size: int, store: Store, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        if rank == 0:
            store.set("name", f"lockstep-{uuid.uuid4().hex}")
        store.wait(["name"], timeout)
        self.name = store.get("name").decode()
        # Both are kept: the registry refers to the group weakly, and torch's C++ calls the store's Python methods.
        self._store = RecountedStore(store, timeout)
        self._group = ProcessGroup(self._store, rank, size)
        _register_process_group(self.name, self._group)  # type: ignore[arg-type]  # a NewType of str, newer than 2.11

    def map(self, num_bytes: int, device: torch.device) -> tuple[Tensor, Any]:
        """A new [num_bytes] uint8 tensor, mapped by every rank; and torch's handle of the mapping.

        Raises:
            EngineError: the mapping uses multicast.
            RuntimeError: torch's, of whatever else fails.
        """
        with torch.cuda.device(device):
            buffer = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            mapping = _SymmetricMemory.rendezvous(buffer, self.name)
        if mapping.multicast_ptr:
            raise EngineError(
                f"torch mapped the ranks' memory on {device} with NVLink multicast, which can wedge the host's switch; "
                f"start every rank's process with TORCH_SYMM_MEM_DISABLE_MULTICAST=1 (env_vars of the runtime_env)"
            )
        return buffer, mapping

    def close(self) -> None:
        _unregister_process_group(self.name)  # type: ignore[arg-type]  # as above


class RecountedStore(Store):
    """`store` for one meeting of torch's symmetric memory, whose exchanges it counts from 0.

    torch names the keys of an exchange <prefix>/<count>/<rank> where count runs since the process started (torch issue
    196082). Without this a rank that lives through several generations and one that was just started would wait for
    each other's keys. Waits end after `timeout`.
    """

    def __init__(self, store: Store, timeout: timedelta) -> None:
        super().__init__()
        self._inner = store
        self._timeout = timeout
        self._first: int | None = None

    def set(self, key: str, value: str) -> None:
        self._inner.set(self._recounted(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(self._recounted(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self._inner.multi_get([self._recounted(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._inner.add(self._recounted(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check([self._recounted(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait([self._recounted(key) for key in keys], self._timeout)

    def _recounted(self, key: str) -> str:
        return re.sub(r"(?<=/)\d+", self._offset, key, count=1)

    def _offset(self, match: re.Match[str]) -> str:
        count = int(match[0])
        if self._first is None:
            self._first = count
        return str(count - self._first)
