"""The interface through which layers read weights. It imports no torch, for code that only checks headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from parallel.plan import Span

if TYPE_CHECKING:
    import torch


class TensorSource(Protocol):
    """A source of a layer's checkpoint tensors."""

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Fills `out`, in its dtype, with tensor `name`, or with the given rows and columns of it.

        Rows and columns are those of `parallel.plan.as_matrix`, for tensor and `out` alike.
        """

    def scale_block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns per scale block of a matrix that can be read in FP8. None if it cannot."""
        return None

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        """Fills `out` with rows and columns of a matrix in e4m3, and `scales` with the fp32 scales of all blocks that
        these rows and columns touch."""
        raise AssertionError(f"{name} cannot be read in FP8; please report this bug")

    def is_mxfp4(self, name: str) -> bool:
        """Whether the matrices of this tensor (inputs first) can be read in MXFP4."""
        return False

    def read_mxfp4(self, name: str, codes: torch.Tensor, exponents: torch.Tensor, *, rows: Span, columns: Span) -> bool:
        """Fills the codes and exponents of some columns of one MXFP4 matrix, for whole blocks of 32 rows.

        Args:
            codes: [columns, rows / 2] uint8, the lower half of each byte first.
            exponents: [columns, rows / 32] uint8, biased by 127.

        Returns:
            False if the tensor data already lies where it belongs and nothing was read.
        """
        raise AssertionError(f"{name} cannot be read in MXFP4; please report this bug")
