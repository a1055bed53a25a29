"""Binary messages as tables of arrays. A `Section` declares an array once, for encoding, decoding, sizes and checks.

A message is little-endian: a fixed header, then the arrays one after the other; no pickle, no torch, no Ray. The header
has the lengths that sections name. Arrays that name the same length are equally long. An empty array takes no bytes.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from configs.errors import EngineError

_MAGIC = 0x4C4B5354  # "LKST"
_SEAL = struct.Struct("<II")  # magic, checksum of all bytes after these two

Array = npt.NDArray[Any]  # each section has its own dtype
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Section(Generic[_Scalar]):
    """One array of a message, declared as a class attribute. A message has an empty array until the array is set.

    Args:
        length: name of the array's length.
        width: a number or the name of one, for an array [length, width]. If None, the array has one dimension.
    """

    def __init__(
        self,
        dtype: type[_Scalar] | np.dtype[_Scalar],
        length: str,
        width: str | int | None = None,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.length = length
        self.width = width
        # All messages may share this array, since an empty array cannot be changed.
        self._empty = np.empty(0 if width is None else (0, width if isinstance(width, int) else 0), self.dtype)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, message: None, owner: type) -> Self: ...

    @overload
    def __get__(self, message: Message, owner: type) -> npt.NDArray[_Scalar]: ...

    def __get__(self, message: Message | None, owner: type) -> Self | npt.NDArray[_Scalar]:
        return self if message is None else message.arrays.get(self.name, self._empty)

    def __set__(self, message: Message, array: npt.NDArray[_Scalar]) -> None:
        message.arrays[self.name] = array


class Message:
    """A step's message with the sections that a subclass declares. Raises TypeError for an undeclared section."""

    __slots__ = ("arrays", "generation", "step")

    _sections: ClassVar[dict[str, Section[Any]]]
    _table: ClassVar[list[tuple[str, np.dtype[Any], int, int | None, int | None]]]
    """For each section: name, dtype, index of its length in the header, index of its width, and a fixed width."""
    _num_lengths: ClassVar[int]
    _header: ClassVar[struct.Struct]
    """Magic, checksum of all bytes after these two, kind, generation, step, lengths."""

    def __init_subclass__(cls) -> None:
        cls._sections = {name: part for name, part in vars(cls).items() if isinstance(part, Section)}
        parts = cls._sections.values()
        names = dict.fromkeys(name for part in parts for name in (part.length, part.width) if isinstance(name, str))
        indices = {name: index for index, name in enumerate(names)}
        cls._table = [
            (part.name, part.dtype, indices[part.length], indices[part.width], None)
            if isinstance(part.width, str)
            else (part.name, part.dtype, indices[part.length], None, part.width)
            for part in parts
        ]
        cls._num_lengths = len(indices)
        cls._header = struct.Struct(f"<IIIIQ{len(indices)}I")

    def __init__(self, generation: int, step: int, arrays: dict[str, Array]) -> None:
        if not arrays.keys() <= self._sections.keys():
            raise TypeError(f"{type(self).__name__} has no sections {sorted(arrays.keys() - self._sections)}; a bug")
        self.generation = generation
        self.step = step
        self.arrays = arrays
        """Arrays by section. A section that is missing is empty."""

    @classmethod
    def num_bytes(cls, **lengths: int) -> int:
        """Bytes of a message with these lengths and widths. Lengths and widths that are not given are 0."""
        return cls._header.size + cls.section_bytes(**lengths)

    @classmethod
    def section_bytes(cls, **lengths: int) -> int:
        """Like `num_bytes`, without the header."""
        return sum(
            part.dtype.itemsize
            * lengths.get(part.length, 0)
            * (lengths.get(part.width, 0) if isinstance(part.width, str) else part.width or 1)
            for part in cls._sections.values()
        )

    def _encode(self, kind: int) -> bytes:
        arrays = self.arrays
        lengths = [0] * self._num_lengths
        parts: list[bytes] = []
        for name, _, index, width_index, _ in self._table:
            if name in arrays:
                array = arrays[name]
                parts.append(array.tobytes())
                lengths[index] = len(array)
                if width_index is not None:
                    lengths[width_index] = array.shape[1]
        header = self._header.pack(_MAGIC, 0, kind, self.generation, self.step, *lengths)[_SEAL.size :]
        body = b"".join(parts)
        return _SEAL.pack(_MAGIC, zlib.crc32(body, zlib.crc32(header))) + header + body

    @classmethod
    def _decode(cls, buffer: bytes | memoryview) -> tuple[int, int, int, dict[str, Array]]:
        """Kind, generation, step and the arrays that are not empty, as views of `buffer`.

        Raises:
            EngineError: the bytes are not a message of this class.
        """
        offset = cls._header.size
        if len(buffer) < offset:
            raise EngineError(f"step message of {len(buffer)} bytes is shorter than its header; please report this bug")
        magic, checksum, kind, generation, step, *lengths = cls._header.unpack_from(buffer)
        if magic != _MAGIC:
            raise EngineError(f"step message begins with {magic:#x}, not {_MAGIC:#x}; please report this bug")
        if zlib.crc32(memoryview(buffer)[_SEAL.size :]) != checksum:
            raise EngineError(
                f"step message {step} of generation {generation} fails its checksum; please report this bug"
            )
        arrays: dict[str, Array] = {}
        for name, dtype, index, width_index, width in cls._table:
            if length := lengths[index]:
                if width_index is not None:
                    width = lengths[width_index]
                array = np.frombuffer(buffer, dtype, length if width is None else length * width, offset)
                arrays[name] = array if width is None else array.reshape(length, width)
                offset += array.nbytes
        return kind, generation, step, arrays
