"""FlashInfer's wrapper for latent layers (MLA). It attends only in the absorbed form."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from attention.flashinfer_plans import Geometry, PlanInputs, Uploads


class LatentWrapper:
    """Plans and runs attention for latent layers of one geometry.

    FlashInfer allocates pinned memory and a workspace for each plan, and does not say when they are free. This class
    holds the pinned memory until its upload is done.

    Args:
        module: `flashinfer.mla`.
        workspaces: the float workspace and, for plans of a graph, the integer one.
        static: int32 `qo_indptr`, `kv_indptr`, `kv_indices` and `kv_len_arr` of a graph. Empty for eager steps.
    """

    def __init__(
        self,
        module: Any,
        geometry: Geometry,
        kernels: Literal["fa2", "fa3"],
        workspaces: tuple[torch.Tensor, torch.Tensor],
        uploads: Uploads,
        static: dict[str, torch.Tensor],
    ) -> None:
        latent_dim = geometry.latent_dim
        assert latent_dim is not None, "of latent layers"
        self._module, self._geometry, self._widths = module, geometry, (latent_dim, geometry.head_dim - latent_dim)
        # Zero heads pad the number of heads to a power of two. Otherwise a token may end in the middle of a program's
        # tile, and FlashInfer refuses to plan that for some lengths.
        self._num_heads = 1 << (geometry.num_q_heads - 1).bit_length()
        self._uploads, self._in_graph = uploads, bool(static)
        workspace, self._int_workspace = workspaces
        given = {"use_cuda_graph": self._in_graph, **static}
        self._wrapper = module.BatchMLAPagedAttentionWrapper(workspace, backend=kernels, **given)
        self._is_first = True

    def plan(self, inputs: PlanInputs, indices: torch.Tensor, page_size: int, dtype: torch.dtype, causal: bool) -> None:
        """Plans a step and queues the upload of the plan.

        Args:
            causal: may be False if each row has one new token.
        """
        self._plan(inputs, indices, page_size, dtype, causal)
        if self._is_first and self._in_graph:
            # FlashInfer writes a graph's later plans to the memory of the plan before: from now on, to our workspace.
            self._wrapper._planned_backend._int_workspace_buffer = self._int_workspace
            self._plan(inputs, indices, page_size, dtype, causal)
        self._is_first = False

    def run(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Attends in the absorbed form.

        Args:
            q: [num_tokens, tp_q_head_num, head_dim], absorbed.
            pages: [num_pages, page_size, head_dim].

        Returns:
            Weighted sums of latents [num_tokens, tp_q_head_num, latent_dim].
        """
        num_heads = q.shape[1]
        out: torch.Tensor = self._wrapper.run(query=F.pad(q, (0, 0, 0, self._num_heads - num_heads)), kv_cache=pages)
        return out[:, :num_heads]

    def _plan(
        self, inputs: PlanInputs, indices: torch.Tensor, page_size: int, dtype: torch.dtype, causal: bool
    ) -> None:
        self._wrapper.plan(
            metadata=self._module.MLAPlanMetadata.csr(inputs.qo_indptr, inputs.kv_indptr, indices, inputs.seq_lens),
            num_heads=self._num_heads,
            head_dim_ckv=self._widths[0],
            head_dim_kpe=self._widths[1],
            page_size=page_size,
            causal=causal,
            sm_scale=self._geometry.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        planned = self._wrapper._planned_backend
        self._uploads.hold(planned._pin_memory_int_workspace_buffer)
        planned._pin_memory_int_workspace_buffer = None
