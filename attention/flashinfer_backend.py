"""The FlashInfer backend. It plans on the host, once per step for all layers with the same geometry.

One paged call per layer serves all steps, because the pool already holds the new tokens' keys and values. The exception
is an eager step with one long prompt, which attention/flashinfer_ragged.py serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from attention.backend import AttentionBackend, register
from attention.flashinfer_latent import LatentWrapper
from attention.flashinfer_plans import Geometry, PlanInputs, Uploads, load_flashinfer
from attention.flashinfer_ragged import RaggedPrompts
from attention.forward_batch import ForwardBatch, ForwardMode, Int32Array, Int64Array, NewTokenMask
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.rotation import QKNorms, Rotation
from attention.step_shape import FEW_ROWS, StepShape
from configs.errors import ConfigError, EngineError

_FLOAT_WORKSPACE_BYTES = 128 << 20  # the size that FlashInfer recommends
_INT_WORKSPACE_BYTES = 8 << 20  # the size that its wrappers need

Kernels = Literal["decode", "fa2", "fa3"]
"""decode: one token per row. fa2: any rows; groups query heads and splits keys. fa3: Hopper kernels for prompts, which
read a row's keys again for each query head and each 128 tokens, and never split keys."""


class _Listed(NamedTuple):
    """Identifies one list of pages. Layers with equal values share the list."""

    windowed: bool
    """Whether these are pages of the window pool."""
    chunk: int | None
    """Tokens per chunk. The list then starts, for each row, at the page in which its first new token's chunk begins. If
    None, the list has all pages."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """Tensors that the graph of one shape reads."""

    kernels: Kernels
    wrappers: dict[Geometry, Any]
    indices: dict[_Listed, torch.Tensor]
    """Pages of all rows, int32, with room for the largest number."""


class _Mask(NamedTuple):
    """A step's mask for layers of one geometry."""

    packed: torch.Tensor
    begins: torch.Tensor
    """Both tensors are written by `pack_mask`, which describes them."""
    max_len: int
    """Largest number of new tokens of a row."""


@register("flashinfer")
class FlashInferBackend(AttentionBackend):
    """Attention by FlashInfer's wrappers, with one plan per `Geometry`, or two for a long prompt.

    FlashInfer compiles its kernels at their first use, which takes minutes, and stores them on disk. Here that happens
    while a rank loads. Unused page-table entries and unused pages are never read.

    Args:
        prompt_kernels: kernels for steps with prompts only, and for captured steps with few rows. If None, fa3 on
            Hopper, but fa2 on other GPUs and for FP8 pools. Other steps with prompts, and steps with masks, use fa2.

    Raises:
        ConfigError: FlashInfer is not installed, or its kernels cannot be compiled or run here.
    """

    captures_cuda_graphs = True
    plans_on_host = True

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        token_to_kv_pool: TokenToKVPool,
        *,
        prompt_kernels: Literal["fa2", "fa3"] | None = None,
    ) -> None:
        super().__init__(layers, token_to_kv_pool)
        device = token_to_kv_pool.device
        self._library = load_flashinfer(device)
        from attention.kernels.flat_pages import flatten_pages

        self._flatten_pages = flatten_pages
        # With FP8 keys, fa3 accepts only FP8 queries.
        has_fa3 = self._library.has_fa3 and token_to_kv_pool.dtype is token_to_kv_pool.compute_dtype
        self._prompt_kernels: Literal["fa2", "fa3"] = prompt_kernels or ("fa3" if has_fa3 else "fa2")
        self._geometry_of = {layer.layer_id: Geometry.of(layer) for layer in layers}
        self._geometries = tuple(dict.fromkeys(self._geometry_of.values()))
        # Zeros, as FlashInfer requires. All wrappers share this buffer: each kernel reads it before the next one
        # writes.
        self._float_workspace = torch.zeros(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # A plan stays in its buffer for one step. Plans of one step need separate buffers; steps share them.
        self._int_workspaces = {
            geometry: torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            for geometry in self._geometries
        }
        self._uploads = Uploads(_INT_WORKSPACE_BYTES, device)
        self._latent_uploads = Uploads(0, device)  # FlashInfer allocates this memory
        kinds: set[Kernels] = {"decode", "fa2", self._prompt_kernels}
        self._eager = {
            (kernels, geometry): self._wrapper(kernels, geometry)
            for kernels in sorted(kinds)
            for geometry in self._geometries
        }
        for kernels, geometry in self._eager:
            self._probe(kernels, geometry)
        self._captured: dict[StepShape, _Captured] = {}
        self._now: dict[Geometry, Any] = {}
        self._ragged = RaggedPrompts(
            self._library.module,
            {
                geometry: wrapper
                for (kernels, geometry), wrapper in self._eager.items()
                # In FP8, attention must see keys that are rounded like those of the pool.
                if kernels == self._prompt_kernels and token_to_kv_pool.dtype is token_to_kv_pool.compute_dtype
            },
            self._prompt_kernels,
            self._float_workspace,
            _INT_WORKSPACE_BYTES,
            self._uploads,
            token_to_kv_pool.page_size,
        )
        self._ragged.load_kernels(token_to_kv_pool.compute_dtype)
        self._long_prompt_of: frozenset[Geometry] = frozenset()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plans on the host, and queues the uploads and a few small kernels. Waits for nothing.

        Raises:
            EngineError: the mask has more bits than FlashInfer can count.
        """
        super().init_forward_metadata(batch)
        batch.paged.check()
        # A row's only new token sees itself with or without a mask.
        mask = None if batch.mode is ForwardMode.DECODE else batch.mask
        assert mask is None or all(it.latent_dim is None for it in self._geometries), "a mask over latents"
        kernels = self._kernels_of(batch.mode) if mask is None else "fa2"
        self._long_prompt_of = frozenset() if mask is not None else self._ragged.plan(batch, self._options_of)
        on_pages = [it for it in self._geometries if it not in self._long_prompt_of]
        lists = {self._list_of(it, masked=mask is not None) for it in on_pages}
        inputs = self._inputs(lists, batch.prefix_lens, batch.extend_lens)
        device = batch.paged.page_table.device
        indices = {which: torch.empty(it.num_pages, dtype=torch.int32, device=device) for which, it in inputs.items()}
        self._list_pages(batch, indices)
        self._now = {geometry: self._eager[kernels, geometry] for geometry in on_pages}
        self._plan(
            kernels,
            self._now,
            inputs,
            indices,
            masks=None if mask is None else _packed_masks(batch, mask, self._geometries),
        )

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        """Plans for `batch` (before a warm-up), then queues the page list, which the graph captures."""
        assert batch.mask is None, "a plan with a mask is that of one step"
        super().init_forward_metadata(batch)
        if shape not in self._captured:
            batch.paged.check()
            self._captured[shape] = self._new_captured(batch, shape)
        if not torch.cuda.is_current_stream_capturing():
            self._plan_captured(shape, batch.prefix_lens, batch.extend_lens)
        captured = self._captured[shape]
        self._list_pages(batch, captured.indices)
        self._now, self._long_prompt_of = captured.wrappers, frozenset()

    def prepare_replay(self, shape: StepShape, prefix_lens: Int32Array, extend_lens: Int32Array) -> None:
        """Plans the step that is about to be replayed."""
        self._plan_captured(shape, *shape.padded(prefix_lens, extend_lens))

    def forward(
        self, qkv: torch.Tensor, layer: AttentionLayer, rotation: Rotation, norms: QKNorms | None
    ) -> torch.Tensor:
        if not self.is_long_prompt(layer):
            return super().forward(qkv, layer, rotation, norms)
        out_cache_loc = self.batch_of(layer).out_cache_loc
        q = rotation.norm_rotate_store(qkv, layer, norms, self.token_to_kv_pool, out_cache_loc)
        return self.attend_to_prompt(q, qkv[:, -layer.tp_k_head_num * layer.head_dim :], layer)

    def is_long_prompt(self, layer: AttentionLayer) -> bool:
        """Whether `attend_to_prompt` must be called for the layer in the prepared step. If not, `attend` must."""
        return self._geometry_of[layer.layer_id] in self._long_prompt_of

    def attend_to_prompt(self, q: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """Attends like `attend`, in a step with one long prompt, by `RaggedPrompts`.

        Args:
            v: [num_tokens, tp_k_head_num * head_dim]: the values of the new tokens.
        """
        k_slots, _ = self.token_to_kv_pool.slots(layer.layer_id)
        k = k_slots[self.batch_of(layer).out_cache_loc]
        q, k, v = (it.view(len(q), -1, layer.head_dim) for it in (q, k, v))
        pages = self.token_to_kv_pool.pages(layer.layer_id)
        return self._ragged.run(self._geometry_of[layer.layer_id], q, (k, v), pages).flatten(1)

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(heads.shape, dtype=q.dtype, device=q.device)
        wrapper = self._now[self._geometry_of[layer.layer_id]]
        pages = self.token_to_kv_pool.pages(layer.layer_id)
        wrapper.run(heads, pages, k_scale=layer.k_scale, v_scale=layer.v_scale, out=out)
        return out.view(q.shape)

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        """Attends in the absorbed form in every step."""
        [pages] = self.token_to_kv_pool.pages(layer.layer_id)
        absorbed = heads.absorb(q).view(-1, layer.tp_q_head_num, layer.head_dim)
        return heads.values(self._now[self._geometry_of[layer.layer_id]].run(absorbed, pages).flatten(1))

    def _kernels_of(self, mode: ForwardMode) -> Kernels:
        if mode is ForwardMode.DECODE:
            return "decode"
        return self._prompt_kernels if mode is ForwardMode.EXTEND else "fa2"

    def _list_of(self, geometry: Geometry, *, masked: bool = False) -> _Listed:
        """The page list for `geometry`. With a mask (`masked`), the mask hides tokens outside chunks: all pages are
        listed."""
        windowed = geometry.window is not None and self.token_to_kv_pool.num_window_pages is not None
        return _Listed(windowed, None if masked else geometry.chunk)

    def _list_pages(self, batch: ForwardBatch, indices: Mapping[_Listed, torch.Tensor]) -> None:
        for which, out in indices.items():
            paged = (batch.in_window_pool or batch).paged if which.windowed else batch.paged
            self._flatten_pages(paged, self.token_to_kv_pool.page_size, out, which.chunk)

    def _inputs(
        self,
        lists: Iterable[_Listed],
        prefix_lens: Int64Array,
        extend_lens: Int64Array,
        num_rows: Mapping[_Listed, int] | None = None,
    ) -> dict[_Listed, PlanInputs]:
        page_size = self.token_to_kv_pool.page_size
        return {
            it: PlanInputs.of(prefix_lens, extend_lens, page_size, it.chunk, None if num_rows is None else num_rows[it])
            for it in lists
        }

    def _new_captured(self, batch: ForwardBatch, shape: StepShape) -> _Captured:
        if shape.is_decode:
            kernels: Kernels = "decode"
        else:
            kernels = self._prompt_kernels if shape.num_sampled <= FEW_ROWS else "fa2"
        indices = {}
        for which in map(self._list_of, self._geometries):
            # The index tensors are as large as the page table, because rows may share pages. The largest shape comes
            # first, and the other shapes use parts of its tensors.
            table = batch.paged.page_table
            fit = (it.indices[which] for it in self._captured.values() if len(it.indices[which]) >= table.numel())
            found = next(fit, None)
            indices[which] = table.new_empty(table.numel()) if found is None else found
        wrappers = {
            geometry: self._wrapper(kernels, geometry, indices[self._list_of(geometry)], geometry.num_rows(shape))
            for geometry in self._geometries
        }
        return _Captured(kernels, wrappers, indices)

    def _plan_captured(self, shape: StepShape, prefix_lens: Int64Array, extend_lens: Int64Array) -> None:
        captured = self._captured[shape]
        num_rows = {self._list_of(it): it.num_rows(shape) for it in self._geometries}
        inputs = self._inputs(captured.indices, prefix_lens, extend_lens, num_rows)
        # FlashInfer copies its inputs to the buffers that it was created with, unless they are the same memory, as
        # here.
        indices = {which: it[: inputs[which].num_pages] for which, it in captured.indices.items()}
        self._plan(captured.kernels, captured.wrappers, inputs, indices, shape)

    def _plan(
        self,
        kernels: Kernels,
        wrappers: Mapping[Geometry, Any],
        inputs: Mapping[_Listed, PlanInputs],
        indices: Mapping[_Listed, torch.Tensor],
        shape: StepShape | None = None,
        masks: Mapping[Geometry, _Mask] | None = None,
    ) -> None:
        """Plans each of `wrappers`.

        Args:
            shape: shape of the graph that will run the plan. None for an eager step.
            masks: None if all rows are causal.
        """
        pool = self.token_to_kv_pool
        for geometry, wrapper in wrappers.items():
            mask = None if masks is None else masks[geometry]
            which = self._list_of(geometry, masked=mask is not None)
            of_rows = inputs[which]
            if isinstance(wrapper, LatentWrapper):
                wrapper.plan(of_rows, indices[which], pool.page_size, pool.dtype, causal=kernels != "decode")
                continue
            paged = (
                of_rows.kv_indptr,
                indices[which],
                of_rows.last_page_len,
                geometry.num_q_heads,
                geometry.num_k_heads,
                geometry.head_dim,
                pool.page_size,
            )
            options = self._options(geometry, of_rows, shape, mask)
            # FlashInfer writes a plan to pinned memory, queues the upload and does not wait for it.
            wrapper._pin_memory_int_workspace_buffer = self._uploads.next_buffer()
            if kernels == "decode":
                wrapper.plan(*paged, **options)
            elif mask is None:
                wrapper.plan(of_rows.qo_indptr, *paged, causal=True, **options)
            else:
                wrapper.plan(of_rows.qo_indptr, *paged, packed_custom_mask=mask.packed, **options)
                # FlashInfer's own offsets count bits, but its kernel reads bytes. `begins` counts bytes.
                wrapper._mask_indptr_buf = mask.begins
            self._uploads.record()

    def _options(
        self, geometry: Geometry, of_rows: PlanInputs, shape: StepShape | None, mask: _Mask | None
    ) -> dict[str, Any]:
        window_left = -1 if geometry.window is None else geometry.window - 1
        is_whole = shape is not None and self._library.is_filled(shape, geometry)
        if mask is not None and geometry.window is not None:
            # FlashInfer's window counts from a token's index in its row, but the mask uses positions. This window is
            # wide enough to hide nothing that the mask shows, and it keeps split keys from including later keys.
            window_left += mask.max_len - 1
            is_whole = True
        of_step = {"window_left": window_left, "seq_lens": of_rows.seq_lens, "disable_split_kv": is_whole}
        return self._options_of(geometry) | of_step

    def _options_of(self, geometry: Geometry) -> dict[str, Any]:
        """Arguments of every plan for layers of `geometry`."""
        return {
            "sm_scale": geometry.scale,
            "window_left": -1 if geometry.window is None else geometry.window - 1,
            "logits_soft_cap": geometry.softcap or 0.0,
            "q_data_type": self.token_to_kv_pool.compute_dtype,
            "kv_data_type": self.token_to_kv_pool.dtype,
        }

    def _wrapper(
        self, kernels: Kernels, geometry: Geometry, indices: torch.Tensor | None = None, num_rows: int = 0
    ) -> Any:
        """A FlashInfer wrapper for layers of `geometry`.

        Args:
            indices: the tensor in which a graph of `num_rows` rows finds its pages. None for eager steps.
        """
        static: dict[str, Any] = {}
        if indices is not None:
            bounds, lens = indices.new_zeros(2, num_rows + 1), indices.new_zeros(num_rows)
            static = {"kv_indptr": bounds[0], "kv_indices": indices, "kv_last_page_len": lens}
        if geometry.latent_dim is not None:
            if static:
                static["kv_len_arr"], static["qo_indptr"] = static.pop("kv_last_page_len"), bounds[1]
            best: Literal["fa2", "fa3"] = "fa3" if self._library.has_fa3 else "fa2"
            workspaces = (self._float_workspace, self._int_workspaces[geometry])
            mla = self._library.module.mla
            return LatentWrapper(mla, geometry, best, workspaces, self._latent_uploads, static)
        module, given = self._library.module, {"use_cuda_graph": indices is not None}
        if kernels == "decode":
            # FlashInfer's kernels without tensor cores exist only for 1, 2, 3, 4 and 8 query heads per KV head.
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
                self._float_workspace,
                "NHD",
                use_tensor_cores=geometry.group >= 4,
                backend="fa2",
                **given,
                **{f"paged_{name}_buffer": tensor for name, tensor in static.items()},
            )
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
                self._float_workspace,
                "NHD",
                backend=kernels,
                qo_indptr_buf=bounds[1] if static else None,
                **given,
                **{f"paged_{name}_buf": tensor for name, tensor in static.items()},
            )
        wrapper._int_workspace_buffer = self._int_workspaces[geometry]
        return wrapper

    def _probe(self, kernels: Kernels, geometry: Geometry) -> None:
        """Attends once from one token to itself, which compiles missing kernels. Waits for the device."""
        pool = self.token_to_kv_pool
        q = torch.zeros(1, geometry.num_q_heads, geometry.head_dim, dtype=pool.compute_dtype, device=pool.device)
        k = q.new_zeros(1, pool.page_size, geometry.num_k_heads, geometry.head_dim, dtype=pool.dtype)
        v = torch.linspace(0.0, 1.0, k.numel(), device=pool.device).view(k.shape).to(pool.dtype)
        which = self._list_of(geometry)
        inputs = self._inputs([which], np.zeros(1, np.int64), np.ones(1, np.int64))
        page = torch.zeros(1, dtype=torch.int32, device=pool.device)
        wrapper, out = self._eager[kernels, geometry], torch.empty_like(q)
        try:
            self._plan(kernels, {geometry: wrapper}, inputs, {which: page})
            if isinstance(wrapper, LatentWrapper):
                out = wrapper.run(q, v[:, :, 0])
            else:
                wrapper.run(q, (k, v), out=out)
            expected = v[0, 0].to(q.dtype).repeat_interleave(geometry.group, dim=0)[:, : geometry.latent_dim]
            wrong = None if torch.allclose(out[0], expected, atol=0.01, rtol=0.01) else "it returned wrong values"
        except RuntimeError as error:  # compiler errors too
            wrong = str(error).partition("\n")[0]
        if wrong is not None:
            raise ConfigError(
                f"attention backend flashinfer: {kernels} kernels of FlashInfer {self._library.module.__version__} "
                f"cannot serve {geometry}, {pool.dtype}: {wrong}\nSet attention.backend=triton"
            )


def _packed_masks(batch: ForwardBatch, mask: NewTokenMask, geometries: Iterable[Geometry]) -> dict[Geometry, _Mask]:
    """Packs the step's mask, with one kernel per window and chunk."""
    from attention.kernels.packed_mask import pack_mask

    num_bytes = -(-batch.extend_lens * batch.seq_lens // 8)
    total = int(num_bytes.sum())
    if total >= 1 << 31:
        raise EngineError(
            f"attention backend flashinfer takes masks of less than 2 GiB, and this has {total} bytes; set "
            "attention.backend=triton"
        )
    device, found = batch.paged.page_table.device, dict[tuple[int | None, int | None], _Mask]()
    for geometry in geometries:
        if (key := (geometry.window, geometry.chunk)) not in found:
            packed = torch.empty(total, dtype=torch.uint8, device=device)
            begins = torch.empty(batch.batch_size, dtype=torch.int32, device=device)
            pack_mask(batch.paged, mask, *key, most_bytes=int(num_bytes.max()), packed=packed, begins=begins)
            found[key] = _Mask(packed, begins, int(batch.extend_lens.max()))
    return {it: found[it.window, it.chunk] for it in geometries}
