"""A layer: a mixer and a feed-forward, each of which says its tensors, and what a token leaves in the cache.

Plain data. Whatever has to know a model's tensors or state folds over these answers and repeats none of them: the check
of a checkpoint, its readers, dummy weights, the shard plan, the KV pool's size, the cost of a step. A new kind is one
more spec class here and one module that computes it in worker/layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

from configs.attention import Feature
from configs.rope import RopeConfig

_FEWEST_LEAVES = 8  # for exact sums over heads, where the heads allow it: so many ranks may share them


class Axis(StrEnum):
    """An axis that is dealt to ranks: each of them gets a span of it. The value is its name for people."""

    QUERY_HEADS = "query heads"
    KV_HEADS = "KV heads"
    LATENT = "latent"
    """The latent that all heads of latent attention share: one, which every rank has."""
    MLP_COLUMNS = "MLP columns"
    EXPERT_COLUMNS = "expert columns"
    """Columns of each routed expert: a rank has the same of all of them."""
    SHARED_EXPERT_COLUMNS = "shared expert columns"
    VOCABULARY = "vocabulary rows"


class Role(StrEnum):
    """The work of a tensor, as far as its type in memory or the size of its values depends on it."""

    MATRIX = auto()
    EMBEDDING = auto()
    """The embedding or the LM head, which may be one."""
    QUERY_KEY = auto()
    """Rows of heads that the rotary embedding turns."""
    ATTENTION_OUTPUT = auto()
    BIAS = auto()
    NORM = auto()
    QUERY_KEY_NORM = auto()


FINEST_EXPERT_GRANULE = 32
"""The granule of the grouped products: 768 columns over 5 ranks are 160 or 128, not 256 or 128."""

Amounts = Mapping[Axis | None, int]
"""How much each index of an axis accounts for; under None, what every rank has whole."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut: of dimension `dim`, each index of `axis` takes `width`."""

    axis: Axis
    dim: int
    """The dimension that is cut; in a matrix 0: rows (outputs), 1: columns (inputs)."""
    width: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint. Names are relative to the layer, unless the tensor is in none."""

    name: str
    """The name in a Hugging Face checkpoint."""
    shape: tuple[int, ...]
    """Whole, outermost dimension first."""
    role: Role
    cut: Cut | None = None
    """None: every rank has all of it."""
    share: Fraction = Fraction(1)
    """The part of all tokens that is multiplied with it: k of E for a tensor of one expert."""
    offset: float = 0.0
    """The number that the model adds to the checkpoint's values, in fp32: 1 for the weights of Gemma's norms."""
    may_be_mxfp4: bool = False
    """Whether it stays in MXFP4 where a checkpoint has it so."""

    @property
    def may_be_fp8(self) -> bool:
        """Whether it is a matrix that stays in FP8 where a checkpoint has it so: not those that choose, as routers do,
        nor those that have no cut or whose inputs come first."""
        is_product = self.role in (Role.MATRIX, Role.QUERY_KEY, Role.ATTENTION_OUTPUT)
        return is_product and self.cut is not None and len(self.shape) == 2

    @property
    def elements(self) -> int:
        """All of them."""
        return prod(self.shape)

    @property
    def elements_per_index(self) -> int:
        """Elements that one index of the cut's axis accounts for; all of them where there is no cut."""
        return self.elements if self.cut is None else self.elements // self.shape[self.cut.dim] * self.cut.width


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear weight [out_features, in_features] and its bias. Names lack `.weight` and `.bias`."""

    name: str
    out_features: int
    in_features: int
    cut: Cut
    bias: bool = False
    role: Role = Role.MATRIX
    first_row: int = 0
    """The place of its rows in the tensor, where the checkpoint has several linears as one, of the same name."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The weight and, if there is one, the bias."""
        shape = (self.out_features, self.in_features)
        weight = TensorSpec(f"{self.name}.weight", shape, self.role, self.cut)
        if not self.bias:
            return (weight,)
        # The bias is added once, after the ranks' sum, where columns are cut.
        cut = None if self.cut.dim == 1 else self.cut
        return weight, TensorSpec(f"{self.name}.bias", shape[:1], Role.BIAS, cut)


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Heads that are dealt in groups; beyond one group a rank, the ranks of a group share its head in `groups`."""

    heads: Axis
    num_heads: int
    groups: Axis
    num_groups: int
    """Divides num_heads."""

    @property
    def leaf_heads(self) -> int:
        """Heads of a leaf of the exact sums over heads: the most of one group that are at least 8 leaves, or one."""
        group = self.num_heads // self.num_groups
        fitting = [n for n in range(1, group + 1) if group % n == 0 and self.num_heads // n >= _FEWEST_LEAVES]
        return max(fitting, default=1)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns that are dealt in granules, to the ranks that hold the least."""

    axis: Axis
    size: int
    finest_granule: int = 128
    """How fine granules may become for the sake of an even deal. A dense MLP has so many columns that 128, the width of
    an FP8 scale block and of a tensor-core tile, is even enough; narrow experts go down to 32."""
    may_be_empty: bool = False
    """Whether a rank may have none, where otherwise some would have fewer than the finest granule."""


class FeedForward(Protocol):
    """A part of a layer that computes on each token alone."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All of them."""

    @property
    def axes(self) -> tuple[HeadGroups | Columns, ...]:
        """Axes that are dealt to ranks, in this order."""


class Mixer(FeedForward, Protocol):
    """A part of a layer that lets the tokens of a sequence see one another: it has state beside its tensors."""

    @property
    def token_elements(self) -> Amounts:
        """Elements that one token leaves in the layer's pool."""

    @property
    def pair_flops(self) -> Amounts:
        """Operations for one query and one token it sees."""

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding."""

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that it turns."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself among them; None: all before it."""

    @property
    def chunk(self) -> int | None:
        """Positions of a chunk, of which a query sees its own alone; None: all before it."""

    @property
    def head_dim(self) -> int:
        """Elements of a head that a query and a key are compared by."""

    @property
    def features(self) -> frozenset[Feature]:
        """Features that it asks of an attention backend."""

    @property
    def kv_scales(self) -> tuple[tuple[str, ...], ...]:
        """Names, for each tensor that a token leaves in the pool, under which a checkpoint may have the factor of its
        elements in FP8, the usual one first: a scalar, which is none of `tensors`."""


@dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Attention whose query heads share key and value heads in equal groups."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: RopeConfig
    input_size: int | None = None
    """Inputs of queries, keys and values; None: `hidden_size`."""
    qkv_bias: bool = False
    o_bias: bool = False
    fused_qkv: bool = False
    """Whether the checkpoint has the three projections as one tensor."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotary embedding (Qwen3)."""
    norms_have_weights: bool = True
    """Otherwise they are ones. Such norms are the same behind the rotary embedding, where Llama 4 has them."""
    norm_offset: float = 0.0
    """The `TensorSpec.offset` of these norms' weights."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""
    has_sinks: bool = False
    """Each query head has a score that takes a share of the softmax and has no value (gpt-oss)."""
    window: int | None = None
    """A query sees itself and `window - 1` tokens before it; None is full."""
    chunk: int | None = None
    """A query sees those of its own chunk of so many positions, up to itself; None is all."""

    @property
    def qkv(self) -> tuple[Linear, Linear, Linear]:
        """The projections, q | k | v."""
        num_q, num_kv = self.num_attention_heads, self.num_key_value_heads
        return (
            self._projection("q", Axis.QUERY_HEADS, num_q, Role.QUERY_KEY, 0),
            self._projection("k", Axis.KV_HEADS, num_kv, Role.QUERY_KEY, num_q),
            self._projection("v", Axis.KV_HEADS, num_kv, Role.MATRIX, num_q + num_kv),
        )

    @property
    def o(self) -> Linear:
        """The output projection."""
        columns, cut = self.num_attention_heads * self.head_dim, Cut(Axis.QUERY_HEADS, 1, self.head_dim)
        return Linear("self_attn.o_proj", self.hidden_size, columns, cut, self.o_bias, Role.ATTENTION_OUTPUT)

    @property
    def head_norms(self) -> tuple[TensorSpec, ...]:
        """Weights of the norms of query and key heads, or none."""
        has_weights = self.qk_norm and self.norms_have_weights
        names = (f"self_attn.{letter}_norm.weight" for letter in "qk" if has_weights)
        return tuple(TensorSpec(name, (self.head_dim,), Role.QUERY_KEY_NORM, offset=self.norm_offset) for name in names)

    @property
    def sinks(self) -> TensorSpec | None:
        """[num_attention_heads], or none."""
        shape, cut = (self.num_attention_heads,), Cut(Axis.QUERY_HEADS, 0)
        return TensorSpec("self_attn.sinks", shape, Role.BIAS, cut) if self.has_sinks else None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        sinks = () if self.sinks is None else (self.sinks,)
        return tensors_of(*self.qkv, self.o) + self.head_norms + sinks

    @property
    def axes(self) -> tuple[HeadGroups, ...]:
        return (HeadGroups(Axis.QUERY_HEADS, self.num_attention_heads, Axis.KV_HEADS, self.num_key_value_heads),)

    @property
    def token_elements(self) -> Amounts:
        return {Axis.KV_HEADS: 2 * self.head_dim}  # a key and a value

    @property
    def pair_flops(self) -> Amounts:
        return {Axis.QUERY_HEADS: 4 * self.head_dim}  # a multiply-add for each element of the key and the value

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.partial)

    @property
    def features(self) -> frozenset[Feature]:
        asked = {
            Feature.WINDOW: self.window is not None,
            Feature.CHUNK: self.chunk is not None,
            Feature.SOFTCAP: self.softcap is not None,
            Feature.SINKS: self.has_sinks,
        }
        return frozenset(feature for feature, is_asked in asked.items() if is_asked)

    @property
    def kv_scales(self) -> tuple[tuple[str, ...], ...]:
        return tuple((f"self_attn.{it}_scale", f"self_attn.{it}_proj.{it}_scale") for it in "kv")

    def _projection(self, letter: str, axis: Axis, num_heads: int, role: Role, first_head: int) -> Linear:
        letters, first_row = ("qkv", first_head * self.head_dim) if self.fused_qkv else (letter, 0)
        shape = num_heads * self.head_dim, self.input_size or self.hidden_size
        cut = Cut(axis, 0, self.head_dim)
        return Linear(f"self_attn.{letters}_proj", *shape, cut, self.qkv_bias, role, first_row)


@dataclass(frozen=True, kw_only=True)
class DenseMLP:
    """down(act(gate(x)) * up(x)): the feed-forward of a layer, or one expert of it."""

    hidden_size: int
    intermediate_size: int
    hidden_act: str = "silu"
    bias: bool = False
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down, behind `name`; of gate and up one, where the checkpoint has them as one tensor."""
    axis: Axis = Axis.MLP_COLUMNS
    finest_granule: int = 128
    """See Columns."""

    @property
    def gate_up(self) -> tuple[Linear, Linear]:
        """The projections into the columns, gate | up."""
        gate, up, _ = self.projections
        shape = self.intermediate_size, self.hidden_size, Cut(self.axis, 0)
        return (
            Linear(f"{self.name}.{gate}", *shape, self.bias),
            Linear(f"{self.name}.{up}", *shape, self.bias, first_row=self.intermediate_size * (gate == up)),
        )

    @property
    def down(self) -> Linear:
        """The projection out of them."""
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
    """MLPs of which each token goes to those that a router prefers, and perhaps one that all tokens go to.

    y = sum over the top k experts e of weight[e] * expert_e(x) + sigmoid(x @ shared_gate) * shared(x)

    The weights are the softmax of all experts' logits, or their sigmoids. The shared expert may have no gate: then it
    counts whole.
    """

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    """Columns of one expert."""
    norm_topk_prob: bool
    """Divide a token's weights by their sum."""
    round_weights: bool = True
    """Round them to the activations' type, as Qwen's models do and Mixtral does not."""
    weight_scale: float = 1.0
    """Factor of them, before they are rounded."""
    sigmoid: bool = False
    has_choice_bias: bool = False
    """Whether a bias is added to the sigmoids by which experts are chosen, not to those that weigh them."""
    scales_input: bool = False
    """Whether a weight is a factor of what its expert takes, not of what it gives (Llama 4)."""
    num_groups: int = 1
    """Equal groups of neighbouring experts."""
    top_groups: int = 1
    """A token's experts are of the so many groups whose best experts it prefers; with a bias, whose two best ones."""
    shared_intermediate_size: int | None = None
    """Columns of the shared expert; None where there is none."""
    shared_name: str = "shared_expert"
    has_shared_gate: bool = True
    hidden_act: str = "silu"
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down."""
    router_name: str = "gate"
    are_stacked: bool = False
    """Whether all experts' gates and ups are one tensor, and their downs; inputs come first."""

    @property
    def router(self) -> TensorSpec:
        """[num_experts, hidden_size]; every rank has all of it."""
        name, shape = f"{self.name}.{self.router_name}.weight", (self.num_experts, self.hidden_size)
        return TensorSpec(name, shape, Role.MATRIX)

    @property
    def choice_bias(self) -> TensorSpec | None:
        """[num_experts], used in fp32, or none."""
        name = f"{self.name}.gate.e_score_correction_bias"
        return TensorSpec(name, (self.num_experts,), Role.BIAS) if self.has_choice_bias else None

    @property
    def experts(self) -> tuple[DenseMLP, ...]:
        """The routed ones."""
        return tuple(
            DenseMLP(
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                hidden_act=self.hidden_act,
                name=f"{self.name}.experts.{i}",
                projections=self.projections,
                axis=Axis.EXPERT_COLUMNS,
            )
            for i in range(self.num_experts)
        )

    @property
    def stacked(self) -> tuple[TensorSpec, TensorSpec]:
        """[num_experts, hidden_size, 2 * intermediate_size], gate | up, and [num_experts, intermediate_size,
        hidden_size], where all experts are one tensor."""
        num, size, columns, name = self.num_experts, self.hidden_size, self.intermediate_size, f"{self.name}.experts"
        gate_up, down = Cut(Axis.EXPERT_COLUMNS, 2, 2), Cut(Axis.EXPERT_COLUMNS, 1)
        return (
            TensorSpec(f"{name}.gate_up_proj", (num, size, 2 * columns), Role.MATRIX, gate_up),
            TensorSpec(f"{name}.down_proj", (num, columns, size), Role.MATRIX, down),
        )

    @property
    def shared(self) -> DenseMLP | None:
        """The expert that all tokens go to."""
        if self.shared_intermediate_size is None:
            return None
        return DenseMLP(
            hidden_size=self.hidden_size,
            intermediate_size=self.shared_intermediate_size,
            hidden_act=self.hidden_act,
            name=f"{self.name}.{self.shared_name}",
            axis=Axis.SHARED_EXPERT_COLUMNS,
            finest_granule=FINEST_EXPERT_GRANULE,
        )

    @property
    def shared_gate(self) -> TensorSpec | None:
        """[1, hidden_size]: how much of the shared expert a token gets; None: all of it, or there is none."""
        if self.shared is None or not self.has_shared_gate:
            return None
        return TensorSpec(f"{self.name}.{self.shared_name}_gate.weight", (1, self.hidden_size), Role.MATRIX)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        share = Fraction(self.top_k, self.num_experts)
        each = self.stacked if self.are_stacked else (it for expert in self.experts for it in expert.tensors)
        routed = tuple(replace(tensor, share=share) for tensor in each)
        beside = tuple(it for it in (self.choice_bias, self.shared_gate) if it is not None)
        return (self.router, *routed, *beside, *(() if self.shared is None else self.shared.tensors))

    @property
    def axes(self) -> tuple[Columns, ...]:
        shared = () if self.shared is None else self.shared.axes
        return (Columns(Axis.EXPERT_COLUMNS, self.intermediate_size, FINEST_EXPERT_GRANULE, may_be_empty=True), *shared)


class NormNames(NamedTuple):
    """Names of the weights of a layer's norms in a checkpoint. None: there is no such norm."""

    before_mixer: str = "input_layernorm"
    after_mixer: str | None = None
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str | None = None


PLAIN_NORMS = NormNames()


class Norms(NamedTuple):
    """Weights of the norms around a mixer or a feed-forward."""

    before: TensorSpec
    after: TensorSpec | None
    """None: what it returns is added to the residual as it is."""


@dataclass(frozen=True)
class LayerSpec:
    """Residual + mixer(norm(residual)), then + feed_forward(norm(...)); what is added may be normed, too."""

    hidden_size: int
    mixer: Mixer
    feed_forward: FeedForward
    norm_names: NormNames = PLAIN_NORMS
    """Gemma and GLM 4 norm what mixer and feed-forward return, too, before it is added."""
    norm_offset: float = 0.0
    """The `TensorSpec.offset` of the norms' weights."""

    @property
    def mixer_norms(self) -> Norms:
        """The norms around the mixer."""
        names = self.norm_names
        after = None if names.after_mixer is None else self._norm(names.after_mixer)
        return Norms(self._norm(names.before_mixer), after)

    @property
    def feed_forward_norms(self) -> Norms:
        """The norms around the feed-forward."""
        names = self.norm_names
        after = None if names.after_feed_forward is None else self._norm(names.after_feed_forward)
        return Norms(self._norm(names.before_feed_forward), after)

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All of the layer's."""
        norms = tuple(norm for norm in self.mixer_norms + self.feed_forward_norms if norm is not None)
        return self.mixer.tensors + self.feed_forward.tensors + norms

    @cached_property
    def axes(self) -> tuple[HeadGroups | Columns, ...]:
        """Axes that are dealt to ranks, in this order."""
        return self.mixer.axes + self.feed_forward.axes

    @cached_property
    def weight_elements(self) -> Amounts:
        """Elements of all tensors."""
        return elements_of(self.tensors)

    @cached_property
    def product_elements(self) -> Mapping[Fraction, Amounts]:
        """Elements of the tensors that tokens are multiplied with, by the share of the tokens."""
        return _by_share(it for it in self.tensors if len(it.shape) > 1 and it.role is not Role.BIAS)

    @cached_property
    def fp8_elements(self) -> Mapping[Fraction, Amounts]:
        """Elements of the tensors that may be in FP8, by the share of the tokens."""
        return _by_share(it for it in self.tensors if it.may_be_fp8)

    @cached_property
    def mxfp4_elements(self) -> Mapping[Fraction, Amounts]:
        """Elements of the tensors that may be in MXFP4, by the share of the tokens."""
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
    """Elements of `tensors`, by the axis they are cut along."""
    amounts: dict[Axis | None, int] = {}
    for tensor in tensors:
        axis = None if tensor.cut is None else tensor.cut.axis
        amounts[axis] = amounts.get(axis, 0) + tensor.elements_per_index
    return amounts
