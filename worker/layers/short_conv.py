"""The gated short convolution of LFM2."""

from __future__ import annotations

import torch

from attention.state_pool import StateLayer
from configs.recurrent import ShortConvolution
from parallel.collectives.interface import PartialSum
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.layers.causal_conv import CausalConv
from worker.layers.step import Step


class ShortConv:
    """out(c * conv(b * x)) over this rank's channels, with b, c and x from one product. The all-reduce may be left to
    the norm that reads the output of `project`."""

    def __init__(self, spec: ShortConvolution, context: LayerContext, layer_id: int, _eps: float) -> None:
        self.layer = StateLayer.of(layer_id, spec, context)
        self._into = ColumnParallelLinear(*spec.into, context=context)
        self._conv = CausalConv(spec.conv, context)
        self._out = RowParallelLinear(spec.out, context)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        for part in (self._into, self._conv, self._out):
            part.load(source, prefix)

    def row_groups(self) -> None:
        """Implements MixerModule. Returns None: the input must not be in FP8."""

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, channels of this rank]. Stores the convolution's inputs."""
        assert step.states is not None, "a model with recurrent layers has a state pool"
        b, c, x = self._into(x).chunk(3, dim=1)
        return c * self._conv(b * x, step.states, *step.states.pool.tensors(self.layer.layer_id))

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """Computes the layer's output [num_tokens, hidden_size] from the output of `attend`."""
        return self._out.for_norm(attended)
