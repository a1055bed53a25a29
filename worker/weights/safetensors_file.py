"""Safetensors files: reads the rows and columns of tensors that this rank needs.

Files are read with `pread`. The safetensors package maps them, and mapped pages count as a rank's memory in addition to
the copies, which would double its memory while loading.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import CheckpointError
from parallel.plan import Span, as_matrix
from worker.weights.range_reader import RangeReader

if TYPE_CHECKING:  # checks of headers skip torch's slow import
    import torch

_SCALED = "F8_E4M3", "U8"
"""Types with values that are meaningless without scales."""
_DTYPES = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F64": ("float64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "U8": ("uint8", 1),
    "I64": ("int64", 8),
    "BOOL": ("bool", 1),
}
"""torch's names of the types, and bytes of an element."""
_CHUNK_BYTES = 16 << 20
"""Maximum number of bytes read before they are copied to a tensor. It bounds what loading adds to peak memory."""


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""


class SafetensorsFile:
    """One .safetensors file. Its header is 8 bytes of length and JSON, and tensors follow in row-major order."""

    def __init__(self, reader: RangeReader, entries: Mapping[str, _Entry]) -> None:
        self._reader = reader
        self._entries = entries

    @classmethod
    def open(cls, path: Path, name_of: Callable[[str], str | None] = lambda name: name) -> SafetensorsFile:
        """Reads and checks the header. `name_of` gives a tensor's new name, or None to skip the tensor."""
        reader = RangeReader(path)
        try:
            entries = _read_header(reader)
        except CheckpointError:
            reader.close()
            raise
        reader.bytes_read = 0
        return cls(reader, {new: entry for name, entry in entries.items() if (new := name_of(name)) is not None})

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def scaled(self) -> set[str]:
        return {name for name, entry in self._entries.items() if entry.kind in _SCALED}

    def read(self, name: str, out: torch.Tensor, rows: Span, columns: Span | None) -> None:
        import torch

        entry = self._entries[name]
        dtype, itemsize = _DTYPES[entry.kind]
        row_elements = as_matrix(entry.shape)[1] if len(entry.shape) > 1 else 1
        first, width = (columns.start, columns.size) if columns is not None else (0, row_elements)
        step = max(1, _CHUNK_BYTES // (width * itemsize))
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            data = self._reader.read_strided(
                entry.offset + (start * row_elements + first) * itemsize,
                row_elements * itemsize,
                stop - start,
                width * itemsize,
            )
            part = out[start - rows.start : stop - rows.start]
            part.copy_(torch.frombuffer(data, dtype=getattr(torch, dtype)).view(part.shape))
            del data  # frees it before the next read

    def close(self) -> None:
        self._reader.close()


def _read_header(reader: RangeReader) -> dict[str, _Entry]:
    path = reader.path
    if reader.size < 8:
        raise CheckpointError(f"{path} has {reader.size} bytes: too short for a safetensors file; download it again")
    (length,) = struct.unpack("<Q", reader.read(0, 8))
    if length > reader.size - 8:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: its header alone asks for {length} bytes; download it again"
        )
    try:
        header = json.loads(bytes(reader.read(8, length)))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is no safetensors file: its header is not JSON ({error}); download it again"
        ) from error
    entries = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape = str(info["dtype"]), tuple(int(size) for size in info["shape"])
            begin, end = (int(offset) for offset in info["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: the header's entry for tensor {name} is malformed ({error!r}); download it again"
            ) from error
        if kind not in _DTYPES:
            raise CheckpointError(f"{path}: tensor {name} is of type {kind}; supported are {', '.join(_DTYPES)}")
        if begin < 0 or min(shape, default=0) < 0 or end - begin != _DTYPES[kind][1] * prod(shape):
            raise CheckpointError(
                f"{path}: tensor {name} of shape {list(shape)} cannot be at bytes {begin} to {end}; download it again"
            )
        if 8 + length + end > reader.size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + end} of {reader.size}; "
                "download it again"
            )
        entries[name] = _Entry(kind=kind, shape=shape, offset=8 + length + begin)
    return entries
