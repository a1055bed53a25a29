"""The interface of an attention backend. attention/registry.py lists the backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from attention.forward_batch import ForwardBatch, Int32Array, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.rotation import LatentNorm, QKNorms, Rotation
from attention.sparse import IndexInputs, SparseStep
from attention.step_shape import StepShape
from configs.attention import BACKENDS

IMPLEMENTATIONS: dict[str, type[AttentionBackend]] = {}
"""The class of each backend, by name. `register` fills this table when attention/registry.py imports the backends."""
_BackendT = TypeVar("_BackendT", bound="AttentionBackend")


def register(name: str) -> Callable[[type[_BackendT]], type[_BackendT]]:
    """Registers a class as the backend that configs/attention.py describes as `name`."""
    assert name in BACKENDS, f"{name} is not in the table of what backends can do"

    def decorate(cls: type[_BackendT]) -> type[_BackendT]:
        IMPLEMENTATIONS[name] = cls
        return cls

    return decorate


class AttentionBackend(ABC):
    """Causal attention of new tokens over the paged KV cache, for the heads of one rank.

    A step calls `init_forward_metadata` once and then `forward` once per layer, in any order. Work that does not depend
    on a layer's values (indices, masks, plans) belongs in `init_forward_metadata`, not in `attend`. For a captured
    step, `prepare_capture` is called instead, and `prepare_replay` before each replay.

    configs/attention.py says which layers and steps a backend serves. Constructors and steps do not check this again,
    except for features that only some builds of a package have. Those with `Feature.EXACT` take the argument `exact`.
    """

    captures_cuda_graphs: bool = False
    """Whether a step over static `ForwardBatch.paged` buffers can be captured in a CUDA graph and replayed."""
    plans_on_host: bool = False
    """Whether `prepare_replay` of a decode needs the rows' lengths on the host. See `BackendSpec`."""

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
        top_ks = {layer.top_k for layer in layers if isinstance(layer, LatentLayer) and layer.top_k is not None}
        assert len(top_ks) <= 1, f"sparse layers that see different numbers of keys: {top_ks}"
        self._top_k = next(iter(top_ks), None)
        self._sparse: SparseStep | None = None
        self._chosen: list[tuple[slice, PagedMetadata]] = []

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepares for the step `batch`. Page-table entries after a row's last page are never used."""
        self._batch = batch
        if self._top_k is not None:
            self.prepare_sparse(batch, int(batch.seq_lens.max()))

    def prepare_sparse(self, batch: ForwardBatch, most_keys: int) -> None:
        """Prepares sparse layers for a step in which no token may see more than `most_keys` keys. If that is at most
        their `top_k`, the step's attention is dense."""
        is_dense = self._top_k is None or most_keys <= self._top_k
        self._sparse, self._chosen = None if is_dense else SparseStep.of(batch, most_keys), []

    def batch_of(self, layer: AttentionLayer) -> ForwardBatch:
        """The prepared step, with the slots and pages of the layer's pool."""
        assert self._batch is not None, "before init_forward_metadata"
        return self._batch.seen_by(layer.window)

    def capture_shapes(self, shape: StepShape, max_model_len: int) -> list[StepShape]:
        """The shapes to capture for steps that fit `shape`, in order.

        A backend may want several shapes for rows of different lengths. The last shape holds rows of `max_model_len`
        tokens. If the list is empty, such steps run eagerly.
        """
        return [shape]

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        """Prepares for the capture of a step of `shape`, one of `capture_shapes`.

        The tensors of `batch` are static. Its host arrays belong to no particular step. Kernels that this method queues
        are captured too.
        """
        self.init_forward_metadata(batch)

    def prepare_replay(  # noqa: B027 - a backend without plans has nothing to do
        self, shape: StepShape, prefix_lens: Int32Array, extend_lens: Int32Array
    ) -> None:
        """Prepares for a replay of the graph of `shape`, before the graph fills its static tensors for the step.
        Kernels that this method queues run before the graph. A backend that plans on the host plans here.

        Args:
            prefix_lens: [number of the step's rows, without padding], host: number of tokens of each row in the cache.
            extend_lens: [number of the step's rows, without padding], host: number of input tokens of each row.
        """

    @abstractmethod
    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Attends over the pool, which already holds K and V of the new tokens.

        Args:
            q: [num_tokens, tp_q_head_num * head_dim] in the pool's compute_dtype, after norm and rotary embedding. The
                row stride may exceed the row length.

        Returns:
            [num_tokens, tp_q_head_num * head_dim], contiguous.
        """

    def forward(
        self, qkv: torch.Tensor, layer: AttentionLayer, rotation: Rotation, norms: QKNorms | None
    ) -> torch.Tensor:
        """Applies norms and rotary embedding to the new tokens' heads, writes their K and V to the pool, and attends.

        Args:
            qkv: [num_tokens, (tp_q_head_num + 2 * tp_k_head_num) * head_dim], contiguous. The query columns may be
                overwritten.
            rotation: the rotary embedding at the batch's positions.
            norms: norms of query and key heads, or None if the layer has none.

        Returns:
            The output of `attend`.
        """
        out_cache_loc = self.batch_of(layer).out_cache_loc
        q = rotation.norm_rotate_store(qkv, layer, norms, self.token_to_kv_pool, out_cache_loc)
        return self.attend(q, layer)

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        """Attends over a pool that already holds the new tokens' latents. Backends without `Feature.LATENT` lack it.

        Args:
            q: [num_tokens, tp_q_head_num, nope_dim + rope_dim], the last columns after the rotary embedding.

        Returns:
            [num_tokens, tp_q_head_num * v_dim], contiguous.
        """
        raise NotImplementedError(f"{type(self).__name__} serves no latent layers; please report this bug")

    def choose_keys(self, index: IndexInputs, layer: LatentLayer, step: SparseStep) -> torch.Tensor:
        """The keys with the largest index scores. Backends without `Feature.SPARSE` lack it.

        Returns:
            [num_tokens, top_k] int32: the result of `SparseStep.choose`. Slots at the end of tokens that see fewer keys
            may be undefined.
        """
        raise NotImplementedError(f"{type(self).__name__} serves no sparse layers; please report this bug")

    def attend_chosen(self, q: torch.Tensor, layer: LatentLayer, chosen: PagedMetadata) -> torch.Tensor:
        """Attends over chosen keys, in the absorbed form. Backends without `Feature.SPARSE` lack it.

        Args:
            q: [num_tokens, tp_q_head_num * head_dim], contiguous.
            chosen: one row per token. Its page table lists the chosen slots, as if pages had one slot.

        Returns:
            [num_tokens, tp_q_head_num * head_dim], or only the latents [num_tokens, tp_q_head_num * latent_dim].
        """
        raise NotImplementedError(f"{type(self).__name__} serves no sparse layers; please report this bug")

    def forward_latent(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        layer: LatentLayer,
        heads: LatentHeads,
        rotation: Rotation,
        norm: LatentNorm,
        index: IndexInputs | None = None,
    ) -> torch.Tensor:
        """Applies norm and rotary embedding, writes the new tokens' latents and keys to the pool, and attends. If the
        layer has a `top_k` and the step may have a token with more keys, each token sees those with the largest index
        scores.

        Args:
            q: [num_tokens, tp_q_head_num, nope_dim + rope_dim]. The rotary embedding is applied in place.
            latents: [num_tokens, latent_dim + rope_dim]: the latent before its norm, and the key before its rotation.
            rotation: the rotary embedding at the batch's positions.
            index: the output of the layer's indexer. If None, tokens see the keys that the last layer with an indexer
                chose.

        Returns:
            The output of `attend_latent`.
        """
        out_cache_loc = self.batch_of(layer).out_cache_loc
        rotation.norm_rotate_store_latent(q, latents, layer, norm, self.token_to_kv_pool, out_cache_loc)
        if index is not None:
            self.token_to_kv_pool.set_index(layer.layer_id, out_cache_loc, index.k)
        return self.attend_stored(q, layer, heads, index)

    def attend_stored(
        self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads, index: IndexInputs | None
    ) -> torch.Tensor:
        """Attends over a pool that already holds the new tokens' latents and index keys: over all keys, or, in sparse
        steps, over the chosen ones. Arguments and result are those of `forward_latent`, with `q` rotated."""
        if layer.top_k is None or self._sparse is None:
            return self.attend_latent(q, layer, heads)
        if index is not None:
            self._chosen = [
                (tokens, part.paged(self.choose_keys(IndexInputs(*(it[tokens] for it in index)), layer, part)))
                for tokens, part in self._sparse.parts()
            ]
        out = [
            heads.values(self.attend_chosen(heads.absorb(q[tokens]), layer, chosen)) for tokens, chosen in self._chosen
        ]
        return out[0] if len(out) == 1 else torch.cat(out)
