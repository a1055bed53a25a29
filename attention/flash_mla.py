"""The FlashMLA backend for Hopper GPUs: kernels of sglang-kernel for latent attention, beside Triton's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from attention.backend import register
from attention.fa3_builds import SGLANG_KERNEL
from attention.forward_batch import ForwardBatch, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.sparse import rows_of
from attention.step_shape import StepShape
from attention.triton_backend import TritonBackend
from configs.errors import ConfigError

_FEW_TOKENS, _MOST_TOKENS = 8, 512
"""An eager step with more new tokens in some row, or more in all rows, is served by Triton. Steps with drafts usually
have fewer. Not measured."""
_HEADS_UNIT, _KEYS_UNIT = 64, 128
"""The kernel for sparse attention needs multiples of these numbers of heads and of chosen keys."""


@register("flash_mla")
class FlashMlaBackend(TritonBackend):
    """Attention by FlashMLA, in the absorbed form. FlashMLA serves decodes, steps with few new tokens in each row,
    captured steps, and attention over the chosen keys of sparse layers. Triton's kernels serve prompts and masks.

    FlashMLA's kernel for decodes needs the same number of tokens in each row. If a step has a row with several, each
    token becomes a row, with the pages of its own row and the tokens up to itself.

    Raises:
        ConfigError: FlashMLA cannot be imported.
    """

    def __init__(self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> None:
        super().__init__(layers, token_to_kv_pool)
        self._library = _load()
        self._paged: PagedMetadata | None = None  # None if Triton's kernels serve the step
        self._schedule: Any = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        longest = batch.paged.max_seqlen_q
        are_few = longest == 1 or (longest <= _FEW_TOKENS and batch.num_tokens <= _MOST_TOKENS)
        if are_few and batch.mask is None:
            self._prepare(batch)
        else:
            self._paged = None

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        super().prepare_capture(batch, shape)
        self._prepare(batch)

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        if self._paged is None:
            return super().attend_latent(q, layer, heads)
        return heads.values(self._attend(heads.absorb(q), layer, self._paged).flatten(1))

    def attend_chosen(self, q: torch.Tensor, layer: LatentLayer, chosen: PagedMetadata) -> torch.Tensor:
        if q.dtype is torch.float16:  # FlashMLA's kernel has no such numbers
            return super().attend_chosen(q, layer, chosen)
        num_heads, slots = layer.tp_q_head_num, chosen.page_table
        latents, *_ = self.token_to_kv_pool.pages(layer.layer_id)
        out, *_ = self._library.flash_mla_sparse_fwd(
            _padded(q.view(len(q), num_heads, -1), 1, _HEADS_UNIT),
            latents.view(-1, 1, layer.head_dim),
            _padded(slots, 1, _KEYS_UNIT).unsqueeze(1),
            layer.scale,
            topk_length=chosen.cache_seqlens,
        )
        return out[:, :num_heads].flatten(1)

    def _prepare(self, batch: ForwardBatch) -> None:
        """Prepares for a step that FlashMLA serves."""
        # The first layer's call fills the schedule, on the device.
        self._schedule, _ = self._library.get_mla_metadata()
        self._paged = batch.paged
        if batch.paged.max_seqlen_q > 1:
            rows, positions = rows_of(batch)
            self._paged = PagedMetadata.of_single_tokens((positions + 1).int(), batch.paged.page_table[rows])

    def _attend(self, q: torch.Tensor, layer: LatentLayer, paged: PagedMetadata) -> torch.Tensor:
        """Absorbed queries q [num_rows, tp_q_head_num * head_dim] -> [num_rows, 1, tp_q_head_num, latent_dim]."""
        latents, *_ = self.token_to_kv_pool.pages(layer.layer_id)
        out: torch.Tensor
        out, _ = self._library.flash_mla_with_kvcache(
            q.view(len(q), 1, layer.tp_q_head_num, layer.head_dim),
            latents.unsqueeze(2),
            paged.page_table,
            paged.cache_seqlens,
            layer.latent_dim,
            self._schedule,
            softmax_scale=layer.scale,
        )
        return out


def _padded(x: torch.Tensor, dim: int, unit: int) -> torch.Tensor:
    """`x` with zeros at the end of `dim`, so that `unit` divides its size."""
    missing = -x.shape[dim] % unit
    return x if not missing else F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing))


def _load() -> ModuleType:
    try:
        from sgl_kernel import flash_mla, flashmla_ops  # noqa: F401 -- flash_mla can be imported without its kernels
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"attention backend flash_mla finds no FlashMLA ({error}): install sglang-kernel {SGLANG_KERNEL} (the "
            "`cuda` extra), or set attention.backend=triton"
        ) from None
    return flash_mla
