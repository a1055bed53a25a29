"""Weights that are quantised to FP8 while they are read.

Each scale belongs to a block of the checkpoint's whole matrix, so no scale depends on the part that a rank reads.
"""

from __future__ import annotations

from types import TracebackType

import torch

from configs.model_config import ModelConfig
from configs.quantization import FP8_BLOCKS
from parallel.numerics.fp8 import FP8, LARGEST, ROWS_AT_ONCE, multiply
from parallel.plan import Span, blocks_of
from worker.weights.checkpoint import AnyCheckpoint


class QuantisedCheckpoint(AnyCheckpoint):
    """Wraps a checkpoint and quantises its plain linear weights to FP8 while they are read. Weights already in FP8 pass
    through. A context manager, like the wrapped checkpoint.

    Args:
        model: determines the blocks of the scales. If the model has no scales, the blocks are those of `FP8_BLOCKS`.
    """

    def __init__(self, source: AnyCheckpoint, model: ModelConfig) -> None:
        self._source = source
        self._kind = model.weight_scales or FP8_BLOCKS
        self._dtype = getattr(torch, model.dtype)
        self._shapes = {name: it.shape for name, it in model.stored_tensors().items() if it.may_be_fp8}
        self._bytes_made = 0

    @property
    def bytes_loaded(self) -> int:
        """Bytes of the tensors filled so far, counted in the dtype of the filled tensors."""
        return self._source.bytes_loaded + self._bytes_made

    def scale_block(self, name: str) -> tuple[int, int] | None:
        """Implements TensorSource."""
        if not self.keeps_fp8:
            return None
        own = self._kind.block(self._shapes[name]) if name in self._shapes else None
        return self._source.scale_block(name) or own

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Implements TensorSource. The values are rounded to FP8 and scaled back."""
        if name not in self._shapes or self._source.scale_block(name) is not None:
            self._source.read(name, out, rows=rows, columns=columns)
            return
        height, width = self._shapes[name]
        rows, columns = rows or Span(0, height), columns or Span(0, width)
        block = self._kind.block((height, width))
        scales = torch.empty(blocks_of(rows, block[0]).size, blocks_of(columns, block[1]).size, device=out.device)
        values = torch.empty(out.shape, dtype=FP8, device=out.device)
        self.read_fp8(name, values, scales, rows=rows, columns=columns)
        out.copy_(values)
        multiply(out, scales, block, rows, columns)
        self._bytes_made += out.nbytes - values.nbytes - scales.nbytes

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        """Implements TensorSource. Reads whole blocks."""
        if self._source.scale_block(name) is not None:
            self._source.read_fp8(name, out, scales, rows=rows, columns=columns)
            return
        before, shape = self._source.bytes_loaded, self._shapes[name]
        height, width = self._kind.block(shape)
        down, across = blocks_of(rows, height), blocks_of(columns, width)
        step = max(1, ROWS_AT_ONCE // height)
        whole = Span(across.start * width, min(across.stop * width, shape[1]))
        for first in range(down.start, down.stop, step):
            last = min(first + step, down.stop)
            taken = Span(first * height, min(last * height, shape[0]))
            plain = torch.empty(taken.size, whole.size, dtype=self._dtype, device=out.device)
            self._source.read(name, plain, rows=taken, columns=whole)
            blocks = plain.new_zeros((last - first) * height, across.size * width, dtype=torch.float32)
            blocks[: taken.size, : whole.size] = plain
            blocks = blocks.view(last - first, height, across.size, width)
            of_blocks = blocks.abs().amax((1, 3)) / LARGEST
            of_blocks.masked_fill_(of_blocks == 0.0, 1.0)
            blocks /= of_blocks[:, None, :, None]
            values = blocks.flatten(0, 1).flatten(1)
            begin, end = max(taken.start, rows.start), min(taken.stop, rows.stop)
            part = values[begin - taken.start : end - taken.start, columns.start - whole.start :][:, : columns.size]
            # Rounding may raise a value above the largest FP8 number, which would become NaN.
            out[begin - rows.start : end - rows.start] = part.clamp_(-LARGEST, LARGEST).to(FP8)
            scales[first - down.start : last - down.start] = of_blocks
        self._bytes_made += out.nbytes + scales.nbytes - (self._source.bytes_loaded - before)

    def is_mxfp4(self, name: str) -> bool:
        """Implements TensorSource."""
        return self._source.is_mxfp4(name)

    def read_mxfp4(self, name: str, codes: torch.Tensor, exponents: torch.Tensor, *, rows: Span, columns: Span) -> bool:
        """Implements TensorSource."""
        return self._source.read_mxfp4(name, codes, exponents, rows=rows, columns=columns)

    def kv_scales(self) -> list[tuple[float, ...]]:
        """The checkpoint's scales of keys and values."""
        return self._source.kv_scales()

    def __enter__(self) -> QuantisedCheckpoint:
        self._source.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._source.__exit__(kind, error, traceback)
