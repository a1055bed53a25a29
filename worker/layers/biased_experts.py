"""Experts with biases and a clamped activation, as one rank has them: some columns of each, and the whole router."""

from __future__ import annotations

import torch

from configs.biased_mixture import BiasedMixture
from configs.errors import ConfigError
from configs.layers import Axis
from parallel.numerics.arithmetic import LayerPlace
from parallel.numerics.weight import CpuWeight, TensorSource
from parallel.plan import Span
from worker.kernels.cpu_pointwise import clamped_act_and_mul, softmax
from worker.layers.routed_experts import RoutedExperts, choose
from worker.layers.step import Padding


class BiasedExperts:
    """A BiasedMixture over this rank's columns, summed over the ranks; on CPUs.

    Raises ConfigError on CUDA.
    """

    def __init__(self, spec: BiasedMixture, place: LayerPlace) -> None:
        if place.device.type == "cuda":
            raise ConfigError("experts with biases (gpt_oss) are not computed on GPUs yet; set device=cpu")
        self._spec = spec
        self._place = place
        self._router: CpuWeight | None = None
        self._routed = RoutedExperts(spec.num_experts, spec.hidden_size, self._act, place)
        self._down_bias = place.empty(spec.num_experts, spec.hidden_size)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the router and this rank's part of every expert; names begin with `prefix`."""
        spec, place = self._spec, self._place
        # Logits that are rounded often tie, and then choose other experts.
        router, router_bias = torch.empty(spec.router.shape), torch.empty(spec.router_bias.shape)
        source.read(prefix + spec.router.name, router)
        source.read(prefix + spec.router_bias.name, router_bias)
        self._router = CpuWeight(router, router_bias)
        columns = place.shard[Axis.EXPERT_COLUMNS]
        gate_up = place.empty(spec.num_experts, spec.hidden_size, 2 * columns.size)
        gate_up_bias = place.empty(spec.num_experts, 2 * columns.size)
        for tensor, out in ((spec.gate_up, gate_up), (spec.gate_up_bias, gate_up_bias)):
            assert tensor.cut is not None
            source.read(prefix + tensor.name, out, columns=place.shard.span_of(tensor.cut))
        down = place.empty(columns.size, spec.hidden_size)
        for expert in range(spec.num_experts):
            start, stop = (expert * spec.intermediate_size + column for column in columns)
            source.read(prefix + spec.down.name, down, rows=Span(start, stop))
            self._routed.keep(expert, _parted(gate_up[expert].t()), down.t(), _parted(gate_up_bias[expert]))
        source.read(prefix + spec.down_bias.name, self._down_bias)

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor:
        """[num_tokens, hidden_size] -> the same in fp32, 0 for padding."""
        assert self._router is not None, "forward before load"
        kept, experts, live = choose(self._router(x.float()), self._spec.top_k, padding)
        weights = softmax(kept, kept)
        y = self._routed(x, experts, weights).float()
        # Whole on every rank, so added after the sum.
        for expert, weight in zip(experts.where(live, 0).unbind(1), weights.unsqueeze(2).unbind(1), strict=True):
            y += weight * self._down_bias[expert]
        return y.masked_fill_(~live, 0.0)

    def _act(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return clamped_act_and_mul(x, self._spec.limit, self._spec.alpha, out)


def _parted(rows: torch.Tensor) -> torch.Tensor:
    """Those of gate, then those of up, which take turns."""
    return torch.cat((rows[::2], rows[1::2]))
