"""FlashInfer's attention of a prompt in two parts. One part attends to the new tokens, with keys and values side by
side, the other one to the cached tokens, which are on pages. A kernel merges the two outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from attention.flashinfer_plans import Geometry, PlanInputs, Uploads
from attention.forward_batch import ForwardBatch

_LEAST_NEW: int | None = None
"""Number of new tokens from which a prompt is served in two parts. If None, no prompt is, until a GPU has run it."""
_MOST_CACHED = 1
"""Largest number of cached tokens for each new one. Not measured."""


class RaggedPrompts:
    """Plans and runs eager steps with one long prompt, for layers without chunks or latents.

    Steps with several rows are not served, because FlashInfer's kernels for Hopper read values of the next row and give
    them a weight of zero, and zero times NaN is NaN.

    Args:
        module: `flashinfer`.
        paged: FlashInfer's wrapper for prompts on pages, for each geometry.
        float_workspace: memory that all wrappers share.
        int_workspace_bytes: largest size of a plan.
    """

    def __init__(
        self,
        module: Any,
        paged: Mapping[Geometry, Any],
        kernels: Literal["fa2", "fa3"],
        float_workspace: torch.Tensor,
        int_workspace_bytes: int,
        uploads: Uploads,
        page_size: int,
    ) -> None:
        from attention.kernels.flat_pages import flatten_pages
        from attention.kernels.merge import merge_states

        self._flatten_pages, self._merge_states = flatten_pages, merge_states
        self._uploads, self._page_size = uploads, page_size
        served = {} if _LEAST_NEW is None else paged
        self._of_cached = {it: wrapper for it, wrapper in served.items() if it.chunk is None and it.latent_dim is None}
        self._of_new: dict[Geometry, Any] = {}
        for geometry in self._of_cached:
            wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(float_workspace, "NHD", backend=kernels)
            # The other plan of the same step is in the paged wrapper's workspace.
            wrapper._int_workspace_buffer = float_workspace.new_empty(int_workspace_bytes)
            self._of_new[geometry] = wrapper
        self._has_cached = False

    def load_kernels(self, dtype: torch.dtype) -> None:
        """Compiles the kernel that merges outputs of `dtype`, which would otherwise happen in the first step that needs
        it."""
        for geometry, wrapper in self._of_new.items():
            device = wrapper._int_workspace_buffer.device
            out = torch.zeros(1, geometry.num_q_heads, geometry.head_dim, dtype=dtype, device=device)
            lse = torch.zeros(1, geometry.num_q_heads, device=device)
            self._merge_states(out, lse, out, lse, out=torch.empty_like(out), lse=torch.empty_like(lse))

    def plan(self, batch: ForwardBatch, options: Callable[[Geometry], dict[str, Any]]) -> frozenset[Geometry]:
        """Plans the step for the geometries that are served in two parts, and returns these. Queues the uploads of the
        plans, and does not wait for the device.

        Args:
            options: returns the arguments of plans that depend only on the geometry.
        """
        num_new, num_cached = int(batch.extend_lens.sum()), int(batch.prefix_lens.sum())
        is_long = _LEAST_NEW is not None and num_new >= _LEAST_NEW and num_cached <= _MOST_CACHED * num_new
        if batch.batch_size > 1 or not is_long:
            return frozenset()
        # Over the cached tokens alone, FlashInfer would count a window from the last of them, not from the query.
        planned = [it for it in self._of_new if it.window is None or not num_cached]
        nothing = np.zeros_like(batch.extend_lens)
        new = PlanInputs.of(nothing, batch.extend_lens, self._page_size)
        cached = PlanInputs.of(batch.prefix_lens, nothing, self._page_size)
        paged, self._has_cached = batch.paged, num_cached > 0
        pages = torch.empty(cached.num_pages, dtype=torch.int32, device=paged.page_table.device)
        if num_cached:
            lens = paged.cache_seqlens - paged.cu_seqlens_q.diff()
            self._flatten_pages(replace(paged, cache_seqlens=lens), self._page_size, pages, None)
        for geometry in planned:
            heads, others = (geometry.num_q_heads, geometry.num_k_heads, geometry.head_dim), options(geometry)
            self._plan(self._of_new[geometry], new.qo_indptr, new.qo_indptr, *heads, causal=True, **others)
            if num_cached:
                keys = cached.kv_indptr, pages, cached.last_page_len, *heads, self._page_size
                self._plan(self._of_cached[geometry], new.qo_indptr, *keys, causal=False, **others)
        return frozenset(planned)

    def run(
        self,
        geometry: Geometry,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Attends to the new tokens up to the query's own, and to all cached tokens.

        Args:
            q: [num_tokens, num_q_heads, head_dim].
            new: keys and values of the new tokens, [num_tokens, num_k_heads, head_dim] each.
            pages: keys and values of the pool, [num_pages, page_size, num_k_heads, head_dim] each.

        Returns:
            A tensor like q, contiguous.
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not self._has_cached:
            self._of_new[geometry].run(q, *new, out=out)
            return out
        _, lse = self._of_new[geometry].run(q, *new, out=out, return_lse=True, lse_base="ln")
        part, lse_of_part = self._of_cached[geometry].run(q, pages, return_lse=True, lse_base="ln")
        return self._merge_states(out, lse, part, lse_of_part, out=out, lse=lse)

    def _plan(self, wrapper: Any, *args: Any, **options: Any) -> None:
        """Plans in a free pinned buffer, from which FlashInfer queues the upload."""
        wrapper._pin_memory_int_workspace_buffer = self._uploads.next_buffer()
        wrapper.plan(*args, **options)
        self._uploads.record()
