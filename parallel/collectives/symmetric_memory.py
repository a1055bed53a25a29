"""SymmetricMemoryCollectives: collectives of CUDA ranks on one node, through memory that all of them have mapped.

This module owns the mapping, which torch makes. fused_sum.py uses the mapped memory. NCCL is not involved: every wait
has a deadline and can be aborted, also inside CUDA graphs, so a rank can always leave.
"""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import EngineError
from parallel.collectives.fused_sum import FusedSum, PeerMemory, PeerSizes
from parallel.collectives.interface import Collectives, await_stream, late
from parallel.tree import SumTree


class SymmetricMemoryCollectives(Collectives):
    """Collectives by kernels that read and write the other ranks' memory. A sum has the same bits on every rank.

    All calls queue work on the current stream and can be captured in CUDA graphs, which hold the addresses of this
    group's memory. The ranks share one set of flags, so each rank must use one stream for all calls, and the thread's
    current device must be the group's. Each rank must be a process, because torch exchanges the mappings through a
    socket named after the process.
    """

    def __init__(
        self, size: int, memory: PeerMemory, mapping: Any, registration: _Registration | None, device: torch.device
    ) -> None:
        super().__init__(size)
        self._memory = memory
        self._mapping = mapping  # torch's handle, which keeps the peers' memory mapped
        self._registration = registration
        self._device = device

    @classmethod
    def create(
        cls, *, rank: int, size: int, store: Store, device: torch.device, timeout_s: float, sizes: PeerSizes
    ) -> SymmetricMemoryCollectives:
        """Connects to the other ranks, maps their memory and tests it with an exchange. Returns when all ranks have
        done so.

        Args:
            store: no other code may use its keys.
            sizes: equal on every rank.

        Raises:
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: the ranks cannot map each other's memory, or would do so with multicast.
        """
        try:
            registration = _Registration(rank=rank, size=size, store=store, timeout_s=timeout_s)
            memory, mapping = registration.map(PeerMemory.bytes_of(sizes), device)
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
        peers = PeerMemory(memory, mapping.buffer_ptrs, sizes, rank=rank, timeout_s=timeout_s)
        self = cls(size, peers, mapping, registration, device)
        try:
            self._check(rank)
        except EngineError:
            self.close()
            raise
        return self

    @classmethod
    def alone(cls, *, rank: int, size: int, device: torch.device, sizes: PeerSizes) -> SymmetricMemoryCollectives:
        """Collectives of a rank that uses its own memory in place of the others'. See `TensorParallelGroup.alone`."""
        memory = torch.zeros(PeerMemory.bytes_of(sizes), dtype=torch.uint8, device=device)
        peers = PeerMemory(memory, (memory.data_ptr(),) * size, sizes, rank=rank, timeout_s=1.0)
        peers.give_up()
        return cls(size, peers, None, None, device)

    def partial_sum(self, shape: tuple[int, int], of: torch.dtype | SumTree) -> FusedSum | None:
        return self._memory.partial_sum(shape, of)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self._memory.all_gather(out, x)

    def look_up(self, ids: Tensor, row_of: Tensor, rows: Tensor) -> Tensor | None:
        return self._memory.look_up(ids, row_of, rows)

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.int32, device=self._device)
        self.all_gather(torch.empty(self._size, dtype=torch.int32, device=self._device), token)
        await_stream(self._device)  # the kernel's own deadline ends the wait
        self.check_alive()

    def check_alive(self) -> None:
        self._memory.check_alive()

    def abort(self, reason: str) -> None:
        self._memory.abort(reason)

    def close(self) -> None:
        """Implements Collectives. Unmapping waits for the device."""
        if self._registration is not None:
            self._registration.close()
        self._memory.close()
        self._mapping = None

    def _check(self, rank: int) -> None:
        found = torch.empty(self._size, dtype=torch.int32, device=self._device)
        self.all_gather(found, torch.full((1,), rank, dtype=torch.int32, device=self._device))
        self.barrier()
        if found.tolist() != list(range(self._size)):
            raise EngineError(
                f"rank {rank} on {self._device}: data read through symmetric memory is wrong; choose "
                f"parallel.all_reduce=nccl"
            )


class _Registration:
    """The name by which torch's kernels find the ranks without a default process group."""

    def __init__(self, *, rank: int, size: int, store: Store, timeout_s: float) -> None:
        self.size = size
        self._rank = rank
        self._timeout_s = timeout_s
        self._keys = PrefixStore("meeting", store)
        timeout = timedelta(seconds=timeout_s)
        if rank == 0:
            store.set("name", f"lockstep-{uuid.uuid4().hex}")
        self.meet("here")
        self.name = store.get("name").decode()
        # Both objects must be held here: the registry holds the group weakly, and torch's C++ calls the store's Python
        # methods.
        self._store = RecountedStore(PrefixStore("symmetric_memory", store), timeout)
        self._group = ProcessGroup(self._store, rank, size)
        _register_process_group(self.name, self._group)  # type: ignore[arg-type]  # a NewType of str, newer than 2.11

    def meet(self, what: str) -> None:
        """Returns once every rank has called it with the same `what`. Raises DeadlineError if a rank does not come."""
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        self._keys.set(keys[self._rank], "1")
        try:
            self._keys.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise late(self._rank, "the other ranks", "the meeting of the ranks", self._timeout_s) from error

    def map(self, num_bytes: int, device: torch.device) -> tuple[Tensor, Any]:
        """Allocates a [num_bytes] uint8 tensor that every rank maps. Returns it and torch's handle of the mapping.

        Raises:
            EngineError: the mapping uses multicast.
            RuntimeError: from torch, if anything else fails.
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
    """The store for one meeting of torch's symmetric memory, which counts exchanges from 0.

    torch names the keys of an exchange <prefix>/<count>/<rank>, and counts from the start of the process (torch issue
    196082). Without this wrapper, a rank that lives through several generations and a newly started rank would wait for
    different keys. Waits end after `timeout`.
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
