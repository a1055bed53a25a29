"""Weights in four bits, as in the published experts of gpt-oss: MXFP4 of OCP's "Microscaling Formats".

A matrix is stored with its inputs in the last dimension, in blocks of 32. A block has 16 bytes of codes, with the low
half first, and one byte for a power of two by which its 32 values are multiplied. The tensor that a checkpoint encodes
in this way has the inputs before the outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from parallel.plan import Span, blocks_of

if TYPE_CHECKING:  # checks of headers skip torch's slow import
    import torch

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two stored tensors, after the name of the tensor that they encode."""
_BLOCK = 32
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BORDERS = tuple((low + high) / 2 for low, high in itertools.pairwise(_VALUES))


def stored_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of tensors that encode matrices [num_matrices, inputs, outputs]. Empty for other shapes."""
    if len(shape) != 3 or shape[1] % _BLOCK:
        return {}
    rows = shape[0], shape[2], shape[1] // _BLOCK
    return {name + BLOCKS: (*rows, _BLOCK // 2), name + SCALES: rows}


def read_matrices(
    read: Callable[..., bool], name: str, shape: tuple[int, ...], out: torch.Tensor, rows: Span, columns: Span
) -> None:
    """Fills `out` [rows, columns] with that part of a tensor of `shape`, seen `as_matrix`. `read` works like
    `TensorSource.read_mxfp4`."""
    import torch

    for matrix in range(rows.start // shape[1], -(-rows.stop // shape[1])):
        first = matrix * shape[1]
        taken = Span(max(rows.start, first), min(rows.stop, first + shape[1]))
        blocks = blocks_of(Span(taken.start - first, taken.stop - first), _BLOCK)
        whole = Span(first + blocks.start * _BLOCK, first + blocks.stop * _BLOCK)
        codes = torch.empty(columns.size, whole.size // 2, dtype=torch.uint8, device=out.device)
        exponents = torch.empty(columns.size, blocks.size, dtype=torch.uint8, device=out.device)
        read(name, codes, exponents, rows=whole, columns=columns)
        values = _decoded(codes, exponents)[:, taken.start - whole.start :][:, : taken.size]
        out[taken.start - rows.start : taken.stop - rows.start] = values.t()


def encode(values: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor) -> None:
    """Encodes fp32 [num_rows, 32 * num_blocks] as bytes [num_rows, 16 * num_blocks] and [num_rows, num_blocks]. Each
    block is divided by the power of two that scales its largest value into 4 to 8, and codes are the nearest ones."""
    import torch

    blocks = values.view(*exponents.shape, _BLOCK)
    powers = blocks.abs().amax(2).frexp().exponent - 3
    scaled = torch.ldexp(blocks, -powers.unsqueeze(2))
    halves = torch.bucketize(scaled.abs(), torch.tensor(_BORDERS, device=values.device)) | (scaled < 0).int() << 3
    low, high = halves.view(*codes.shape, 2).unbind(2)
    codes.copy_(low | high << 4)
    exponents.copy_(powers + _BIAS)


def _decoded(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Decodes bytes [num_rows, 16 * num_blocks] and [num_rows, num_blocks] to fp32 [num_rows, 32 * num_blocks]."""
    import torch

    values = torch.tensor([*_VALUES, *(-it for it in _VALUES)], device=codes.device)
    halves = torch.stack((codes & 15, codes >> 4), -1)
    blocks = values[halves.view(*exponents.shape, _BLOCK).int()]
    return torch.ldexp(blocks, exponents.int().unsqueeze(-1) - _BIAS).flatten(1)
