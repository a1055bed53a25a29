"""Weights in four bits as gpt-oss publishes its experts: MXFP4 of the Open Compute Project's "Microscaling Formats".

A matrix is stored with its inputs side by side, 32 to a block: 16 bytes, of each the low half first, and one more for
a power of two that all of them are multiplied by. The tensor that they stand for has its inputs first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from parallel.plan import Span

if TYPE_CHECKING:  # who checks headers alone does without its seconds
    import torch

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors, behind that of the one that they stand for."""
_BLOCK = 32
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Read = Callable[[str, "torch.Tensor", Span, Span], None]
"""Fills a matrix of bytes with rows and columns of a tensor, by its name."""


def stored_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that may stand for one of matrices [num_matrices, inputs, outputs]; none where
    none may."""
    if len(shape) != 3 or shape[1] % _BLOCK:
        return {}
    rows = shape[0], shape[2], shape[1] // _BLOCK
    return {name + BLOCKS: (*rows, _BLOCK // 2), name + SCALES: rows}


def read_matrices(read: Read, name: str, shape: tuple[int, ...], out: torch.Tensor, rows: Span, columns: Span) -> None:
    """Fills `out` [rows, columns] with those of a tensor of `shape` as `as_matrix` has it, reading whole blocks."""
    import torch

    _, inputs, outputs = shape
    for matrix in range(rows.start // inputs, -(-rows.stop // inputs)):
        first = matrix * inputs
        taken = Span(max(rows.start, first), min(rows.stop, first + inputs))
        blocks = Span((taken.start - first) // _BLOCK, -(-(taken.stop - first) // _BLOCK))
        stored = Span(matrix * outputs + columns.start, matrix * outputs + columns.stop)
        codes = torch.empty(columns.size, blocks.size * _BLOCK // 2, dtype=torch.uint8)
        read(name + BLOCKS, codes, stored, Span(*(it * _BLOCK // 2 for it in blocks)))
        exponents = torch.empty(columns.size, blocks.size, dtype=torch.uint8)
        read(name + SCALES, exponents, stored, blocks)
        begin = taken.start - first - blocks.start * _BLOCK
        values = _decoded(codes.to(out.device), exponents.to(out.device))[:, begin : begin + taken.size]
        out[taken.start - rows.start : taken.stop - rows.start] = values.t()


def _decoded(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """fp32 [num_rows, 32 * num_blocks] of bytes [num_rows, 16 * num_blocks] and [num_rows, num_blocks]."""
    import torch

    values = torch.tensor([*_VALUES, *(-it for it in _VALUES)], device=codes.device)
    halves = torch.stack((codes & 15, codes >> 4), -1)
    blocks = values[halves.view(*exponents.shape, _BLOCK).int()]
    return torch.ldexp(blocks, exponents.int().unsqueeze(-1) - _BIAS).flatten(1)
