"""The dense feed-forward of a layer, or one expert that all tokens use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from configs.layers import DenseMLP
from parallel.collectives.interface import PartialSum
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.fp8 import Fp8Rows
from parallel.numerics.tensor_source import TensorSource
from worker.layers.activation import ActAndMul, Activation, relu2
from worker.layers.step import Padding

if TYPE_CHECKING:
    from parallel.numerics.kernels.fp8_groups import Groups


class MLP:
    """down(act(gate(x)) * up(x)), or down(relu2(up(x))) without a gate, over this rank's columns. Then an all-reduce,
    which may be left to the next norm."""

    def __init__(self, spec: DenseMLP, context: LayerContext) -> None:
        self._factors = spec.factors
        self._act = ActAndMul(spec.hidden_act) if spec.is_gated else relu2
        self._gate_up = ColumnParallelLinear(*spec.gate_up, context=context)
        self._down = RowParallelLinear(spec.down, context)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        self._gate_up.load(source, prefix)
        self._down.load(source, prefix)

    def row_groups(self) -> Groups | None:
        """The groups of elements that share a scale if the input is in FP8. None if the input must not be in FP8."""
        return self._gate_up.row_groups()

    def partial(
        self, x: torch.Tensor | Fp8Rows, act: Activation | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """This rank's part of the sum, without the bias of `down`. Written to `out` if it is given.

        Args:
            x: [num_tokens, hidden_size].
            act: replaces the spec's activation.
        """
        return self._down.partial(self._activated(x) if act is None else act(self._gate_up(x)), out)

    def __call__(self, x: torch.Tensor | Fp8Rows, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] -> the same shape, or a PartialSum for the next norm. Padding is computed too."""
        return self._down.for_norm(self._activated(x))

    def add_to(
        self, y: torch.Tensor, x: torch.Tensor, padding: Padding, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y + the output for x, times `gate` [num_tokens, 1] if it is given, in fp32; 0 for padding."""
        output = self._down(self._activated(x))
        output = output if gate is None else output * gate
        is_padding = (padding.token_slots() < padding.first_slot).unsqueeze(1)
        return y.float().add_(output).masked_fill_(is_padding, 0.0)

    def _activated(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor | Fp8Rows:
        hidden = self._gate_up(x)
        if self._factors is not None:
            for part, factor in zip(hidden.chunk(2, dim=1), self._factors, strict=True):
                part.mul_(factor)
        return self._act(hidden, self._down.row_groups())
