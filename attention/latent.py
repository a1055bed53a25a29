"""The products of latent attention (MLA) between latents and the heads' own keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attention.layer import LatentLayer
from parallel.numerics.kernels.cpu_products import Mixture, mixed_products, pack

_MOST_TOKENS = 64


class LatentHeads:
    """This rank's heads of one latent layer. Key h of a token is [w_k[h] @ latent | rotated key], value h is w_v[h] @
    latent.

    There are two ways to attend. With expanded heads, keys and values are computed from the pool's latents. In the
    absorbed form, both products move to the query's side: q @ (w_k @ latent) = (q @ w_k) @ latent, and the weighted sum
    of values is w_v @ the weighted sum of latents. The absorbed form reads each latent once for all heads.

    Args:
        weight: [tp_q_head_num, nope_dim + v_dim, latent_dim], contiguous: for each head the rows of w_k, then of w_v.
        exact: whether `head_products` multiplies any number of tokens, for exact numerics on a GPU.
    """

    def __init__(self, layer: LatentLayer, weight: torch.Tensor, *, exact: bool = False) -> None:
        self._layer = layer
        self._weight = weight
        self._exact = exact
        self._w_k, self._w_v = torch.split(weight, [layer.nope_dim, layer.v_dim], dim=1)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Turns head queries [num_tokens, tp_q_head_num, nope_dim + rope_dim] into queries of the absorbed form.

        Returns:
            [num_tokens, tp_q_head_num * head_dim].
        """
        nope_dim = self._layer.nope_dim
        if self._exact or _are_few(q):
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
        if self._exact or _are_few(heads):
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
        head_products(x, weight, out, exact=self._exact)
        return out.flatten(1)


def exact_heads(layer: LatentLayer, weight: torch.Tensor) -> LatentHeads:
    """The heads for exact numerics: each element of `absorb` and `values` is one chain over ascending columns, rounded
    once. So its bits do not depend on other tokens, or on the rank's number of heads. Expanded keys are rounded
    elsewhere and must not be used.

    Args:
        weight: as for LatentHeads. On a CPU it is copied.
    """
    return LatentHeads(layer, weight, exact=True) if weight.is_cuda else CpuExactHeads(layer, weight)


class CpuExactHeads(LatentHeads):
    """What `exact_heads` makes on a CPU, in the absorbed form only."""

    def __init__(self, layer: LatentLayer, weight: torch.Tensor) -> None:
        w_k, w_v = torch.split(weight, [layer.nope_dim, layer.v_dim], dim=1)
        self._layer = layer
        self._packed_k, self._packed_v = (torch.stack([*map(pack, it)]) for it in (w_k.transpose(1, 2), w_v))

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        nope_dim, latent_dim = self._layer.nope_dim, self._layer.latent_dim
        latent = _chains(q[..., :nope_dim], self._packed_k, latent_dim)
        return torch.cat((latent, q[..., nope_dim:]), dim=-1).flatten(1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        heads = attended.view(len(attended), layer.tp_q_head_num, -1)[..., : layer.latent_dim]
        return _chains(heads, self._packed_v, layer.v_dim).flatten(1)


def _chains(x: torch.Tensor, packed: torch.Tensor, width: int) -> torch.Tensor:
    """Multiplies each head's columns x[:, head, :] by the head's weight on a CPU: [num_tokens, num_heads, width]. The
    weights are packed by `pack`, [num_heads, tiles, columns, 64]."""
    num_tokens, num_heads, num_columns = x.shape
    ends = torch.arange(1, num_heads + 1) * num_tokens
    rows = torch.arange(num_tokens * num_heads).view(num_tokens, num_heads).t().flatten()
    # The sum over a pair's weights has one weight in it, that of its head.
    mixture = Mixture(ends, rows, torch.ones(len(rows)))
    out = x.new_empty(1, len(rows), width)
    mixed_products(x.transpose(0, 1).flatten(0, 1), packed, num_columns, ((0, 1),), mixture, out)
    return out.view(num_tokens, num_heads, width)


def _are_few(heads: torch.Tensor) -> bool:
    """Whether `head_products` is faster than torch's batched product. torch's tiles are larger, and its kernel starts
    only after the kernel before it is done. A layer of 16 heads takes 5 us less for 1, 16 and 64 tokens
    (benchmarks/results/latent_decode_h200_2026-11-26.txt). More tokens were not measured."""
    return heads.is_cuda and heads.element_size() == 2 and len(heads) <= _MOST_TOKENS
