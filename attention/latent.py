"""The step of latent attention's heads (MLA) between a token's latent and their own keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attention.layer import LatentLayer


class LatentHeads:
    """This rank's heads of one layer: key h of a token is [w_k[h] @ latent | rotated key], value h is w_v[h] @ latent.

    There are two ways to attend with them. In heads of their own, keys and values are made of what the pool keeps. In
    the absorbed form both products move to the query's side: q @ (w_k @ latent) = (q @ w_k) @ latent, and the weighted
    sum of values is w_v @ the weighted sum of latents. That reads each latent once for all heads.

    Args:
        weight: [tp_q_head_num, nope_dim + v_dim, latent_dim], contiguous: rows of each head's w_k, then of its w_v.
    """

    def __init__(self, layer: LatentLayer, weight: torch.Tensor) -> None:
        self._layer = layer
        self._weight = weight
        self._w_k, self._w_v = torch.split(weight, [layer.nope_dim, layer.v_dim], dim=1)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries of heads [num_tokens, tp_q_head_num, nope_dim + rope_dim] as queries of what the pool keeps.

        Returns:
            [num_tokens, tp_q_head_num * head_dim].
        """
        nope_dim = self._layer.nope_dim
        latent = torch.bmm(q[..., :nope_dim].transpose(0, 1), self._w_k).transpose(0, 1)
        return torch.cat((latent, q[..., nope_dim:]), dim=-1).flatten(1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of what the pool keeps as sums of the heads' values.

        Args:
            attended: [num_tokens, tp_q_head_num * head_dim], or of the latents alone [..., tp_q_head_num * latent_dim].

        Returns:
            [num_tokens, tp_q_head_num * v_dim].
        """
        layer = self._layer
        heads = attended.view(len(attended), layer.tp_q_head_num, -1)[..., : layer.latent_dim]
        out = attended.new_empty(len(attended), layer.tp_q_head_num, layer.v_dim)
        # With the weight in front: half the time on a CPU for up to four tokens.
        torch.bmm(self._w_v, heads.permute(1, 2, 0), out=out.permute(1, 2, 0))
        return out.flatten(1)

    def keys_values(self, kept: torch.Tensor, which: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_keys, num_heads, nope_dim + rope_dim] and values [..., v_dim] of what the pool keeps of tokens.

        Args:
            kept: [num_keys, head_dim].
            which: the heads, of this rank's; all where not given.
        """
        layer, weight = self._layer, self._weight[which]
        own = F.linear(kept[:, : layer.latent_dim], weight.flatten(0, 1)).view(len(kept), len(weight), -1)
        k_nope, v = torch.split(own, [layer.nope_dim, layer.v_dim], dim=-1)
        k_rope = kept[:, None, layer.latent_dim :].expand(-1, len(weight), -1)
        return torch.cat((k_nope, k_rope), dim=-1), v
