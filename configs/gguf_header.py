"""The header of a GGUF file: metadata and the list of tensors, read in milliseconds and without torch or numpy.

Arrays longer than a few elements (the tokenizer's) are stepped over unless they are asked for: decoding them takes a
tenth of a second and few need them. Owns no meaning of any key.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.errors import CheckpointError

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_UINT32, _STRING, _ARRAY, _UINT64 = 4, 8, 9, 10
_SUPPORTED_VERSIONS = (2, 3)
_MAX_ARRAY = 1024
"""Elements of the longest array that is kept unasked: one value a layer fits, a vocabulary does not."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it."""
    ggml_type: int
    """GGMLQuantizationType: 0 is float32, 1 float16, 30 bfloat16, most others quantised."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors of a GGUF file, as its header lists them."""

    metadata: Mapping[str, Value]
    """Values by key; arrays of more than 1024 elements are there only where `read` was asked for them."""
    tensors: Mapping[str, TensorInfo]
    """Tensors by GGUF name."""

    @classmethod
    def read(cls, path: Path, *, arrays: Collection[str] = ()) -> GGUFHeader:
        """Reads the header, and the arrays of these keys whatever their length. Raises CheckpointError for another
        format or version, or a file that ends too early."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parse(_Cursor(content), path, arrays)
        except (EOFError, struct.error, OverflowError):  # the last: a corrupt length beyond any file
            raise CheckpointError(f"{path} is truncated: it ends inside its header; download it again") from None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is corrupt: a name in its header is no UTF-8 ({error.reason})") from None
        except ValueError as error:  # an empty file cannot be mapped
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is empty; download it again") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


class _Cursor:
    """Reads a mapped file front to back; EOFError past its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.size = len(content)
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        start = self.position
        self.skip(num_bytes)
        return self._content[start : self.position]

    def skip(self, num_bytes: int) -> None:
        if num_bytes > self.size - self.position:
            raise EOFError
        self.position += num_bytes

    def scalar(self, kind: int) -> int | float | bool:
        layout = _SCALARS[kind]
        value: int | float | bool = layout.unpack_from(self._content, self.position)[0]
        self.position += layout.size
        return value

    def uint(self, kind: int) -> int:
        return int(self.scalar(kind))

    def string(self) -> str:
        return self.take(self.uint(_UINT64)).decode("utf-8")

    def scalars(self, kind: int, count: int) -> tuple[int | float | bool, ...]:
        layout = _SCALARS[kind]
        values = self.take(count * layout.size)
        return tuple(value for (value,) in layout.iter_unpack(values))

    def strings(self, count: int) -> tuple[str, ...]:
        # A Cursor's look-ups out of the loop halve the time of a vocabulary, here and below.
        content, position, unpack = self._content, self.position, _SCALARS[_UINT64].unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(content, position)[0]
            strings.append(content[start:position].decode("utf-8"))
        if position > self.size:
            raise EOFError
        self.position = position
        return tuple(strings)

    def skip_strings(self, count: int) -> None:
        content, position, unpack = self._content, self.position, _SCALARS[_UINT64].unpack_from
        for _ in range(count):
            position += 8 + unpack(content, position)[0]
        if position > self.size:
            raise EOFError
        self.position = position


def _parse(cursor: _Cursor, path: Path, arrays: Collection[str]) -> GGUFHeader:
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"{path} is no GGUF file: it does not begin with the letters GGUF")
    version = cursor.uint(_UINT32)
    if version not in _SUPPORTED_VERSIONS:
        raise CheckpointError(f"{path} is GGUF version {version}; supported are 2 and 3, little-endian")
    num_tensors, num_fields = cursor.uint(_UINT64), cursor.uint(_UINT64)
    metadata: dict[str, Value] = {}
    for _ in range(num_fields):
        key = cursor.string()
        value = _value(cursor, cursor.uint(_UINT32), path, keep=key in arrays)
        if value is not None:
            metadata[key] = value
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path} is corrupt: general.alignment={alignment!r} is no positive integer")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorInfo(shape, kind, start + offset) for name, shape, kind, offset in infos}
    for name, info in tensors.items():
        if info.offset >= cursor.size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} begins at byte {info.offset} of {cursor.size}; download it again"
            )
    return GGUFHeader(metadata, tensors)


def _value(cursor: _Cursor, kind: int, path: Path, *, keep: bool) -> Value | None:
    """The value; None for a long array that is not to be kept."""
    if kind in _SCALARS:
        return cursor.scalar(kind)
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY:
        raise CheckpointError(f"{path} is corrupt: metadata of unknown type {kind} at byte {cursor.position}")
    element_kind, count = cursor.uint(_UINT32), cursor.uint(_UINT64)
    keep = keep or count <= _MAX_ARRAY
    if element_kind in _SCALARS:
        if keep:
            return cursor.scalars(element_kind, count)
        cursor.skip(count * _SCALARS[element_kind].size)
        return None
    if element_kind == _STRING:
        if keep:
            return cursor.strings(count)
        cursor.skip_strings(count)
        return None
    raise CheckpointError(f"{path} is corrupt: an array of unknown type {element_kind} at byte {cursor.position}")


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dimensions = cursor.uint(_UINT32)
    if num_dimensions > 8:  # GGML has four
        raise EOFError
    shape = tuple(reversed([cursor.uint(_UINT64) for _ in range(num_dimensions)]))
    return name, shape, cursor.uint(_UINT32), cursor.uint(_UINT64)
