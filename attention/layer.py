"""The geometry of one attention layer on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

_Counts = TypeVar("_Counts", int, npt.NDArray[np.int64], torch.Tensor)


@dataclass(frozen=True, slots=True)
class VisibleRange:
    """Which keys before its own position a query sees. See `window` and `chunk` of AttentionLayer."""

    window: int | None
    chunk: int | None

    def first_keys(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first key that a query at each of `positions` sees."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(positions - (self.window - 1), 0)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayer:
    """What a backend needs to know about a layer. Head counts are this rank's, from the shard plan."""

    layer_id: int
    tp_q_head_num: int
    """A multiple of `tp_k_head_num`. Query head h reads KV head h // (tp_q_head_num / tp_k_head_num)."""
    tp_k_head_num: int
    head_dim: int
    scale: float
    """Factor of the scores, before softcap and softmax."""
    k_scale: float = 1.0
    """An FP8 pool stores keys divided by this factor. Scores are multiplied by it in turn."""
    v_scale: float = 1.0
    """An FP8 pool stores values divided by this factor. The output is multiplied by it in turn."""
    window: int | None = None
    """A query sees itself and `window - 1` tokens before it. If None, it sees all tokens before it."""
    softcap: float | None = None
    """If set, scores become softcap * tanh(scores / softcap)."""
    chunk: int | None = None
    """Positions are divided in chunks of this many, and a query sees only its own chunk, up to itself. If None, it sees
    all tokens before it."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """[tp_q_head_num] fp32, device: one more score per query head (after scale and softcap) that takes part in the
    softmax and has no value. None without sinks."""

    @property
    def visible_range(self) -> VisibleRange:
        """The keys that a query sees."""
        return VisibleRange(self.window, self.chunk)

    @property
    def qk_dim(self) -> int:
        """Elements of a query or key head."""
        return self.head_dim

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that the KV pool stores for a token: its keys and its values."""
        return ((self.tp_k_head_num, self.head_dim),) * 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentLayer(AttentionLayer):
    """A latent layer (MLA): its heads compute keys and values from one latent vector per token.

    The absorbed form is attention of query heads that share one key head, [latent | rotated key], and read the same
    vector as value. So `tp_k_head_num` is 1, `head_dim` is latent_dim + rope_dim, and an FP8 pool has one factor, equal
    to both `k_scale` and `v_scale`.
    """

    latent_dim: int
    nope_dim: int
    """Columns of a query head that are multiplied with keys computed from latents. The other columns are multiplied
    with the rotated key."""
    v_dim: int
    """Columns of a head's value."""
    top_k: int | None = None
    """If set, a query sees at most this many tokens, those with the largest index scores (attention/sparse.py). If
    None, it sees all tokens before it."""
    index_heads: int = 0
    """Number of index heads. All ranks have all of them. 0 if the layer computes no index scores."""
    index_dim: int = 0
    """Elements of an index head, and of the index key that the KV pool stores for a token."""

    @property
    def rope_dim(self) -> int:
        """Columns of the rotated key."""
        return self.head_dim - self.latent_dim

    @property
    def qk_dim(self) -> int:
        """Columns of a query or key of an expanded head."""
        return self.nope_dim + self.rope_dim

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the vectors that the KV pool stores for a token. The first is the latent, then the rotated key. The
        second is the index key, if the layer computes index scores."""
        return ((self.head_dim,), (self.index_dim,)) if self.index_dim else ((self.head_dim,),)

    def absorbs(self, num_queries: _Counts, num_keys: _Counts) -> Any:
        """Whether the absorbed form takes fewer operations for this number of queries, if each sees about `num_keys`
        tokens. It multiplies with the weight per query instead of per key, but its products are wider. For int64
        arrays, the result is an array too."""
        own, latent = self.nope_dim + self.v_dim, self.latent_dim
        return (num_keys - num_queries) * own * latent >= num_queries * num_keys * (2 * latent - own)
