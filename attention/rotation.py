"""The work on query and key heads between the QKV product and attention: norms, rotary embedding, writes to the
pool."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer, LatentLayer


class QKNorms(NamedTuple):
    """RMSNorm on every query and key head, before the rotary embedding."""

    q_weight: torch.Tensor
    """[head_dim] in the activations' dtype or fp32."""
    k_weight: torch.Tensor
    """[head_dim] in the activations' dtype or fp32."""
    eps: float


class LatentNorm(NamedTuple):
    """RMSNorm on every token's latent."""

    weight: torch.Tensor
    """[latent_dim] in the activations' dtype or fp32."""
    eps: float


class Rotation(Protocol):
    """The rotary embedding for the positions of one step's tokens, implemented in worker/layers/rotary.py."""

    def norm_rotate_store(
        self,
        qkv: torch.Tensor,
        layer: AttentionLayer,
        norms: QKNorms | None,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> torch.Tensor:
        """Applies norms and rotary embedding to query and key heads, and writes keys and values to their slots.

        Args:
            qkv: [num_tokens, (tp_q_head_num + 2 * tp_k_head_num) * head_dim], contiguous. The query columns may be
                overwritten.
            norms: None if the layer has none.
            pool: its `compute_dtype` must be qkv's dtype. It converts keys and values to its own dtype.
            out_cache_loc: [num_tokens] int64: the slot of each token.

        Returns:
            The query heads [num_tokens, tp_q_head_num * head_dim]. The row stride may exceed the row length.
        """

    def norm_rotate_store_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        layer: LatentLayer,
        norm: LatentNorm,
        pool: TokenToKVPool,
        out_cache_loc: torch.Tensor,
    ) -> None:
        """Rotates query heads, and writes the normed latents and the rotated keys to their slots.

        Args:
            q: [num_tokens, tp_q_head_num, nope_dim + rope_dim]. The last columns are rotated in place.
            latents: [num_tokens, latent_dim + rope_dim]: latents and keys, before norm and rotation.
            pool: its `compute_dtype` must be the dtype of `latents`. It converts what it stores to its own dtype.
            out_cache_loc: [num_tokens] int64: the slot of each token.
        """

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Heads [num_tokens, num_heads, head_dim] with the first rotary_dim columns rotated, as a new tensor."""
