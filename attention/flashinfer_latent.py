"""FlashInfer's wrapper for latent layers (MLA), which attends in the absorbed form alone."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from attention.flashinfer_plans import Geometry, PlanInputs, Uploads


class LatentWrapper:
    """Plans and runs for latent layers of one geometry.

    It makes pinned memory and a workspace of its own for each plan, and says of neither when it is free: pinned memory
    is kept here until it is on the device.

    Args:
        module: `flashinfer.mla`.
        workspaces: of floats and, for a graph's plans, of integers.
        static: where a graph finds the pages: int32 `qo_indptr`, `kv_indptr`, `kv_indices` and `kv_len_arr`. Empty:
            it is not for a graph.
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
        # Heads of zeros fill the next power of two: a token with another number of them may end in the middle of a
        # program's tile, which FlashInfer refuses to plan for some lengths.
        self._num_heads = 1 << (geometry.num_q_heads - 1).bit_length()
        self._uploads, self._in_graph = uploads, bool(static)
        workspace, self._int_workspace = workspaces
        given = {"use_cuda_graph": self._in_graph, **static}
        self._wrapper = module.BatchMLAPagedAttentionWrapper(workspace, backend=kernels, **given)
        self._is_first = True

    def plan(self, inputs: PlanInputs, indices: torch.Tensor, page_size: int, dtype: torch.dtype, causal: bool) -> None:
        """Queues the upload of a plan.

        Args:
            causal: not needed where each row has one new token.
        """
        self._plan(inputs, indices, page_size, dtype, causal)
        if self._is_first and self._in_graph:
            # The next plans of a graph are written where the last one was.
            self._wrapper._planned_backend._int_workspace_buffer = self._int_workspace
            self._plan(inputs, indices, page_size, dtype, causal)
        self._is_first = False

    def run(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents [num_tokens, tp_q_head_num, latent_dim].

        Args:
            q: [num_tokens, tp_q_head_num, head_dim], absorbed.
            pages: [num_pages, page_size, head_dim].
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
