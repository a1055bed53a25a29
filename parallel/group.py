"""TensorParallelGroup: one rank's membership of its tensor-parallel group.

Owns the meeting of the ranks and which strategy carries their collectives. Nothing here is global to the process: two
ranks can be two threads of one test. How tensors move is in all_reduce.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import ConfigError, EngineError
from parallel.all_reduce import Collectives, LibraryCollectives, SharedMemoryCollectives

Strategy = Literal["gloo", "nccl", "shared_memory"]


class TensorParallelGroup:
    """`rank` of `size` ranks. Every rank makes the same collective calls in the same order, from one thread."""

    def __init__(self, *, rank: int, size: int, device: torch.device, collectives: Collectives | None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._collectives = collectives

    @classmethod
    def create(
        cls,
        *,
        rank: int,
        size: int,
        store: Store | None,
        device: torch.device | str,
        strategy: Strategy,
        timeout_s: float,
        generation: int = 1,
        spin_us: int = 0,
    ) -> TensorParallelGroup:
        """Meets the other ranks; returns when all are there.

        Args:
            store: the rendezvous store; this rank's own client of it when ranks are threads, because a TCPStore
                client that waits blocks its other callers. None only for `size` 1.
            timeout_s: deadline of the meeting and of each collective: parallel.step_timeout_s.
            generation: keys in the store start with it, so a rebuilt group never meets remains of the last one.
            spin_us: how long a waiting rank spins before it sleeps; only shared_memory spins.

        Raises:
            ConfigError: the strategy does not fit this machine.
            DeadlineError: not all ranks came in time.
        """
        device = torch.device(device)
        if size == 1:
            return cls.single(device)
        assert store is not None, "a group of several ranks needs a store"
        assert 0 <= rank < size, f"rank {rank} of {size}"
        if (strategy == "nccl") != (device.type == "cuda"):
            right = "nccl" if device.type == "cuda" else "gloo or shared_memory"
            raise ConfigError(f"parallel.all_reduce={strategy} does not serve device={device.type}; choose {right}")
        store = PrefixStore(f"gen{generation}", store)
        collectives: Collectives
        if strategy == "shared_memory":
            collectives = SharedMemoryCollectives.create(
                rank=rank, size=size, store=store, timeout_s=timeout_s, spin_us=spin_us
            )
        else:
            collectives = LibraryCollectives.create(
                strategy=strategy, rank=rank, size=size, store=store, device=device, timeout_s=timeout_s
            )
        return cls(rank=rank, size=size, device=device, collectives=collectives)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> TensorParallelGroup:
        """A group of one: every collective is the identity."""
        return cls(rank=0, size=1, device=torch.device(device), collectives=None)

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks in rank order, in place; float32, bf16, fp16 or integers.

        bf16 and fp16 are added in float32 and rounded once. On NCCL the order is NCCL's, and the sum is ready in
        stream order.

        Raises:
            DeadlineError: a rank did not come within the group's deadline.
            EngineError: the group was aborted, or a rank died.
        """
        if self._collectives is None:
            return x
        if x.is_contiguous():
            self._collectives.all_reduce(x)
        else:
            packed = x.contiguous()
            self._collectives.all_reduce(packed)
            x.copy_(packed)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, stacked: [size, *x.shape]. All ranks bring one shape and dtype. Raises as all_reduce."""
        if self._collectives is None:
            return x.unsqueeze(0)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._collectives.all_gather(out, x.contiguous())
        return out

    def barrier(self) -> None:
        """Returns once every rank has called it. Raises as all_reduce."""
        if self._collectives is not None:
            self._collectives.barrier()

    def abort(self, reason: str) -> None:
        """Ends this generation from any thread: blocked and later collectives raise EngineError(reason)."""
        if self._collectives is not None:
            self._collectives.abort(reason)

    def close(self) -> None:
        """Leaves the group. No collective may be running, unless it was aborted and has returned."""
        collectives, self._collectives = self._collectives, _Closed()
        if collectives is not None:
            collectives.close()


class _Closed:
    """Collectives of a group that was left."""

    def all_reduce(self, x: Tensor) -> None:
        raise EngineError("the tensor-parallel group is closed")

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        raise EngineError("the tensor-parallel group is closed")

    def barrier(self) -> None:
        raise EngineError("the tensor-parallel group is closed")

    def abort(self, reason: str) -> None:
        """Nothing is left to end."""

    def close(self) -> None:
        """Already left."""
