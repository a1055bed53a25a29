"""The memory that a decoder's weights lie in: the device's own, memory that outlives the process, or the host's.

In persistent memory each layer has a block of its own, and what is in no layer has one more, which is made last and
whose note describes the weights in all of them. A decoder is loaded as ever, layer by layer, and its tensors are moved
into the block of each. Where the blocks are there, whoever takes the process's place loads a decoder from nothing, for
the sake of its tensors alone, which are put where the weights lie.

Other weights for a decoder that serves are those of a second decoder, made and loaded as the first one was: whatever a
weight is made into, packed, tied or with an offset added, is made in both alike. They are copied over the first one's
between two steps, memory over memory, so addresses stay, which CUDA graphs hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from configs.errors import ConfigError, EngineError
from parallel.numerics.tensor_source import TensorSource
from parallel.persistent_memory import WEIGHTS, PersistentMemory, room_for
from worker.models.decoder import Decoder
from worker.weights.checkpoint import AnyCheckpoint
from worker.weights.host_memory import HostMemory, by_memory, bytes_of, copy, tensors

_LAYER, _REST = WEIGHTS


class _Note(msgspec.Struct):
    """The last block's note about the weights in all blocks."""

    identity: str
    num_bytes: int
    checksum: int


class _Nothing:
    """A source that reads nothing, so tensors stay as they are; `like` says which of them may be in FP8 and MXFP4."""

    def __init__(self, like: TensorSource) -> None:
        self.scale_block, self.is_mxfp4 = like.scale_block, like.is_mxfp4

    def read(self, *_: object, **__: object) -> Any:
        """Reads nothing."""

    read_fp8 = read_mxfp4 = read


class WeightMemory:
    """The memory of the weights of `decoder`, which is not loaded yet.

    Args:
        persistent: keeps the weights while they are on the device. None: they die with this process.
    """

    def __init__(self, decoder: Decoder, persistent: PersistentMemory | None = None) -> None:
        self._decoder = decoder
        self._persistent = persistent
        self._blocks: list[torch.Tensor] = []
        self._note = ""  # the one beside these weights once they are in persistent memory
        self.on_host = HostMemory()
        """Memory of the weights that waits on the host."""
        self.num_bytes = 0
        """Bytes of the weights, once they are loaded."""

    def find(self, source: TensorSource, identity: str, on_progress: Callable[[float], None] | None = None) -> bool:
        """Has the decoder use the weights in persistent memory, and returns True, if they are those of `identity`. Else
        the decoder has to be loaded. `source` is one that they might be read from, and are not.

        Raises:
            EngineError: they are not as they were. The decoder is of no use.
        """
        last = None if self._persistent is None else self._persistent.find(_REST)
        if last is None or not last.note:
            return False
        note = msgspec.json.decode(last.note, type=_Note)
        if note.identity != identity:
            return False
        self._load(_Nothing(source), functools.partial(self._to_block, is_new=False), on_progress)
        if self._checksum() != note.checksum:
            raise EngineError("the weights that were kept are not as they were")
        self._note, self.num_bytes = last.note, note.num_bytes
        return True

    def load(
        self,
        source: AnyCheckpoint,
        identity: str = "",
        on_progress: Callable[[float], None] | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        """Loads the decoder from `source`, part by part into persistent memory; if `on_host`, into the host's memory,
        where the weights wait for `load_to_device` or to be copied over others."""

        def place(part: object, name: str) -> None:
            if on_host:
                self.on_host.move(part)
            elif self._persistent is not None:
                self._to_block(part, name)

        self._load(source, place, on_progress)
        self.num_bytes = source.bytes_loaded
        if self._persistent is not None:
            self._note = self._note_of(identity)
            if not on_host:
                self._write_note(self._note)

    def move_to_host(self) -> None:
        """Moves the weights to the host's memory, where they wait for `load_to_device`. Until then they die with this
        process, once the keeper has dropped their blocks."""
        self.on_host.move(self._decoder)
        self._blocks.clear()

    def load_to_device(self) -> None:
        """Moves weights that wait on the host into new blocks on the device; returns once they are there."""
        if not self.on_host:
            return
        self._blocks.clear()
        for part, name in self._parts():
            self._to_block(part, name)
        self._write_note(self._note)
        self._synchronize()
        self.on_host.clear()

    def stage(self, decoder: Decoder, source: AnyCheckpoint, identity: str, *, on_host: bool) -> WeightMemory:
        """Loads other weights into `decoder`, made as the one here was, for `take`. Nothing is changed here.

        Raises:
            ConfigError: memory cannot be exchanged.
        """
        other = WeightMemory(decoder)
        other.load(source, on_host=on_host)
        live, staged = ([(it.shape, it.dtype) for it in tensors(each)] for each in (self._decoder, decoder))
        if live != staged:
            raise ConfigError(
                "one of the weights that serve and the others has matrices in FP8 or MXFP4 that the other has not, or "
                "scales of others; graphs hold where they lie. Start anew. With quantization=fp8 those in FP8 are alike"
            )
        other.num_bytes = self.num_bytes
        if self._persistent is not None:
            other._note = other._note_of(identity)
        return other

    def take(self, staged: WeightMemory) -> None:
        """Copies the staged weights over those here; no step is in flight. Returns when the device is done."""
        self._write_note("")
        # Tensors of one memory lie in the live one as they do in the other, which may begin elsewhere.
        pairs = zip(tensors(self._decoder), tensors(staged._decoder), strict=True)
        for live, other in {it.untyped_storage()._cdata: (live, it) for live, it in pairs}.values():
            begin = (live.storage_offset() - other.storage_offset()) * live.itemsize
            copy(staged.on_host.pieces_of(other.untyped_storage()), bytes_of(live.untyped_storage())[begin:])
        self._synchronize()
        self._write_note(staged._note)

    def _write_note(self, note: str) -> None:
        """Writes `note` beside the weights in persistent memory. An empty note marks them invalid; it is written before
        they are changed in place."""
        self._note = note
        if self._persistent is not None:
            self._persistent.write_note(_REST, note)

    def _note_of(self, identity: str) -> str:
        return msgspec.json.encode(_Note(identity, self.num_bytes, self._checksum())).decode()

    def _checksum(self) -> int:
        """The sum of the words of 64 bits of all memory, wherever it is; each piece is filled up with zeros."""
        total = 0
        for piece in (it for held in by_memory(self._decoder) for it in self._pieces(held)):
            num_whole = len(piece) // 8 * 8
            total += int(piece[:num_whole].view(torch.int64).sum())
            total += int.from_bytes(bytes(piece[num_whole:].tolist()), "little")
        return total % (1 << 64)

    def _synchronize(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)

    def _parts(self) -> Iterator[tuple[object, str]]:
        """Each layer, and then the decoder for what is in none, with the name of its block."""
        yield from ((layer, f"{_LAYER}{i}") for i, layer in enumerate(self._decoder.layers))
        yield self._decoder, _REST

    def _load(
        self, source: TensorSource, place: Callable[[object, str], None], on_progress: Callable[[float], None] | None
    ) -> None:
        """Loads the decoder, and has `place` put each part where it belongs as soon as it is loaded."""
        parts = self._parts()
        self._blocks.clear()

        def loaded(share: float) -> None:
            place(*next(parts))
            if on_progress is not None:
                on_progress(share)

        self._decoder.load(source, loaded)

    def _to_block(self, part: object, name: str, *, is_new: bool = True) -> None:
        """Puts those tensors of `part` that are in no block yet into a new one, with what lies in their memory; or into
        the one that is there, whose weights they then have."""
        assert self._persistent is not None, "weights without persistent memory have no blocks"
        blocks = {block.untyped_storage()._cdata for block in self._blocks}
        loose = [held for held in by_memory(part) if held[0].untyped_storage()._cdata not in blocks]
        moved = [held for held in loose if any(it.nbytes for it in held)]
        room = [room_for(sum(map(len, self._pieces(held)))) for held in moved]
        block = (self._persistent.new if is_new else self._persistent.existing)(name, sum(room))
        for held, memory in zip(moved, torch.split(block, room), strict=True):
            if is_new:
                copy(self._pieces(held), memory)
            for it in held:
                begin = memory.storage_offset() // it.itemsize
                it.set_(block.untyped_storage(), begin + it.storage_offset(), it.shape, it.stride())
        self._blocks.append(block)

    def _pieces(self, held: list[torch.Tensor]) -> list[torch.Tensor]:
        """The memory that the tensors lie in, as vectors of bytes."""
        return self.on_host.pieces_of(held[0].untyped_storage())
