"""The input of FlashInfer's plans of a step, and what its plans need: on the host."""

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
"""The version of flashinfer-python whose planner this is written for."""
# Plans whose upload may wait behind a step: those of two kinds of layers, of two steps in flight.
_NUM_UPLOADS = 4


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
            "extra) on every node, or set attention.backend=triton"
        ) from error
    properties = torch.cuda.get_device_properties(device)
    return Library(flashinfer, properties.multi_processor_count, (properties.major, properties.minor) == (9, 0))


@dataclass(frozen=True, slots=True)
class Geometry:
    """The facts about a layer that its plan depends on: layers that agree share one."""

    num_q_heads: int
    num_k_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None
    latent_dim: int | None
    """None: these are not latent layers."""

    @classmethod
    def of(cls, layer: AttentionLayer) -> Geometry:
        heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim)
        latent_dim = layer.latent_dim if isinstance(layer, LatentLayer) else None
        return cls(*heads, layer.scale, layer.window, layer.softcap, layer.chunk, latent_dim)

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_k_heads

    def num_rows(self, shape: StepShape) -> int:
        """Rows that a step of `shape` is planned as, at most: a row that leaves its chunk is two, or more."""
        if self.chunk is None or shape.is_decode:
            return shape.num_rows
        return 2 * shape.num_rows + shape.num_tokens // self.chunk


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The input from which a step is planned. On the host, int32: FlashInfer would wait for tensors of the device.

    Where layers have a chunk, the tokens of a row in one chunk are a row of its own here, whose pages begin with it.
    """

    qo_indptr: torch.Tensor
    """[num_rows + 1]: where each row's tokens begin."""
    kv_indptr: torch.Tensor
    """[num_rows + 1]: where each row's pages begin among those of all rows."""
    last_page_len: torch.Tensor
    """[num_rows]: tokens in each row's last page; 0 of a row without tokens."""
    seq_lens: torch.Tensor
    """[num_rows]"""

    @classmethod
    def of(
        cls,
        prefix_lens: Int64Array,
        extend_lens: Int64Array,
        page_size: int,
        chunk: int | None = None,
        num_rows: int | None = None,
    ) -> PlanInputs:
        """The input for rows with so many tokens in the cache and new ones.

        Args:
            chunk: a multiple of `page_size`.
            num_rows: rows there are to be, the last of them empty. None: as many as it takes.
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
    """Rows cut where chunks begin, and of each the tokens before it in its chunk, and its own."""
    seq_lens, first = prefix_lens + extend_lens, prefix_lens // chunk
    counts = np.maximum(-(-seq_lens // chunk) - first, 1)
    row = np.repeat(np.arange(len(counts)), counts)
    start = (first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
    prefixes = np.maximum(prefix_lens[row] - start, 0)
    return prefixes, np.minimum(seq_lens[row] - start, chunk) - prefixes


class Uploads:
    """Pinned memory for plans, each written anew only when it is on the device.

    Args:
        num_bytes: of a plan, at most.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        shape = (_NUM_UPLOADS, num_bytes)
        buffers = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu)
        self._buffers = list(buffers.unbind())
        self._uploaded: list[Any] = [torch.cuda.Event() if on_gpu else None for _ in self._buffers]  # type: ignore[no-untyped-call]  # torch's
        self._next = 0

    def next_buffer(self) -> torch.Tensor:
        """The buffer for the next plan, as soon as the plan that was in it last is on the device."""
        if self._uploaded[self._next] is not None:
            self._uploaded[self._next].synchronize()
        return self._buffers[self._next]

    def hold(self, buffer: torch.Tensor) -> None:
        """Keeps `buffer`, pinned memory with a plan whose upload is queued, in the place of a next one."""
        self.next_buffer()
        self._buffers[self._next] = buffer
        self.record()

    def record(self) -> None:
        """Must be called once the plan's upload is queued."""
        if self._uploaded[self._next] is not None:
            self._uploaded[self._next].record()
        self._next = (self._next + 1) % _NUM_UPLOADS
