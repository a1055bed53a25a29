"""The backend of the Triton kernels: any GPU that Triton compiles for, and every feature that a layer may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer
from configs.errors import ConfigError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256


class TritonBackend(AttentionBackend):
    """Steps in which every row has one token by `paged_decode`, all others by `paged_extend`.

    Unused entries of the page table, unused pages and unused slots of a row's last page are never read. The last bits
    of a row's answer do not depend on the other rows, but for a decode on how many there are: `paged_decode` cuts the
    keys of few rows into runs, of many it does not, and among prompts a decode goes through `paged_extend`.

    Raises:
        ConfigError: dtype, page size, a layer's shape or this device is unfit.
    """

    captures_cuda_graphs: ClassVar[bool] = True

    def __init__(self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> None:
        super().__init__(layers, token_to_kv_pool)
        _check_device(token_to_kv_pool.device)
        _check_pool(token_to_kv_pool)
        for layer in layers:
            _check_layer(layer, token_to_kv_pool)
        from attention.kernels.decode import paged_decode  # a CPU install has no Triton
        from attention.kernels.extend import paged_extend

        self._paged_decode, self._paged_extend = paged_decode, paged_extend
        self._paged: PagedMetadata | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Keeps the `paged` tensors of `batch`, which `attend` reads; queues nothing."""
        super().init_forward_metadata(batch)
        batch.paged.check()
        self._paged = batch.paged

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        paged = self._paged
        assert paged is not None, "attend before init_forward_metadata"
        k_pages, v_pages = self.token_to_kv_pool.pages(layer.layer_id)
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(heads.shape, dtype=q.dtype, device=q.device)
        if paged.max_seqlen_q == 1:
            self._paged_decode(heads, k_pages, v_pages, paged, layer, out=out)
        else:
            self._paged_extend(heads, k_pages, v_pages, paged, layer, out=out)
        return out.view(q.shape)


def _check_device(device: torch.device) -> None:
    try:
        from triton import knobs
    except ImportError as error:
        raise ConfigError(
            f"attention_backend=triton needs Triton, which cannot be imported ({error}); set "
            "attention_backend=torch_native"
        ) from error
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ConfigError(
            f"attention_backend=triton needs a GPU, and this is device {device}; set attention_backend=torch_native"
        )


def _check_pool(pool: TokenToKVPool) -> None:
    if pool.dtype not in _DTYPES:
        raise ConfigError(
            f"attention_backend=triton serves bfloat16, float16 and float32, not dtype={pool.dtype}; set dtype, or "
            "attention_backend=torch_native"
        )
    if pool.page_size < 1 or pool.page_size & (pool.page_size - 1):
        raise ConfigError(
            f"kv_cache.page_size={pool.page_size} does not fit attention_backend=triton; choose a power of two"
        )


def _check_layer(layer: AttentionLayer, pool: TokenToKVPool) -> None:
    if layer.tp_k_head_num < 1 or layer.tp_q_head_num % layer.tp_k_head_num:
        raise ConfigError(
            f"attention_backend=triton needs query heads in equal groups: layer {layer.layer_id} has "
            f"{layer.tp_q_head_num} query heads over {layer.tp_k_head_num} KV heads on this rank"
        )
    if layer.head_dim > _MAX_HEAD_DIM:
        raise ConfigError(
            f"attention_backend=triton serves heads of up to {_MAX_HEAD_DIM} elements: layer {layer.layer_id} has "
            f"head_dim={layer.head_dim}; set attention_backend=torch_native"
        )
    if layer.window is not None and layer.window < 1:
        raise ConfigError(f"layer {layer.layer_id} has sliding window {layer.window}; it must be at least 1")
    if layer.chunk is not None and layer.chunk < 1:
        raise ConfigError(f"layer {layer.layer_id} has attention chunks of {layer.chunk}; they must be at least 1")
    if layer.sinks is not None:
        sinks = layer.sinks
        assert sinks.shape == (layer.tp_q_head_num,), "one sink for each query head of this rank"
        assert sinks.dtype is torch.float32, "sinks are fp32"
        assert sinks.is_contiguous(), "sinks are contiguous"
    for pages in pool.pages(layer.layer_id):
        assert pages.shape[1:] == (pool.page_size, layer.tp_k_head_num, layer.head_dim), "pool of other layers"
        assert pages.is_contiguous(), "the kernels read pages that are contiguous"
