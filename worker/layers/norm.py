"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.fused_sum import PartialSum
from parallel.weight import TensorSource


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once.

    Triton kernels on CUDA, where x is two-dimensional; torch elsewhere.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (size,)
        self._eps = eps
        self._weight = torch.empty(size, dtype=dtype, device=device)
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            from worker.kernels.norm import add_rms_norm, rms_norm  # a CPU install has no Triton

            self._rms_norm, self._add_rms_norm = rms_norm, add_rms_norm
        else:
            self._zeros = torch.zeros_like(self._weight)

    @property
    def weight(self) -> torch.Tensor:
        """[size]."""
        return self._weight

    def load(self, source: TensorSource, name: str) -> None:
        """Reads tensor `name`."""
        source.read(name, self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x [..., size], in x's dtype."""
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
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        # torch's norm is eight operations: for one token, starting them takes far longer than the arithmetic.
        flat = x.view(-1)
        factor = (torch.dot(flat, flat).item() / size + self._eps) ** -0.5
        return torch.addcmul(self._zeros, x, self._weight, value=factor)
