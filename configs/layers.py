"""A layer's specification: a mixer and a feed-forward. Each lists its tensors, their cuts, and its state per token.

This module is plain data. All code that needs a model's tensors or state computes it from these specs: the checkpoint
check and readers, dummy weights, the shard plan, the size of the KV pool, the cost of a step. docs/extend.md says how
to add a layer kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, Protocol

from configs.attention import Feature
from configs.rope import RopeConfig

_FEWEST_LEAVES = 8  # leaves of exact sums over heads, if heads allow it: up to 8 ranks can share them


class Axis(StrEnum):
    """An axis whose indices are divided among the ranks. The value is the axis's name in messages."""

    QUERY_HEADS = "query heads"
    KV_HEADS = "KV heads"
    LATENT = "latent"
    """The latent vector that all heads of latent attention share. It has one index, and every rank holds it."""
    CHANNELS = "channels"
    """Channels of a short convolution."""
    MAMBA_HEADS = "Mamba heads"
    MAMBA_GROUPS = "Mamba groups"
    """Groups of Mamba heads that share B and C."""
    MLP_COLUMNS = "MLP columns"
    EXPERT_COLUMNS = "expert columns"
    """Columns of each routed expert. A rank holds the same columns of every expert."""
    SHARED_EXPERT_COLUMNS = "shared expert columns"
    VOCABULARY = "vocabulary rows"


class Role(StrEnum):
    """What a tensor is used for. Its dtype in memory and its random values (`load_format: dummy`) depend on it."""

    MATRIX = auto()
    EMBEDDING = auto()
    """The embedding or the LM head. A model may use one tensor for both."""
    QUERY_KEY = auto()
    """Rows of heads to which the rotary embedding applies."""
    ATTENTION_OUTPUT = auto()
    BIAS = auto()
    DECAY = auto()
    """Logarithms of the rates at which a recurrent layer's states decay."""
    NORM = auto()
    QUERY_KEY_NORM = auto()


GROUPS_OF = {Axis.QUERY_HEADS: Axis.KV_HEADS, Axis.MAMBA_HEADS: Axis.MAMBA_GROUPS}
"""For each axis of heads, the axis of their groups."""
FINEST_EXPERT_GRANULE = 32
"""Column granule of the grouped expert products. 768 columns over 5 ranks become 160 or 128 each, instead of 256 or
128."""

Amounts = Mapping[Axis | None, int]
"""Amounts per index of an axis. The key None has the amount that every rank holds whole."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut along dimension `dim`: each index of `axis` has `width` consecutive entries."""

    axis: Axis
    dim: int
    """The dimension that is cut. For a matrix, 0 means rows (outputs) and 1 means columns (inputs)."""
    width: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint. Its name is relative to its layer, or absolute if it belongs to no layer."""

    name: str
    """Name in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, outermost dimension first."""
    role: Role
    cut: Cut | None = None
    """If None, every rank holds the whole tensor."""
    share: Fraction = Fraction(1)
    """Fraction of all tokens that are multiplied by this tensor: k / E for an expert's tensor if each token takes k of
    E experts."""
    offset: float = 0.0
    """Added to the checkpoint's values in fp32. It is 1 for Gemma's norm weights."""
    may_be_mxfp4: bool = False
    """Whether the tensor stays in MXFP4 in memory if the checkpoint has it in MXFP4."""

    @property
    def may_be_fp8(self) -> bool:
        """Whether the tensor is a matrix that stays in FP8 in memory if the checkpoint has it in FP8. Routers, tensors
        without a cut, and matrices with inputs first do not."""
        is_product = self.role in (Role.MATRIX, Role.QUERY_KEY, Role.ATTENTION_OUTPUT)
        return is_product and self.cut is not None and len(self.shape) == 2

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def elements_per_index(self) -> int:
        """Number of elements per index of the cut's axis. Without a cut, all elements."""
        return self.elements if self.cut is None else self.elements // self.shape[self.cut.dim] * self.cut.width


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear weight [out_features, in_features] with an optional bias. Names omit `.weight` and `.bias`."""

    name: str
    out_features: int
    in_features: int
    cut: Cut
    bias: bool = False
    role: Role = Role.MATRIX
    first_row: int = 0
    """First row of this linear in the checkpoint's tensor. Above 0 only if one tensor holds several linears, such as
    q, k and v."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The weight, and the bias if there is one."""
        shape = (self.out_features, self.in_features)
        weight = TensorSpec(f"{self.name}.weight", shape, self.role, self.cut)
        if not self.bias:
            return (weight,)
        # If columns are cut, the bias is added once, after the all-reduce.
        cut = None if self.cut.dim == 1 else self.cut
        return weight, TensorSpec(f"{self.name}.bias", shape[:1], Role.BIAS, cut)


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Heads that are divided in groups. If there are more ranks than groups, several ranks share the head that a group
    has on axis `groups`."""

    heads: Axis
    num_heads: int
    groups: Axis
    num_groups: int
    """Number of groups. It divides num_heads."""

    @property
    def leaf_heads(self) -> int:
        """Query heads per leaf of the exact sum over heads: the largest divisor of a group with at least 8 leaves, else
        1."""
        group = self.num_heads // self.num_groups
        fitting = [n for n in range(1, group + 1) if group % n == 0 and self.num_heads // n >= _FEWEST_LEAVES]
        return max(fitting, default=1)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that are divided in granules. Each granule goes to the rank with the fewest columns."""

    axis: Axis
    size: int
    finest_granule: int = 128
    """The smallest granule that may be used to divide the columns evenly. A dense MLP has enough columns for 128, which
    is the width of an FP8 scale block and of a tensor-core tile. Narrow experts go down to 32."""
    may_be_empty: bool = False
    """Whether a rank may have no columns. This is used if even the finest granule cannot give every rank some."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Memory that a recurrent layer has for each request, however long the request is."""

    parts: tuple[tuple[Axis, int], ...]
    """The parts of an entry, one after the other: an axis, and the number of elements of each of its indices."""
    num_tokens: int = 1
    """Number of tokens of an entry. All parts of one token come before those of the next."""
    num_recent: int = 0
    """If above 0, the tensor has an entry for each of a running request's last `num_recent` tokens. If 0, it has one
    entry: the state after the last multiple of `configs.recurrent.STATE_CHUNK` tokens, as in the prefix cache."""
    is_fp32: bool = False
    """Whether elements are fp32. If false, they have the activations' dtype."""

    @property
    def elements(self) -> Amounts:
        """Number of elements of one entry."""
        amounts: dict[Axis | None, int] = {}
        for axis, each in self.parts:
            amounts[axis] = amounts.get(axis, 0) + each * self.num_tokens
        return amounts


class FeedForward(Protocol):
    """The part of a layer that computes on each token by itself."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors of this part."""

    @property
    def axes(self) -> tuple[HeadGroups | Columns, ...]:
        """The axes that are divided among the ranks, in this order."""


class Mixer(FeedForward, Protocol):
    """The part of a layer in which tokens of a sequence read each other. Besides its tensors, it has state: per token
    (attention), or per request (recurrent layers)."""

    @property
    def token_elements(self) -> Amounts:
        """Number of elements per token in the layer's KV pool."""

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Memory per request. Empty for attention, which has memory per token."""

    @property
    def pair_flops(self) -> Amounts:
        """Floating-point operations for one query and one key."""

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding."""

    @property
    def rotary_dim(self) -> int:
        """Number of elements of a head that the rotary embedding rotates."""

    @property
    def window(self) -> int | None:
        """Number of tokens that a query sees, including itself. If None, it sees all tokens before it."""

    @property
    def chunk(self) -> int | None:
        """Number of positions of a local-attention chunk. A query sees only its own chunk, up to itself. If None, it
        sees all tokens before it."""

    @property
    def head_dim(self) -> int:
        """Number of elements of a query or key head."""

    @property
    def features(self) -> frozenset[Feature]:
        """Features that an attention backend needs for this layer."""

    @property
    def kv_scales(self) -> tuple[tuple[str, ...], ...]:
        """Names of the FP8 KV scale factors in a checkpoint. One tuple for each tensor that the pool stores per token,
        with the most usual name first. The factors are scalars and not part of `tensors`."""


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Attention in which equal groups of query heads share a key head and a value head."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    input_size: int | None = None
    """Input features of the query, key and value projections. If None, `hidden_size`."""
    qkv_bias: bool = False
    o_bias: bool = False
    fused_qkv: bool = False
    """Whether the checkpoint stores the three projections as one tensor."""
    is_gated: bool = False
    """Whether the output is multiplied by the sigmoid of one more projection. The checkpoint stores its rows with those
    of the queries, head by head."""
    name: str = "self_attn"
    o_name: str = "o_proj"
    """Name of the output projection."""
    qk_norm: bool = False
    """RMSNorm on each query and key head, before the rotary embedding (Qwen3)."""
    head_norm_name: str = "norm"
    """Name of the query norm and the key norm, after the letter q or k and an underscore."""
    norms_have_weights: bool = True
    """If false, the norms' weights are ones. Llama 4 applies such norms after the rotary embedding, which gives the
    same result."""
    norm_offset: float = 0.0
    """`TensorSpec.offset` of the weights of the query and key norms."""
    scale: float | None = None
    """Factor of the attention scores. If None, 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """If set, scores become softcap * tanh(scores / softcap)."""
    has_sinks: bool = False
    """Each query head has one more score, without a value, that takes part in the softmax (gpt-oss)."""
    window: int | None = None
    """A query sees itself and `window - 1` tokens before it. If None, it sees all tokens before it."""
    chunk: int | None = None
    """Positions are divided in chunks of this many, and a query sees only its own chunk, up to itself. If None, it sees
    all tokens before it."""

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return ()

    @property
    def qkv(self) -> tuple[Linear, Linear, Linear]:
        """The query, key and value projections, in this order."""
        num_q, num_kv = self.num_attention_heads, self.num_key_value_heads
        return (
            self._projection("q", Axis.QUERY_HEADS, num_q, Role.QUERY_KEY, 0),
            self._projection("k", Axis.KV_HEADS, num_kv, Role.QUERY_KEY, num_q),
            self._projection("v", Axis.KV_HEADS, num_kv, Role.MATRIX, num_q + num_kv),
        )

    @property
    def gate(self) -> Linear | None:
        """The gate's projection. The sigmoid of its result multiplies the output. None if there is no gate."""
        num_q = self.num_attention_heads
        return self._projection("q", Axis.QUERY_HEADS, num_q, Role.MATRIX, num_q) if self.is_gated else None

    @property
    def o(self) -> Linear:
        """The output projection."""
        columns, cut = self.num_attention_heads * self.head_dim, Cut(Axis.QUERY_HEADS, 1, self.head_dim)
        return Linear(f"{self.name}.{self.o_name}", self.hidden_size, columns, cut, self.o_bias, Role.ATTENTION_OUTPUT)

    @property
    def head_norms(self) -> tuple[TensorSpec, ...]:
        """Weights of the query and key norms. Empty if there are none."""
        has_weights = self.qk_norm and self.norms_have_weights
        names = (f"{self.name}.{letter}_{self.head_norm_name}.weight" for letter in "qk" if has_weights)
        return tuple(TensorSpec(name, (self.head_dim,), Role.QUERY_KEY_NORM, offset=self.norm_offset) for name in names)

    @property
    def sinks(self) -> TensorSpec | None:
        """The sinks [num_attention_heads], or None if the layer has none."""
        shape, cut = (self.num_attention_heads,), Cut(Axis.QUERY_HEADS, 0)
        return TensorSpec(f"{self.name}.sinks", shape, Role.BIAS, cut) if self.has_sinks else None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        sinks = () if self.sinks is None else (self.sinks,)
        gate = () if self.gate is None else (self.gate,)
        return tensors_of(*self.qkv, *gate, self.o) + self.head_norms + sinks

    @property
    def axes(self) -> tuple[HeadGroups, ...]:
        return (HeadGroups(Axis.QUERY_HEADS, self.num_attention_heads, Axis.KV_HEADS, self.num_key_value_heads),)

    @property
    def token_elements(self) -> Amounts:
        return {Axis.KV_HEADS: 2 * self.head_dim}  # one key and one value

    @property
    def pair_flops(self) -> Amounts:
        return {Axis.QUERY_HEADS: 4 * self.head_dim}  # one multiply-add per element of the key and of the value

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.partial)

    @property
    def features(self) -> frozenset[Feature]:
        needed = {
            Feature.WINDOW: self.window is not None,
            Feature.CHUNK: self.chunk is not None,
            Feature.SOFTCAP: self.softcap is not None,
            Feature.SINKS: self.has_sinks,
        }
        return frozenset(feature for feature, is_needed in needed.items() if is_needed)

    @property
    def kv_scales(self) -> tuple[tuple[str, ...], ...]:
        return tuple((f"{self.name}.{it}_scale", f"{self.name}.{it}_proj.{it}_scale") for it in "kv")

    def _projection(self, letter: str, axis: Axis, num_heads: int, role: Role, first_head: int) -> Linear:
        is_stacked = self.fused_qkv or (self.is_gated and letter == "q")
        letters, first_row = "qkv" if self.fused_qkv else letter, first_head * self.head_dim * is_stacked
        shape = num_heads * self.head_dim, self.input_size or self.hidden_size
        cut = Cut(axis, 0, self.head_dim)
        return Linear(f"{self.name}.{letters}_proj", *shape, cut, self.qkv_bias, role, first_row)


@dataclass(frozen=True, kw_only=True)
class DenseMLP:
    """An MLP, down(act(gate(x)) * up(x)) or down(act(up(x))): a layer's feed-forward, or one expert."""

    hidden_size: int
    intermediate_size: int
    hidden_act: str = "silu"
    is_gated: bool = True
    """Whether there is a gate. Without one, the activation is relu2, the square of the positive part (Nemotron-H)."""
    factors: tuple[float, float] | None = None
    """Factors of gate(x) and up(x). None stands for ones."""
    bias: bool = False
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down after `name`. Gate and up have one name if the checkpoint stores them as one
    tensor."""
    axis: Axis = Axis.MLP_COLUMNS
    finest_granule: int = 128
    """The smallest granule of the columns, see Columns."""

    @property
    def gate_up(self) -> tuple[Linear, ...]:
        """The gate, if there is one, and up projections, in this order."""
        gate, up, _ = self.projections
        shape = self.intermediate_size, self.hidden_size, Cut(self.axis, 0)
        gates = (Linear(f"{self.name}.{gate}", *shape, self.bias),) if self.is_gated else ()
        first_row = self.intermediate_size * (self.is_gated and gate == up)
        return (*gates, Linear(f"{self.name}.{up}", *shape, self.bias, first_row=first_row))

    @property
    def down(self) -> Linear:
        """The down projection."""
        name = f"{self.name}.{self.projections[2]}"
        return Linear(name, self.hidden_size, self.intermediate_size, Cut(self.axis, 1), self.bias)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tensors_of(*self.gate_up, self.down)

    @property
    def axes(self) -> tuple[Columns]:
        return (Columns(self.axis, self.intermediate_size, self.finest_granule),)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """MLPs (experts) to which a router sends each token, with an optional shared expert for all tokens.

    y = sum over the top k experts e of weight[e] * expert_e(x) + sigmoid(x @ shared_gate) * shared(x)

    The weights are the softmax of all experts' logits, or their sigmoids. Without a shared gate, the shared expert's
    output is added unscaled.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    """Columns of one expert."""
    norm_topk_prob: bool
    """Whether a token's weights are divided by their sum."""
    round_weights: bool = True
    """Whether the weights are rounded to the activations' dtype. Qwen's models do this, Mixtral does not."""
    weight_scale: float = 1.0
    """Factor of the weights, applied before rounding."""
    sigmoid: bool = False
    has_choice_bias: bool = False
    """Whether a bias is added to the sigmoids when experts are chosen. The weights are sigmoids without the bias."""
    choice_bias_name: str = "gate.e_score_correction_bias"
    sum_epsilon: float = 1e-20
    """Added to the sum of a token's sigmoids before they are divided by it. GPUs add 1e-20 to any sum."""
    scales_input: bool = False
    """Whether a weight multiplies the expert's input instead of its output (Llama 4)."""
    num_groups: int = 1
    """Number of equal groups of neighbouring experts."""
    top_groups: int = 1
    """Number of groups that a token may take experts from: those with the best expert, or with the best sum of two
    experts if there is a choice bias."""
    shared_intermediate_size: int | None = None
    """Columns of the shared expert. If None, there is no shared expert."""
    shared_name: str = "mlp.shared_expert"
    shared_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_shared_gate: bool = True
    hidden_act: str = "silu"
    is_gated: bool = True
    """Whether routed experts and the shared one have a gate, as DenseMLP has."""
    latent_size: int | None = None
    """Size of what routed experts read and write. A projection before them and one after them convert it. If None, it
    is hidden_size, without projections."""
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down."""
    router_name: str = "gate"
    stacked: Literal["no", "inputs first", "outputs first"] = "no"
    """Whether the checkpoint stores all experts in two tensors: one for gate and up together, one for down. Experts are
    their first dimension, then come inputs and outputs (Llama 4), or outputs and inputs (Granite)."""

    @property
    def router(self) -> TensorSpec:
        """The router [num_experts, hidden_size]. Every rank holds all of it."""
        name, shape = f"{self.name}.{self.router_name}.weight", (self.num_experts, self.hidden_size)
        return TensorSpec(name, shape, Role.MATRIX)

    @property
    def choice_bias(self) -> TensorSpec | None:
        """The choice bias [num_experts], used in fp32, or None if there is none."""
        name = f"{self.name}.{self.choice_bias_name}"
        return TensorSpec(name, (self.num_experts,), Role.BIAS) if self.has_choice_bias else None

    @property
    def latents(self) -> tuple[TensorSpec, ...]:
        """The projections before and after the routed experts, whole on every rank. Empty if there are none."""
        if self.latent_size is None:
            return ()
        shape = self.latent_size, self.hidden_size
        sizes = ("fc1", shape), ("fc2", shape[::-1])
        return tuple(TensorSpec(f"{self.name}.{it}_latent_proj.weight", size, Role.MATRIX) for it, size in sizes)

    @property
    def experts(self) -> tuple[DenseMLP, ...]:
        """The routed experts."""
        return tuple(
            DenseMLP(
                hidden_size=self.latent_size or self.hidden_size,
                intermediate_size=self.intermediate_size,
                hidden_act=self.hidden_act,
                is_gated=self.is_gated,
                name=f"{self.name}.experts.{i}",
                projections=self.projections,
                axis=Axis.EXPERT_COLUMNS,
            )
            for i in range(self.num_experts)
        )

    @property
    def stacks(self) -> tuple[TensorSpec, TensorSpec]:
        """The two tensors of all experts if they are `stacked`.

        Returns:
            Gate and up: [num_experts, hidden_size, 2 * intermediate_size].
            Down: [num_experts, intermediate_size, hidden_size].
            With outputs first, the last two dimensions are exchanged.
        """
        num, size, columns, axis = self.num_experts, self.hidden_size, self.intermediate_size, Axis.EXPERT_COLUMNS
        if self.stacked == "outputs first":
            gate_up, _, down = (f"{self.name}.{it}.weight" for it in self.projections)
            return (
                TensorSpec(gate_up, (num, 2 * columns, size), Role.MATRIX, Cut(axis, 1, 2)),
                TensorSpec(down, (num, size, columns), Role.MATRIX, Cut(axis, 2)),
            )
        name = f"{self.name}.experts"
        return (
            TensorSpec(f"{name}.gate_up_proj", (num, size, 2 * columns), Role.MATRIX, Cut(axis, 2, 2)),
            TensorSpec(f"{name}.down_proj", (num, columns, size), Role.MATRIX, Cut(axis, 1)),
        )

    @property
    def shared(self) -> DenseMLP | None:
        """The shared expert, or None if there is none."""
        if self.shared_intermediate_size is None:
            return None
        return DenseMLP(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_intermediate_size,
            hidden_act=self.hidden_act,
            is_gated=self.is_gated,
            name=self.shared_name,
            projections=self.shared_projections,
            axis=Axis.SHARED_EXPERT_COLUMNS,
            finest_granule=FINEST_EXPERT_GRANULE,
        )

    @property
    def shared_gate(self) -> TensorSpec | None:
        """The shared expert's gate [1, hidden_size]. None if there is no shared expert or its output is added
        unscaled."""
        if self.shared is None or not self.has_shared_gate:
            return None
        return TensorSpec(f"{self.shared_name}_gate.weight", (1, self.hidden_size), Role.MATRIX)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        share = Fraction(self.top_k, self.num_experts)
        each = self.stacks if self.stacked != "no" else (it for expert in self.experts for it in expert.tensors)
        routed = tuple(replace(tensor, share=share) for tensor in each)
        beside = tuple(it for it in (self.choice_bias, self.shared_gate) if it is not None)
        return (self.router, *routed, *self.latents, *beside, *(() if self.shared is None else self.shared.tensors))

    @property
    def axes(self) -> tuple[Columns, ...]:
        shared = () if self.shared is None else self.shared.axes
        return (Columns(Axis.EXPERT_COLUMNS, self.intermediate_size, FINEST_EXPERT_GRANULE, may_be_empty=True), *shared)


class NormNames(NamedTuple):
    """Checkpoint names of the weights of a layer's norms. A None means that the layer has no such norm."""

    before_mixer: str = "input_layernorm"
    after_mixer: str | None = None
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str | None = None


PLAIN_NORMS = NormNames()


class Norms(NamedTuple):
    """Weights of the norms around a mixer or a feed-forward."""

    before: TensorSpec
    after: TensorSpec | None
    """Norm of the part's output. If None, the output is added to the residual without a norm."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer: residual += mixer(norm(residual)), then residual += feed_forward(norm(residual)). Layers of Nemotron-H
    have one of the two, because some of its mixers follow each other directly."""

    hidden_size: int
    mixer: Mixer
    """`configs.recurrent.NoMixer` if there is none."""
    feed_forward: FeedForward | None
    norm_names: NormNames = PLAIN_NORMS
    """Gemma and GLM 4 also have norms on the outputs of mixer and feed-forward."""
    norm_offset: float = 0.0
    """`TensorSpec.offset` of the weights of the layer's norms."""

    @property
    def mixer_norms(self) -> Norms | None:
        """The norms around the mixer. None if there is no mixer."""
        if not self.mixer.tensors:
            return None
        names = self.norm_names
        after = None if names.after_mixer is None else self._norm(names.after_mixer)
        return Norms(self._norm(names.before_mixer), after)

    @property
    def feed_forward_norms(self) -> Norms | None:
        """The norms around the feed-forward. None if there is no feed-forward."""
        if self.feed_forward is None:
            return None
        names = self.norm_names
        after = None if names.after_feed_forward is None else self._norm(names.after_feed_forward)
        return Norms(self._norm(names.before_feed_forward), after)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors of the layer."""
        pairs = (self.mixer_norms or ()) + (self.feed_forward_norms or ())
        norms = tuple(norm for norm in pairs if norm is not None)
        return self.mixer.tensors + (() if self.feed_forward is None else self.feed_forward.tensors) + norms

    @cached_property
    def axes(self) -> tuple[HeadGroups | Columns, ...]:
        """The axes that are divided among the ranks, in this order."""
        return self.mixer.axes + (() if self.feed_forward is None else self.feed_forward.axes)

    @cached_property
    def weight_elements(self) -> Amounts:
        """Number of elements of all tensors."""
        return elements_of(self.tensors)

    @cached_property
    def product_elements(self) -> Mapping[Fraction, Amounts]:
        """Number of elements of the matrices that tokens are multiplied by, per `TensorSpec.share`."""
        return _by_share(it for it in self.tensors if len(it.shape) > 1 and it.role not in (Role.BIAS, Role.DECAY))

    @cached_property
    def fp8_elements(self) -> Mapping[Fraction, Amounts]:
        """Number of elements of the tensors that may be in FP8, per `TensorSpec.share`."""
        return _by_share(it for it in self.tensors if it.may_be_fp8)

    @cached_property
    def mxfp4_elements(self) -> Mapping[Fraction, Amounts]:
        """Number of elements of the tensors that may be in MXFP4, per `TensorSpec.share`."""
        return _by_share(it for it in self.tensors if it.may_be_mxfp4)

    def _norm(self, name: str) -> TensorSpec:
        return TensorSpec(f"{name}.weight", (self.hidden_size,), Role.NORM, offset=self.norm_offset)


def tensors_of(*linears: Linear) -> tuple[TensorSpec, ...]:
    """The weights and biases of all `linears`, in order."""
    return tuple(tensor for linear in linears for tensor in linear.tensors)


def _by_share(tensors: Iterable[TensorSpec]) -> Mapping[Fraction, Amounts]:
    found: dict[Fraction, list[TensorSpec]] = {}
    for tensor in tensors:
        found.setdefault(tensor.share, []).append(tensor)
    return {share: elements_of(those) for share, those in found.items()}


def elements_of(tensors: Iterable[TensorSpec]) -> Amounts:
    """Number of elements of `tensors`, per axis that they are cut along."""
    amounts: dict[Axis | None, int] = {}
    for tensor in tensors:
        axis = None if tensor.cut is None else tensor.cut.axis
        amounts[axis] = amounts.get(axis, 0) + tensor.elements_per_index
    return amounts
