"""Combines two backends over one KV pool: one for decodes, one for all other steps."""

from __future__ import annotations

import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode, Int32Array
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.rotation import QKNorms, Rotation
from attention.sparse import IndexInputs
from attention.step_shape import StepShape


class HybridBackend(AttentionBackend):
    """Uses `decode` for steps in which every row has one token, and `prefill` for all others. Both read and write one
    pool.

    Args:
        masked: the one of the two that takes steps with a mask.
    """

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, *, masked: AttentionBackend) -> None:
        assert prefill.token_to_kv_pool is decode.token_to_kv_pool, "one pool"
        super().__init__(prefill.layers, prefill.token_to_kv_pool)
        self._prefill = prefill
        self._decode = decode
        self._masked = masked
        self._now = prefill
        self.captures_cuda_graphs = prefill.captures_cuda_graphs and decode.captures_cuda_graphs
        self.plans_on_host = decode.plans_on_host

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._batch = batch
        self._now = self._decode if batch.mode is ForwardMode.DECODE else self._prefill
        if batch.mask is not None:
            self._now = self._masked
        self._now.init_forward_metadata(batch)

    def capture_shapes(self, shape: StepShape, max_model_len: int) -> list[StepShape]:
        return self._of(shape).capture_shapes(shape, max_model_len)

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        self._batch = batch
        self._now = self._of(shape)
        self._now.prepare_capture(batch, shape)

    def prepare_replay(self, shape: StepShape, prefix_lens: Int32Array, extend_lens: Int32Array) -> None:
        self._of(shape).prepare_replay(shape, prefix_lens, extend_lens)

    def forward(
        self, qkv: torch.Tensor, layer: AttentionLayer, rotation: Rotation, norms: QKNorms | None
    ) -> torch.Tensor:
        return self._now.forward(qkv, layer, rotation, norms)

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return self._now.attend(q, layer)

    def attend_stored(
        self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, index: IndexInputs | None
    ) -> torch.Tensor:
        return self._now.attend_stored(q, layer, heads, index)

    def _of(self, shape: StepShape) -> AttentionBackend:
        return self._decode if shape.is_decode else self._prefill
