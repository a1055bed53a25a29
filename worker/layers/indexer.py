"""The indexer of sparse attention (DSA), which scores the keys that a query may see."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attention.rotation import Rotation
from attention.sparse import IndexInputs
from configs.latent_attention import Indexer
from parallel.layers.linear import ColumnParallelLinear
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.tensor_source import TensorSource
from worker.layers.rotary import RotaryHalves

_NORM_EPS = 1e-6
"""Epsilon of the index key's norm, regardless of config.json's value for other norms, as in DeepSeek's code."""


class IndexerHeads:
    """Computes the index queries and keys of a step's tokens. Every rank computes all of them, with equal bits.

    Args:
        rope_dim: number of rotated columns of a head, the first ones.
    """

    def __init__(self, spec: Indexer, rope_dim: int, context: LayerContext) -> None:
        self._spec = spec
        self._rope_dim = rope_dim
        self._q = ColumnParallelLinear(spec.q, context=context)
        self._norm_weight, self._norm_bias = (context.empty(spec.head_dim) for _ in spec.k_norm)

    def halves(self, source: TensorSource, prefix: str) -> TensorSource:
        """`source` with the rotated rows of the indexer's tensors in the order of RotaryEmbedding."""
        if not self._spec.interleaved:
            return source
        names = (f"{self._spec.q.name}.weight", f"{self._spec.k.name}.weight", *(it.name for it in self._spec.k_norm))
        return RotaryHalves(source, {prefix + name: (self._spec.head_dim, 0) for name in names}, self._rope_dim)

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the projection of queries and the norm of keys from the output of `halves`. Tensor names begin with
        `prefix`."""
        self._q.load(source, prefix)
        for spec, tensor in zip(self._spec.k_norm, (self._norm_weight, self._norm_bias), strict=True):
            source.read(prefix + spec.name, tensor)

    def __call__(
        self, q_latent: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, rotation: Rotation
    ) -> IndexInputs:
        """The inputs of the index scores.

        Args:
            q_latent: [num_tokens, q_lora_rank], the normed latent of queries.
            k: [num_tokens, head_dim], the index key before its norm.
            weights: [num_tokens, num_heads]: the weights of index heads.
            rotation: the rotary embedding at the tokens' positions.
        """
        spec = self._spec
        q = self._q(q_latent).view(-1, spec.num_heads, spec.head_dim)
        k = F.layer_norm(k, (spec.head_dim,), self._norm_weight, self._norm_bias, _NORM_EPS)
        heads = rotation.rotate(torch.cat((q, k.unsqueeze(1)), dim=1))
        return IndexInputs(heads[:, :-1], heads[:, -1], weights.float() * (spec.num_heads * spec.head_dim) ** -0.5)
