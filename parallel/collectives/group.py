"""TensorParallelGroup: one rank's membership of its tensor-parallel group.

This module owns how the ranks meet, and which implementation their collectives use. It has no process-wide state: two
ranks can be two threads of one test (with symmetric_memory, two processes). interface.py and the implementations' files
say how tensors move.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import ConfigError, EngineError
from parallel.collectives.interface import Collectives, FusedSum
from parallel.collectives.library_collectives import LibraryCollectives
from parallel.collectives.shared_memory import SharedMemoryCollectives
from parallel.collectives.symmetric_memory import PeerSizes, SymmetricMemoryCollectives
from parallel.environment import MULTICAST_OFF
from parallel.tree import SumTree

Strategy = Literal["gloo", "nccl", "shared_memory", "symmetric_memory"]
_STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "cpu": ("gloo", "shared_memory"),
    "cuda": ("nccl", "symmetric_memory"),
}


class TensorParallelGroup:
    """`rank` of `size` ranks. Every rank must make the same collective calls in the same order, from one thread."""

    def __init__(self, *, rank: int, size: int, device: torch.device, collectives: Collectives | None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._collectives = collectives
        # Meets the ranks of a generation; None in a group of one rank
        self._meet: Callable[[Store, int], Collectives] | None = None

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
        sizes: PeerSizes = PeerSizes(),  # noqa: B008 - the default is frozen
    ) -> TensorParallelGroup:
        """Meets the other ranks. Returns when all of them have come.

        Args:
            store: the rendezvous store. If ranks are threads, each needs its own TCPStore client, because a waiting
                client blocks its other callers. None only for `size` 1.
            timeout_s: deadline of the meeting and of each collective: parallel.step_timeout_s.
            generation: prefix of the store's keys, so that a rebuilt group never reads keys of an earlier one.
            spin_us: microseconds that a waiting rank spins before it sleeps. Only shared_memory spins.
            sizes: upper bounds of a step's collectives; symmetric_memory allocates memory for them. Equal on all ranks.

        Raises:
            ConfigError: the implementation does not fit this machine, or a CUDA rank's environment allows multicast.
            DeadlineError: not all ranks came in time.
            EngineError: all ranks came, but could not connect.
        """
        device = torch.device(device)
        if size == 1:
            return cls.single(device)
        assert store is not None, "a group of several ranks needs a store"
        assert 0 <= rank < size, f"rank {rank} of {size}"
        right = _STRATEGIES.get(device.type, ())
        if strategy not in right:
            raise ConfigError(
                f"parallel.all_reduce={strategy} does not serve device={device.type}; choose {' or '.join(right)}"
            )
        if device.type == "cuda":
            _check_multicast_is_off()

        def meet(store: Store, generation: int) -> Collectives:
            store = PrefixStore(f"gen{generation}", store)
            if strategy == "shared_memory":
                return SharedMemoryCollectives.create(
                    rank=rank, size=size, store=store, timeout_s=timeout_s, spin_us=spin_us
                )
            if strategy == "symmetric_memory":
                return SymmetricMemoryCollectives.create(
                    rank=rank, size=size, store=store, device=device, timeout_s=timeout_s, sizes=sizes
                )
            return LibraryCollectives.create(
                strategy=strategy, rank=rank, size=size, store=store, device=device, timeout_s=timeout_s
            )

        group = cls(rank=rank, size=size, device=device, collectives=meet(store, generation))
        group._meet = meet
        return group

    def rejoin(self, store: Store | None, generation: int) -> None:
        """Meets the ranks of a later `generation` after an abort. This object then belongs to the new generation.

        No collective may be running. Arguments and errors are those of `create`.
        """
        if self._meet is not None:
            assert store is not None, "a group of several ranks needs a store"
            self.close()
            self._collectives = self._meet(store, generation)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> TensorParallelGroup:
        """A group of one rank: every collective is the identity."""
        return cls(rank=0, size=1, device=torch.device(device), collectives=None)

    @classmethod
    def alone(cls, rank: int, size: int, device: torch.device, sizes: PeerSizes) -> TensorParallelGroup:
        """A group on a GPU without its other ranks. Its collectives do not wait, and their results are meaningless. It
        is used to load their kernels."""
        if size == 1:
            return cls.single(device)
        collectives = SymmetricMemoryCollectives.alone(rank=rank, size=size, device=device, sizes=sizes)
        return cls(rank=rank, size=size, device=device, collectives=collectives)

    def partial_sum(self, shape: tuple[int, int], of: torch.dtype | SumTree) -> FusedSum | None:
        """A pending sum of this shape, which the next norm's kernel finishes. None if another way to sum is faster.

        The producer writes `summand`, then calls `add_norm` before any other call for a sum. All ranks request the same
        shape. Each step (or graph replay) must begin with another collective, or have an even number of these sums: see
        SymmetricMemoryCollectives.

        Args:
            of: the dtype of the summands, or the tree of the summed nodes. A tree's bits are those of `sum_nodes`.
        """
        return None if self._collectives is None else self._collectives.partial_sum(shape, of)

    def look_up(self, ids: Tensor, row_of: Tensor, rows: Tensor) -> Tensor | None:
        """Looks up rows of a matrix with rows divided among the ranks. None if ranks must sum their rows instead.

        Args:
            ids: [num_ids] int64.
            row_of: [number of all ids] int32: index in `rows` of each id; len(rows) - 1 if another rank has it.
            rows: [num_held + 1, row_size], contiguous.

        Returns:
            [num_ids, row_size].
        """
        return None if self._collectives is None else self._collectives.look_up(ids, row_of, rows)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sums `x` over the ranks in place, in rank order, and returns it. `x` is float32, bf16, fp16 or integer.

        bf16 and fp16 are added in float32 and rounded once. With NCCL, order and rounding are NCCL's, but equal on all
        ranks. On CUDA, the sum is ready in stream order.

        Raises:
            DeadlineError: a rank did not come within the group's deadline.
            EngineError: the group was aborted, or a rank died.
        """
        if self._collectives is None:
            return x
        if x.is_contiguous():
            return self._collectives.all_reduce(x)
        return x.copy_(self._collectives.all_reduce(x.contiguous()))

    def node_buffer(self, shape: tuple[int, int, int]) -> Tensor:
        """Returns fp32 memory of this shape for this rank's nodes of the next `sum_nodes`. It is not initialised."""
        if self._collectives is None or shape[0] == 0:
            return torch.empty(shape, device=self.device)
        buffer = self._collectives.node_buffer(shape)
        return torch.empty(shape, device=self.device) if buffer is None else buffer

    def sum_nodes(self, nodes: Tensor, tree: SumTree) -> Tensor:
        """Adds all ranks' nodes of `tree`. The bits are equal for any number of ranks.

        Args:
            nodes: [len(tree.covers[rank]), num_rows, row_size] fp32, contiguous: from `node_buffer`, or any other
                memory.

        Returns:
            The root [num_rows, row_size] fp32, a tensor that belongs to the caller. Raises what all_reduce raises.
        """
        if self._collectives is None:
            return nodes[0] if len(nodes) == 1 else tree.finish(nodes.unbind(), torch.empty_like(nodes[0]))
        return self._collectives.sum_nodes(nodes, tree)

    def all_gather(self, x: Tensor) -> Tensor:
        """Stacks every rank's `x`: [size, *x.shape]. All ranks pass the same shape and dtype. Raises what all_reduce
        raises."""
        if self._collectives is None:
            return x.unsqueeze(0)
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._collectives.all_gather(out, x.contiguous())
        return out

    def barrier(self) -> None:
        """Returns once every rank has called it. Raises what all_reduce raises."""
        if self._collectives is not None:
            self._collectives.barrier()

    def check_alive(self) -> None:
        """Raises EngineError after an abort, and DeadlineError if a collective on the device gave up waiting.

        On CUDA, sums are only queued, and graph replays call nothing here. So call this after waiting for their results
        and before using them.
        """
        if self._collectives is not None:
            self._collectives.check_alive()

    def abort(self, reason: str) -> None:
        """Ends this generation, from any thread: blocked and later collectives raise EngineError(reason).

        NCCL's abort returns only when no graph with its collectives is left, so their owner must drop them first. See
        `TPWorker.leave`.
        """
        if self._collectives is not None:
            self._collectives.abort(reason)

    def close(self) -> None:
        """Leaves the group. No collective may be running, unless it was aborted and has returned."""
        collectives, self._collectives = self._collectives, cast(Collectives, _Closed())
        if collectives is not None:
            collectives.close()


class _Closed:
    """The collectives of a group after `close`: they raise."""

    def __getattr__(self, name: str) -> Any:
        raise EngineError("the tensor-parallel group is closed; please report this bug")

    def abort(self, reason: str) -> None:
        """Does nothing, as no collective is left to end."""

    def close(self) -> None:
        """Does nothing, as the group is closed already."""


def _check_multicast_is_off() -> None:
    wrong = [name for name, value in MULTICAST_OFF.items() if os.environ.get(name) != value]
    if wrong:
        needed = " ".join(f"{name}={value}" for name, value in MULTICAST_OFF.items())
        raise ConfigError(
            f"a rank on a GPU needs {needed} in its environment, but not so set: {', '.join(wrong)}; "
            f"set them before the process starts (env_vars of the runtime_env)"
        )
