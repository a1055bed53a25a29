"""Weights of a rank in memory that outlives its process: whoever takes its place finds them there and reads none.

Each layer's lie in a block of their own, and what is in no layer in one more, which is made last and says what all hold
together. A decoder is loaded as ever, layer by layer, and its tensors are moved into the block of each; or, where the
blocks are there, it is loaded from nothing, for the sake of its tensors alone, and they are put where the weights lie.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import msgspec
import torch

from configs.errors import EngineError
from parallel.kept_memory import KeptMemory
from parallel.numerics.weight import TensorSource
from parallel.plan import Span
from worker.dummy_weights import DummyCheckpoint
from worker.models.decoder import Decoder
from worker.staged_weights import bytes_of, checksum, tensors
from worker.weights import Checkpoint

_ALIGNMENT_BYTES = 256
_REST = "weights"


class _Note(msgspec.Struct):
    """The last block's word on all of them."""

    identity: str
    num_bytes: int
    checksum: int


class _Nothing:
    """A source of tensors that holds none: they stay as they are."""

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Reads nothing."""


class KeptWeights:
    """The weights of a decoder, not loaded yet, in the memory that is `kept`."""

    def __init__(self, decoder: Decoder, kept: KeptMemory) -> None:
        self._decoder = decoder
        self._kept = kept
        self._blocks: list[torch.Tensor] = []

    def find(self, identity: str, on_progress: Callable[[float], None] | None = None) -> int:
        """Has the decoder use the weights that are kept, if they are those of `identity`. Returns their bytes; 0: there
        are none, and the decoder has to be loaded.

        Raises:
            EngineError: they are not as they were. The decoder is of no use.
        """
        last = self._kept.find(_REST)
        if last is None or not last.note:
            return 0
        note = msgspec.json.decode(last.note, type=_Note)
        if note.identity != identity:
            return 0
        self._load(_Nothing(), lambda name, old: self._kept.again(name, sum(_room(old))), on_progress)
        if checksum(self._blocks) != note.checksum:
            raise EngineError("the weights that were kept are not as they were")
        return note.num_bytes

    def load(
        self, source: Checkpoint | DummyCheckpoint, identity: str, on_progress: Callable[[float], None] | None = None
    ) -> None:
        """Loads the decoder from `source`, whose weights are kept from now on."""
        self._load(source, self._copied, on_progress)
        self.describe(identity, source.bytes_loaded, checksum(self._blocks))

    def describe(self, identity: str, num_bytes: int, sum_of_words: int) -> None:
        """Says of the weights that they are whole."""
        note = _Note(identity, num_bytes, sum_of_words)
        self._kept.describe(_REST, msgspec.json.encode(note).decode())

    def change(self) -> None:
        """Says of the weights that they are none: they are about to be changed where they lie."""
        self._kept.describe(_REST, "")

    def _copied(self, name: str, old: list[torch.UntypedStorage]) -> torch.Tensor:
        room = _room(old)
        memory = self._kept.new(name, sum(room))
        for part, storage in zip(torch.split(memory, room), old, strict=True):
            part[: storage.nbytes()] = bytes_of(storage)
        return memory

    def _load(
        self,
        source: TensorSource,
        block_of: Callable[[str, list[torch.UntypedStorage]], torch.Tensor],
        on_progress: Callable[[float], None] | None,
    ) -> None:
        """Loads the decoder, and puts its tensors into the blocks that `block_of` has for what they lay in."""
        self._blocks.clear()
        parts = iter([*((layer, f"layer {i}") for i, layer in enumerate(self._decoder.layers)), (self._decoder, _REST)])

        def move(share: float) -> None:
            part, name = next(parts)
            self._move(part, name, block_of)
            if on_progress is not None:
                on_progress(share)

        self._decoder.load(source, move)

    def _move(
        self, part: object, name: str, block_of: Callable[[str, list[torch.UntypedStorage]], torch.Tensor]
    ) -> None:
        moved = {block.untyped_storage()._cdata for block in self._blocks}
        found = {id(it): it for it in tensors(part) if it.nbytes and it.untyped_storage()._cdata not in moved}
        old = {it.untyped_storage()._cdata: it.untyped_storage() for it in found.values()}
        memory = block_of(name, list(old.values()))
        begins = dict(zip(old, accumulate(_room(list(old.values())), initial=0), strict=False))
        for it in found.values():
            begin = begins[it.untyped_storage()._cdata] // it.itemsize
            it.set_(memory.untyped_storage(), begin + it.storage_offset(), it.shape, it.stride())
        self._blocks.append(memory)


def _room(storages: list[torch.UntypedStorage]) -> list[int]:
    """Bytes that each takes in a block."""
    return [-(-storage.nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for storage in storages]
