"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.linear import TensorSource


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in fp32."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (size,)
        self._eps = eps
        self._weight = torch.empty(size, dtype=dtype, device=device)

    def load(self, source: TensorSource, name: str) -> None:
        """Reads `name`.weight."""
        source.read(f"{name}.weight", self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)
