"""FlashInfer's attention of prompts in two parts: over the new tokens, whose keys and values lie side by side, and over
the cached tokens of their rows, which are on pages. FlashInfer merges the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from attention.flashinfer_plans import Geometry, PlanInputs, Uploads
from attention.forward_batch import ForwardBatch, ForwardMode

# Number of new tokens from which a step is served in two parts, and the largest number of cached tokens for each new
# one. Not measured.
_LEAST_NEW, _MOST_CACHED = 1024, 1


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """FlashInfer's wrappers for layers of one geometry."""

    new: Any
    cached: Any


class RaggedPrompts:
    """Plans and runs eager steps with many new tokens, for layers without chunks or latents.

    Args:
        module: `flashinfer`.
        geometries: of layers of any kind.
        float_workspace: memory that all wrappers share.
        int_workspace_bytes: largest size of a plan.
    """

    def __init__(
        self,
        module: Any,
        geometries: Iterable[Geometry],
        kernels: Literal["fa2", "fa3"],
        float_workspace: torch.Tensor,
        int_workspace_bytes: int,
        uploads: Uploads,
        page_size: int,
    ) -> None:
        from attention.kernels.flat_pages import flatten_pages

        self._flatten_pages, self._module, self._uploads, self._page_size = flatten_pages, module, uploads, page_size
        self._wrappers: dict[Geometry, _Wrappers] = {}
        for geometry in geometries:
            if geometry.chunk is None and geometry.latent_dim is None:
                new = module.BatchPrefillWithRaggedKVCacheWrapper(float_workspace, "NHD", backend=kernels)
                cached = module.BatchPrefillWithPagedKVCacheWrapper(float_workspace, "NHD", backend=kernels)
                for wrapper in (new, cached):
                    wrapper._int_workspace_buffer = float_workspace.new_empty(int_workspace_bytes)
                self._wrappers[geometry] = _Wrappers(new, cached)
        self._has_cached = False

    def plan(self, batch: ForwardBatch, options: Callable[[Geometry], dict[str, Any]]) -> frozenset[Geometry]:
        """Plans the step for the geometries for which two parts are faster, and returns these. Queues the uploads of
        the plans, and does not wait for the device.

        Args:
            options: returns the arguments of plans that depend only on the geometry.
        """
        num_new, num_cached = int(batch.extend_lens.sum()), int(batch.prefix_lens.sum())
        if batch.mode is ForwardMode.DECODE or num_new < _LEAST_NEW or num_cached > _MOST_CACHED * num_new:
            return frozenset()
        # FlashInfer would count a window over the cached tokens alone from their end.
        planned = [it for it in self._wrappers if it.window is None or not num_cached]
        nothing = np.zeros_like(batch.extend_lens)
        new = PlanInputs.of(nothing, batch.extend_lens, self._page_size)
        cached = PlanInputs.of(batch.prefix_lens, nothing, self._page_size)
        paged, self._has_cached = batch.paged, num_cached > 0
        pages = torch.empty(cached.num_pages, dtype=torch.int32, device=paged.page_table.device)
        if num_cached:
            lens = paged.cache_seqlens - paged.cu_seqlens_q.diff()
            self._flatten_pages(replace(paged, cache_seqlens=lens), self._page_size, pages, None)
        for geometry in planned:
            heads = geometry.num_q_heads, geometry.num_k_heads, geometry.head_dim
            same = options(geometry)
            of_new = self._with_buffer(self._wrappers[geometry].new)
            of_new.plan(new.qo_indptr, new.qo_indptr, *heads, causal=True, **same)
            self._uploads.record()
            if num_cached:
                of_pages = cached.kv_indptr, pages, cached.last_page_len
                of_cached = self._with_buffer(self._wrappers[geometry].cached)
                of_cached.plan(new.qo_indptr, *of_pages, *heads, self._page_size, causal=False, **same)
                self._uploads.record()
        return frozenset(planned)

    def run(
        self,
        geometry: Geometry,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Attends to the new tokens of each row up to the query's own, and to all cached tokens of the row.

        Args:
            q: [num_tokens, num_q_heads, head_dim].
            new: keys and values of the new tokens, [num_tokens, num_k_heads, head_dim] each.
            pages: keys and values of the pool, [num_pages, page_size, num_k_heads, head_dim] each.

        Returns:
            A tensor like q, contiguous.
        """
        wrappers, out = self._wrappers[geometry], torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not self._has_cached:
            wrappers.new.run(q, *new, out=out)
            return out
        _, lse = wrappers.new.run(q, *new, out=out, return_lse=True)
        by_cached, cached_lse = wrappers.cached.run(q, pages, return_lse=True)
        self._module.merge_state_in_place(out, lse, by_cached, cached_lse)
        return out

    def _with_buffer(self, wrapper: Any) -> Any:
        """The wrapper, which writes its next plan to a free pinned buffer."""
        wrapper._pin_memory_int_workspace_buffer = self._uploads.next_buffer()
        return wrapper
