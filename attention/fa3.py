"""The FlashAttention-3 backend for Hopper GPUs. For steps that only decode, `auto` uses the faster Triton backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from attention.backend import AttentionBackend, register
from attention.fa3_builds import load_provider, sinks_of
from attention.forward_batch import ForwardBatch
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.step_shape import ANY_LEN, FEW_ROWS, StepShape

_UNSPLIT_KEYS = 8  # keys of the longest row, per token of the shape, up to which a captured shape does not split keys


@register("fa3")
class FlashAttentionBackend(AttentionBackend):
    """Attention by FlashAttention-3: one call per layer, sized by the layer's `tp_q_head_num` and `tp_k_head_num`.

    Decodes, prompts, chunks after a cached prefix and mixtures of them use the same call. Unused page-table entries and
    unused pages are never read. In pages below 128 tokens, unused slots of a row's last page are not read either.
    Larger pages are read whole for prompts: their unused slots must hold finite numbers, which get weight zero, because
    zero times NaN is NaN.

    Args:
        provider: the build of FA3: `sgl_kernel` or `flash_attention_3`. If None, the first installed one.

    Raises:
        ConfigError: no build of FA3 is installed, or the build lacks a feature that the layers need.
    """

    captures_cuda_graphs = True

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        token_to_kv_pool: TokenToKVPool,
        *,
        provider: str | None = None,
    ) -> None:
        super().__init__(layers, token_to_kv_pool)
        self._provider = load_provider(provider)
        geometries: dict[tuple[int | float | None, ...], list[AttentionLayer]] = {}
        for layer in layers:
            shape = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim)
            features = (layer.window, layer.softcap, layer.chunk, layer.sinks is not None)
            geometries.setdefault((*shape, *features), []).append(layer)
        for alike in geometries.values():
            self._provider.probe(
                alike[0],
                page_size=token_to_kv_pool.page_size,
                dtype=token_to_kv_pool.dtype,
                device=token_to_kv_pool.device,
            )
        self._sinks = {layer.layer_id: sinks_of(layer) for layer in layers}
        self._num_splits = 0

    def capture_shapes(self, shape: StepShape, max_model_len: int) -> list[StepShape]:
        return unsplit_shapes(shape, max_model_len)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Stores the `paged` tensors of `batch` for `attend`. Queues no kernel."""
        super().init_forward_metadata(batch)
        batch.paged.check()
        assert batch.mask is None, "FA3 has no masks"
        self._num_splits = 0

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        """Allows FA3 to split keys only for shapes that may have long rows."""
        super().prepare_capture(batch, shape)
        self._num_splits = 0 if shape.max_seq_len == ANY_LEN else 1

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        k_pages, v_pages = self.token_to_kv_pool.pages(layer.layer_id)
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        paged, sinks = self.batch_of(layer).paged, self._sinks[layer.layer_id]
        out = self._provider.attend(heads, k_pages, v_pages, paged, layer, sinks=sinks, num_splits=self._num_splits)
        return out.view(q.shape)

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        """Attends in the absorbed form in every step."""
        [pages] = self.token_to_kv_pool.pages(layer.layer_id)
        widths, paged = [layer.latent_dim, layer.rope_dim], self.batch_of(layer).paged
        latents, keys = torch.split(pages.unsqueeze(2), widths, dim=-1)
        qv, q_rope = torch.split(heads.absorb(q).view(len(q), layer.tp_q_head_num, -1), widths, dim=-1)
        out = self._provider.attend(q_rope, keys, latents, paged, layer, qv=qv, num_splits=self._num_splits)
        return heads.values(out.flatten(1))


def unsplit_shapes(shape: StepShape, max_model_len: int) -> list[StepShape]:
    """Returns `shape`, and before or instead of it a shape for short rows, in which FA3 does not split keys.

    After a split, FA3's combine kernel runs a program for every token that a row may have, and most of them are empty
    if there are many rows. With 12 decodes of 600 tokens beside a prompt, 512 tokens in all, a layer takes 21 us
    without a split instead of 201 (benchmarks/prompt_attention.py; H200, 16 query heads).
    """
    if shape.is_decode or shape.num_sampled <= FEW_ROWS:
        return [shape]
    short = dataclasses.replace(shape, max_seq_len=_UNSPLIT_KEYS * shape.num_tokens)
    return [short, shape] if short.max_seq_len < max_model_len else [short]
