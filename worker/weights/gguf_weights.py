"""GGUF files: rows and columns of quantised tensors as this rank needs them, under Hugging Face names.

Only the blocks that cover a range are read and dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from configs.errors import CheckpointError
from configs.gguf_header import GGUFHeader
from configs.layers import Role
from configs.model_config import ModelConfig
from parallel.plan import Span
from worker.weights.range_reader import RangeReader

if TYPE_CHECKING:  # who checks headers alone does without its seconds
    import torch

_CHUNK_ELEMENTS = 2 << 20
"""Elements dequantised at once; dequantising takes a few times their fp32 bytes."""

_INTERLEAVED_ARCHITECTURES = ("llama",)
"""Architectures whose converter reorders each query and key head from halves to interleaved rotary pairs."""


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first, as torch has it."""
    offset: int
    """Bytes from the start of the file."""
    interleaved: bool
    """Rows of each head are rotary pairs side by side; reading puts them back as halves."""

    @property
    def num_columns(self) -> int:
        return self.shape[-1]

    @property
    def row_bytes(self) -> int:
        block_size, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.num_columns // block_size * block_bytes


class GGUFFile:
    """One .gguf file as a TensorFile."""

    def __init__(self, reader: RangeReader, entries: Mapping[str, _Entry], head_dim: int) -> None:
        self._reader = reader
        self._entries = entries
        self._head_dim = head_dim

    @classmethod
    def open(cls, path: Path, model: ModelConfig) -> GGUFFile:
        """Reads and checks the header. Raises CheckpointError for another format, version or a truncated file."""
        entries = _entries(GGUFHeader.read(path), path, model)
        reader = RangeReader(path)
        try:
            for name, entry in entries.items():
                num_rows = entry.shape[0] if len(entry.shape) > 1 else 1
                end = entry.offset + num_rows * entry.row_bytes
                if end > reader.size:
                    raise CheckpointError(
                        f"{path} is truncated: tensor {name} ends at byte {end} of {reader.size}; download it again"
                    )
        except CheckpointError:
            reader.close()
            raise
        return cls(reader, entries, model.rotary_dim)

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def scaled(self) -> set[str]:
        return set()

    def read(self, name: str, out: torch.Tensor, rows: Span, columns: Span | None) -> None:
        entry = self._entries[name]
        if len(entry.shape) == 1:
            # One row of the file; `rows` are its elements.
            part = out.view(1, -1)
            self._read_rows(entry, part, Span(0, 1), rows)
            if entry.interleaved:
                part.copy_(self._halves(part.view(-1, 1)).view(1, -1))
            return
        width = Span(0, entry.num_columns) if columns is None else columns
        step = max(1, _CHUNK_ELEMENTS // width.size)
        if entry.interleaved:
            step = max(1, step // self._head_dim) * self._head_dim
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            part = out[start - rows.start : stop - rows.start]
            self._read_rows(entry, part, Span(start, stop), width)
            if entry.interleaved:
                part.copy_(self._halves(part))

    def close(self) -> None:
        self._reader.close()

    def _read_rows(self, entry: _Entry, out: torch.Tensor, rows: Span, columns: Span) -> None:
        """Fills out [rows.size, columns.size] from the blocks that cover these columns."""
        import torch

        block_size, block_bytes = GGML_QUANT_SIZES[entry.kind]
        first_block, last_block = columns.start // block_size, -(-columns.stop // block_size)
        length = (last_block - first_block) * block_bytes
        data = self._reader.read_strided(
            entry.offset + rows.start * entry.row_bytes + first_block * block_bytes,
            entry.row_bytes,
            rows.size,
            length,
        )
        values = dequantize(np.frombuffer(data, np.uint8).reshape(rows.size, length), entry.kind)
        skipped = columns.start - first_block * block_size
        out.copy_(torch.from_numpy(values.reshape(rows.size, -1)[:, skipped : skipped + columns.size]))

    def _halves(self, rows: torch.Tensor) -> torch.Tensor:
        """Whole heads of rows, from interleaved rotary pairs (0, d/2, 1, d/2 + 1, ...) to halves; a copy."""
        assert rows.shape[0] % self._head_dim == 0, "query and key rows are read in whole heads"
        pairs = rows.view(-1, self._head_dim // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _entries(header: GGUFHeader, path: Path, model: ModelConfig) -> dict[str, _Entry]:
    """Entries by Hugging Face name; a tensor that the model has no place for keeps its own."""
    interleaved = header.metadata.get("general.architecture") in _INTERLEAVED_ARCHITECTURES
    wanted = {tensor.gguf_name: tensor for tensor in model.tensors()}
    entries = {}
    for gguf_name, info in header.tensors.items():
        tensor = wanted.get(gguf_name)
        entries[gguf_name if tensor is None else tensor.name] = _Entry(
            kind=_quantization(path, gguf_name, info.ggml_type),
            shape=info.shape,
            offset=info.offset,
            interleaved=interleaved and tensor is not None and tensor.role in (Role.QUERY_KEY, Role.QUERY_KEY_BIAS),
        )
    return entries


def _quantization(path: Path, name: str, kind: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name} is of unknown GGML type {kind}") from error
