"""Registration: memory of torch's symmetric memory that CUDA ranks on one node map, for SymmetricMemoryCollectives."""

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
from parallel.collectives.interface import late


class Registration:
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
