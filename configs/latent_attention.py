"""The specs of latent attention (MLA), a mixer of configs/layers.py, and of the indexer of sparse attention (DSA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from configs.attention import Feature, LatentShape
from configs.layers import Amounts, Axis, Cut, HeadGroups, Linear, Role, TensorSpec, tensors_of
from configs.rope import RopeConfig

_INDEXER = "self_attn.indexer"


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Scores every token that a query may see, for sparse attention (DSA).

    The score of a key is the sum over index heads of weight[head] * relu(query[head] @ key). Queries are wq_b(latent of
    MLA's queries), keys are layer_norm(wk(x)), and weights are weights_proj(x). The first columns of queries and keys
    are rotated. Every rank computes all index heads, so that all ranks choose the same keys.
    """

    num_heads: int
    head_dim: int
    interleaved: bool
    """Whether the checkpoint rotates pairs of neighbours, see RopeConfig."""
    hidden_size: int
    q_lora_rank: int

    @property
    def q(self) -> Linear:
        """The projection of the queries' latent into index heads."""
        return self._linear("wq_b", self.num_heads * self.head_dim, self.q_lora_rank)

    @property
    def k(self) -> Linear:
        """The projection into the index key."""
        return self._linear("wk", self.head_dim, self.hidden_size)

    @property
    def weights(self) -> Linear:
        """The projection into the weights of index heads."""
        return self._linear("weights_proj", self.num_heads, self.hidden_size)

    @property
    def k_norm(self) -> tuple[TensorSpec, TensorSpec]:
        """Weight and bias of the index key's norm."""
        name, shape = f"{_INDEXER}.k_norm", (self.head_dim,)
        return TensorSpec(f"{name}.weight", shape, Role.NORM), TensorSpec(f"{name}.bias", shape, Role.BIAS)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return (*tensors_of(self.q, self.k, self.weights), *self.k_norm)

    def _linear(self, name: str, width: int, in_features: int) -> Linear:
        return Linear(f"{_INDEXER}.{name}", width, in_features, Cut(Axis.LATENT, 0, width))


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention in which heads compute keys and values from one latent vector per token (MLA) and share a rotated key.

    kv_a(x) = latent | rotated key; kv_b(norm(latent)) = unrotated key | value of each head. Query heads are q(x), or
    q_b(norm(q_a(x))) if queries have a latent too: first the unrotated columns, then the rotated ones.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    """Columns of the queries' latent. None if queries have no latent."""
    kv_lora_rank: int
    """Columns of the latent of keys and values."""
    qk_nope_head_dim: int
    """Columns of a query or key head that are not rotated."""
    qk_rope_head_dim: int
    """Columns of a query head, and of the key that all heads share, that are rotated in pairs of neighbours (2i, 2i +
    1), or not at all if `rope.partial` is 0 (Kimi-Linear)."""
    v_head_dim: int
    rope: RopeConfig
    scale: float
    """Factor of the scores before the softmax."""
    top_k: int | None = None
    """A query sees at most this many tokens, those with the largest index scores (DSA). If None, it sees all tokens
    before it."""
    indexer: Indexer | None = None
    """Computes the index scores. None if `top_k` is None, or if the layer sees the tokens of the last layer with an
    indexer."""

    state: ClassVar = ()
    window: ClassVar = None
    chunk: ClassVar = None
    kv_scales: ClassVar = (("self_attn.k_scale",),)

    @property
    def features(self) -> frozenset[Feature]:
        return frozenset({Feature.LATENT} if self.top_k is None else {Feature.LATENT, Feature.SPARSE})

    @property
    def head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def q(self) -> Linear:
        """The projection into query heads."""
        letters, size = ("q", self.hidden_size) if self.q_lora_rank is None else ("q_b", self.q_lora_rank)
        return self._into_heads(letters, self.head_dim, size, Role.QUERY_KEY)

    @property
    def q_a(self) -> Linear | None:
        """The projection into the queries' latent."""
        if self.q_lora_rank is None:
            return None
        return self._into_latent("q_a_proj", self.q_lora_rank)

    @property
    def kv_a(self) -> Linear:
        """The projection into the latent of keys and values and the rotated key."""
        return self._into_latent("kv_a_proj_with_mqa", self.kept_dim)

    @property
    def kv_b(self) -> Linear:
        """The projection of the latent of keys and values into key and value heads."""
        width = self.qk_nope_head_dim + self.v_head_dim
        return self._into_heads("kv_b", width, self.kv_lora_rank, Role.MATRIX)

    @property
    def o(self) -> Linear:
        """The output projection."""
        columns, cut = self.num_attention_heads * self.v_head_dim, Cut(Axis.QUERY_HEADS, 1, self.v_head_dim)
        return Linear("self_attn.o_proj", self.hidden_size, columns, cut, role=Role.ATTENTION_OUTPUT)

    @property
    def q_norm(self) -> TensorSpec | None:
        """The norm weight of the queries' latent."""
        if self.q_lora_rank is None:
            return None
        return TensorSpec("self_attn.q_a_layernorm.weight", (self.q_lora_rank,), Role.NORM)

    @property
    def kv_norm(self) -> TensorSpec:
        """The norm weight of the latent of keys and values."""
        return TensorSpec("self_attn.kv_a_layernorm.weight", (self.kv_lora_rank,), Role.NORM)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        linears = (self.q, self.q_a, self.kv_a, self.kv_b, self.o)
        norms = tuple(it for it in (self.q_norm, self.kv_norm) if it is not None)
        of_indexer = () if self.indexer is None else self.indexer.tensors
        return tensors_of(*(it for it in linears if it is not None)) + norms + of_indexer

    @property
    def axes(self) -> tuple[HeadGroups, ...]:
        return (HeadGroups(Axis.QUERY_HEADS, self.num_attention_heads, Axis.LATENT, 1),)

    def shapes(self, num_ranks: int) -> frozenset[LatentShape]:
        """The shapes of this layer on the ranks: each rank has the floor or the ceiling of an even share of heads."""
        counts = {self.num_attention_heads // num_ranks, -(-self.num_attention_heads // num_ranks)}
        return frozenset(LatentShape(count, self.kv_lora_rank, self.qk_rope_head_dim) for count in counts)

    @property
    def token_elements(self) -> Amounts:
        return {Axis.LATENT: self.kept_dim + self.index_dim}

    @property
    def pair_flops(self) -> Amounts:
        # The absorbed form: scores over latent and rotated key, weighted sums over the latent.
        return {Axis.QUERY_HEADS: 2 * (2 * self.kv_lora_rank + self.qk_rope_head_dim)}

    @property
    def index_pair_flops(self) -> Amounts:
        """Floating-point operations for the index score of one query and one key."""
        return {Axis.LATENT: 2 * self.index_heads * self.index_dim}

    @property
    def rotary_dim(self) -> int:
        return int(self.qk_rope_head_dim * self.rope.partial)

    @property
    def kept_dim(self) -> int:
        """Columns of the latent of keys and values and the rotated key, which the KV pool stores for each token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def index_heads(self) -> int:
        return 0 if self.indexer is None else self.indexer.num_heads

    @property
    def index_dim(self) -> int:
        """Elements of the index key, which the KV pool stores for each token. 0 without an indexer."""
        return 0 if self.indexer is None else self.indexer.head_dim

    def _into_latent(self, name: str, width: int) -> Linear:
        return Linear(f"self_attn.{name}", width, self.hidden_size, Cut(Axis.LATENT, 0, width))

    def _into_heads(self, letters: str, width: int, in_features: int, role: Role) -> Linear:
        cut = Cut(Axis.QUERY_HEADS, 0, width)
        return Linear(f"self_attn.{letters}_proj", self.num_attention_heads * width, in_features, cut, role=role)
