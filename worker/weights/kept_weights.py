"""Weights of a rank in memory that outlives its process: whoever takes its place finds them there and reads none.

Each layer's lie in a block of their own, and what is in no layer in one more, which is made last and says what all hold
together. A decoder is loaded as ever, layer by layer, and its tensors are moved into the block of each; or, where the
blocks are there, it is loaded from nothing, for the sake of its tensors alone, and they are put where the weights lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

import msgspec
import torch

from configs.errors import EngineError
from parallel.kept_memory import WEIGHTS, KeptMemory, room_for
from parallel.numerics.tensor_source import TensorSource
from parallel.plan import Span
from worker.models.decoder import Decoder
from worker.weights.checkpoint import AnyCheckpoint
from worker.weights.staged_weights import OnHost, bytes_of, copy, tensors

_LAYER, _REST = WEIGHTS


class _Note(msgspec.Struct):
    """The last block's word on all of them."""

    identity: str
    num_bytes: int
    checksum: int


class _Nothing(TensorSource):
    """A source of tensors that holds none: they stay as they are.

    Args:
        like: knows which of them may be in FP8 and MXFP4.
    """

    def __init__(self, like: TensorSource) -> None:
        self._like = like

    def scale_block(self, name: str) -> tuple[int, int] | None:
        return self._like.scale_block(name)

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        """Reads nothing."""

    def is_mxfp4(self, name: str) -> bool:
        return self._like.is_mxfp4(name)

    def read_mxfp4(self, name: str, codes: torch.Tensor, exponents: torch.Tensor, *, rows: Span, columns: Span) -> bool:
        return False

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Reads nothing."""


class KeptWeights:
    """The weights of a decoder, not loaded yet, in the memory that is `kept`."""

    def __init__(self, decoder: Decoder, kept: KeptMemory) -> None:
        self._decoder = decoder
        self._kept = kept
        self._blocks: list[torch.Tensor] = []
        self._on_host = OnHost()
        self._note = ""  # for those on the host, once they are kept again

    def find(self, source: TensorSource, identity: str, on_progress: Callable[[float], None] | None = None) -> int:
        """Has the decoder use the weights that are kept, if they are those of `identity`. Returns their bytes; 0: there
        are none, and the decoder has to be loaded. `source` is one that they might be read from, and are not.

        Raises:
            EngineError: they are not as they were. The decoder is of no use.
        """
        last = self._kept.find(_REST)
        if last is None or not last.note:
            return 0
        note = msgspec.json.decode(last.note, type=_Note)
        if note.identity != identity:
            return 0
        self._load(_Nothing(source), lambda name, old: self._kept.again(name, sum(self._room(old))), on_progress)
        if _checksum(self._blocks) != note.checksum:
            raise EngineError("the weights that were kept are not as they were")
        return note.num_bytes

    def load(self, source: AnyCheckpoint, identity: str, on_progress: Callable[[float], None] | None = None) -> None:
        """Loads the decoder from `source`, whose weights are kept from now on."""
        self._load(source, self._filled, on_progress)
        self.describe(note_of(identity, source.bytes_loaded, self._blocks))

    def load_on_host(
        self, source: AnyCheckpoint, identity: str, on_progress: Callable[[float], None] | None = None
    ) -> None:
        """Loads the decoder from `source` into memory of the host, where its weights wait for `bring`."""
        self._each_part(source, lambda part, _: self._on_host.move(part), on_progress)
        self._note = note_of(identity, source.bytes_loaded, self._on_host.pieces)

    def put_away(self) -> None:
        """Moves the weights to memory of the host, where they wait for `bring`. Until then they die with this process,
        and what was kept of them is nobody's any more once the keeper has dropped it."""
        last = self._kept.find(_REST)
        self._note = "" if last is None else last.note
        for (part, _), block in zip(self._parts(), self._blocks, strict=True):
            # Tensors keep their places in memory that is as large and given up next: a block cannot be emptied.
            memory = torch.empty_like(block).untyped_storage()
            for it in {id(it): it for it in tensors(part)}.values():
                if it.untyped_storage()._cdata == block.untyped_storage()._cdata:
                    it.set_(memory, it.storage_offset(), it.shape, it.stride())
            bytes_of(memory).copy_(block)
            self._on_host.move_memory(memory)
        self._blocks.clear()

    def bring(self) -> None:
        """Brings weights that wait on the host to where they are kept from now on; returns once they are there."""
        if not self._on_host:
            return
        self._blocks.clear()
        for part, name in self._parts():
            self._move(part, name, self._filled)
        self.describe(self._note)
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)
        self._on_host.clear()

    def describe(self, note: str) -> None:
        """Says of the weights what `note_of` has for them; nothing, and so that they are none, before they are changed
        where they lie."""
        self._kept.describe(_REST, note)

    def _filled(self, name: str, old: list[torch.UntypedStorage]) -> torch.Tensor:
        """A new block with what lies in `old`, or on the host in its place."""
        room = self._room(old)
        memory = self._kept.new(name, sum(room))
        for part, storage in zip(torch.split(memory, room), old, strict=True):
            copy(self._on_host.pieces_of(storage), part)
        return memory

    def _room(self, old: list[torch.UntypedStorage]) -> list[int]:
        """Bytes that each takes in a block."""
        return [room_for(sum(map(len, self._on_host.pieces_of(it)))) for it in old]

    def _load(
        self,
        source: TensorSource,
        block_of: Callable[[str, list[torch.UntypedStorage]], torch.Tensor],
        on_progress: Callable[[float], None] | None,
    ) -> None:
        """Loads the decoder, and puts its tensors into the blocks that `block_of` has for what they lay in."""
        self._blocks.clear()
        self._each_part(source, lambda part, name: self._move(part, name, block_of), on_progress)

    def _parts(self) -> list[tuple[object, str]]:
        """Each layer, and then the decoder for the rest, with the name of its block."""
        return [*((layer, f"{_LAYER}{i}") for i, layer in enumerate(self._decoder.layers)), (self._decoder, _REST)]

    def _each_part(
        self,
        source: TensorSource,
        place: Callable[[object, str], None],
        on_progress: Callable[[float], None] | None,
    ) -> None:
        """Loads the decoder, and has `place` put each part where it belongs as soon as it is loaded."""
        parts = iter(self._parts())

        def loaded(share: float) -> None:
            place(*next(parts))
            if on_progress is not None:
                on_progress(share)

        self._decoder.load(source, loaded)

    def _move(
        self, part: object, name: str, block_of: Callable[[str, list[torch.UntypedStorage]], torch.Tensor]
    ) -> None:
        moved = {block.untyped_storage()._cdata for block in self._blocks}
        found = {id(it): it for it in tensors(part) if it.nbytes and it.untyped_storage()._cdata not in moved}
        old = {it.untyped_storage()._cdata: it.untyped_storage() for it in found.values()}
        memory = block_of(name, list(old.values()))
        begins = dict(zip(old, accumulate(self._room(list(old.values())), initial=0), strict=False))
        for it in found.values():
            begin = begins[it.untyped_storage()._cdata] // it.itemsize
            it.set_(memory.untyped_storage(), begin + it.storage_offset(), it.shape, it.stride())
        self._blocks.append(memory)


def note_of(identity: str, num_bytes: int, parts: Iterable[torch.Tensor]) -> str:
    """The words for weights of `num_bytes` that are whole.

    Args:
        parts: the memory that they lie in, or will: vectors of bytes.
    """
    return msgspec.json.encode(_Note(identity, num_bytes, _checksum(parts))).decode()


def _checksum(parts: Iterable[torch.Tensor]) -> int:
    """The sum of the words of 64 bits of vectors of bytes, each filled up with zeros; whatever their order."""
    total = 0
    for part in parts:
        num_whole = len(part) // 8 * 8
        total += int(part[:num_whole].view(torch.int64).sum())
        total += int.from_bytes(bytes(part[num_whole:].tolist()), "little")
    return total % (1 << 64)
