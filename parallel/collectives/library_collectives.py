"""Collectives by gloo or NCCL, through torch's process groups."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from configs.errors import ConfigError, DeadlineError, EngineError
from parallel.channel.store_relay import STORE_HOST
from parallel.collectives.interface import Collectives, await_stream, late

_ANY_PORT = 9  # any port works, because nothing is sent
# Interval at which a blocked rank checks for an abort.
_SLICE_S = 0.02


class LibraryCollectives(Collectives):
    """Collectives by a torch process group, gloo or NCCL.

    gloo gathers the contributions, and each rank adds them in rank order, with the same bits as the shared-memory
    implementation. NCCL adds in its own order, equal on all ranks; its calls only queue work on the current stream and
    can be captured in a CUDA graph.
    """

    def __init__(self, backend: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        super().__init__(size)
        self._backend = backend  # ProcessGroupGloo or ProcessGroupNCCL, which are untyped C++ classes
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._abort_reason: str | None = None
        self._pending: Any = None
        # Synchronous calls run on the current stream, so no events are needed between it and a stream of NCCL's.
        self._reduce_options, self._gather_options = AllreduceOptions(), AllgatherOptions()
        self._reduce_options.asyncOp = self._gather_options.asyncOp = device.type != "cuda"

    @classmethod
    def create(
        cls, *, strategy: str, rank: int, size: int, store: Store, device: torch.device, timeout_s: float
    ) -> LibraryCollectives:
        """Connects to the other ranks through `store`. No other code may use the store's keys.

        Raises:
            ConfigError: this build of torch lacks the backend.
            DeadlineError: not all ranks came within `timeout_s`.
            EngineError: NCCL could not connect them.
        """
        make = _gloo_backend if strategy == "gloo" else _nccl_backend
        try:
            backend = make(rank=rank, size=size, store=store, device=device, timeout_s=timeout_s)
        except EngineError:
            raise
        except RuntimeError as error:  # includes torch's DistStoreError
            raise DeadlineError(
                f"rank {rank} could not meet the other {size - 1} ranks over {strategy} within "
                f"parallel.step_timeout_s={timeout_s:g}; see what holds them up, or raise it: {_first_line(error)}"
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
        # Sent as bytes, because gloo does not support every dtype.
        out_bytes, x_bytes = out.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)
        self._finish(self._backend._allgather_base(out_bytes, x_bytes, self._gather_options), "all_gather")

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self.all_gather(torch.empty(self._size, dtype=torch.uint8, device=self._device), token)
        if self._device.type == "cuda":
            self._await_stream("barrier")

    def abort(self, reason: str) -> None:
        """Implements Collectives. NCCL's abort returns only when no CUDA graph holds its communicator."""
        if self._abort_reason is not None:
            return  # NCCL must be aborted only once
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
                backend.abort()  # an orderly shutdown would wait for the peers
        elif pending is not None:
            # gloo cannot cancel a call. Destroying the group now would block on the unfinished call until its deadline.
            threading.Thread(target=_outlive, args=(backend, pending), name="gloo-reaper", daemon=True).start()

    def check_alive(self) -> None:
        """Raises EngineError with the abort's reason, if the group was aborted."""
        if self._abort_reason is not None:
            raise EngineError(self._abort_reason)

    def _finish(self, work: Any, name: str) -> None:
        if self._device.type == "cuda":
            return  # queued on the current stream, so there is no work object
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
            # When a peer aborts, its connections break. Then the abort is the error to report.
            self.check_alive()
            raise EngineError(f"rank {self._rank}: {name} over gloo failed: {_first_line(error)}") from error

    def _await_stream(self, name: str) -> None:
        deadline = time.monotonic() + self._timeout_s

        def look() -> None:
            self.check_alive()
            if time.monotonic() > deadline:
                raise late(self._rank, "the other ranks", name, self._timeout_s)

        await_stream(self._device, look)
        self.check_alive()  # after an abort, the stream continues too


def _gloo_backend(*, rank: int, size: int, store: Store, device: torch.device, timeout_s: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
    # Later than our own deadline, because our error names the setting
    options._timeout = timedelta(seconds=timeout_s + 1.0)
    options._threads = 2
    address = _own_address(rank=rank, size=size, store=store, timeout_s=timeout_s)
    options._devices = [
        ProcessGroupGloo.create_device(hostname=address) if address else ProcessGroupGloo.create_default_device()
    ]
    return ProcessGroupGloo(store, rank, size, options)


def _nccl_backend(*, rank: int, size: int, store: Store, device: torch.device, timeout_s: float) -> Any:
    if not torch.distributed.is_nccl_available():
        raise ConfigError("parallel.all_reduce=nccl needs a CUDA build of torch; choose gloo or shared_memory")
    from torch.distributed import ProcessGroupNCCL  # absent from CPU builds of torch

    # NCCL's own rendezvous does not know our deadline, so the ranks meet here first.
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
    """The address at which peers reach this rank. None if only the host's name is known."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        network = f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    keys = [f"network/{peer}" for peer in range(size)]
    store.set(keys[rank], network)
    store.wait(keys, timedelta(seconds=timeout_s))
    if {store.get(key).decode() for key in keys} == {network}:
        return "127.0.0.1"
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not store.check([STORE_HOST]):
        return None
    # The ranks share the interface that reaches the coordinator. Connecting a UDP socket sends nothing.
    host = store.get(STORE_HOST).decode()
    family, kind, _, _, store_address = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(store_address)
        address: str = probe.getsockname()[0]
    return address


def _done_within_slice(work: Any) -> bool:
    """Whether the gloo call has ended, successfully or not, within _SLICE_S."""
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError:
        # Either the slice passed or the call failed. It may also have succeeded since: only the work object knows.
        return bool(work.is_completed())
    return True


def _outlive(backend: Any, pending: Any) -> None:
    """Holds `backend` until its pending gloo call has ended, because destroying it earlier would block."""
    try:
        pending.wait()
    except RuntimeError:
        return  # the call failed, because a peer left or its deadline passed; that is an end too


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
