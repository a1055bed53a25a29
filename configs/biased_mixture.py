"""The experts of gpt-oss: with biases and a clamped activation. A checkpoint stacks each kind of tensor of all
experts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from configs.layers import FINEST_EXPERT_GRANULE, Axis, Columns, Cut, Role, TensorSpec


@dataclass(frozen=True, kw_only=True)
class BiasedMixture:
    """Experts with biases to which a router sends each token.

    y = sum over the top k experts e of weight[e] * (h_e @ down[e] + down_bias[e]), where h_e = (up + 1) * gate *
    sigmoid(alpha * gate). Gate and up are clamped to the limit first, gate only from above.

    The weights are the softmax of the top k logits. In `gate_up`, columns of gate and up alternate.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    """Columns of one expert."""
    limit: float
    alpha: float

    # Same names and meanings as in MixtureOfExperts, so that one router serves both.
    norm_topk_prob: ClassVar = True
    round_weights: ClassVar = False
    weight_scale: ClassVar = 1.0
    sigmoid: ClassVar = False
    choice_bias: ClassVar = None
    sum_epsilon: ClassVar = 0.0
    scales_input: ClassVar = False
    num_groups: ClassVar = 1
    top_groups: ClassVar = 1
    shared: ClassVar = None
    shared_gate: ClassVar = None

    @property
    def router(self) -> TensorSpec:
        """The router [num_experts, hidden_size]. Every rank holds all of it."""
        return TensorSpec("mlp.router.weight", (self.num_experts, self.hidden_size), Role.MATRIX)

    @property
    def router_bias(self) -> TensorSpec:
        """The router's bias [num_experts]."""
        return TensorSpec("mlp.router.bias", (self.num_experts,), Role.BIAS)

    @property
    def gate_up(self) -> TensorSpec:
        """Gate and up of all experts [num_experts, hidden_size, 2 * intermediate_size]: inputs first."""
        shape = self.num_experts, self.hidden_size, 2 * self.intermediate_size
        return self._routed("gate_up_proj", shape, Role.MATRIX, Cut(Axis.EXPERT_COLUMNS, 2, 2))

    @property
    def gate_up_bias(self) -> TensorSpec:
        """Biases of gate and up [num_experts, 2 * intermediate_size]."""
        shape = self.num_experts, 2 * self.intermediate_size
        return self._routed("gate_up_proj_bias", shape, Role.BIAS, Cut(Axis.EXPERT_COLUMNS, 1, 2))

    @property
    def down(self) -> TensorSpec:
        """Down of all experts [num_experts, intermediate_size, hidden_size]: inputs first."""
        shape = self.num_experts, self.intermediate_size, self.hidden_size
        return self._routed("down_proj", shape, Role.MATRIX, Cut(Axis.EXPERT_COLUMNS, 1))

    @property
    def down_bias(self) -> TensorSpec:
        """Bias of down [num_experts, hidden_size]. Every rank holds all of it and adds it after the all-reduce."""
        return self._routed("down_proj_bias", (self.num_experts, self.hidden_size), Role.BIAS, None)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return self.router, self.router_bias, self.gate_up, self.gate_up_bias, self.down, self.down_bias

    @property
    def axes(self) -> tuple[Columns, ...]:
        return (Columns(Axis.EXPERT_COLUMNS, self.intermediate_size, FINEST_EXPERT_GRANULE, may_be_empty=True),)

    def _routed(self, name: str, shape: tuple[int, ...], role: Role, cut: Cut | None) -> TensorSpec:
        share = Fraction(self.top_k, self.num_experts)
        may_be_mxfp4 = role is Role.MATRIX and shape[1] % 32 == 0  # inputs per MXFP4 block
        return TensorSpec(f"mlp.experts.{name}", shape, role, cut, share, may_be_mxfp4=may_be_mxfp4)
