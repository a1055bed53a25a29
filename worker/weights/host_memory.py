"""The memory of tensors as vectors of bytes, and host memory to which it can be moved for a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

import torch

from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import Arithmetic
from worker.layers.rotary import RotaryEmbedding

_NO_WEIGHTS = (TensorParallelGroup, Arithmetic, RotaryEmbedding)
"""Types of parts of a decoder that may have tensors, but no weights."""
_PIECE_BYTES = 16 << 20
"""Bytes of host memory that one call pins. During the call, the driver blocks launches of steps."""
_GIVE_BACK_EVERY_S = 0.05
_SPARE_BYTES = 2 << 30
"""Device memory that staged weights leave free for other uses."""


class HostMemory:
    """Tensors' memory that is staged on the host. They stay views of their device memory, which is empty meanwhile."""

    def __init__(self) -> None:
        # The keys are ids of the device memory that the pieces were copied from.
        self._pieces: dict[int, list[torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def move(self, part: object) -> None:
        """Moves the memory of all tensors of `part` to the host. Memory from a GPU goes to pinned memory."""
        for held in by_memory(part):
            memory = held[0].untyped_storage()
            if not memory.nbytes():
                continue
            is_pinned = memory.device.type == "cuda"
            pieces = [
                torch.empty(len(piece), dtype=torch.uint8, pin_memory=is_pinned).copy_(piece)
                for piece in torch.split(bytes_of(memory), _PIECE_BYTES)
            ]
            if not memory.resizable():  # a persistent block cannot be emptied, so the tensors get new memory first
                memory = torch.empty_like(bytes_of(memory)).untyped_storage()
                for it in held:
                    it.set_(memory, it.storage_offset(), it.shape, it.stride())
            memory.resize_(0)
            self._pieces[memory._cdata] = pieces

    def pieces_of(self, memory: torch.UntypedStorage) -> list[torch.Tensor]:
        """The bytes of `memory` as one or more vectors, in order: on the host if moved there, else on the device."""
        return self._pieces.get(memory._cdata) or [bytes_of(memory)]

    def clear(self) -> None:
        """Drops the memory on the host. A thread frees pinned pieces one by one: each blocks steps for 1 or 2 ms."""
        pieces = [piece for pieces in self._pieces.values() for piece in pieces]
        self._pieces.clear()
        if pieces and pieces[0].is_pinned():
            threading.Thread(target=_give_back, args=(pieces,), name="give back", daemon=True).start()


def _give_back(pieces: list[torch.Tensor]) -> None:
    # torch caches unused pinned memory until it is asked to free it.
    empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache  # public from 2.12 on
    while pieces:
        time.sleep(_GIVE_BACK_EVERY_S)
        pieces.pop()
        empty()


def copy(pieces: Iterable[torch.Tensor], into: torch.Tensor) -> None:
    """Copies vectors of bytes one after the other into another vector. Does not wait for copies from pinned memory."""
    for piece in pieces:
        into[: len(piece)].copy_(piece, non_blocking=True)
        into = into[len(piece) :]


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Gives this thread its own stream on a GPU, so that steps run meanwhile. Waits for the stream at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def tensors(part: object, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Each tensor that `part` holds directly or through its attributes, once. Equally built parts give the same order.

    Args:
        seen: ids of objects to leave out. The ids of objects found are added.
    """
    seen = set() if seen is None else seen
    if isinstance(part, list | tuple | dict):
        return [it for each in (part.values() if isinstance(part, dict) else part) for it in tensors(each, seen)]
    if id(part) in seen or isinstance(part, _NO_WEIGHTS):
        return []
    if isinstance(part, torch.Tensor):
        seen.add(id(part))
        return [part]
    if not type(part).__module__.startswith(("attention.", "parallel.", "worker.")):
        return []
    seen.add(id(part))
    return tensors(part.__getstate__(), seen)  # its attributes, in __dict__ or in slots


def by_memory(part: object) -> list[list[torch.Tensor]]:
    """The tensors that `part` holds, grouped by the memory that they share."""
    found: dict[int, list[torch.Tensor]] = {}
    for it in tensors(part):
        found.setdefault(it.untyped_storage()._cdata, []).append(it)
    return list(found.values())


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether the device has `num_bytes` left for weights in addition to the serving ones. Always true on CPU."""
    return device.type == "cpu" or _free_bytes(device) >= num_bytes


def _free_bytes(device: torch.device) -> int:
    """Bytes of device memory that staged weights may take."""
    return torch.cuda.mem_get_info(device)[0] - _SPARE_BYTES


def bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    """The memory as a vector of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
