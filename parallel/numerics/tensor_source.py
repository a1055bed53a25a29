"""The source of a rank's weights, as layers know it. Whoever checks headers alone does without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from parallel.plan import Span

if TYPE_CHECKING:
    import torch


class TensorSource(Protocol):
    """The source of a layer's shards of checkpoint tensors."""

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Fills `out`, cast to its dtype, with tensor `name` or the given rows or columns of it, or columns of rows.

        Rows and columns are those of `parallel.plan.as_matrix`, of tensor and `out` alike.
        """

    def scale_block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of the blocks of a matrix that have a scale each, where it may be read in FP8."""
        return None

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        """Fills `out` with rows and columns of a matrix in e4m3, and `scales` with the fp32 ones of all blocks that
        they are in."""
        raise AssertionError(f"{name} is not to be had in FP8")

    def is_mxfp4(self, name: str) -> bool:
        """Whether matrices whose inputs come first may be read in MXFP4."""
        return False

    def read_mxfp4(self, name: str, codes: torch.Tensor, exponents: torch.Tensor, *, rows: Span, columns: Span) -> bool:
        """Fills `codes` [columns, rows / 2] uint8, of each the low half first, and `exponents` [columns, rows / 32]
        uint8, which 127 is to be taken from, with columns of whole blocks of 32 rows of one of the matrices. Returns
        whether it does: not where they lie elsewhere, as they are to be."""
        raise AssertionError(f"{name} is not to be had in MXFP4")
