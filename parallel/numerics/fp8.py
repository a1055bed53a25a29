"""Matrices that stay in FP8 in memory: elements in e4m3, with the scales of the checkpoint's blocks beside them.

The contract of exact numerics: an element stands for the activations' type of (fp32 of it times its scale), rounded
once. So it follows from its row and column in the checkpoint alone, whatever the ranks and the rows beside; it is what
reading the checkpoint to that type makes of it, and products have the bits that they have of a matrix so read.

The contract of fast numerics: a row of activations is rounded to FP8 as well, by groups of at most 128 columns that are
in one of the weight's blocks, and the sums over groups are multiplied by the scales of both (see fp8_groups.py). Groups
are those of the rank's columns, so answers depend on the ranks as those of bf16 do, by less than the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.plan import Span, blocks_of

if TYPE_CHECKING:
    from parallel.numerics.tensor_source import TensorSource

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number in e4m3."""
MOST_EVEN_ROWS = 128
ROWS_AT_ONCE = 1024
"""Rows that are quantised, or multiplied by scales of theirs, at once, which bounds the memory for that."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A rank's rows and columns of matrices of a checkpoint, of one or of several below one another; or, with a
    dimension before all others, of as many such groups of matrices."""

    values: Tensor
    """[..., num_rows, num_columns] e4m3."""
    scales: Tensor
    """[..., num_blocks, blocks of columns] fp32: those of the blocks that the rows and columns are in, each matrix's
    below those before."""
    blocks: Tensor
    """[num_rows] int32: the row of `scales` that is of a row."""
    first: int
    """The place of the first column in its block: ranks may cut blocks."""
    width: int
    """Columns of a block."""
    even_rows: int
    """Rows from a multiple of this on, as many, are of one row of `scales`: a power of two, up to `MOST_EVEN_ROWS`."""

    @classmethod
    def empty(
        cls, sizes: Sequence[tuple[int, int]], rows: Sequence[Span], columns: Span, device: torch.device, *groups: int
    ) -> Fp8Matrix:
        """One of rows of each of some matrices, below one another, and columns of them, not read yet.

        Args:
            sizes: rows and columns of each matrix's blocks; as many columns in all.
            groups: the number of such groups of matrices, if there are several.
        """
        blocks, above, width = [torch.empty(0, dtype=torch.int64)], 0, sizes[0][1]
        for (height, _), span in zip(sizes, rows, strict=True):
            those = blocks_of(span, height)
            blocks.append(torch.arange(span.start, span.stop) // height - those.start + above)
            above += those.size
        across, joined = blocks_of(columns, width), torch.cat(blocks)
        edges = joined.diff().nonzero().flatten() + 1
        return cls(
            torch.empty(*groups, sum(it.size for it in rows), columns.size, dtype=FP8, device=device),
            torch.empty(*groups, above, across.size, device=device),
            joined.to(device, torch.int32),
            columns.start - across.start * width,
            width,
            math.gcd(MOST_EVEN_ROWS, *edges.tolist()),
        )

    def read(
        self, source: TensorSource, names: Sequence[str], rows: Sequence[Span], columns: Span, *group: int
    ) -> None:
        """Fills it, or a group, from the matrices' tensors, by the rows and columns that it was made for."""
        values, scales = self.values[group], self.scales[group]
        end = 0
        for name, span in zip(names, rows, strict=True):
            begin, end = end, end + span.size
            if span.size and columns.size:
                first, last = self.blocks[[begin, end - 1]].tolist()
                source.read_fp8(name, values[begin:end], scales[first : last + 1], rows=span, columns=columns)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> Fp8Matrix:
        """Some of the rows of the only group."""
        even_rows = math.gcd(self.even_rows, rows.start or 0)
        return Fp8Matrix(self.values[rows], self.scales, self.blocks[rows], self.first, self.width, even_rows)

    @property
    def shape(self) -> torch.Size:
        """The shape of `values`."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.values.device


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows of activations as products of fast numerics take them."""

    values: Tensor
    """[room, num_columns] e4m3: rows up to a multiple of 4, those past the last undefined."""
    scales: Tensor
    """[num_groups, room] fp32."""
    finished: Tensor
    """[MOST_TILES] int32 zeros, for the one product that takes them."""
    num_rows: int
    dtype: torch.dtype
    """The type that they were rounded from, and that answers are in."""

    def __len__(self) -> int:
        return self.num_rows


def multiply(out: Tensor, scales: Tensor, block: tuple[int, int], rows: Span, columns: Span) -> None:
    """Multiplies rows and columns of a matrix in blocks by the scales of all blocks that they are in: in fp32, rounded
    once."""
    height, width = block
    scales = scales.to(out.device)
    block_of = torch.arange(columns.start, columns.stop, device=out.device) // width - columns.start // width
    for start in range(rows.start, rows.stop, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, rows.stop)
        row_of = torch.arange(start, stop, device=out.device) // height - rows.start // height
        part = out[start - rows.start : stop - rows.start]
        part.copy_(part.float() * scales[row_of][:, block_of])
