"""Experts with biases and a clamped activation, as one rank has them: some columns of each, and the whole router."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from configs.biased_mixture import BiasedMixture
from configs.errors import ConfigError
from configs.layers import Axis, Cut
from parallel.arithmetic import LayerPlace
from parallel.fused_sum import PartialSum
from parallel.plan import Span
from parallel.weight import TensorSource
from worker.layers.experts import sum_of_experts
from worker.layers.step import Padding


class BiasedExperts:
    """A BiasedMixture over this rank's columns, then all-reduce, perhaps by the next norm; by torch, on CPUs.

    Raises ConfigError on CUDA.
    """

    def __init__(self, spec: BiasedMixture, place: LayerPlace) -> None:
        if place.device.type == "cuda":
            raise ConfigError("experts with biases (gpt_oss) are not computed on GPUs yet; set device=cpu")
        self._spec = spec
        self._shard = place.shard
        self._columns = place.shard[Axis.EXPERT_COLUMNS]
        self._is_first = place.group.rank == 0
        self._sum = place.arithmetic.rank_sum(spec.hidden_size, Cut(Axis.EXPERT_COLUMNS, 1), place)
        # Logits that are rounded often tie, and then choose other experts.
        self._router, self._router_bias = torch.empty(spec.router.shape), torch.empty(spec.router_bias.shape)
        num_experts, hidden_size, width = spec.num_experts, spec.hidden_size, self._columns.size
        self._gate_up = place.empty(num_experts, hidden_size, 2 * width)
        self._gate_up_bias = place.empty(num_experts, 2 * width)
        self._down = place.empty(num_experts, width, hidden_size)
        self._down_bias = place.empty(num_experts, hidden_size)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the router and this rank's part of every expert; names begin with `prefix`."""
        spec = self._spec
        source.read(prefix + spec.router.name, self._router)
        source.read(prefix + spec.router_bias.name, self._router_bias)
        for tensor, out in ((spec.gate_up, self._gate_up), (spec.gate_up_bias, self._gate_up_bias)):
            assert tensor.cut is not None
            source.read(prefix + tensor.name, out, columns=self._shard.span_of(tensor.cut))
        for expert, down in enumerate(self._down):
            start, stop = (expert * spec.intermediate_size + column for column in self._columns)
            source.read(prefix + spec.down.name, down, rows=Span(start, stop))
        source.read(prefix + spec.down_bias.name, self._down_bias)
        if not self._is_first:
            self._down_bias.zero_()  # counted once

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] -> the same, 0 for padding, or what the next norm is to sum."""
        return self._sum.for_norm(len(x), lambda out: self._partial(x, padding, out))

    def _partial(self, x: torch.Tensor, padding: Padding, out: torch.Tensor | None) -> torch.Tensor:
        logits = F.linear(x.float(), self._router, self._router_bias)
        kept, experts = logits.topk(self._spec.top_k, dim=1)
        live = (padding.token_slots() >= padding.first_slot).unsqueeze(1)
        total = sum_of_experts(x, experts.where(live, -1), kept.softmax(1), self._expert)
        return total.to(x.dtype) if out is None else out.copy_(total)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of what `expert` makes of x [num_rows, hidden_size]."""
        limit = self._spec.limit
        gate_up = torch.addmm(self._gate_up_bias[expert], x, self._gate_up[expert])
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        hidden = (up + 1) * gate * torch.sigmoid(self._spec.alpha * gate)
        return torch.addmm(self._down_bias[expert], hidden, self._down[expert])
