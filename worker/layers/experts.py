"""A mixture of experts as one rank has it: some columns of every expert, and the whole router.

Every rank routes for itself, from equal bits to equal choices, and sums its experts' columns; those of a shared expert
are added before the one all-reduce. Which columns a rank has is decided elsewhere: spans come from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from configs.errors import ConfigError
from parallel.fused_sum import PartialSum
from parallel.group import TensorParallelGroup
from parallel.linear import Matmul, MergedColumnParallelLinear, TensorSource
from parallel.plan import Span
from worker.layers.activation import ActAndMul

_ACTIVATION = "silu"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What a family calls a layer's tensors, below the layer's prefix; each is followed by `.weight`."""

    gate: str
    up: str
    down: str
    router: str = "gate"
    experts: str = "experts"
    """Followed by the expert's number and `gate`, `up` or `down`."""
    shared: str = "shared_expert"
    """Followed by `gate_proj`, `up_proj` or `down_proj`."""
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, slots=True)
class Padding:
    """Which tokens of a step are a graph's padding: those whose keys and values go to a slot before the first."""

    slots: torch.Tensor
    """[num_tokens] int64: the tokens' slots in the KV pool."""
    first_slot: int


class Experts:
    """Routed experts and perhaps a shared one over this rank's columns, then all-reduce.

    y[t] = sum over the top k experts e of weight[t, e] * down_e(silu(gate_e(x[t])) * up_e(x[t]))
           + sigmoid(x[t] @ shared_gate) * shared(x[t])

    The weights are the softmax of all experts' logits, of the top k divided by their sum with `norm_topk_prob`.

    Args:
        columns: this rank's columns of every expert; none or a multiple of 32.
        shared_columns: this rank's columns of the shared expert; None where the model has none.
        round_weights: round the weights to `dtype`, as Qwen's models do and Mixtral does not.

    Raises:
        ConfigError: the experts' activation is not silu.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        columns: Span,
        *,
        norm_topk_prob: bool,
        round_weights: bool,
        shared_columns: Span | None,
        hidden_act: str,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if hidden_act != _ACTIVATION:
            raise ConfigError(f"hidden_act={hidden_act} of a mixture of experts is not {_ACTIVATION}")
        self._hidden_size = hidden_size
        self._top_k = top_k
        self._columns = columns
        self._norm_topk_prob = norm_topk_prob
        self._round_to = dtype if round_weights else torch.float32
        self._group = group
        self._dtype = dtype
        self._on_cuda = device.type == "cuda"
        self._asks_for_buffer = self._on_cuda and group.size > 1
        # With the shared expert's gate as its last row. fp32 from the product on, since bf16 logits often tie, and then
        # choose other experts; on CPU the product itself.
        self._router = torch.empty(
            num_experts + (shared_columns is not None),
            hidden_size,
            dtype=dtype if self._on_cuda else torch.float32,
            device=device,
        )
        self._w13 = torch.empty(num_experts, 2 * columns.size, hidden_size, dtype=dtype, device=device)
        self._w2 = torch.empty(num_experts, hidden_size, columns.size, dtype=dtype, device=device)
        self._shared: _SharedExpert | None = None
        if shared_columns is not None and shared_columns.size > 0:
            self._shared = _SharedExpert(hidden_size, shared_columns, dtype=dtype, device=device)

    def load(self, source: TensorSource, prefix: str, names: ExpertNames) -> None:
        """Reads the router and this rank's columns of every expert below `prefix`."""
        num_experts, width = len(self._w2), self._columns.size
        source.read(f"{prefix}.{names.router}.weight", self._router[:num_experts])
        if len(self._router) > num_experts:
            source.read(f"{prefix}.{names.shared_gate}.weight", self._router[num_experts:])
        for i, (gate_up, down) in enumerate(zip(self._w13, self._w2, strict=True)):
            expert = f"{prefix}.{names.experts}.{i}"
            source.read(f"{expert}.{names.gate}.weight", gate_up[:width], rows=self._columns)
            source.read(f"{expert}.{names.up}.weight", gate_up[width:], rows=self._columns)
            source.read(f"{expert}.{names.down}.weight", down, columns=self._columns)
        if self._shared is not None:
            self._shared.load(source, f"{prefix}.{names.shared}")

    def __call__(self, x: torch.Tensor, padding: Padding | None = None) -> torch.Tensor:
        """The sum [num_tokens, hidden_size] of all ranks, 0 for padding.

        On CUDA perhaps in the group's reduce_buffer, so valid until the group's next reduction.
        """
        out = self._group.reduce_buffer((len(x), self._hidden_size), self._dtype) if self._asks_for_buffer else None
        y = self.partial(x, padding, torch.empty_like(x) if out is None else out)
        return self._group.all_reduce(y) if self._group.size > 1 else y

    def for_norm(self, x: torch.Tensor, padding: Padding | None = None) -> torch.Tensor | PartialSum:
        """What `RMSNorm.add` takes: the sum, as a call returns it, or its summand where norm and sum are one kernel."""
        if self._asks_for_buffer:
            partial_sum = self._group.partial_sum((len(x), self._hidden_size), self._dtype)
            if partial_sum is not None:
                self.partial(x, padding, partial_sum.summand)
                return partial_sum
        return self(x, padding)

    def partial(self, x: torch.Tensor, padding: Padding | None, out: torch.Tensor) -> torch.Tensor:
        """`out` [num_tokens, hidden_size], contiguous, filled with this rank's part of the sum; 0 for padding."""
        return self._mixture(
            x,
            self._router,
            self._w13,
            self._w2,
            top_k=self._top_k,
            normalise=self._norm_topk_prob,
            round_to=self._round_to,
            out=out,
            slots=None if padding is None else padding.slots,
            first_slot=0 if padding is None else padding.first_slot,
            shared=None if self._shared is None else self._shared(x),
        )

    @cached_property
    def _mixture(self) -> Callable[..., torch.Tensor]:
        if self._on_cuda:
            from worker.kernels import moe  # a CPU install has no Triton

            return moe.mixture
        return mixture


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
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """`worker.kernels.moe.mixture` by torch, with an fp32 router; reads only the experts that a token chose."""
    num_experts, _, num_columns = w2.shape
    logits = F.linear(x.float(), router)
    # Of equal logits the first expert, as the kernels choose.
    kept, experts = (it[:, :top_k] for it in logits[:, :num_experts].sort(dim=1, descending=True, stable=True))
    normaliser = (kept if normalise else logits[:, :num_experts]).logsumexp(1, keepdim=True)
    weights = (kept - normaliser).exp().to(round_to).float()
    live = None if slots is None else (slots >= first_slot).unsqueeze(1)
    if live is not None:
        experts = experts.where(live, -1)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    chosen_experts = experts.flatten()
    hit = set(chosen_experts.tolist()) - {-1} if num_columns > 0 else set()
    for expert in sorted(hit):
        chosen = (chosen_experts == expert).nonzero().squeeze(1)
        tokens = chosen // top_k
        gate, up = F.linear(x[tokens], w13[expert]).chunk(2, dim=1)
        y = F.linear(F.silu(gate).mul_(up), w2[expert]).float()
        total.index_add_(0, tokens, y.mul_(weights.flatten()[chosen].unsqueeze(1)))
    if shared is not None:
        total += logits[:, num_experts:].sigmoid() * shared
        if live is not None:
            total.masked_fill_(~live, 0.0)
    return out.copy_(total)


class _SharedExpert:
    """down(silu(gate(x)) * up(x)) over this rank's columns, not reduced."""

    def __init__(self, hidden_size: int, columns: Span, *, dtype: torch.dtype, device: torch.device) -> None:
        self._columns = columns
        self._act_and_mul = ActAndMul(_ACTIVATION)
        self._gate_up = MergedColumnParallelLinear(
            hidden_size, (columns, columns), bias=False, dtype=dtype, device=device
        )
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._down: Matmul | None = None

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the columns of gate_proj, up_proj and down_proj."""
        self._gate_up.load(source, (f"{prefix}.gate_proj", f"{prefix}.up_proj"))
        down = torch.empty(self._hidden_size, self._columns.size, dtype=self._dtype, device=self._device)
        source.read(f"{prefix}.down_proj.weight", down, columns=self._columns)
        self._down = Matmul(down, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._down is not None, "forward before load"
        return self._down(self._act_and_mul(self._gate_up(x)))
