"""The interface of an attention backend. attention/registry.py has those there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from attention.forward_batch import ForwardBatch, Int32Array
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.rotation import LatentNorm, QKNorms, Rotation
from attention.step_shape import StepShape
from configs.attention import BACKENDS

IMPLEMENTATIONS: dict[str, type[AttentionBackend]] = {}
"""Filled by `register`; attention/registry.py imports all that there are."""
_BackendT = TypeVar("_BackendT", bound="AttentionBackend")


def register(name: str) -> Callable[[type[_BackendT]], type[_BackendT]]:
    """Makes a class the backend that configs/attention.py describes as `name`."""
    assert name in BACKENDS, f"{name} is not in the table of what backends can do"

    def decorate(cls: type[_BackendT]) -> type[_BackendT]:
        IMPLEMENTATIONS[name] = cls
        return cls

    return decorate


class AttentionBackend(ABC):
    """Causal attention of new tokens over the paged KV cache, for the heads of one rank.

    A step calls `init_forward_metadata` once and then `forward` once for each layer, in any order. What does not depend
    on a layer's values (indices, masks, plans) is made in `init_forward_metadata`, never in `attend`. While a step is
    captured, `prepare_capture` takes its place; before each replay `prepare_replay` does.

    Which layers and steps it serves is what configs/attention.py says: constructors and steps refuse none of them, but
    for what a build of another package lacks. Those of backends with `Feature.EXACT` take `exact`.
    """

    captures_cuda_graphs: bool = False
    """Whether a step over static `ForwardBatch.paged` buffers can be captured in a CUDA graph and replayed."""
    plans_on_host: bool = False
    """See `BackendSpec`: whether `prepare_replay` of decodes has to know how long rows are."""

    def __init__(self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> None:
        for layer in layers:
            assert layer.tp_q_head_num % layer.tp_k_head_num == 0, f"unequal groups of query heads: {layer}"
            assert all(size is None or size > 0 for size in (layer.window, layer.chunk)), f"nothing is seen: {layer}"
            if layer.sinks is not None:
                shape, dtype = tuple(layer.sinks.shape), layer.sinks.dtype
                assert (shape, dtype) == ((layer.tp_q_head_num,), torch.float32), f"sinks of {shape}, {dtype}"
        self.layers = tuple(layers)
        self.token_to_kv_pool = token_to_kv_pool
        self._batch: ForwardBatch | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepares for `batch`. Page-table entries past a row's last page are never used."""
        self._batch = batch

    def batch_of(self, layer: AttentionLayer) -> ForwardBatch:
        """The step that was prepared, with slots and pages of the layer's pool."""
        assert self._batch is not None, "before init_forward_metadata"
        return self._batch.seen_by(layer.window)

    def capture_shapes(self, shape: StepShape, max_model_len: int) -> list[StepShape]:
        """The shapes, in order, to capture for the steps that `shape` holds: rows of other lengths may want others.

        The last one holds rows of `max_model_len` tokens. Where there is none, such steps run eagerly.
        """
        return [shape]

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        """Prepares for `batch`, static tensors of any step of `shape`, one of `capture_shapes`, before it is captured.

        The batch's host arrays are those of no particular step. What is queued here is captured.
        """
        self.init_forward_metadata(batch)

    def prepare_replay(  # noqa: B027 - who plans nothing has nothing to do
        self, shape: StepShape, prefix_lens: Int32Array, extend_lens: Int32Array
    ) -> None:
        """Prepares for a replay of what was captured of `shape`, whose static tensors are about to hold another step.

        What is queued here runs before the graph: where a backend plans on the host, it plans here.

        Args:
            prefix_lens: [rows of the step], without padding, on the host: tokens already in the cache.
            extend_lens: likewise: input tokens.
        """

    @abstractmethod
    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Attention over the pool, which already holds K and V of the new tokens.

        Args:
            q: [num_tokens, tp_q_head_num * head_dim], after norm and rotary embedding, in the pool's compute_dtype;
                rows may lie further apart than they are long.

        Returns:
            [num_tokens, tp_q_head_num * head_dim], contiguous.
        """

    def forward(
        self, qkv: torch.Tensor, layer: AttentionLayer, rotation: Rotation, norms: QKNorms | None
    ) -> torch.Tensor:
        """Norms and rotates the heads of the new tokens, writes their K and V to the pool, and attends.

        Args:
            qkv: [num_tokens, (tp_q_head_num + 2 * tp_k_head_num) * head_dim], contiguous; query columns may be changed.
            rotation: at the positions of the batch.
            norms: of query and key heads; None for none.

        Returns:
            As `attend`.
        """
        out_cache_loc = self.batch_of(layer).out_cache_loc
        q = rotation.norm_rotate_store(qkv, layer, norms, self.token_to_kv_pool, out_cache_loc)
        return self.attend(q, layer)

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        """Attention over a pool that already holds the new tokens' latents; of backends that serve such layers only.

        Args:
            q: [num_tokens, tp_q_head_num, nope_dim + rope_dim], the last columns after rotary embedding.

        Returns:
            [num_tokens, tp_q_head_num * v_dim], contiguous.
        """
        raise NotImplementedError(f"{type(self).__name__} serves no latent layers")

    def forward_latent(
        self,
        q: torch.Tensor,
        kept: torch.Tensor,
        layer: LatentLayer,
        heads: LatentHeads,
        rotation: Rotation,
        norm: LatentNorm,
    ) -> torch.Tensor:
        """Norms and rotates, writes what the pool keeps of the new tokens, and attends.

        Args:
            q: as for `attend_latent`, before rotary embedding; rotated in place.
            kept: [num_tokens, latent_dim + rope_dim]: the latent before its norm, the key before rotary embedding.
            rotation: at the positions of the batch.

        Returns:
            As `attend_latent`.
        """
        out_cache_loc = self.batch_of(layer).out_cache_loc
        rotation.norm_rotate_store_latent(q, kept, layer, norm, self.token_to_kv_pool, out_cache_loc)
        return self.attend_latent(q, layer, heads)
