"""Linear attention with a delta rule: Gated DeltaNet (Qwen3-Next, Qwen3.5) and Kimi Delta Attention (Kimi-Linear)."""

from __future__ import annotations

import torch

from attention.state_pool import StateLayer
from configs.delta_net import GatedDeltaNet
from configs.kimi_delta import KimiDeltaAttention
from configs.layers import Axis
from parallel.collectives.interface import PartialSum
from parallel.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.kernels import cpu_delta
from worker.kernels.cpu_delta import DeltaArgs
from worker.layers.causal_conv import CausalConv
from worker.layers.interleaved_rows import InterleavedRows
from worker.layers.step import Step


class DeltaNet:
    """Linear attention over this rank's value heads: qkv, z, b, a -> convolution -> delta rule -> gated norm -> out. z
    and a may be products of two matrices.

    The all-reduce may be left to the norm that reads the output of `project`.
    """

    def __init__(
        self, spec: GatedDeltaNet | KimiDeltaAttention, context: LayerContext, layer_id: int, eps: float
    ) -> None:
        keys, values = context.shard[spec.key_axis].size, context.shard[Axis.QUERY_HEADS].size
        self.layer = StateLayer.of(layer_id, spec, context)
        self._spec, self._context = spec, context
        lengths = values, values * spec.decay_dim, spec.value_dim
        a_log, dt_bias, norm = (torch.empty(n, device=context.device) for n in lengths)
        sizes = keys, values, spec.key_dim, spec.value_dim, spec.decay_dim
        self._args = DeltaArgs(*sizes, spec.has_sigmoid_gate, eps, a_log, dt_bias, norm)
        widths = [context.shard.span_of(it.cut).size for it in spec.into]
        self._widths = [sum(widths[:3]), *widths[3:]]
        self._into = ColumnParallelLinear(*spec.into, context=context)
        self._gates = [ColumnParallelLinear(it, context=context) for it in spec.gates]
        is_gated = spec.decay_dim == 1
        self._conv = CausalConv(spec.conv, context, silu=True, normed=(2 * keys, spec.key_dim) if is_gated else (0, 0))
        self._out = RowParallelLinear(spec.out, context)
        if context.device.type == "cuda":
            from worker.kernels import delta, kimi_delta

            self._delta_net = delta.delta_net if is_gated else kimi_delta.delta_net
        else:
            self._delta_net = cpu_delta.delta_net

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's part of the spec's tensors. Their names begin with `prefix`."""
        spec = self._spec
        interleaved = {prefix + name: parts for name, parts in spec.interleaved.items()}
        self._into.load(InterleavedRows(source, interleaved, spec.num_key_heads), prefix)
        for gate in self._gates:
            gate.load(source, prefix)
        self._conv.load(source, prefix)
        self._out.load(source, prefix)
        for tensor, out in zip(spec.decay, (self._args.a_log, self._args.dt_bias), strict=True):
            assert tensor.cut is not None, "decays are divided among the ranks"
            span, name = self._context.shard.span_of(tensor.cut), prefix + tensor.name
            if tensor.cut.dim:  # Kimi-Linear's A_log is [1, 1, num_heads, 1]
                source.read(name, out.view(1, -1), columns=span)
            else:
                source.read(name, out, rows=span)
        source.read(prefix + spec.norm.name, self._args.norm)

    def row_groups(self) -> None:
        """Implements MixerModule. Returns None: the input must not be in FP8."""

    def attend(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, this rank's value heads * value_dim]. Moves the states forward."""
        assert step.states is not None, "a model with recurrent layers has a state pool"
        conv_slots, conv_recent, slots, *recent = step.states.pool.tensors(self.layer.layer_id)
        qkv, z, b, a = torch.split(self._into(x), self._widths, dim=1)
        if self._gates:
            z, a = (gate(low) for gate, low in zip(self._gates, (z, a), strict=True))
        qkv = self._conv(qkv, step.states, conv_slots, conv_recent)
        keys, values, decays = recent
        return self._delta_net(qkv, (z, b, a), self._args, step.states, slots, (keys, values, decays))

    def project(self, attended: torch.Tensor) -> torch.Tensor | PartialSum:
        """Computes the layer's output [num_tokens, hidden_size] from the output of `attend`."""
        return self._out.for_norm(attended)
