"""A mixture of experts as one rank has it: some columns of every expert, and the whole router.

Every rank routes for itself, from equal bits to equal choices, and sums its experts' columns. Which columns a rank has
is decided elsewhere: spans come from outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from configs.errors import ConfigError
from configs.layers import Axis, Cut, DenseMLP, MixtureOfExperts
from parallel.fused_sum import PartialSum
from parallel.numerics.arithmetic import LayerPlace
from parallel.numerics.weight import CpuWeight, TensorSource
from worker.kernels.cpu_pointwise import act_and_mul, softmax
from worker.layers.mlp import MLP
from worker.layers.routed_experts import RoutedExperts, choose, top
from worker.layers.step import Padding


class Experts(ABC):
    """Routed experts and perhaps a shared one over this rank's columns, summed over the ranks.

    Raises ConfigError where the experts' activation is not silu.
    """

    def __init__(self, spec: MixtureOfExperts, place: LayerPlace) -> None:
        if spec.hidden_act != "silu":
            raise ConfigError(f"hidden_act={spec.hidden_act} of a mixture of experts is not silu")
        self._spec = spec
        self._columns = place.shard[Axis.EXPERT_COLUMNS]
        self._round_to = place.dtype if spec.round_weights else torch.float32
        self._shared = None if spec.shared is None else MLP(spec.shared, place)

    @staticmethod
    def of(spec: MixtureOfExperts, place: LayerPlace) -> Experts:
        """As the place's device computes them."""
        return (CudaExperts if place.device.type == "cuda" else CpuExperts)(spec, place)

    @abstractmethod
    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the router and this rank's part of every expert; names begin with `prefix`."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] -> the same, 0 for padding, or what the next norm is to sum."""

    def _empty_router(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[num_experts, hidden_size], and the shared expert's gate, if it has one, as one more row."""
        spec = self._spec
        num_rows = spec.num_experts + (spec.shared_gate is not None)
        return torch.empty(num_rows, spec.hidden_size, dtype=dtype, device=device)

    def _load_router(self, source: TensorSource, prefix: str, router: torch.Tensor) -> None:
        """And what a shared expert has."""
        spec = self._spec
        source.read(prefix + spec.router.name, router[: spec.num_experts])
        if spec.shared_gate is not None:
            source.read(prefix + spec.shared_gate.name, router[spec.num_experts :])
        if self._shared is not None:
            self._shared.load(source, prefix)

    def _read_expert(
        self, source: TensorSource, prefix: str, expert: DenseMLP, gate_up: torch.Tensor, down: torch.Tensor
    ) -> None:
        for linear, out in zip(expert.gate_up, gate_up.chunk(2), strict=True):
            source.read(f"{prefix}{linear.name}.weight", out, rows=self._columns)
        source.read(f"{prefix}{expert.down.name}.weight", down, columns=self._columns)


class CudaExperts(Experts):
    """Experts by kernels in Triton. A shared expert's part is added to this rank's, or in exact numerics its nodes
    stand beside those of the experts: there is one sum over the ranks.

    Raises:
        ConfigError: also where this rank's columns are no multiple of 32, unless numerics are exact, or the experts are
            chosen from the best groups.
    """

    def __init__(self, spec: MixtureOfExperts, place: LayerPlace) -> None:
        super().__init__(spec, place)
        width, unit = self._columns.size, place.arithmetic.choose(fast=32, exact=1)
        if width % unit:
            raise ConfigError(
                f"{spec.intermediate_size} columns of an expert leave rank {place.group.rank} {width}, and GPUs take "
                f"multiples of {unit}; choose a smaller tensor_parallel_size"
            )
        if spec.top_groups < spec.num_groups:
            raise ConfigError(
                f"experts of the best {spec.top_groups} of {spec.num_groups} groups are not chosen on GPUs yet; set "
                "device=cpu"
            )
        cut = Cut(Axis.EXPERT_COLUMNS, 1)
        beside = None if spec.shared is None else spec.shared.down.cut
        leaves = place.arithmetic.leaves(cut, place)
        self._leaf, self._nodes = place.arithmetic.choose(fast=(None, ()), exact=(leaves.width, leaves.nodes))
        self.rank_sum = place.arithmetic.rank_sum(spec.hidden_size, cut, place, of_weight=False, beside=beside)
        # fp32 from the product on, since bf16 logits often tie, and then choose other experts.
        self._router = self._empty_router(place.dtype, place.device)
        self._w13 = place.empty(spec.num_experts, 2 * width, spec.hidden_size)
        self._w2 = place.empty(spec.num_experts, spec.hidden_size, width)

    def load(self, source: TensorSource, prefix: str) -> None:
        self._load_router(source, prefix, self._router)
        for expert, gate_up, down in zip(self._spec.experts, self._w13, self._w2, strict=True):
            self._read_expert(source, prefix, expert, gate_up, down)

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor | PartialSum:
        return self.rank_sum.for_norm(len(x), lambda out: self.partial(x, padding, out))

    def partial(self, x: torch.Tensor, padding: Padding, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of `rank_sum` [num_tokens, hidden_size], or its nodes in fp32 [num_nodes, num_tokens,
        hidden_size]; 0 for padding; written to contiguous `out` if one is given."""
        from worker.kernels.moe import gated_silu_and_mul, mixture  # a CPU install has no Triton

        spec, nodes, slots, first_slot = self._spec, self._nodes, padding.token_slots(), padding.first_slot
        is_exact = self._leaf is not None
        if out is None:
            assert not is_exact, "a sum of nodes gives their memory"
            out = torch.empty_like(x)
        logits = mixture(
            x,
            self._router,
            self._w13,
            self._w2,
            top_k=spec.top_k,
            normalise=spec.norm_topk_prob,
            round_to=self._round_to,
            weight_scale=spec.weight_scale,
            out=out[: len(nodes)] if is_exact else out,
            slots=slots,
            first_slot=first_slot,
            shared=None if is_exact or self._shared is None else self._shared.partial(x),
            leaf=self._leaf,
            nodes=nodes,
        )
        if is_exact and self._shared is not None and len(out) > len(nodes):

            def act(hidden: torch.Tensor) -> torch.Tensor:
                return gated_silu_and_mul(hidden, logits, spec.num_experts, slots, first_slot)

            self._shared.partial(x, act, out[len(nodes) :])
        return out


class CpuExperts(Experts):
    """By chains that follow from a token alone; a shared expert has a sum over the ranks of its own."""

    def __init__(self, spec: MixtureOfExperts, place: LayerPlace) -> None:
        super().__init__(spec, place)
        self._place = place
        self._router: CpuWeight | None = None
        self._routed = RoutedExperts(spec.num_experts, spec.hidden_size, _silu_and_mul, place)

    def load(self, source: TensorSource, prefix: str) -> None:
        # fp32, since bf16 logits often tie, and then choose other experts.
        router = self._empty_router(torch.float32, self._place.device)
        self._load_router(source, prefix, router)
        self._router = CpuWeight(router, None)
        gate_up = self._place.empty(2 * self._columns.size, self._spec.hidden_size)
        down = self._place.empty(self._spec.hidden_size, self._columns.size)
        for i, expert in enumerate(self._spec.experts):
            self._read_expert(source, prefix, expert, gate_up, down)
            self._routed.keep(i, gate_up, down)

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor:
        """As Experts; fp32, but in the activations' type where there is neither a shared expert nor an exact sum."""
        assert self._router is not None, "forward before load"
        spec = self._spec
        logits = self._router(x.float())
        logits, shared_gate = logits[:, : spec.num_experts], logits[:, spec.num_experts :]
        kept, experts, live = choose(self._of_best_groups(logits), spec.top_k, padding)
        weights = softmax(kept, kept if spec.norm_topk_prob else logits).mul_(spec.weight_scale)
        y = self._routed(x, experts, weights.to(self._round_to).float())
        if self._shared is None:
            return y
        shared = self._shared(x, padding)
        assert isinstance(shared, torch.Tensor), "on CPU norms sum nothing over ranks"
        if shared_gate.shape[1]:
            shared = shared * softmax(shared_gate, F.pad(shared_gate, (0, 1)))  # the sigmoid
        return y.float().add_(shared).masked_fill_(~live, 0.0)

    def _of_best_groups(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_experts]: of the groups whose best experts have the highest logits; -inf for others."""
        num_groups, top_groups = self._spec.num_groups, self._spec.top_groups
        if top_groups == num_groups:
            return logits
        by_group = logits.reshape(len(logits), num_groups, self._spec.num_experts // num_groups)
        _, groups = top(by_group.amax(2), top_groups)
        closed = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, groups, False)
        return by_group.masked_fill(closed.unsqueeze(2), float("-inf")).flatten(1)


def _silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return act_and_mul(x, "silu", out)
