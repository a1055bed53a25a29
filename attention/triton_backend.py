"""Attention by Triton kernels of our own, on any GPU."""

from __future__ import annotations

import torch

from attention.backend import AttentionBackend, register
from attention.layer import AttentionLayer


@register("triton")
class TritonBackend(AttentionBackend):
    """Decodes by `paged_decode`."""

    captures_cuda_graphs = True

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        from attention.kernels.decode import paged_decode

        k_pages, v_pages = self.token_to_kv_pool.pages(layer.layer_id)
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(heads.shape, dtype=q.dtype, device=q.device)
        paged_decode(heads, k_pages, v_pages, self.batch_of(layer).paged, layer, out=out)
        return out.view(q.shape)
