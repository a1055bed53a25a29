"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.fused_sum import PartialSum
from parallel.weight import TensorSource


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once.

    Triton kernels on CUDA, where x is two-dimensional; torch elsewhere.

    Args:
        dtype: of the activations.
        offset: added to the weight of the checkpoint; the sum is kept in fp32, where 1 + w is exact enough. Rounded to
            bf16 it would be off by up to 0.4 %, by as much for every token.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0) -> None:
        self._shape = (size,)
        self._eps = eps
        self._offset = offset
        self._weight = torch.empty(size, dtype=torch.float32 if offset else dtype, device=device)
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            from worker.kernels.norm import add_rms_norm, rms_norm  # a CPU install has no Triton

            self._rms_norm, self._add_rms_norm = rms_norm, add_rms_norm
        else:
            self._zeros = torch.zeros_like(self._weight)

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
        """The norm of x [..., size], in x's dtype. Of a PartialSum: as `add` to a residual of zeros."""
        if isinstance(x, PartialSum):
            return x.add_norm(torch.zeros_like(x.summand), self._weight, self._eps)
        if self._on_cuda:
            return self._rms_norm(x, self._weight, self._eps)
        return self._on_cpu(x)

    def add(self, x: torch.Tensor | PartialSum, residual: torch.Tensor) -> torch.Tensor:
        """Adds x to `residual` in place, both [num_tokens, size], and returns the norm of the (rounded) sum.

        Of a PartialSum the ranks' summands are added first. Raises EngineError then, if a rank did not come.
        """
        if isinstance(x, PartialSum):
            return x.add_norm(residual, self._weight, self._eps)
        if self._on_cuda:
            return self._add_rms_norm(x, residual, self._weight, self._eps)
        residual += x
        return self._on_cpu(residual)

    def _on_cpu(self, x: torch.Tensor) -> torch.Tensor:
        [size] = self._shape
        if x.numel() > size or x.dtype is not torch.float32:
            return rms_norm(x, self._weight, self._eps)
        # torch's norm is eight operations: for one token, starting them takes far longer than the arithmetic.
        flat = x.view(-1)
        factor = (torch.dot(flat, flat).item() / size + self._eps) ** -0.5
        return torch.addcmul(self._zeros, x, self._weight, value=factor)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x [..., size] by torch, rounded once to x's dtype; weight [size] is of that dtype or fp32."""
    if weight.dtype is x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
