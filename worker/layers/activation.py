"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from configs.errors import ConfigError
from worker.kernels import cpu_pointwise

Activation = Callable[[torch.Tensor], torch.Tensor]

# A checkpoint's names, and the kernels'.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


class ActAndMul:
    """act(gate) * up: a Triton kernel for CUDA tensors, C for others.

    Raises ConfigError when `hidden_act`, a checkpoint's name of the activation, is not known.
    """

    def __init__(self, hidden_act: str) -> None:
        if hidden_act not in _ACTIVATIONS:
            raise ConfigError(f"hidden_act={hidden_act} is not one of {', '.join(sorted(_ACTIVATIONS))}")
        self._act = _ACTIVATIONS[hidden_act]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, 2 * size], gate then up -> [num_tokens, size]."""
        if x.is_cuda:
            return self._fused(x)
        return cpu_pointwise.act_and_mul(x, self._act)

    @cached_property
    def _fused(self) -> Activation:
        from worker.kernels import activation  # a CPU install has no Triton

        fused = {
            "silu": activation.silu_and_mul,
            "gelu": activation.gelu_and_mul,
            "gelu_tanh": activation.gelu_tanh_and_mul,
        }
        return fused[self._act]
