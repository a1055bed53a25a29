"""The spec of Kimi Delta Attention, a recurrent mixer of configs/layers.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from configs.layers import Axis, Cut, HeadGroups, Linear, Role, StateTensor, TensorSpec, tensors_of
from configs.recurrent import RECENT_TOKENS, Recurrent, conv_state


@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention(Recurrent):
    """Linear attention with a delta rule, like GatedDeltaNet, in which each channel of a key has a decay of its own
    (Kimi-Linear). For each head, with k and q of length 1:

    S = diag(e^g) S; S += k (beta (v - S'k))'; o = S'q / sqrt(key_dim)

    q, k and v pass a convolution with silu first. g = -e^A_log softplus(f_b(f_a(x)) + dt_bias), beta = sigmoid(b(x)).
    The output is norm(o) sigmoid(g_b(g_a(x))), projected.
    """

    hidden_size: int
    num_heads: int
    key_dim: int
    """Elements of a query, key or value head, and of f_a(x) and g_a(x)."""
    width: int
    """Number of tokens that the convolution reads, including the current one."""

    key_axis: ClassVar = Axis.QUERY_HEADS
    has_sigmoid_gate: ClassVar = True
    interleaved: ClassVar[Mapping[str, tuple[int, ...]]] = {}

    @property
    def num_key_heads(self) -> int:
        return self.num_heads

    @property
    def value_dim(self) -> int:
        return self.key_dim

    @property
    def decay_dim(self) -> int:
        """Number of decays of a head."""
        return self.key_dim

    @property
    def into(self) -> tuple[Linear, ...]:
        """The projections to q, k, v, g_a(x), b and f_a(x), in this order."""
        q, k, v = (self._into_heads(f"{letter}_proj", self.key_dim, self.hidden_size) for letter in "qkv")
        cut = Cut(Axis.LATENT, 0, self.key_dim)
        g_a, f_a = (Linear(f"self_attn.{it}_a_proj", self.key_dim, self.hidden_size, cut) for it in "gf")
        return q, k, v, g_a, self._into_heads("b_proj", 1, self.hidden_size), f_a

    @property
    def gates(self) -> tuple[Linear, Linear]:
        """g_b and f_b, the projections from g_a(x) and f_a(x) to the channels of all heads."""
        g_b, f_b = (self._into_heads(f"{it}_b_proj", self.key_dim, self.key_dim) for it in "gf")
        return g_b, f_b

    @property
    def conv(self) -> tuple[TensorSpec, ...]:
        """The weights of the convolution, of q, k and v."""
        shape, cut = (self.num_heads * self.key_dim, 1, self.width), Cut(Axis.QUERY_HEADS, 0, self.key_dim)
        return tuple(TensorSpec(f"self_attn.{it}_conv1d.weight", shape, Role.MATRIX, cut) for it in "qkv")

    @property
    def decay(self) -> tuple[TensorSpec, TensorSpec]:
        """A_log [1, 1, num_heads, 1] and dt_bias [num_heads * key_dim], used in fp32."""
        num, of_heads, of_channels = self.num_heads, Cut(Axis.QUERY_HEADS, 2), Cut(Axis.QUERY_HEADS, 0, self.key_dim)
        return (
            TensorSpec("self_attn.A_log", (1, 1, num, 1), Role.DECAY, of_heads),
            TensorSpec("self_attn.dt_bias", (num * self.key_dim,), Role.BIAS, of_channels),
        )

    @property
    def norm(self) -> TensorSpec:
        """The weight [value_dim] of the norm of each head's output."""
        return TensorSpec("self_attn.o_norm.weight", (self.value_dim,), Role.NORM)

    @property
    def out(self) -> Linear:
        """The output projection."""
        columns, cut = self.num_heads * self.value_dim, Cut(Axis.QUERY_HEADS, 1, self.value_dim)
        return Linear("self_attn.o_proj", self.hidden_size, columns, cut, role=Role.ATTENTION_OUTPUT)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return (*tensors_of(*self.into, *self.gates, self.out), *self.conv, *self.decay, self.norm)

    @property
    def axes(self) -> tuple[HeadGroups]:
        return (HeadGroups(Axis.QUERY_HEADS, self.num_heads, Axis.LATENT, 1),)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The tensors of GatedDeltaNet's state, with a decay for each channel."""
        size = self.key_dim
        recent = StateTensor(((Axis.QUERY_HEADS, size),), num_recent=RECENT_TOKENS)
        state = StateTensor(((Axis.QUERY_HEADS, size * size),), is_fp32=True)
        return (*conv_state(self.conv), state, recent, recent, replace(recent, is_fp32=True))

    def _into_heads(self, name: str, width: int, in_features: int) -> Linear:
        cut = Cut(Axis.QUERY_HEADS, 0, width)
        return Linear(f"self_attn.{name}", self.num_heads * width, in_features, cut)
