"""The gated activation of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from configs.errors import ConfigError
from parallel.numerics.fp8 import Fp8Rows
from worker.kernels import cpu_pointwise

if TYPE_CHECKING:
    from parallel.numerics.kernels.fp8_groups import Groups

Activation = Callable[[torch.Tensor], torch.Tensor]

# A checkpoint's names, and the kernels' names.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def relu2(x: torch.Tensor, _groups: Groups | None = None) -> torch.Tensor:
    """The square of the positive part: the activation of MLPs without a gate. Changes x."""
    return x.clamp_min_(0.0).square_()


class ActAndMul:
    """act(gate) * up: a Triton kernel for CUDA tensors, C for all others.

    Raises ConfigError if `hidden_act`, a checkpoint's name of the activation, is not known.
    """

    def __init__(self, hidden_act: str) -> None:
        if hidden_act not in _ACTIVATIONS:
            raise ConfigError(
                f"hidden_act={hidden_act} is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}"
            )
        self._act = _ACTIVATIONS[hidden_act]

    def __call__(self, x: torch.Tensor, groups: Groups | None = None) -> torch.Tensor | Fp8Rows:
        """x [num_tokens, 2 * size], gate then up -> [num_tokens, size]. On CUDA with `groups`, quantised to FP8."""
        if not x.is_cuda:
            return cpu_pointwise.act_and_mul(x, self._act)
        from worker.kernels.activation import act_and_mul, act_and_mul_in_fp8

        return act_and_mul(x, self._act) if groups is None else act_and_mul_in_fp8(x, self._act, groups)
