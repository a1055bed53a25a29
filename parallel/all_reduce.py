"""How the ranks of one group add and gather tensors: the strategies behind TensorParallelGroup.

    LibraryCollectives     gloo or NCCL through torch's process group objects
    shared_memory          parallel/shared_memory.py: ranks of one node, on CPU

A strategy owns its connections and nothing else; which one a group uses is the group's choice.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import ConfigError, DeadlineError, EngineError

# A blocked rank looks for an abort this often.
_SLICE_S = 0.02


class Collectives(Protocol):
    """What a strategy offers. Every rank makes the same calls in the same order, from one thread at a time."""

    def all_reduce(self, x: Tensor) -> None:
        """Sums contiguous `x` over the ranks, in place."""

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Fills contiguous `out` [size, *x.shape] with every rank's contiguous `x`."""

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def abort(self, reason: str) -> None:
        """Ends blocked and later calls with EngineError(reason). Safe from any thread."""

    def close(self) -> None:
        """Releases the strategy's resources."""


def sum_in_rank_order(contributions: Tensor, out: Tensor) -> None:
    """Writes the sum over the first axis of `contributions` [size, *out.shape] to `out`, rank 0 first.

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


class LibraryCollectives:
    """Collectives of a torch process group object, gloo or NCCL.

    gloo gathers the contributions and adds them in rank order: the same bits as the shared-memory strategy. NCCL adds
    in its own order, and its calls only enqueue: they return before the GPU is done.
    """

    def __init__(self, backend: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self._backend = backend  # ProcessGroupGloo or ProcessGroupNCCL: untyped classes of torch's C extension
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout_s = timeout_s
        self._abort_reason: str | None = None
        self._pending: Any = None

    @classmethod
    def create(
        cls, *, strategy: str, rank: int, size: int, store: Store, device: torch.device, timeout_s: float
    ) -> LibraryCollectives:
        """Connects to the other ranks through `store`, whose keys nobody else may use.

        Raises:
            ConfigError: this build of torch has no such backend.
            DeadlineError: not all ranks came within `timeout_s`.
        """
        make = _gloo_backend if strategy == "gloo" else _nccl_backend
        try:
            backend = make(rank=rank, size=size, store=store, device=device, timeout_s=timeout_s)
        except RuntimeError as error:  # torch's DistStoreError among them
            raise DeadlineError(
                f"rank {rank} could not meet the other {size - 1} ranks over {strategy} within "
                f"parallel.step_timeout_s={timeout_s:g}: {_first_line(error)}"
            ) from error
        return cls(backend, rank=rank, size=size, device=device, timeout_s=timeout_s)

    def all_reduce(self, x: Tensor) -> None:
        if self._device.type == "cuda":
            options = torch.distributed.AllreduceOptions()
            self._finish(self._backend.allreduce([x], options), "all_reduce")
            return
        contributions = torch.empty((self._size, *x.shape), dtype=x.dtype)
        self.all_gather(contributions, x)
        sum_in_rank_order(contributions, x)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self._check_alive()
        # Bytes, because gloo does not know every type.
        self._finish(
            self._backend._allgather_base(out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)), "all_gather"
        )

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self.all_gather(torch.empty(self._size, dtype=torch.uint8, device=self._device), token)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self, reason: str) -> None:
        self._abort_reason = reason
        if self._device.type == "cuda":
            self._backend.abort()

    def close(self) -> None:
        backend, pending = self._backend, self._pending
        self._backend = self._pending = None
        self._abort_reason = self._abort_reason or "the group is closed"
        if pending is not None:
            # gloo cannot cancel: destroying it now would block on the unfinished call for up to the deadline.
            threading.Thread(target=_outlive, args=(backend, pending), name="gloo-reaper", daemon=True).start()

    def _finish(self, work: Any, name: str) -> None:
        if self._device.type == "cuda":
            work.wait()  # orders the current stream after the collective; the host goes on
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE_S))
                return
            except RuntimeError as error:
                if self._abort_reason is not None:
                    self._pending = work
                    raise EngineError(self._abort_reason) from None
                if work.is_completed():
                    raise EngineError(f"rank {self._rank}: {name} over gloo failed: {_first_line(error)}") from error
                if time.monotonic() > deadline:
                    self._pending = work
                    raise DeadlineError(
                        f"rank {self._rank} waited for the other ranks in {name} longer than "
                        f"parallel.step_timeout_s={self._timeout_s:g}"
                    ) from None

    def _check_alive(self) -> None:
        if self._abort_reason is not None:
            raise EngineError(self._abort_reason)


def _gloo_backend(*, rank: int, size: int, store: Store, device: torch.device, timeout_s: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    address = _own_address(rank=rank, size=size, store=store, timeout_s=timeout_s)
    options._devices = [
        ProcessGroupGloo.create_device(hostname=address) if address else ProcessGroupGloo.create_default_device()
    ]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl_backend(*, rank: int, size: int, store: Store, device: torch.device, timeout_s: float) -> Any:
    if not torch.distributed.is_nccl_available():
        raise ConfigError("parallel.all_reduce=nccl needs a CUDA build of torch; choose gloo or shared_memory")
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
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
    if not isinstance(store, torch.distributed.TCPStore):
        return None
    # The interface that reaches the store is the one the ranks share. Connecting UDP sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store.host, store.port))
        address: str = probe.getsockname()[0]
    return address


def _outlive(backend: Any, pending: Any) -> None:
    try:
        pending.wait()
    except RuntimeError:
        return  # the call ended with its peers or at the deadline, and `backend` may go


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
