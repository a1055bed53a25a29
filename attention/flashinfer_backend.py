"""The backend of FlashInfer, whose kernels are planned on the host: once a step for layers that are alike.

One paged call a layer serves prompts, chunks behind a cached prefix and mixtures: the pool holds the new tokens' keys
and values by then, so there is no second, ragged call to join with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from attention.backend import AttentionBackend, register
from attention.forward_batch import ForwardBatch, ForwardMode, Int32Array, Int64Array, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer
from attention.step_shape import FEW_ROWS, StepShape
from configs.errors import ConfigError

FLASHINFER = "0.7.2.post1"
"""The version of flashinfer-python whose planner this file is written for."""
_FLOAT_WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_INT_WORKSPACE_BYTES = 8 << 20  # what its wrappers take
# Plans whose upload may wait behind a step: those of two kinds of layers, of two steps in flight.
_NUM_UPLOADS = 4
# FlashInfer gives a program at most so many query rows (times heads of a group), and a multiprocessor two programs.
_TILE, _PROGRAMS_OF_SM = 128, 2

Kernels = Literal["decode", "fa2", "fa3"]
"""decode: one token a row. fa2: any rows; joins the query heads of a group, splits keys. fa3: Hopper's, for prompts: it
reads a row's keys for each query head and 128 tokens anew and splits none."""


@dataclass(frozen=True, slots=True)
class Library:
    """FlashInfer on a device."""

    module: Any
    num_sms: int
    has_fa3: bool


def load_flashinfer(device: torch.device) -> Library:
    """Imports it.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    # Its kernels for later GPUs come as binaries that it would fetch; none of those is called here.
    os.environ.setdefault("FLASHINFER_NO_DOWNLOAD", "1")
    try:
        import flashinfer
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"attention backend flashinfer cannot be imported: {error}. Install flashinfer-python (the `flashinfer` "
            "extra) on every node, or set attention.backend=auto"
        ) from error
    properties = torch.cuda.get_device_properties(device)
    return Library(flashinfer, properties.multi_processor_count, (properties.major, properties.minor) == (9, 0))


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a layer its plan depends on: layers that agree share one."""

    num_q_heads: int
    num_k_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def of(cls, layer: AttentionLayer) -> Geometry:
        return cls(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.scale, layer.window, layer.softcap)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_k_heads


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What a step is planned from. On the host, int32: FlashInfer would wait for tensors of the device."""

    qo_indptr: torch.Tensor
    """[num_rows + 1]: where each row's tokens begin."""
    kv_indptr: torch.Tensor
    """[num_rows + 1]: where each row's pages begin among those of all rows."""
    last_page_len: torch.Tensor
    """[num_rows]: tokens in each row's last page; 0 of a row without tokens."""
    seq_lens: torch.Tensor
    """[num_rows]"""

    @classmethod
    def of(cls, prefix_lens: Int64Array, extend_lens: Int64Array, page_size: int) -> PlanInputs:
        seq_lens = prefix_lens + extend_lens
        num_pages = -(-seq_lens // page_size)
        last_page_len = seq_lens - page_size * np.maximum(num_pages - 1, 0)
        bounds = np.zeros((2, len(seq_lens) + 1), np.int64)
        np.cumsum((extend_lens, num_pages), axis=1, out=bounds[:, 1:])
        return cls(*(torch.from_numpy(x.astype(np.int32)) for x in (*bounds, last_page_len, seq_lens)))

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])


@dataclass(frozen=True, slots=True)
class _Captured:
    """What the graph of a shape reads."""

    kernels: Kernels
    wrappers: dict[Geometry, Any]
    indices: dict[bool, torch.Tensor]
    """[pages of all rows, at most] int32, of the pool of layers with a window (True) or of the other pool."""


@register("flashinfer")
class FlashInferBackend(AttentionBackend):
    """Attention by FlashInfer's paged wrappers, a plan for each `Geometry`.

    Its kernels are compiled when first asked for, which takes minutes, and kept on disk: here that is while a rank
    loads. Unused entries of the page table and unused pages are never read.

    Args:
        prompt_kernels: for steps of prompts alone and for captured steps with few rows. None: fa3 on Hopper, else fa2,
            which all other steps with prompts take.

    Raises:
        ConfigError: FlashInfer is not installed, or cannot be compiled or run here.
    """

    captures_cuda_graphs = True

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
        from attention.kernels.flat_pages import flatten_pages  # a CPU install has no Triton

        self._flatten_pages = flatten_pages
        self._prompt_kernels: Kernels = prompt_kernels or ("fa3" if self._library.has_fa3 else "fa2")
        self._geometry_of = {layer.layer_id: Geometry.of(layer) for layer in layers}
        self._geometries = tuple(dict.fromkeys(self._geometry_of.values()))
        # Zeros, as FlashInfer asks. All wrappers share it: what is in it is read before the next kernel writes.
        self._float_workspace = torch.zeros(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # A plan stays in it for a step, so plans of one step need one each, and those of two steps can share.
        self._int_workspaces = {
            geometry: torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            for geometry in self._geometries
        }
        self._uploads = _Uploads(device)
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

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plans on the host; queues the uploads of the plans and one or two small kernels, and waits for nothing."""
        super().init_forward_metadata(batch)
        batch.paged.check()
        kernels = self._kernels_of(batch.mode)
        inputs = PlanInputs.of(batch.prefix_lens, batch.extend_lens, self.token_to_kv_pool.page_size)
        num_pages = inputs.num_pages
        indices = {
            windowed: torch.empty(num_pages, dtype=torch.int32, device=paged.page_table.device)
            for windowed, paged in self._tables(batch).items()
        }
        self._list_pages(batch, indices)
        self._now = {geometry: self._eager[kernels, geometry] for geometry in self._geometries}
        self._plan(kernels, self._now, inputs, indices)

    def prepare_capture(self, batch: ForwardBatch, shape: StepShape) -> None:
        """Before a warm-up plans for `batch`; then, for the graph to hold it, queues the list of pages."""
        super().init_forward_metadata(batch)
        if shape not in self._captured:
            batch.paged.check()
            self._captured[shape] = self._new_captured(batch, shape)
        if not torch.cuda.is_current_stream_capturing():
            self._plan_captured(shape, batch.prefix_lens, batch.extend_lens)
        captured = self._captured[shape]
        self._list_pages(batch, captured.indices)
        self._now = captured.wrappers

    def prepare_replay(self, shape: StepShape, prefix_lens: Int32Array, extend_lens: Int32Array) -> None:
        """Plans the step that is about to be replayed."""
        self._plan_captured(shape, *shape.padded(prefix_lens, extend_lens))

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        heads = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(heads.shape, dtype=q.dtype, device=q.device)
        wrapper = self._now[self._geometry_of[layer.layer_id]]
        wrapper.run(heads, self.token_to_kv_pool.pages(layer.layer_id), out=out)
        return out.view(q.shape)

    def _kernels_of(self, mode: ForwardMode) -> Kernels:
        if mode is ForwardMode.DECODE:
            return "decode"
        return self._prompt_kernels if mode is ForwardMode.EXTEND else "fa2"

    def _is_windowed(self, geometry: Geometry) -> bool:
        """Whether layers of `geometry` read the window pool."""
        return geometry.window is not None and self.token_to_kv_pool.num_window_pages is not None

    def _tables(self, batch: ForwardBatch) -> dict[bool, PagedMetadata]:
        """Page tables that layers read, by whether it is that of the window pool."""
        return {self._is_windowed(it): batch.seen_by(it.window).paged for it in self._geometries}

    def _list_pages(self, batch: ForwardBatch, indices: dict[bool, torch.Tensor]) -> None:
        for windowed, paged in self._tables(batch).items():
            self._flatten_pages(paged, self.token_to_kv_pool.page_size, indices[windowed])

    def _new_captured(self, batch: ForwardBatch, shape: StepShape) -> _Captured:
        if shape.is_decode:
            kernels: Kernels = "decode"
        else:
            kernels = self._prompt_kernels if shape.num_sampled <= FEW_ROWS else "fa2"
        indices = {}
        for windowed, paged in self._tables(batch).items():
            # As large as the table: rows may share pages, so the pool's size is no bound. The largest shape comes
            # first and leaves its own to the others.
            table = paged.page_table
            fit = (it.indices[windowed] for it in self._captured.values() if len(it.indices[windowed]) >= table.numel())
            found = next(fit, None)
            indices[windowed] = table.new_empty(table.numel()) if found is None else found
        wrappers = {
            geometry: self._wrapper(kernels, geometry, indices[self._is_windowed(geometry)], shape.num_rows)
            for geometry in self._geometries
        }
        return _Captured(kernels, wrappers, indices)

    def _plan_captured(self, shape: StepShape, prefix_lens: Int64Array, extend_lens: Int64Array) -> None:
        captured = self._captured[shape]
        inputs = PlanInputs.of(prefix_lens, extend_lens, self.token_to_kv_pool.page_size)
        # FlashInfer copies what it is given to what it was made with: here the same memory, which it sees.
        indices = {windowed: it[: inputs.num_pages] for windowed, it in captured.indices.items()}
        self._plan(captured.kernels, captured.wrappers, inputs, indices, shape)

    def _plan(
        self,
        kernels: Kernels,
        wrappers: dict[Geometry, Any],
        inputs: PlanInputs,
        indices: dict[bool, torch.Tensor],
        shape: StepShape | None = None,
    ) -> None:
        """Plans each of `wrappers`.

        Args:
            shape: of the graph that runs the plan; None: none does.
        """
        dtype = self.token_to_kv_pool.dtype
        for geometry, wrapper in wrappers.items():
            paged = (
                inputs.kv_indptr,
                indices[self._is_windowed(geometry)],
                inputs.last_page_len,
                geometry.num_q_heads,
                geometry.num_k_heads,
                geometry.head_dim,
                self.token_to_kv_pool.page_size,
            )
            options = {
                "sm_scale": geometry.scale,
                "window_left": -1 if geometry.window is None else geometry.window - 1,
                "logits_soft_cap": geometry.softcap or 0.0,
                "q_data_type": dtype,
                "kv_data_type": dtype,
                "seq_lens": inputs.seq_lens,
                "disable_split_kv": shape is not None and self._is_full(shape, geometry),
            }
            # FlashInfer writes a plan to pinned memory, queues its upload and does not wait.
            wrapper._pin_memory_int_workspace_buffer = self._uploads.next_buffer()
            if kernels == "decode":
                wrapper.plan(*paged, **options)
            else:
                wrapper.plan(inputs.qo_indptr, *paged, causal=True, **options)
            self._uploads.record()

    def _is_full(self, shape: StepShape, geometry: Geometry) -> bool:
        """Whether a graph of `shape` has programs enough without splitting keys.

        Its grid is fixed, and with split keys every answer goes through memory and a second kernel, also where the plan
        then splits none: FlashInfer makes no more pieces than the GPU runs programs at once.
        """
        num_tiles = shape.num_rows + (0 if shape.is_decode else shape.num_tokens * geometry.group // _TILE)
        return num_tiles * geometry.num_k_heads >= _PROGRAMS_OF_SM * self._library.num_sms

    def _wrapper(
        self, kernels: Kernels, geometry: Geometry, indices: torch.Tensor | None = None, num_rows: int = 0
    ) -> Any:
        """A wrapper of FlashInfer for layers of `geometry`.

        Args:
            indices: where a graph of `num_rows` rows finds the pages. None: it is not for a graph.
        """
        static: dict[str, Any] = {}
        if indices is not None:
            bounds, lens = indices.new_zeros(2, num_rows + 1), indices.new_zeros(num_rows)
            static = {"kv_indptr": bounds[0], "kv_indices": indices, "kv_last_page_len": lens}
        module, given = self._library.module, {"use_cuda_graph": indices is not None}
        if kernels == "decode":
            # Its kernels without tensor cores are made for few heads in a group: 1, 2, 3, 4 and 8.
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
        """Attends once from one token to itself, which compiles what is not compiled yet; waits for the device."""
        pool = self.token_to_kv_pool
        q = torch.zeros(1, geometry.num_q_heads, geometry.head_dim, dtype=pool.dtype, device=pool.device)
        k = q.new_zeros(1, pool.page_size, geometry.num_k_heads, geometry.head_dim)
        v = torch.linspace(0.0, 1.0, k.numel(), device=pool.device).view(k.shape).to(pool.dtype)
        inputs = PlanInputs.of(np.zeros(1, np.int64), np.ones(1, np.int64), pool.page_size)
        page = torch.zeros(1, dtype=torch.int32, device=pool.device)
        wrapper, out = self._eager[kernels, geometry], torch.empty_like(q)
        try:
            self._plan(kernels, {geometry: wrapper}, inputs, {False: page, True: page})
            wrapper.run(q, (k, v), out=out)
            expected = v[0, 0].repeat_interleave(geometry.group, dim=0)
            wrong = None if torch.allclose(out[0], expected, atol=0.01, rtol=0.01) else "it returned wrong values"
        except RuntimeError as error:  # also what the compiler says
            wrong = str(error).partition("\n")[0]
        if wrong is not None:
            raise ConfigError(
                f"attention backend flashinfer: {kernels} kernels of FlashInfer {self._library.module.__version__} "
                f"cannot serve {geometry}, {pool.dtype}: {wrong}\nSet attention.backend=auto"
            )


class _Uploads:
    """Pinned memory for plans, each written anew only when it is on the device."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        shape = (_NUM_UPLOADS, _INT_WORKSPACE_BYTES)
        self._buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu).unbind()
        self._uploaded: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]  # type: ignore[no-untyped-call]  # torch's
        self._next = 0

    def next_buffer(self) -> torch.Tensor:
        """For the next plan, as soon as the plan that was in it last is on the device."""
        if self._uploaded[self._next] is not None:
            self._uploaded[self._next].synchronize()
        return self._buffers[self._next]

    def record(self) -> None:
        """To be called once the plan's upload is queued."""
        if self._uploaded[self._next] is not None:
            self._uploaded[self._next].record()
        self._next = (self._next + 1) % _NUM_UPLOADS
