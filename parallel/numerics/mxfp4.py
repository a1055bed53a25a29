"""Matrices that stay in MXFP4 in memory: four-bit codes of -6 to 6, and a power of two per block of 32 inputs.

An element stands for the bf16 number that dequantising the checkpoint gives. Four neighbouring blocks form a group. A
16-bit word has one code of each of the four blocks, so that few word operations make bf16 numbers, and the inputs of a
block are side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import CheckpointError
from parallel.plan import Span

if TYPE_CHECKING:
    from parallel.numerics.tensor_source import TensorSource

BLOCK = 32
GROUP = 4 * BLOCK
_BIAS = 126
"""At bf16's bit positions, a code's bits stand for the code divided by two to this power. The checkpoint's exponents
have a bias of 127, as bf16's have, and the smallest code is one half."""
_LARGEST_EXPONENT = 254 - _BIAS
_CODES = torch.arange(16, dtype=torch.int32)
_HIGH = (_CODES & 8) << 12 | (_CODES & 7) << 6
_WORDS = _HIGH, _HIGH >> 3, _HIGH >> 6, (_CODES & 8) << 11 | (_CODES & 6) << 9 | (_CODES & 1) << 13
"""For each of a group's four blocks, the bits that each code sets in a word. The first block's bits are where bf16 has
its sign, the exponent's last bits and the mantissa's first. The next two blocks' bits are 3 and 6 lower, and the last
block's fill the rest."""


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A rank's rows and columns of several matrices."""

    codes: Tensor
    """[num_matrices, num_rows, BLOCK * num_groups] int16: words, zeros after the last column."""
    exponents: Tensor
    """[num_matrices, num_groups, num_rows] int32: one byte per block, the first block lowest. Each is the bf16 exponent
    of the power of two by which the codes' bits are multiplied."""
    num_columns: int

    @classmethod
    def empty(cls, num_matrices: int, num_rows: int, num_columns: int, device: torch.device) -> Mxfp4Matrix:
        """A matrix that is not read yet. `num_columns` is a multiple of BLOCK."""
        assert num_columns % BLOCK == 0, f"{num_columns} columns are not blocks of {BLOCK}"
        groups = -(-num_columns // GROUP)
        return cls(
            torch.empty(num_matrices, num_rows, groups * BLOCK, dtype=torch.int16, device=device),
            torch.empty(num_matrices, groups, num_rows, dtype=torch.int32, device=device),
            num_columns,
        )

    def read(self, source: TensorSource, name: str, i: int, rows: Span, columns: Span) -> None:
        """Fills matrix `i` with rows and columns of a tensor that has the inputs, the columns here, as first dimension.

        Raises:
            CheckpointError: the weights are far too large to be real.
        """
        num_rows, groups = columns.size, self.exponents.shape[1]
        codes = torch.empty(num_rows, rows.size // 2, dtype=torch.uint8, device=self.device)
        exponents = torch.empty(num_rows, rows.size // BLOCK, dtype=torch.uint8, device=self.device)
        if not source.read_mxfp4(name, codes, exponents, rows=rows, columns=columns):
            return
        if (exponents > _LARGEST_EXPONENT).any():
            raise CheckpointError(f"tensor {name} in MXFP4 has blocks of a power above 2; download it again")
        missing = groups * 4 - exponents.shape[1]
        halves = F.pad(torch.stack((codes & 15, codes >> 4), -1).flatten(1), (0, missing * BLOCK))
        blocks = halves.view(num_rows, groups, 4, BLOCK).int().unbind(2)
        words = [bits.to(self.device)[block] for bits, block in zip(_WORDS, blocks, strict=True)]
        self.codes[i] = (words[0] | words[1] | words[2] | words[3]).flatten(1)
        factors = F.pad(exponents + _BIAS, (0, missing))
        self.exponents[i] = factors.view(torch.int32).t()

    @property
    def shape(self) -> torch.Size:
        """Number of matrices, rows and columns."""
        return torch.Size((*self.codes.shape[:2], self.num_columns))

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.codes.device
