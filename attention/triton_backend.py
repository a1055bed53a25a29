"""The backend of Lockstep's own Triton kernels, for every GPU that Triton supports and every layer feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention.backend import AttentionBackend, register
from attention.forward_batch import ForwardBatch, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.sparse import IndexInputs, SparseStep
from attention.step_shape import StepShape
from attention.triton_latent import LatentPlan, TritonLatent, plan_of, plan_of_any

_MOST_ABSORBED = 512
"""Maximum number of new tokens of a captured step with prompts, for latent layers. A graph does not know how many
tokens are cached, so it uses the absorbed form. With more new tokens, that form takes longer than eager launches. Not
measured."""


@register("triton")
class TritonBackend(AttentionBackend):
    """Uses `paged_decode` for steps in which every row has one token, and `paged_extend` for all others.

    Unused page-table entries, unused pages and unused slots of a row's last page are never read. The bits of a row's
    output do not depend on the other rows' contents. A decode's bits depend on the number of rows, because
    `paged_decode` splits the keys of few rows, and decodes among prompts use `paged_extend`. Latent layers are in
    attention/triton_latent.py; their bits also depend on whether the step is captured.

    Args:
        exact: use `paged_exact` for all steps. The bits of an output then depend only on what the token sees, by the
            contract of attention/kernels/exact.py. It does not support masks.
    """

    captures_cuda_graphs = True

    def __init__(
        self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool, *, exact: bool = False
    ) -> None:
        super().__init__(layers, token_to_kv_pool)
        for layer in layers:
            for pages in token_to_kv_pool.pages(layer.layer_id):
                assert pages.is_contiguous(), "the kernels read pages that are contiguous"
        from attention.kernels.decode import paged_decode
        from attention.kernels.exact import paged_exact
        from attention.kernels.extend import paged_extend

        self._paged_exact = paged_exact if exact else None
        self._paged_decode, self._paged_extend = paged_decode, paged_extend
        self._latent = TritonLatent(token_to_kv_pool)
        # In exact steps all latent layers are absorbed, which needs no plan.
        self._planned = None if exact else next((layer for layer in layers if isinstance(layer, LatentLayer)), None)
        self._latent_plan: LatentPlan | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Queues kernels only for latent layers."""
        super().init_forward_metadata(batch)
        batch.paged.check()
        assert batch.mask is None or self._paged_exact is None, "a mask in an exact step"
        if self._planned is not None and batch.paged.max_seqlen_q > 1:
            self._latent_plan = plan_of(batch, self._planned, self.token_to_kv_pool.page_size)

    def capture_shapes(self, shape: StepShape, max_model_len: int) -> list[StepShape]:
        is_eager = self._planned is not None and not shape.is_decode and shape.num_tokens > _MOST_ABSORBED
        return [] if is_eager else [shape]

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        super().init_forward_metadata(batch)
        self.prepare_sparse(batch, batch.paged.page_table.shape[1] * self.token_to_kv_pool.page_size)
        if self._planned is not None and not shape.is_decode:
            self._latent_plan = plan_of_any(batch)

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        batch = self.batch_of(layer)
        paged = batch.paged
        k_pages, v_pages = self.token_to_kv_pool.pages(layer.layer_id)
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(heads.shape, dtype=q.dtype, device=q.device)
        if self._paged_exact is not None:
            self._paged_exact(heads, k_pages, v_pages, paged, layer, out=out)
        elif paged.max_seqlen_q == 1:
            self._paged_decode(heads, k_pages, v_pages, paged, layer, out=out)
        else:
            self._paged_extend(heads, k_pages, v_pages, paged, layer, out=out, mask=batch.mask)
        return out.view(q.shape)

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        paged = self.batch_of(layer).paged
        if self._paged_exact is not None:
            return self._latent.absorbed(self._paged_exact, q, layer, heads, paged)
        if paged.max_seqlen_q == 1:
            return self._latent.decode(q, layer, heads, paged)
        assert self._latent_plan is not None, "before init_forward_metadata"
        return self._latent.extend(q, layer, heads, self._latent_plan)

    def choose_keys(self, index: IndexInputs, layer: LatentLayer, step: SparseStep) -> torch.Tensor:
        from attention.kernels.index_scores import choose_keys

        assert layer.top_k is not None, "a sparse layer"
        _, keys = self.token_to_kv_pool.pages(layer.layer_id)
        return choose_keys(index, keys, step, layer.top_k)

    def attend_chosen(self, q: torch.Tensor, layer: LatentLayer, chosen: PagedMetadata) -> torch.Tensor:
        return self._latent.chosen(self._paged_exact or self._paged_decode, q, layer, chosen)
