"""The products of latent attention (MLA) between latents and the heads' own keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attention.layer import LatentLayer

_MOST_TOKENS = 64


class LatentHeads:
    """This rank's heads of one latent layer. Key h of a token is [w_k[h] @ latent | rotated key], value h is w_v[h] @
    latent.

    There are two ways to attend. With expanded heads, keys and values are computed from the pool's latents. In the
    absorbed form, both products move to the query's side: q @ (w_k @ latent) = (q @ w_k) @ latent, and the weighted sum
    of values is w_v @ the weighted sum of latents. The absorbed form reads each latent once for all heads.

    Args:
        weight: [tp_q_head_num, nope_dim + v_dim, latent_dim], contiguous: for each head the rows of w_k, then of w_v.
    """

    def __init__(self, layer: LatentLayer, weight: torch.Tensor) -> None:
        self._layer = layer
        self._weight = weight
        self._w_k, self._w_v = torch.split(weight, [layer.nope_dim, layer.v_dim], dim=1)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Turns head queries [num_tokens, tp_q_head_num, nope_dim + rope_dim] into queries of the absorbed form.

        Returns:
            [num_tokens, tp_q_head_num * head_dim].
        """
        nope_dim = self._layer.nope_dim
        if _are_few(q):
            return self._product(q, self._w_k, self._layer.head_dim)
        latent = torch.bmm(q[..., :nope_dim].transpose(0, 1), self._w_k).transpose(0, 1)
        return torch.cat((latent, q[..., nope_dim:]), dim=-1).flatten(1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Turns weighted sums of latents into weighted sums of the heads' values.

        Args:
            attended: [num_tokens, tp_q_head_num * head_dim], or only the latents [..., tp_q_head_num * latent_dim].

        Returns:
            [num_tokens, tp_q_head_num * v_dim].
        """
        layer = self._layer
        heads = attended.view(len(attended), layer.tp_q_head_num, -1)[..., : layer.latent_dim]
        if _are_few(heads):
            return self._product(heads, self._w_v.transpose(1, 2), layer.v_dim)
        out = attended.new_empty(len(attended), layer.tp_q_head_num, layer.v_dim)
        # With the weight as the first operand, this takes half the time on a CPU for up to four tokens.
        torch.bmm(self._w_v, heads.permute(1, 2, 0), out=out.permute(1, 2, 0))
        return out.flatten(1)

    def keys_values(self, latents: torch.Tensor, heads: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Expands the pool's latents to keys [num_keys, num_heads, nope_dim + rope_dim] and values [num_keys,
        num_heads, v_dim].

        Args:
            latents: [num_keys, head_dim], as the pool stores them.
            heads: a range of this rank's heads.
        """
        layer, weight = self._layer, self._weight[heads]
        own = F.linear(latents[:, : layer.latent_dim], weight.flatten(0, 1)).view(len(latents), len(weight), -1)
        k_nope, v = torch.split(own, [layer.nope_dim, layer.v_dim], dim=-1)
        k_rope = latents[:, None, layer.latent_dim :].expand(-1, len(weight), -1)
        return torch.cat((k_nope, k_rope), dim=-1), v

    def _product(self, x: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
        """The result of `head_products`, [num_tokens, tp_q_head_num * width]."""
        from attention.kernels.latent_heads import head_products

        out = x.new_empty(len(x), self._layer.tp_q_head_num, width)
        head_products(x, weight, out)
        return out.flatten(1)


def _are_few(heads: torch.Tensor) -> bool:
    """Whether `head_products` is faster than torch's batched product. torch's tiles are larger, and its kernel starts
    only after the kernel before it is done. A layer of 16 heads takes 5 us less for 1, 16 and 64 tokens
    (benchmarks/results/latent_decode_h200_2026-11-26.txt). More tokens were not measured."""
    return heads.is_cuda and heads.element_size() == 2 and len(heads) <= _MOST_TOKENS
