"""The memory of a decoder's weights: the device's own, persistent memory, or the host's.

In persistent memory each layer has its own block, and the tensors outside layers have one more. That block is made
last, and its note describes the weights in all blocks. A decoder is loaded layer by layer, and each layer's tensors are
then moved into its block. If the blocks already exist, a new process of the rank loads a decoder without reading
anything, only to create its tensors, and points these to the blocks.

To replace the weights of a serving decoder, a second decoder is made and loaded like the first one, so both pack, tie
or offset each weight in the same way. Its memory is then copied over the first one's between two steps. Addresses do
not change, because CUDA graphs contain them.
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
    """The last block's note, which describes the weights in all blocks."""

    identity: str
    num_bytes: int
    checksum: int


class _Nothing:
    """A source that reads nothing, so tensors are not changed. `like` determines which may be in FP8 and MXFP4."""

    def __init__(self, like: TensorSource) -> None:
        self.scale_block, self.is_mxfp4 = like.scale_block, like.is_mxfp4

    def read(self, *_: object, **__: object) -> Any:
        """Reads nothing."""

    read_fp8 = read_mxfp4 = read


class WeightMemory:
    """The memory of the weights of `decoder`, which is not loaded yet.

    Args:
        persistent: retains the weights while they are on the device. If None, they are lost when this process ends.
    """

    def __init__(self, decoder: Decoder, persistent: PersistentMemory | None = None) -> None:
        self._decoder = decoder
        self._persistent = persistent
        self._blocks: list[torch.Tensor] = []
        self._note = ""  # the note of these weights, once they are in persistent memory
        self.on_host = HostMemory()
        """Memory of weights that are staged on the host."""
        self.num_bytes = 0
        """Bytes of the weights, once they are loaded."""

    def find(self, source: TensorSource, identity: str, on_progress: Callable[[float], None] | None = None) -> bool:
        """Makes the decoder use the weights in persistent memory if their note has this `identity`. Otherwise returns
        False, and the decoder must be loaded. `source` only determines dtypes and is not read.

        Raises:
            EngineError: the weights have changed in memory. The decoder is unusable.
        """
        last = None if self._persistent is None else self._persistent.find(_REST)
        if last is None or not last.note:
            return False
        note = msgspec.json.decode(last.note, type=_Note)
        if note.identity != identity:
            return False
        self._load(_Nothing(source), functools.partial(self._to_block, is_new=False), on_progress)
        if self._checksum() != note.checksum:
            raise EngineError("the checksum of the weights in persistent memory has changed, so they are read again")
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
        """Loads the decoder from `source`, part by part, into persistent memory. If `on_host`, loads it into host
        memory, for `load_to_device` or to be copied over other weights."""

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
        """Moves the weights to host memory until `load_to_device`. Once the keeper has dropped their blocks, they are
        lost if this process dies."""
        self.on_host.move(self._decoder)
        self._blocks.clear()

    def load_to_device(self) -> None:
        """Moves weights staged on the host into new blocks on the device. Returns once the copy is complete."""
        if not self.on_host:
            return
        self._blocks.clear()
        for part, name in self._parts():
            self._to_block(part, name)
        self._write_note(self._note)
        self._synchronize()
        self.on_host.clear()

    def stage(self, decoder: Decoder, source: AnyCheckpoint, identity: str, *, on_host: bool) -> WeightMemory:
        """Loads other weights into `decoder`, made like the serving one, for `take`. Changes nothing here.

        Raises:
            ConfigError: the two decoders' tensors differ in shape or dtype.
        """
        other = WeightMemory(decoder)
        other.load(source, on_host=on_host)
        live, staged = ([(it.shape, it.dtype) for it in tensors(each)] for each in (self._decoder, decoder))
        if live != staged:
            raise ConfigError(
                "the new weights differ from the serving ones in which matrices are in FP8 or MXFP4 or have scales; "
                "CUDA graphs cannot change that. Restart the server, or use quantization=fp8, which makes them equal"
            )
        other.num_bytes = self.num_bytes
        if self._persistent is not None:
            other._note = other._note_of(identity)
        return other

    def take(self, staged: WeightMemory) -> None:
        """Copies the staged weights over the serving ones while no step is in flight. Waits for the device."""
        self._write_note("")
        # Tensors that share a memory have the same relative offsets in both decoders, but the first offset may differ.
        pairs = zip(tensors(self._decoder), tensors(staged._decoder), strict=True)
        for live, other in {it.untyped_storage()._cdata: (live, it) for live, it in pairs}.values():
            begin = (live.storage_offset() - other.storage_offset()) * live.itemsize
            copy(staged.on_host.pieces_of(other.untyped_storage()), bytes_of(live.untyped_storage())[begin:])
        self._synchronize()
        self._write_note(staged._note)

    def _write_note(self, note: str) -> None:
        """Writes `note` with the weights in persistent memory. An empty note marks them invalid. Write it before
        changing them in place."""
        self._note = note
        if self._persistent is not None:
            self._persistent.write_note(_REST, note)

    def _note_of(self, identity: str) -> str:
        return msgspec.json.encode(_Note(identity, self.num_bytes, self._checksum())).decode()

    def _checksum(self) -> int:
        """The sum of the 64-bit words of all weight memory, on host or device. Each piece is padded with zeros."""
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
        """Yields each layer, and then the decoder for the tensors outside layers, each with the name of its block."""
        yield from ((layer, f"{_LAYER}{i}") for i, layer in enumerate(self._decoder.layers))
        yield self._decoder, _REST

    def _load(
        self, source: TensorSource, place: Callable[[object, str], None], on_progress: Callable[[float], None] | None
    ) -> None:
        """Loads the decoder, and calls `place` with each part as soon as it is loaded."""
        parts = self._parts()
        self._blocks.clear()

        def loaded(share: float) -> None:
            place(*next(parts))
            if on_progress is not None:
                on_progress(share)

        self._decoder.load(source, loaded)

    def _to_block(self, part: object, name: str, *, is_new: bool = True) -> None:
        """Moves the tensors of `part` that are in no block yet into a new block, with their contents. If not `is_new`,
        points them to the existing block and its contents."""
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
        """The memory of the tensors, as vectors of bytes."""
        return self.on_host.pieces_of(held[0].untyped_storage())
