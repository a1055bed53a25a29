"""What an attention backend does. Which ones there are: attention/registry.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from attention.forward_batch import ForwardBatch
from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer
from attention.rotation import QKNorms, Rotation


class AttentionBackend(ABC):
    """Causal attention of new tokens over the paged KV cache, for the heads of one rank.

    A step calls `init_forward_metadata` once and then `forward` or `attend` once for each layer, in any order. What
    does not depend on a layer's values (indices, masks, plans) is made in `init_forward_metadata`, never in `attend`.
    """

    captures_cuda_graphs: ClassVar[bool] = False
    """Whether a step over static `ForwardBatch.paged` buffers can be captured in a CUDA graph and replayed."""

    def __init__(self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> None:
        self.layers = tuple(layers)
        self.token_to_kv_pool = token_to_kv_pool
        self._out_cache_loc: torch.Tensor | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepares for `batch`. Page-table entries past a row's last page are never used."""
        self._out_cache_loc = batch.out_cache_loc

    @abstractmethod
    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Attention over the pool, which already holds K and V of the new tokens.

        Args:
            q: [num_tokens, tp_q_head_num * head_dim], after norm and rotary embedding, in the pool's dtype; rows may
                lie further apart than they are long.

        Returns:
            [num_tokens, tp_q_head_num * head_dim], contiguous.
        """

    def forward(
        self, qkv: torch.Tensor, layer: AttentionLayer, rotation: Rotation, norms: QKNorms | None
    ) -> torch.Tensor:
        """Norms and rotates the heads of the new tokens, writes their K and V to the pool, and attends.

        Args:
            qkv: [num_tokens, (tp_q_head_num + 2 * tp_k_head_num) * head_dim], contiguous; query columns may be changed.
            rotation: at the positions of the batch.
            norms: of query and key heads; None for none.

        Returns:
            As `attend`.
        """
        assert self._out_cache_loc is not None, "forward before init_forward_metadata"
        q = rotation.norm_rotate_store(qkv, layer, norms, self.token_to_kv_pool, self._out_cache_loc)
        return self.attend(q, layer)
