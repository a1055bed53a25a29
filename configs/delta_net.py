"""The spec of Gated DeltaNet, a recurrent mixer of configs/layers.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from configs.layers import Axis, Cut, HeadGroups, Linear, Role, StateTensor, TensorSpec, tensors_of
from configs.recurrent import RECENT_TOKENS, Recurrent, conv_state

_NAME = "linear_attn"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Recurrent):
    """Linear attention with a gated delta rule. For each value head, with its key head's k and q of length 1:

    S = e^g S; S += k (beta (v - S'k))'; o = S'q / sqrt(key_dim)

    q, k and v pass a convolution with silu first. g = -e^A_log softplus(a + dt_bias), beta = sigmoid(b). The output is
    norm(o) silu(z), projected.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`: equal groups of value heads share a key head."""
    key_dim: int
    """Elements of a key or query head."""
    value_dim: int
    """Elements of a value head."""
    width: int
    """Number of tokens that the convolution reads, including the current one."""
    is_interleaved: bool = False
    """Whether the checkpoint stores q, k, v and z as one tensor, key head by key head, and so b and a (Qwen3-Next)."""

    # Same names and meanings as in KimiDeltaAttention, so that one module computes both.
    key_axis: ClassVar = Axis.KV_HEADS
    decay_dim: ClassVar = 1
    has_sigmoid_gate: ClassVar = False
    gates: ClassVar[tuple[Linear, ...]] = ()

    @property
    def into(self) -> tuple[Linear, ...]:
        """The projections to q, k, v, z, b and a, in this order."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        qkv, z, b, a = ("qkvz", "qkvz", "ba", "ba") if self.is_interleaved else ("qkv", "z", "b", "a")
        after_v, after_b = (2 * keys + values, self.num_value_heads) if self.is_interleaved else (0, 0)
        return (
            self._into(qkv, Axis.KV_HEADS, self.num_key_heads, self.key_dim, 0),
            self._into(qkv, Axis.KV_HEADS, self.num_key_heads, self.key_dim, keys),
            self._into(qkv, Axis.QUERY_HEADS, self.num_value_heads, self.value_dim, 2 * keys),
            self._into(z, Axis.QUERY_HEADS, self.num_value_heads, self.value_dim, after_v),
            self._into(b, Axis.QUERY_HEADS, self.num_value_heads, 1, 0),
            self._into(a, Axis.QUERY_HEADS, self.num_value_heads, 1, after_b),
        )

    @property
    def interleaved(self) -> dict[str, tuple[int, ...]]:
        """Tensors that the checkpoint stores key head by key head: their names, and for each projection in a tensor the
        number of rows per key head."""
        if not self.is_interleaved:
            return {}
        shared = self.num_value_heads // self.num_key_heads
        values = shared * self.value_dim
        return {
            f"{_NAME}.in_proj_qkvz.weight": (self.key_dim, self.key_dim, values, values),
            f"{_NAME}.in_proj_ba.weight": (shared, shared),
        }

    @property
    def conv(self) -> tuple[TensorSpec, ...]:
        """The weights of the convolution, of q, k and v. The checkpoint stores them as one tensor."""
        return tuple(
            TensorSpec(f"{_NAME}.conv1d.weight", (it.out_features, 1, self.width), Role.MATRIX, it.cut)
            for it in self.into[:3]
        )

    @property
    def decay(self) -> tuple[TensorSpec, TensorSpec]:
        """A_log and dt_bias [num_value_heads], used in fp32."""
        shape, cut = (self.num_value_heads,), Cut(Axis.QUERY_HEADS, 0)
        a_log = TensorSpec(f"{_NAME}.A_log", shape, Role.DECAY, cut)
        return a_log, TensorSpec(f"{_NAME}.dt_bias", shape, Role.BIAS, cut)

    @property
    def norm(self) -> TensorSpec:
        """The weight [value_dim] of the norm of each head's output."""
        return TensorSpec(f"{_NAME}.norm.weight", (self.value_dim,), Role.NORM)

    @property
    def out(self) -> Linear:
        """The output projection."""
        columns, cut = self.num_value_heads * self.value_dim, Cut(Axis.QUERY_HEADS, 1, self.value_dim)
        return Linear(f"{_NAME}.out_proj", self.hidden_size, columns, cut, role=Role.ATTENTION_OUTPUT)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return (*tensors_of(*self.into, self.out), *self.conv, *self.decay, self.norm)

    @property
    def axes(self) -> tuple[HeadGroups]:
        return (HeadGroups(Axis.QUERY_HEADS, self.num_value_heads, Axis.KV_HEADS, self.num_key_heads),)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The convolution's two parts; S; and of recent tokens k, the value that each adds, and the logarithm of the
        decay since the state."""
        return (
            *conv_state(self.conv),
            StateTensor(((Axis.QUERY_HEADS, self.key_dim * self.value_dim),), is_fp32=True),
            StateTensor(((Axis.KV_HEADS, self.key_dim),), num_recent=RECENT_TOKENS),
            StateTensor(((Axis.QUERY_HEADS, self.value_dim),), num_recent=RECENT_TOKENS),
            StateTensor(((Axis.QUERY_HEADS, 1),), num_recent=RECENT_TOKENS, is_fp32=True),
        )

    def _into(self, name: str, axis: Axis, num_heads: int, width: int, first_row: int) -> Linear:
        size, cut = num_heads * width, Cut(axis, 0, width)
        return Linear(f"{_NAME}.in_proj_{name}", size, self.hidden_size, cut, first_row=first_row)
