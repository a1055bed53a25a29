"""Matrices that stay in FP8 in memory: e4m3 elements, with the scales of the checkpoint's blocks.

In exact numerics, an element stands for (its fp32 value times its scale), rounded once to the activations' dtype. So
its value depends only on its row and column in the checkpoint, not on ranks or other rows, and products have the bits
of a matrix that was dequantised while it was read.

In fast numerics, a row of activations is rounded to FP8 too, in groups of at most 128 columns within one block of the
weight. The sum over a group is multiplied by the scales of the row's group and of the weight's block (see
fp8_groups.py). Groups are cut from the rank's columns. So answers depend on the number of ranks, as with bf16 weights,
but less than on the rounding.
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
"""Number of rows that are quantised or scaled at once, which bounds the temporary memory."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A rank's rows and columns of one or several stacked FP8 matrices. With a leading dimension, several such groups
    of matrices."""

    values: Tensor
    """[..., num_rows, num_columns] e4m3: the elements, not multiplied by their scales."""
    scales: Tensor
    """[..., num_blocks, blocks of columns] fp32: scales of the blocks that the rows and columns touch, matrix after
    matrix."""
    blocks: Tensor
    """[num_rows] int32: index in `scales` of each row's block."""
    first: int
    """Index of the first column within its block. Ranks may cut blocks."""
    width: int
    """Columns per block."""
    even_rows: int
    """Every aligned run of this many rows shares one row of `scales`. A power of two, at most `MOST_EVEN_ROWS`."""

    @classmethod
    def empty(
        cls, sizes: Sequence[tuple[int, int]], rows: Sequence[Span], columns: Span, device: torch.device, *groups: int
    ) -> Fp8Matrix:
        """An empty matrix for rows of several stacked matrices and some of their columns, not read yet.

        Args:
            sizes: rows and columns per block of each matrix. All matrices have the same columns.
            groups: number of groups of stacked matrices. If it is left out, there is one, without a leading dimension.
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
        """Reads the rows and columns for which `empty` made it, for the only group or for group `group`."""
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
        """Some rows of a matrix that has no leading dimension."""
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
    """Rows of activations in FP8, the input of products in fast numerics."""

    values: Tensor
    """[room, num_columns] e4m3. `room` is a multiple of 4. Rows from `num_rows` on are undefined."""
    scales: Tensor
    """[num_groups, room] fp32: a scale for each group of columns of each row."""
    finished: Tensor
    """[MOST_TILES] int32 zeros, in which the one product that uses these rows counts programs that finished a tile."""
    num_rows: int
    dtype: torch.dtype
    """The dtype from which the rows were rounded, which is also the dtype of the products."""

    def __len__(self) -> int:
        return self.num_rows


def multiply(out: Tensor, scales: Tensor, block: tuple[int, int], rows: Span, columns: Span) -> None:
    """Multiplies every value of `out`, which holds these rows and columns of a matrix, by its block's scale, in fp32,
    and rounds once."""
    height, width = block
    scales = scales.to(out.device)
    block_of = torch.arange(columns.start, columns.stop, device=out.device) // width - columns.start // width
    for start in range(rows.start, rows.stop, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, rows.stop)
        row_of = torch.arange(start, stop, device=out.device) // height - rows.start // height
        part = out[start - rows.start : stop - rows.start]
        part.copy_(part.float() * scales[row_of][:, block_of])
