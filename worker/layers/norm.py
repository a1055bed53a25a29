"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from parallel.collectives.interface import PartialSum
from parallel.numerics.fp8 import Fp8Rows
from parallel.numerics.tensor_source import TensorSource
from worker.kernels import cpu_pointwise

if TYPE_CHECKING:
    from parallel.numerics.kernels.fp8_groups import Groups


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once.

    Uses Triton kernels on CUDA, where x must be two-dimensional, and C elsewhere.

    Args:
        dtype: dtype of the activations.
        offset: added to the weight of the checkpoint. The sum is stored in fp32, where 1 + w is exact enough. Rounded
            to bf16 it would be off by up to 0.4 %, equally for every token.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0) -> None:
        self._shape = (size,)
        self._dtype = dtype
        self._eps = eps
        self._offset = offset
        self._weight = torch.empty(size, dtype=torch.float32 if offset else dtype, device=device)
        if device.type == "cuda":
            from worker.kernels import norm

            self._rms_norm, self._add_rms_norm = norm.rms_norm, norm.add_rms_norm
        else:
            self._rms_norm, self._add_rms_norm = cpu_pointwise.rms_norm, cpu_pointwise.add_rms_norm

    @property
    def weight(self) -> torch.Tensor:
        """[size], the offset included."""
        return self._weight

    def load(self, source: TensorSource, name: str) -> None:
        """Reads tensor `name`."""
        source.read(name, self._weight)
        if self._offset:
            self._weight += self._offset

    def __call__(self, x: torch.Tensor | PartialSum) -> torch.Tensor:
        """The norm of x [..., size], in x's dtype. For a PartialSum, like `add` with a residual of zeros."""
        if isinstance(x, PartialSum):
            zeros = torch.zeros(x.num_rows, *self._shape, dtype=self._dtype, device=self._weight.device)
            return x.add_norm(zeros, self._weight, self._eps)
        return self._rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor | PartialSum, residual: torch.Tensor) -> torch.Tensor:
        """Adds x to `residual` in place, both [num_tokens, size], and returns the norm of the (rounded) sum.

        If x is a PartialSum, the ranks' summands are added first. Then raises EngineError if a rank did not take part.
        """
        if isinstance(x, PartialSum):
            return x.add_norm(residual, self._weight, self._eps)
        return self._add_rms_norm(x, residual, self._weight, self._eps)

    def add_for(
        self, x: torch.Tensor | PartialSum, residual: torch.Tensor, groups: Groups | None
    ) -> torch.Tensor | Fp8Rows:
        """Like `add`, for a product that may take its rows in FP8 in `groups`. A PartialSum stays unquantised."""
        if groups is None or isinstance(x, PartialSum):
            return self.add(x, residual)
        from worker.kernels.norm import add_rms_norm_in_fp8

        return add_rms_norm_in_fp8(x, residual, self._weight, self._eps, groups)
