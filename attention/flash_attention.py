"""The backend of Hopper GPUs: FlashAttention-3 over the paged KV cache, one call a layer for any mixture of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from attention.backend import AttentionBackend
from attention.fa3 import load_provider
from attention.forward_batch import ForwardBatch, PagedMetadata
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer
from configs.errors import ConfigError, EngineError

# FA3 chooses: up to 19 times as fast as one piece for one row of 32k tokens (H200, two KV heads). A row's last bits
# then depend on what else is in the batch.
_NUM_SPLITS = 0
_MAX_PAGE_SIZE = 256


class FlashAttentionBackend(AttentionBackend):
    """Attention by FlashAttention-3, sized by each layer's own `tp_q_head_num` and `tp_k_head_num`.

    Unused entries of the page table, unused pages and, for pages below 128 tokens, unused slots of a row's last page
    are never read. Larger pages are fetched whole for prompts: there an unused slot must hold finite numbers, which
    weigh nothing, because zero times NaN is NaN.

    Args:
        provider: `sgl_kernel` or `flash_attention_3`. None: the first of them that is installed.
        use_scheduler_metadata: make FA3's plan once a decode step for all layers without a window, and not in each:
            1 to 5 % of a decode step (H200, Qwen3-8B and 0.6B, 1 to 256 rows).

    Raises:
        ConfigError: dtype, page size, a layer's shape, this device or this build of FA3 is unfit.
    """

    captures_cuda_graphs: ClassVar[bool] = True

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        *,
        provider: str | None = None,
        use_scheduler_metadata: bool = True,
    ) -> None:
        super().__init__(layers, req_to_token_pool, token_to_kv_pool)
        _check(layers, token_to_kv_pool)
        self._provider = load_provider(provider, token_to_kv_pool.device)
        geometries: dict[tuple[int | float | None, ...], list[AttentionLayer]] = {}
        for layer in layers:
            geometry = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.window, layer.softcap)
            geometries.setdefault(geometry, []).append(layer)
        for alike in geometries.values():
            self._provider.probe(
                alike[0],
                page_size=token_to_kv_pool.page_size,
                dtype=token_to_kv_pool.dtype,
                device=token_to_kv_pool.device,
            )
        self._planned: list[list[AttentionLayer]] = []
        if use_scheduler_metadata:
            self._planned = [alike for alike in geometries.values() if alike[0].window is None]
        self._scheduler_metadata: dict[int, torch.Tensor] = {}  # by layer id
        self._paged: PagedMetadata | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepares for `batch`, whose `paged` tensors are read by `attend` and kept.

        With scheduler metadata this queues a kernel, which belongs into the graph that `attend` is captured in.
        """
        super().init_forward_metadata(batch)
        paged = batch.paged
        if paged is None:
            raise EngineError("attention_backend=flash_attention got a batch without paged metadata")
        _check_paged(paged)
        self._paged = paged
        self._scheduler_metadata.clear()
        if paged.max_seqlen_q > 1:
            return
        pool = self.token_to_kv_pool
        for alike in self._planned:
            metadata = self._provider.scheduler_metadata(
                paged, alike[0], dtype=pool.dtype, page_size=pool.page_size, num_splits=_NUM_SPLITS
            )
            for layer in alike:
                self._scheduler_metadata[layer.layer_id] = metadata

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        paged = self._paged
        assert paged is not None, "attend before init_forward_metadata"
        k_pages, v_pages = self.token_to_kv_pool.pages(layer.layer_id)
        out = self._provider.attend(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k_pages,
            v_pages,
            paged,
            layer,
            num_splits=_NUM_SPLITS,
            scheduler_metadata=self._scheduler_metadata.get(layer.layer_id),
        )
        return out.view(q.shape)


def _check(layers: Sequence[AttentionLayer], pool: TokenToKVPool) -> None:
    if pool.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"attention_backend=flash_attention serves bfloat16 and float16, not dtype={pool.dtype}; set dtype, or "
            "attention_backend=torch_native"
        )
    if not 1 <= pool.page_size <= _MAX_PAGE_SIZE or pool.page_size & (pool.page_size - 1):
        raise ConfigError(
            f"kv_cache.page_size={pool.page_size} does not fit attention_backend=flash_attention; choose a power of "
            f"two from 1 to {_MAX_PAGE_SIZE}"
        )
    for layer in layers:
        if layer.tp_k_head_num < 1 or layer.tp_q_head_num % layer.tp_k_head_num:
            raise ConfigError(
                f"attention_backend=flash_attention needs query heads in equal groups: layer {layer.layer_id} has "
                f"{layer.tp_q_head_num} query heads over {layer.tp_k_head_num} KV heads on this rank"
            )
        if layer.window is not None and layer.window < 1:
            raise ConfigError(f"layer {layer.layer_id} has sliding window {layer.window}; it must be at least 1")
        for pages in pool.pages(layer.layer_id):
            assert pages.shape[1:] == (pool.page_size, layer.tp_k_head_num, layer.head_dim), "pool of other layers"
            assert pages.stride(-1) == 1, "FA3 reads heads that are contiguous"


def _check_paged(paged: PagedMetadata) -> None:
    """FA3 takes other widths for page ids, and reads rows that are not there: once a step, this is cheap."""
    lens, starts, table = paged.cache_seqlens, paged.cu_seqlens_q, paged.page_table
    assert lens.dtype == starts.dtype == table.dtype == torch.int32, "paged metadata is int32"
    assert len(lens) == len(table) == len(starts) - 1, f"{len(lens)} lengths, {len(table)} rows of pages"
    assert table.stride(1) == lens.stride(0) == starts.stride(0) == 1, "paged metadata is contiguous"
