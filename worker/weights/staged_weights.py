"""Other weights for a decoder that serves: read into memory of their own while it computes, and copied over its own
between two steps. Addresses stay, which CUDA graphs hold.

They are those of a second decoder, made and loaded as the first one was: whatever a weight is made into, packed, tied
or with an offset added, is made in both alike, and memory is exchanged for memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import chain

import torch

from configs.errors import ConfigError
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import Arithmetic
from parallel.numerics.tensor_source import TensorSource
from worker.layers.rotary import RotaryEmbedding
from worker.models.decoder import Decoder

_NO_WEIGHTS = (TensorParallelGroup, Arithmetic, RotaryEmbedding)
"""Parts of a decoder that its weights have no part in, and that may have tensors."""
_PIECE_BYTES = 16 << 20
"""Host memory that is pinned at once: the driver keeps steps from being launched meanwhile."""
_GIVE_BACK_EVERY_S = 0.05
_SPARE_BYTES = 2 << 30
"""Device memory that staged weights leave to everything else."""


class StagedWeights:
    """The weights that `staged` loads, to take the place of those of `live`.

    Raises from its making whatever the source raises, and ConfigError where memory cannot be exchanged; nothing is
    changed then.

    Args:
        staged: made as `live` was, and not loaded yet.
        num_bytes: what the weights take, about.
    """

    def __init__(self, live: Decoder, staged: Decoder, source: TensorSource, num_bytes: int) -> None:
        self._live = live
        self._staged = staged
        self._on_host = OnHost()
        self.is_on_host = not has_room(staged.device, num_bytes)
        """Whether the device has no room for them, so that they wait in pinned memory of the host."""
        layers = iter(staged.layers)
        # After each layer, and at the end after what is in none.
        staged.load(source, (lambda _: self._on_host.move(next(layers, staged))) if self.is_on_host else None)
        if _layout(staged) != _layout(live):
            raise ConfigError(
                "one of the weights that serve and the others has matrices in FP8 or MXFP4 that the other has not, or "
                "scales of others; graphs hold where they lie. Start anew. With quantization=fp8 those in FP8 are alike"
            )

    def take_over(self) -> None:
        """Copies them over the live ones; no step is in flight. Returns when the device is done."""
        # Tensors of one memory lie in the live one as they do in the other, which may begin elsewhere.
        pairs = zip(tensors(self._live), tensors(self._staged), strict=True)
        for live, staged in {it.untyped_storage()._cdata: (live, it) for live, it in pairs}.values():
            begin = (live.storage_offset() - staged.storage_offset()) * live.itemsize
            copy(self._on_host.pieces_of(staged.untyped_storage()), bytes_of(live.untyped_storage())[begin:])
        if self._live.device.type == "cuda":
            torch.cuda.synchronize(self._live.device)

    def forget(self) -> None:
        """Gives back the host's memory that they waited in."""
        self._on_host.clear()

    @property
    def memory(self) -> Iterator[torch.Tensor]:
        """The memory of all of them, as vectors of bytes."""
        for storage in {it._cdata: it for it in storages(self._staged)}.values():
            yield from self._on_host.pieces_of(storage)


class OnHost:
    """Memory of tensors that waits on the host, by what it lay in, which is empty meanwhile though its tensors stay."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def move(self, part: object) -> None:
        """Moves the memory of all tensors of `part` that have some."""
        for storage in storages(part):
            if storage.nbytes():
                self.move_memory(storage)

    def move_memory(self, storage: torch.UntypedStorage) -> None:
        """Moves what lies in `storage` to memory of the host, pinned where it lay on a GPU."""
        is_pinned = storage.device.type == "cuda"
        self._pieces[storage._cdata] = [
            torch.empty(len(piece), dtype=torch.uint8, pin_memory=is_pinned).copy_(piece)
            for piece in torch.split(bytes_of(storage), _PIECE_BYTES)
        ]
        storage.resize_(0)

    def pieces_of(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        """The memory as vectors of bytes, one after the other, wherever they are."""
        return self._pieces.get(storage._cdata) or [bytes_of(storage)]

    @property
    def pieces(self) -> Iterator[torch.Tensor]:
        """All that is on the host."""
        return chain.from_iterable(self._pieces.values())

    def clear(self) -> None:
        """Forgets it. What is pinned goes back piece by piece, by a thread that takes its time: each stops steps for a
        millisecond or two."""
        pieces = list(self.pieces)
        self._pieces.clear()
        if pieces and pieces[0].is_pinned():
            threading.Thread(target=_give_back, args=(pieces,), name="give back", daemon=True).start()


def _give_back(pieces: list[torch.Tensor]) -> None:
    while pieces:
        time.sleep(_GIVE_BACK_EVERY_S)
        pieces.pop()
        free_pinned()


def copy(pieces: Iterable[torch.Tensor], into: torch.Tensor) -> None:
    """Copies vectors of bytes one after the other into another; from pinned memory without a wait."""
    for piece in pieces:
        into[: len(piece)].copy_(piece, non_blocking=True)
        into = into[len(piece) :]


def free_pinned() -> None:
    """Gives pinned memory back that nobody uses, which torch keeps for those who come."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # from torch 2.12 on
    if empty is None:
        empty = torch._C._host_emptyCache
    empty()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Gives this thread a stream of its own on a GPU, all of it done at the end, so that steps go on beside it."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def storages(part: object) -> list[torch.UntypedStorage]:
    """The memory of each tensor that `part` holds, as `tensors` has them; memory of several tensors as often."""
    return [tensor.untyped_storage() for tensor in tensors(part)]


def tensors(part: object) -> list[torch.Tensor]:
    """Each tensor that `part` holds, itself or through what it holds. Parts that are made alike have theirs in the same
    order."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def visit(it: object) -> None:
        if isinstance(it, torch.Tensor):
            found.append(it)
        elif isinstance(it, list | tuple):
            for each in it:
                visit(each)
        elif _may_hold_weights(it) and id(it) not in seen:
            seen.add(id(it))
            slots = [name for kind in type(it).__mro__ for name in getattr(kind, "__slots__", ())]
            for name in [*getattr(it, "__dict__", ()), *slots]:
                visit(getattr(it, name, None))

    visit(part)
    return found


def _layout(decoder: Decoder) -> list[tuple[torch.Size, torch.dtype]]:
    return [(it.shape, it.dtype) for it in tensors(decoder)]


def _may_hold_weights(it: object) -> bool:
    return type(it).__module__.startswith(("attention.", "parallel.", "worker.")) and not isinstance(it, _NO_WEIGHTS)


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether the device has room for weights beside those that serve."""
    return device.type == "cpu" or _free_bytes(device) >= num_bytes


def _free_bytes(device: torch.device) -> int:
    """Device memory that staged weights may take."""
    return torch.cuda.mem_get_info(device)[0] - _SPARE_BYTES


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory as a vector of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
