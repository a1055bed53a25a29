"""A mixture of experts on one rank: some columns of every expert, and the whole router.

Every rank routes for itself: all have equal bits, so they make equal choices. Then it sums its columns of the experts.
The shard plan says which columns these are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.biased_mixture import BiasedMixture
from configs.errors import ConfigError
from configs.layers import Axis, Cut, MixtureOfExperts
from parallel.collectives.interface import PartialSum
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.kernels.cpu_products import TILE, Mixture, mixed_products, pack
from parallel.numerics.mxfp4 import Mxfp4Matrix
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import CpuWeight, Weight
from parallel.plan import Span
from worker.kernels.cpu_pointwise import act_and_mul, clamped_act_and_mul, softmax
from worker.layers.activation import relu2
from worker.layers.expert_tensors import read_biased, read_gate_up_bias, read_stacked
from worker.layers.mlp import MLP
from worker.layers.step import Padding

if TYPE_CHECKING:
    from worker.kernels.grouped_experts import Biases

ExpertsSpec = MixtureOfExperts | BiasedMixture
_CUT = Cut(Axis.EXPERT_COLUMNS, 1)


class Experts(ABC):
    """Routed experts and perhaps a shared one over this rank's columns, summed over the ranks.

    Raises ConfigError if the experts' activation is neither silu nor, without a gate, relu2.
    """

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        if isinstance(spec, MixtureOfExperts) and spec.hidden_act != ("silu" if spec.is_gated else "relu2"):
            raise ConfigError(f"hidden_act={spec.hidden_act} of experts is not supported; only silu is")
        self._spec = spec
        self._experts = spec.experts if isinstance(spec, MixtureOfExperts) else ()
        self._columns = context.shard[Axis.EXPERT_COLUMNS]
        self._round_to = context.dtype if spec.round_weights else torch.float32
        self._shared = None if spec.shared is None else MLP(spec.shared, context)
        self._context = context
        latent_size = spec.latent_size if isinstance(spec, MixtureOfExperts) else None
        self._size = latent_size or spec.hidden_size  # size of what an expert reads and writes
        self._latents: list[Weight] = []
        bias = spec.choice_bias
        self._choice_bias = None if bias is None else torch.empty(bias.shape, device=context.device)

    @staticmethod
    def of(spec: ExpertsSpec, context: LayerContext) -> Experts:
        """The experts for the context's device."""
        return (CudaExperts if context.device.type == "cuda" else CpuExperts)(spec, context)

    @abstractmethod
    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the router and this rank's part of every expert. Names begin with `prefix`."""

    def row_groups(self) -> None:
        """Implements FeedForwardModule. None, because routers read unquantised rows."""
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] -> the same shape, zeros for padding; or a PartialSum that the next norm
        finishes."""

    def _empty_router(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[num_experts, hidden_size], with one more row for the shared expert's gate, if it has one."""
        spec = self._spec
        num_rows = spec.num_experts + (spec.shared_gate is not None)
        return torch.empty(num_rows, spec.hidden_size, dtype=dtype, device=device)

    def _load_router(self, source: TensorSource, prefix: str, router: torch.Tensor) -> None:
        """Reads the router, and if there are any the shared expert and the projections to latents and back."""
        spec = self._spec
        source.read(prefix + spec.router.name, router[: spec.num_experts])
        if spec.shared_gate is not None:
            source.read(prefix + spec.shared_gate.name, router[spec.num_experts :])
        if spec.choice_bias is not None and self._choice_bias is not None:
            source.read(prefix + spec.choice_bias.name, self._choice_bias)
        if self._shared is not None:
            self._shared.load(source, prefix)
        self._latents.clear()
        for latent in spec.latents if isinstance(spec, MixtureOfExperts) else ():
            weight = self._context.empty(*latent.shape)
            source.read(prefix + latent.name, weight)
            self._latents.append(self._context.arithmetic.weight(weight, None))

    def _read_expert(self, source: TensorSource, prefix: str, i: int, gate_up: Tensor, down: Tensor) -> None:
        """Fills gate_up [2 * columns, size] and down [size, columns] for one expert. Without a gate, gate_up is up
        [columns, size]."""
        if isinstance(self._spec, MixtureOfExperts) and self._spec.stacked != "no":
            read_stacked(source, prefix, self._spec, i, self._columns, gate_up, down)
            return
        expert = self._experts[i]
        for linear, out in zip(expert.gate_up, gate_up.chunk(len(expert.gate_up)), strict=True):
            source.read(f"{prefix}{linear.name}.weight", out, rows=self._columns)
        source.read(f"{prefix}{expert.down.name}.weight", down, columns=self._columns)


class CudaExperts(Experts):
    """Experts with Triton kernels. A shared expert's part is added to this rank's part. In exact numerics, its nodes
    are stored after the experts' nodes. In both cases there is one sum over the ranks.

    Raises:
        ConfigError: as for Experts, or if this rank's columns are not a multiple of 32, unless numerics are exact.
    """

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        from worker.kernels.routing import Scoring

        super().__init__(spec, context)
        groups = spec.num_groups, spec.top_groups
        self._scoring = Scoring(spec.sigmoid, self._choice_bias, *groups, spec.scales_input)
        width, unit = self._columns.size, context.arithmetic.choose(fast=32, exact=1)
        if width % unit:
            raise ConfigError(
                f"rank {context.group.rank} has {width} of the {spec.intermediate_size} columns of an expert, but GPUs "
                f"need a multiple of {unit}; choose a smaller tensor_parallel_size"
            )
        self._num_parts = 1 if isinstance(spec, MixtureOfExperts) and not spec.is_gated else 2
        # A shared expert is added to this rank's part, unless experts write latents.
        self._beside = None if isinstance(spec, MixtureOfExperts) and spec.latents else self._shared
        beside = None if self._beside is None or spec.shared is None else spec.shared.down.cut
        leaves = context.arithmetic.leaves(_CUT, context)
        self._leaf, self._nodes = context.arithmetic.choose(fast=(None, ()), exact=(leaves.width, leaves.nodes))
        self.rank_sum = context.arithmetic.rank_sum(self._size, _CUT, context, of_weight=False, beside=beside)
        # The logits are fp32, since bf16 logits often tie, and a tie may choose other experts.
        self._router = self._empty_router(context.dtype, context.device)
        self._w13: torch.Tensor | Fp8Matrix | Mxfp4Matrix | None = None
        self._w2: torch.Tensor | Fp8Matrix | Mxfp4Matrix | None = None
        self._biases: Biases | None = None

    def load(self, source: TensorSource, prefix: str) -> None:
        spec, width = self._spec, self._columns.size
        self._load_router(source, prefix, self._router)
        if isinstance(spec, BiasedMixture):
            self._load_biases(spec, source, prefix)
            if self._load_mxfp4(spec, source, prefix):
                return
        elif self._load_fp8(source, prefix):
            return
        self._w13 = self._context.empty(spec.num_experts, self._num_parts * width, self._size)
        self._w2 = self._context.empty(spec.num_experts, self._size, width)
        if isinstance(spec, BiasedMixture):
            for i, parts in enumerate(read_biased(source, prefix, spec, self._context)):
                for into, part in zip((self._w13[i], self._w2[i]), parts, strict=True):
                    into.copy_(part)
            return
        for i, (gate_up, down) in enumerate(zip(self._w13, self._w2, strict=True)):
            self._read_expert(source, prefix, i, gate_up, down)

    def _load_biases(self, spec: BiasedMixture, source: TensorSource, prefix: str) -> None:
        from worker.kernels.grouped_experts import Biases

        context, columns = self._context, self._columns
        router = torch.empty(spec.num_experts, device=context.device)
        source.read(prefix + spec.router_bias.name, router)
        gate_up, down = read_gate_up_bias(source, prefix, spec, context), context.empty(*spec.down_bias.shape)
        source.read(prefix + spec.down_bias.name, down)
        is_first = columns.start == 0
        self._biases = Biases(router, gate_up, down if is_first else None, spec.limit, spec.alpha)

    def _load_mxfp4(self, spec: BiasedMixture, source: TensorSource, prefix: str) -> bool:
        """Reads the experts if they stay in MXFP4. Returns whether they do."""
        columns, (gate_up, down) = self._columns, (prefix + it.name for it in (spec.gate_up, spec.down))
        is_mxfp4 = source.is_mxfp4(gate_up) and source.is_mxfp4(down)
        if not (self._context.keeps_mxfp4 and is_mxfp4 and columns.size):
            return False
        size, device, both = spec.hidden_size, self._context.device, Span(2 * columns.start, 2 * columns.stop)
        self._w13 = w13 = Mxfp4Matrix.empty(spec.num_experts, both.size, size, device)
        self._w2 = w2 = Mxfp4Matrix.empty(spec.num_experts, size, columns.size, device)
        for i in range(spec.num_experts):
            inputs = Span(*(i * spec.intermediate_size + it for it in columns))
            w13.read(source, gate_up, i, Span(i * size, (i + 1) * size), both)
            w2.read(source, down, i, inputs, Span(0, size))
        return True

    def _load_fp8(self, source: TensorSource, prefix: str) -> bool:
        """Reads the experts if all of them stay in FP8. Returns whether they do."""
        columns, whole, num_parts = self._columns, Span(0, self._size), self._num_parts
        into = [[f"{prefix}{it.name}.weight" for it in expert.gate_up] for expert in self._experts]
        out_of = [f"{prefix}{expert.down.name}.weight" for expert in self._experts]
        into_blocks = self._context.fp8_blocks(source, [name for names in into for name in names])
        out_of_blocks = self._context.fp8_blocks(source, out_of)
        if not into_blocks or not out_of_blocks or not columns.size:
            return False
        size, device = len(out_of), self._context.device
        self._w13 = w13 = Fp8Matrix.empty(into_blocks[:num_parts], [columns] * num_parts, whole, device, size)
        self._w2 = w2 = Fp8Matrix.empty(out_of_blocks[:1], [whole], columns, device, size)
        for i, (names, name) in enumerate(zip(into, out_of, strict=True)):
            w13.read(source, names, [columns] * num_parts, whole, i)
            w2.read(source, [name], [whole], columns, i)
        return True

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor | PartialSum:
        if not self._latents:
            return self.rank_sum.for_norm(len(x), lambda out: self.partial(x, padding, out))
        y = self._latents[1](self.rank_sum(len(x), lambda out: self.partial(x, padding, out)).to(x.dtype))
        return y if self._shared is None else self._shared.add_to(y, x, padding)

    def partial(self, x: torch.Tensor, padding: Padding, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of `rank_sum` [num_tokens, size], or its nodes in fp32 [num_nodes, num_tokens, size]; 0 for
        padding. The size is that of latents, if experts write those. Written to contiguous `out` if it is given."""
        from worker.kernels.moe import activate_shared, mixture

        spec, nodes, slots, first_slot = self._spec, self._nodes, padding.token_slots(), padding.first_slot
        assert self._w13 is not None, "forward before load"
        assert self._w2 is not None, "forward before load"
        is_exact = self._leaf is not None
        if out is None:
            shape = (len(nodes), len(x), self._size) if is_exact else (len(x), self._size)
            out = x.new_empty(shape, dtype=torch.float32 if is_exact else x.dtype)
        logits = mixture(
            x,
            self._router,
            self._w13,
            self._w2,
            top_k=spec.top_k,
            normalise=spec.norm_topk_prob,
            round_to=self._round_to,
            weight_scale=spec.weight_scale,
            scoring=self._scoring,
            biases=self._biases,
            out=out[: len(nodes)] if is_exact else out,
            slots=slots,
            first_slot=first_slot,
            shared=None if is_exact or self._beside is None else self._beside.partial(x),
            latents=self._latents[0](x) if self._latents else None,
            leaf=self._leaf,
            nodes=nodes,
        )
        if is_exact and self._beside is not None and len(out) > len(nodes):

            def act(hidden: torch.Tensor) -> torch.Tensor:
                has_gate = self._num_parts == 2
                return activate_shared(hidden, logits, spec.num_experts, slots, first_slot, has_gate=has_gate)

            self._beside.partial(x, act, out[len(nodes) :])
        return out


class CpuExperts(Experts):
    """Experts with C kernels, as chains that depend only on a token. A shared expert has a separate sum.

    Each leaf of the sum over columns is first summed over ascending experts, so that only whole sums go to other ranks.
    """

    def __init__(self, spec: ExpertsSpec, context: LayerContext) -> None:
        super().__init__(spec, context)
        self._router: CpuWeight | None = None
        self._leaves = context.arithmetic.leaves(_CUT, context)
        self._sum = context.arithmetic.rank_sum(self._size, _CUT, context, of_weight=False)
        self._gate_up: list[CpuWeight] = []
        self._down = context.empty(spec.num_experts, -(-self._size // TILE), self._columns.size, TILE)
        self._down_bias: torch.Tensor | None = None

    def load(self, source: TensorSource, prefix: str) -> None:
        # fp32, since bf16 logits often tie, which would choose other experts.
        router, bias = self._empty_router(torch.float32, self._context.device), None
        self._load_router(source, prefix, router)
        self._gate_up.clear()
        if isinstance(self._spec, BiasedMixture):
            bias = torch.empty(self._spec.router_bias.shape)
            source.read(prefix + self._spec.router_bias.name, bias)
            biases = read_gate_up_bias(source, prefix, self._spec, self._context)
            for i, parts in enumerate(read_biased(source, prefix, self._spec, self._context)):
                self._keep(*parts, biases[i])
            self._down_bias = self._context.empty(*self._spec.down_bias.shape)
            source.read(prefix + self._spec.down_bias.name, self._down_bias)
        else:
            gate_up = self._context.empty((1 + self._spec.is_gated) * self._columns.size, self._size)
            down = self._context.empty(self._size, self._columns.size)
            for i in range(self._spec.num_experts):
                self._read_expert(source, prefix, i, gate_up, down)
                self._keep(gate_up, down)
        self._router = CpuWeight(router, bias)

    def _keep(self, gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None = None) -> None:
        """Packs an expert's gate_up [2 * columns, hidden_size], down [hidden_size, columns], bias [2 * columns]."""
        pack(down, self._down[len(self._gate_up)])
        self._gate_up.append(CpuWeight.of_packed(pack(gate_up), len(gate_up), gate_up_bias))

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor:
        """[num_tokens, hidden_size], in fp32 if the sum is exact, or if a bias or a shared expert is added to it."""
        assert self._router is not None, "forward before load"
        spec = self._spec
        logits = self._router(x.float())
        logits, shared_gate = logits[:, : spec.num_experts], logits[:, spec.num_experts :]
        if spec.sigmoid:
            experts, weights = self._by_sigmoids(logits)
        else:
            kept, experts = top(self._of_best_groups(logits), spec.top_k)
            weights = softmax(kept, kept if spec.norm_topk_prob else logits)
        live = (padding.token_slots() >= padding.first_slot).unsqueeze(1)
        weights = weights.mul_(spec.weight_scale).to(self._round_to).float()
        y = self._routed(self._latents[0](x) if self._latents else x, experts.where(live, spec.num_experts), weights)
        if self._latents:
            y = self._latents[1](y.to(x.dtype))
        if self._down_bias is not None:
            y = y.float()
            # The bias is whole on every rank, so it is added after the sum.
            for expert, weight in zip(experts.where(live, 0).unbind(1), weights.unsqueeze(2).unbind(1), strict=True):
                y += weight * self._down_bias[expert]
            return y.masked_fill_(~live, 0.0)
        if self._shared is None:
            return y
        return self._shared.add_to(y, x, padding, _sigmoid(shared_gate) if shared_gate.shape[1] else None)

    def _routed(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of the routed experts over the ranks, of x's shape, in memory that the caller owns.

        Args:
            experts: [num_tokens, top_k] int64. A value of num_experts means no expert.
            weights: [num_tokens, top_k] fp32.
        """
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        ends = chosen.bincount(minlength=len(self._down) + 1)[:-1].cumsum(0)
        tokens = order // experts.shape[1]
        mixture = Mixture(ends, tokens, weights.flatten()[order])
        hidden = self._hidden(x, mixture)

        def part(out: torch.Tensor | None) -> torch.Tensor:
            if out is None:
                out = self._context.empty(len(x), self._size)
            leaves = self._leaves
            nodes = out.view(len(leaves.nodes), len(x), self._size)
            mixed_products(hidden, self._down, leaves.width, leaves.nodes, mixture, nodes)
            return out

        return self._sum(len(x), part)

    def _hidden(self, x: torch.Tensor, mixture: Mixture) -> torch.Tensor:
        """The activations of all pairs [num_pairs, columns], expert after expert."""
        ends, columns = mixture.ends.tolist(), self._columns.size
        hidden, begin = x.new_empty(ends[-1], columns), 0
        for expert, end in enumerate(ends):
            if begin < end:
                gate_up = self._gate_up[expert](x.index_select(0, mixture.rows[begin:end]))
                if self._spec.scales_input:
                    # For w times the input, the activation is silu(w * gate) * w * up. The sum applies the other w.
                    gate_up[:, :columns] *= mixture.factors[begin:end, None]
                self._act(gate_up, hidden[begin:end])
                begin = end
        return hidden

    def _act(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        if isinstance(self._spec, BiasedMixture):
            clamped_act_and_mul(gate_up, self._spec.limit, self._spec.alpha, out)
        elif not self._spec.is_gated:
            out.copy_(relu2(gate_up))
        else:
            act_and_mul(gate_up, "silu", out)

    def _by_sigmoids(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights [num_tokens, top_k] of routers without a softmax."""
        scores = _sigmoid(logits)
        choice = logits if self._choice_bias is None else scores + self._choice_bias
        _, experts = top(self._of_best_groups(choice), self._spec.top_k)
        weights = scores.gather(1, experts)
        if self._spec.norm_topk_prob:
            # Added one after the other, because torch's order of summing a row depends on the number of rows.
            first, *others = weights.unbind(1)
            weights = weights / (sum(others, first) + self._spec.sum_epsilon).unsqueeze(1)
        return experts, weights

    def _of_best_groups(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_experts]: logits of the groups chosen by MixtureOfExperts.top_groups; -inf elsewhere."""
        num_groups, top_groups = self._spec.num_groups, self._spec.top_groups
        if top_groups == num_groups:
            return logits
        by_group = logits.reshape(len(logits), num_groups, self._spec.num_experts // num_groups)
        best = by_group.amax(2) if self._choice_bias is None else by_group.topk(2).values.sum(2)
        _, groups = top(best, top_groups)
        closed = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, groups, False)
        return by_group.masked_fill(closed.unsqueeze(2), float("-inf")).flatten(1)


def top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest of each row and their columns. Ties go to the first, as in the kernels."""
    values, columns = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :k], columns[:, :k]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of each element of a matrix. The bits of an element depend only on that element."""
    elements = x.reshape(-1, 1)
    return softmax(elements, F.pad(elements, (0, 1))).view(x.shape)
