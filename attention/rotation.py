"""The work on query and key heads between the QKV product and attention, as a backend sees it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer


class QKNorms(NamedTuple):
    """RMSNorm of every query head and of every key head, before the rotation."""

    q_weight: torch.Tensor
    """[head_dim], of the activations' dtype or fp32."""
    k_weight: torch.Tensor
    """[head_dim], likewise."""
    eps: float


class LatentNorm(NamedTuple):
    """RMSNorm of every token's latent."""

    weight: torch.Tensor
    """[latent_dim], of the activations' dtype or fp32."""
    eps: float


class Rotation(Protocol):
    """The rotary embedding at the positions of one step's tokens; worker/layers/rotary.py makes it."""

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        layer: AttentionLayer,
        norms: QKNorms | None,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Norms and rotates query and key heads, and writes keys, so treated, and values to their slots.

        Args:
            qkv: [num_tokens, (tp_q_head_num + 2 * tp_k_head_num) * head_dim], contiguous; query columns may be changed.
            norms: None for none.
            pool: of qkv's `compute_dtype`, which keys and values are turned into its own dtype from.
            out_cache_loc: [num_tokens] int64: the slot of each token.

        Returns:
            The query heads [num_tokens, tp_q_head_num * head_dim]; rows may lie further apart than they are long.
        """

    def norm_rotate_store_latent(
        self,
        q: torch.Tensor,
        kept: torch.Tensor,
        layer: LatentLayer,
        norm: LatentNorm,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> None:
        """Rotates query heads, and writes the latents after their norm, and the keys, rotated, to their slots.

        Args:
            q: [num_tokens, tp_q_head_num, nope_dim + rope_dim]; the last columns turn, in place.
            kept: [num_tokens, latent_dim + rope_dim]: latents and keys, before norm and rotation.
            pool: of their dtype.
            out_cache_loc: [num_tokens] int64: the slot of each token.
        """
