"""Builds the host-side input of FlashInfer's planner for a step, and the pinned memory of its plans."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attention.forward_batch import Int64Array
from attention.layer import AttentionLayer, LatentLayer
from attention.step_shape import StepShape
from configs.errors import ConfigError

FLASHINFER = "0.7.2.post1"
"""The version of flashinfer-python for which this code was written."""
# Number of plans that may still be uploading: two kinds of layers in each of two steps in flight.
_NUM_UPLOADS = 4
# Largest number of query rows (tokens times heads of a group) per program in FlashInfer, with two programs per SM.
_TILE, _PROGRAMS_OF_SM = 128, 2


@dataclass(frozen=True, slots=True)
class Library:
    """The imported FlashInfer, for one device."""

    module: Any
    num_sms: int
    has_fa3: bool

    def is_filled(self, shape: StepShape, geometry: Geometry) -> bool:
        """Whether a graph of `shape` has enough programs without splitting keys. Its grid is fixed at capture. With
        split keys, every output goes through memory and a second kernel, even if the plan splits none. FlashInfer makes
        no more pieces than the GPU can run at once."""
        num_tiles = shape.num_rows + (0 if shape.is_decode else shape.num_tokens * geometry.group // _TILE)
        return num_tiles * geometry.num_k_heads >= _PROGRAMS_OF_SM * self.num_sms


def load_flashinfer(device: torch.device) -> Library:
    """Imports FlashInfer.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    # FlashInfer would download kernels for newer GPUs as binaries. None of those is used here.
    os.environ.setdefault("FLASHINFER_NO_DOWNLOAD", "1")
    try:
        import flashinfer
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"attention backend flashinfer cannot be imported: {error}. Install flashinfer-python (the `flashinfer` "
            "extra) on every node, or set attention.backend=triton"
        ) from error
    properties = torch.cuda.get_device_properties(device)
    return Library(flashinfer, properties.multi_processor_count, (properties.major, properties.minor) == (9, 0))


@dataclass(frozen=True, slots=True)
class Geometry:
    """The properties of a layer on which its plan depends. Layers with equal properties share a plan."""

    num_q_heads: int
    num_k_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None
    latent_dim: int | None
    """None if these are not latent layers."""

    @classmethod
    def of(cls, layer: AttentionLayer) -> Geometry:
        heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim)
        latent_dim = layer.latent_dim if isinstance(layer, LatentLayer) else None
        return cls(*heads, layer.scale, layer.window, layer.softcap, layer.chunk, latent_dim)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_k_heads

    def num_rows(self, shape: StepShape) -> int:
        """Largest number of planned rows for a step of `shape`. A row across chunks is planned as several rows."""
        if self.chunk is None or shape.is_decode:
            return shape.num_rows
        return 2 * shape.num_rows + shape.num_tokens // self.chunk


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The planner's input for one step: int32 arrays on the host, because FlashInfer would wait for device tensors.

    If layers have a chunk, the part of a row inside one chunk is a separate row here, and its pages begin at the chunk.
    """

    qo_indptr: torch.Tensor
    """[num_rows + 1]: start of each row's tokens."""
    kv_indptr: torch.Tensor
    """[num_rows + 1]: start of each row's pages in the list of all pages."""
    last_page_len: torch.Tensor
    """[num_rows]: tokens in each row's last page. 0 for a row without tokens."""
    seq_lens: torch.Tensor
    """[num_rows]: tokens of each row in the cache."""

    @classmethod
    def of(
        cls,
        prefix_lens: Int64Array,
        extend_lens: Int64Array,
        page_size: int,
        chunk: int | None = None,
        num_rows: int | None = None,
    ) -> PlanInputs:
        """The input for rows with the given numbers of cached and new tokens.

        Args:
            chunk: a multiple of `page_size`.
            num_rows: number of rows, with empty rows at the end. If None, no empty rows are added.
        """
        if chunk is not None:
            prefix_lens, extend_lens = _cut(prefix_lens, extend_lens, chunk)
        if num_rows is not None:
            padding = (0, num_rows - len(extend_lens))
            prefix_lens, extend_lens = np.pad(prefix_lens, padding), np.pad(extend_lens, padding)
        seq_lens = prefix_lens + extend_lens
        num_pages = -(-seq_lens // page_size)
        last_page_len = seq_lens - page_size * np.maximum(num_pages - 1, 0)
        bounds = np.zeros((2, len(seq_lens) + 1), np.int64)
        np.cumsum((extend_lens, num_pages), axis=1, out=bounds[:, 1:])
        return cls(*(torch.from_numpy(x.astype(np.int32)) for x in (*bounds, last_page_len, seq_lens)))

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])


def _cut(prefix_lens: Int64Array, extend_lens: Int64Array, chunk: int) -> tuple[Int64Array, Int64Array]:
    """Cuts rows at chunk boundaries. Returns, for each part, the numbers of tokens before it in its chunk and of new
    tokens."""
    seq_lens, first = prefix_lens + extend_lens, prefix_lens // chunk
    counts = np.maximum(-(-seq_lens // chunk) - first, 1)
    row = np.repeat(np.arange(len(counts)), counts)
    start = (first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
    prefixes = np.maximum(prefix_lens[row] - start, 0)
    return prefixes, np.minimum(seq_lens[row] - start, chunk) - prefixes


class Uploads:
    """Pinned buffers for plans. A buffer is reused only after the upload of its last plan is done.

    Args:
        num_bytes: largest size of a plan.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        shape = (_NUM_UPLOADS, num_bytes)
        buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu)
        self._buffers = list(buffers.unbind())
        self._uploaded: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]  # type: ignore[no-untyped-call]  # torch's
        self._next = 0

    def next_buffer(self) -> torch.Tensor:
        """Returns the buffer for the next plan. Waits until the upload of the plan that it held is done."""
        if self._uploaded[self._next] is not None:
            self._uploaded[self._next].synchronize()
        return self._buffers[self._next]

    def hold(self, buffer: torch.Tensor) -> None:
        """Holds `buffer`, pinned memory with a queued upload, in place of the oldest buffer."""
        self.next_buffer()
        self._buffers[self._next] = buffer
        self.record()

    def record(self) -> None:
        """Call this once the plan's upload is queued."""
        if self._uploaded[self._next] is not None:
            self._uploaded[self._next].record()
        self._next = (self._next + 1) % _NUM_UPLOADS
