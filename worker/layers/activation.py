"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F

from configs.errors import ConfigError

Activation = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class ActAndMul:
    """act(gate) * up: a Triton kernel for CUDA tensors, torch for others.

    Raises ConfigError when `hidden_act`, a checkpoint's name of the activation, is not known.
    """

    def __init__(self, hidden_act: str) -> None:
        if hidden_act not in _ACTIVATIONS:
            raise ConfigError(f"hidden_act={hidden_act} is not one of {', '.join(sorted(_ACTIVATIONS))}")
        self._hidden_act = hidden_act
        self._act = _ACTIVATIONS[hidden_act]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, 2 * size], gate then up -> [num_tokens, size]."""
        if x.is_cuda:
            return self._fused(x)
        gate, up = x.chunk(2, dim=-1)
        return self._act(gate).mul_(up)

    @cached_property
    def _fused(self) -> Activation:
        from worker.kernels import activation  # a CPU install has no Triton

        fused = {
            "silu": activation.silu_and_mul,
            "gelu": activation.gelu_and_mul,
            "gelu_pytorch_tanh": activation.gelu_tanh_and_mul,
        }
        return fused[self._hidden_act]
