"""A mixture of experts as one rank has it: some columns of every expert, and the whole router.

Every rank routes for itself, from equal bits to equal choices, and sums its experts' columns; those of a shared expert
are added before the one all-reduce. Which columns a rank has is decided elsewhere: spans come from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F

from configs.errors import ConfigError
from configs.layers import Axis, Cut, MixtureOfExperts
from parallel.arithmetic import LayerPlace
from parallel.fused_sum import PartialSum
from parallel.weight import TensorSource
from worker.layers.mlp import MLP
from worker.layers.step import Padding

_COLUMN_UNIT = 32
"""Columns of a rank that the CUDA kernels take are a multiple of this."""


class Experts:
    """Routed experts and perhaps a shared one over this rank's columns, then all-reduce, perhaps by the next norm.

    Raises:
        ConfigError: the experts' activation is not silu; or, on CUDA, this rank's columns are no multiple of 32, or the
            experts are chosen from the best groups.
    """

    def __init__(self, spec: MixtureOfExperts, place: LayerPlace) -> None:
        if spec.hidden_act != "silu":
            raise ConfigError(f"hidden_act={spec.hidden_act} of a mixture of experts is not silu")
        self._spec = spec
        self._columns = place.shard[Axis.EXPERT_COLUMNS]
        self._round_to = place.dtype if spec.round_weights else torch.float32
        self._sum = place.arithmetic.rank_sum(spec.hidden_size, Cut(Axis.EXPERT_COLUMNS, 1), place)
        self._on_cuda = place.device.type == "cuda"
        width = self._columns.size
        if self._on_cuda and width % _COLUMN_UNIT:
            raise ConfigError(
                f"{spec.intermediate_size} columns of an expert leave rank {place.group.rank} {width}, and GPUs take "
                f"multiples of {_COLUMN_UNIT}; choose a smaller tensor_parallel_size"
            )
        if self._on_cuda and spec.top_groups < spec.num_groups:
            raise ConfigError(
                f"experts of the best {spec.top_groups} of {spec.num_groups} groups are not chosen on GPUs yet; set "
                "device=cpu"
            )
        # With the shared expert's gate, if it has one, as its last row. fp32 from the product on, since bf16 logits
        # often tie, and then choose other experts; on CPU the product itself.
        self._router = torch.empty(
            spec.num_experts + (spec.shared_gate is not None),
            spec.hidden_size,
            dtype=place.dtype if self._on_cuda else torch.float32,
            device=place.device,
        )
        self._w13 = place.empty(spec.num_experts, 2 * width, spec.hidden_size)
        self._w2 = place.empty(spec.num_experts, spec.hidden_size, width)
        self._shared = None if spec.shared is None else MLP(spec.shared, place)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the router and this rank's part of every expert; names begin with `prefix`."""
        spec, columns = self._spec, self._columns
        source.read(prefix + spec.router.name, self._router[: spec.num_experts])
        w13 = self._w13.view(spec.num_experts, 2, columns.size, spec.hidden_size)
        for expert, gate_up, down in zip(spec.experts, w13, self._w2, strict=True):
            for linear, out in zip(expert.gate_up, gate_up, strict=True):
                source.read(f"{prefix}{linear.name}.weight", out, rows=columns)
            source.read(f"{prefix}{expert.down.name}.weight", down, columns=columns)
        if spec.shared_gate is not None:
            source.read(prefix + spec.shared_gate.name, self._router[spec.num_experts :])
        if self._shared is not None:
            self._shared.load(source, prefix)

    def __call__(self, x: torch.Tensor, padding: Padding) -> torch.Tensor | PartialSum:
        """[num_tokens, hidden_size] -> the same, 0 for padding, or what the next norm is to sum."""
        return self._sum.for_norm(len(x), lambda out: self.partial(x, padding, out))

    def partial(self, x: torch.Tensor, padding: Padding, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of the sum [num_tokens, hidden_size], 0 for padding; contiguous `out` if one is given."""
        return self._mixture(
            x,
            self._router,
            self._w13,
            self._w2,
            top_k=self._spec.top_k,
            normalise=self._spec.norm_topk_prob,
            round_to=self._round_to,
            weight_scale=self._spec.weight_scale,
            out=torch.empty_like(x) if out is None else out,
            slots=padding.token_slots(),
            first_slot=padding.first_slot,
            shared=None if self._shared is None else self._shared.partial(x),
        )

    @cached_property
    def _mixture(self) -> Callable[..., torch.Tensor]:
        if self._on_cuda:
            from worker.kernels import moe  # a CPU install has no Triton

            return moe.mixture
        return functools.partial(mixture, num_groups=self._spec.num_groups, top_groups=self._spec.top_groups)


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    top_k: int,
    normalise: bool,
    round_to: torch.dtype,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
    first_slot: int = 0,
    weight_scale: float = 1.0,
    shared: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
) -> torch.Tensor:
    """`worker.kernels.moe.mixture` by torch, with an fp32 router; reads only the experts that a token chose.

    Args:
        num_groups: equal groups of neighbouring experts.
        top_groups: a token goes to experts of so many groups only, those whose best experts have the highest logits.
    """
    num_experts, _, num_columns = w2.shape
    logits = F.linear(x.float(), router)
    logits, shared_gate = logits[:, :num_experts], logits[:, num_experts:]
    open_to = logits
    if top_groups < num_groups:
        _, groups = _top(logits.view(len(x), num_groups, num_experts // num_groups).amax(2), top_groups)
        closed = torch.ones(len(x), num_groups, dtype=torch.bool, device=x.device).scatter_(1, groups, False)
        open_to = logits.masked_fill(closed.repeat_interleave(num_experts // num_groups, dim=1), float("-inf"))
    kept, experts = _top(open_to, top_k)
    normaliser = (kept if normalise else logits).logsumexp(1, keepdim=True)
    weights = (kept - normaliser).exp().mul_(weight_scale).to(round_to).float()
    live = None if slots is None else (slots >= first_slot).unsqueeze(1)
    if live is not None:
        experts = experts.where(live, -1)

    def run(expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w13[expert]).chunk(2, dim=1)
        return F.linear(F.silu(gate).mul_(up), w2[expert])

    total = sum_of_experts(x, experts if num_columns > 0 else experts.new_full((1, 1), -1), weights, run)
    if shared is not None:
        total += shared_gate.sigmoid() * shared if shared_gate.shape[1] else shared
        if live is not None:
            total.masked_fill_(~live, 0.0)
    return out.copy_(total)


def sum_of_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, run: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """[num_tokens, hidden_size] fp32: for each token the sum over its experts of weight * what the expert makes of it.

    Args:
        experts: [num_tokens, top_k] int64; -1 is none.
        weights: [num_tokens, top_k] fp32.
        run: gets an expert and the rows of x that chose it, and returns as many.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    chosen_experts = experts.flatten()
    for expert in sorted(set(chosen_experts.tolist()) - {-1}):
        chosen = (chosen_experts == expert).nonzero().squeeze(1)
        tokens = chosen // experts.shape[1]
        y = run(expert, x[tokens]).float()
        total.index_add_(0, tokens, y.mul_(weights.flatten()[chosen].unsqueeze(1)))
    return total


def _top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest of each row and their columns; of equal ones the first, as the kernels choose."""
    values, columns = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :k], columns[:, :k]
