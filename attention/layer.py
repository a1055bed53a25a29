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
    """The keys up to its own that a query sees, by `window` and `chunk` of AttentionLayer."""

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
    """Facts that a backend must know about a layer. Head counts are this rank's own, from the shard plan."""

    layer_id: int
    tp_q_head_num: int
    """A multiple of `tp_k_head_num`; query head h reads KV head h // (tp_q_head_num / tp_k_head_num)."""
    tp_k_head_num: int
    head_dim: int
    scale: float
    """Factor of the scores before softcap and softmax."""
    k_scale: float = 1.0
    """A further factor of the scores: a pool in FP8 holds keys divided by it."""
    v_scale: float = 1.0
    """A factor of the answers: a pool in FP8 holds values divided by it."""
    window: int | None = None
    """A query sees itself and `window - 1` tokens before it; None sees all."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""
    chunk: int | None = None
    """A query sees the tokens of its own chunk of so many positions, up to itself; None sees all."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """[tp_q_head_num] fp32, on the device: for each query head a score, after scale and softcap, that takes its share
    of the softmax and has no value."""

    @property
    def visible_range(self) -> VisibleRange:
        """The keys that its queries see."""
        return VisibleRange(self.window, self.chunk)

    @property
    def qk_dim(self) -> int:
        """Elements of a head that a query and a key are compared by."""
        return self.head_dim

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a token leaves in the KV pool: its keys, and its values."""
        return ((self.tp_k_head_num, self.head_dim),) * 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentLayer(AttentionLayer):
    """Attention whose heads make their keys and values from one latent a token (MLA).

    In its absorbed form it is that of query heads which share one key head, [latent | rotated key], and read as values
    what they read as keys. So `tp_k_head_num` is 1, `head_dim` is latent_dim + rope_dim, and a pool in FP8 has one
    factor, which `k_scale` and `v_scale` both are.
    """

    latent_dim: int
    nope_dim: int
    """Columns of a query head that meet keys made from latents; its others meet the rotated key."""
    v_dim: int
    """Columns of a head's value."""

    @property
    def rope_dim(self) -> int:
        """Columns of the rotated key."""
        return self.head_dim - self.latent_dim

    @property
    def qk_dim(self) -> int:
        """The values in heads of their own, as the model has them."""
        return self.nope_dim + self.rope_dim

    @property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The latent and the rotated key, side by side, and nothing else."""
        return ((self.head_dim,),)

    def absorbs(self, num_queries: _Counts, num_keys: _Counts) -> Any:
        """Whether the absorbed form takes fewer operations for queries that each see about `num_keys` tokens.

        It multiplies with the weight for every query, not for every key; but its products are wider for every pair. Of
        arrays, int64, an answer for each element.
        """
        own, latent = self.nope_dim + self.v_dim, self.latent_dim
        return (num_keys - num_queries) * own * latent >= num_queries * num_keys * (2 * latent - own)
