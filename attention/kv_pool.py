"""The KV memory of one rank: the page table, and the pool with keys and values."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from attention.layer import AttentionLayer, LatentLayer
from configs.errors import EngineError
from parallel.persistent_memory import room_for

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


class ReqToTokenPool:
    """The page table: row r lists the pages of the request in row r. Row 0 and page 0 are padding.

    Args:
        num_placed_pages: the largest page id, if there is a window pool. None without a window pool.
    """

    def __init__(
        self, num_rows: int, max_pages: int, device: torch.device, *, num_placed_pages: int | None = None
    ) -> None:
        self.page_table = torch.zeros((num_rows + 1, max_pages), dtype=torch.int32, device=device)
        """[num_rows + 1, max_pages] int32, device: page ids of each row. Each step writes its page deltas here."""
        self.window_page_of: torch.Tensor | None = None
        """[num_placed_pages + 1] int32, device: window page of each page. Undefined (0 or any window page) for pages
        outside all windows. None without a window pool."""
        if num_placed_pages is not None:
            self.window_page_of = torch.zeros(num_placed_pages + 1, dtype=torch.int32, device=device)

    def check(self, deltas: npt.NDArray[np.int32], num_pages: int) -> None:
        """Raises EngineError if a delta (row, index, page id) in `deltas` [num_deltas, 3] is outside the tables."""
        if len(deltas) == 0:
            return
        num_rows, max_pages = self.page_table.shape
        rows, indices, pages = deltas[:, 0], deltas[:, 1], deltas[:, 2]
        if not (
            ((rows >= 1) & (rows < num_rows)).all()
            and ((indices >= 0) & (indices < max_pages)).all()
            and ((pages >= 1) & (pages <= num_pages)).all()
        ):
            raise EngineError(
                f"a page delta is outside {num_rows - 1} rows of {max_pages} pages with ids 1 to {num_pages}; please "
                "report this bug"
            )

    def check_window_pages(self, changes: npt.NDArray[np.int32], num_window_pages: int | None) -> None:
        """Raises EngineError if a change (page id, window page) in `changes` [num_changes, 2] is outside the pools."""
        if len(changes) == 0:
            return
        num_pages = 0 if self.window_page_of is None else len(self.window_page_of) - 1
        if not ((changes >= 1).all() and (changes <= (num_pages, num_window_pages or 0)).all()):
            raise EngineError(
                f"a change is outside {num_pages} pages and {num_window_pages or 0} of the window pool with ids from 1"
                "; please report this bug"
            )


def kv_tensors(
    layer: AttentionLayer,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    allocate: Callable[[int], torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """A layer's tensors in the pool, [num_pages + 1, page_size, *shape] for each of its `token_shapes`. `allocate`
    returns their memory [num_bytes] uint8."""
    shapes = [(num_pages + 1, page_size, *shape) for shape in layer.token_shapes]
    parts = parts_of([prod(shape) * dtype.itemsize for shape in shapes], allocate)
    return tuple(part.view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True))


def parts_of(sizes: Sequence[int], allocate: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Parts [size] uint8 of one block of memory, aligned for any kernel. `allocate` returns the block."""
    room = [room_for(size) for size in sizes]
    return [part[:size] for part, size in zip(torch.split(allocate(sum(room)), room), sizes, strict=True)]


class TokenToKVPool:
    """The KV pool: for every layer, one tensor [num_pages + 1, page_size, *shape] for each of its `token_shapes`.

    Most layers store keys and values, [tp_k_head_num, head_dim] each. Latent layers store one vector per token, and
    some of them an index key as well. Page 0 is padding. Slot s is page s // page_size, offset s % page_size.

    Args:
        dtype: dtype of the stored values. FP8 (e4m3) values are divided by the layer's `k_scale` or `v_scale`, rounded
            to nearest, and clamped to +-448.
        compute_dtype: dtype of keys and values when they are written, of queries, and of attention's output. If None,
            `dtype`.
        num_window_pages: number of window pages, for layers with a window. If None, there is no window pool, and these
            layers use the same pages as all others.
        allocate: allocates a layer's memory, [num_bytes] uint8 on `device` with finite numbers, given the layer's index
            and num_bytes. If None, the pool allocates it.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        num_window_pages: int | None = None,
        allocate: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.num_pages = num_pages
        self.num_window_pages = num_window_pages
        self.page_size = page_size
        self.dtype = dtype
        self.compute_dtype = dtype if compute_dtype is None else compute_dtype
        self.device = device
        windowed = num_pages if num_window_pages is None else num_window_pages
        self._layers = {layer.layer_id: layer for layer in layers}
        self._pages = {
            i: kv_tensors(layer, pages, page_size, dtype, functools.partial(allocate or self._allocate, i))
            for i, layer in self._layers.items()
            for pages in (num_pages if layer.window is None else windowed,)
        }
        # Slot views are created once, because a view per layer and step costs Python time in decodes.
        self._slots = {
            i: tuple(pages.flatten(0, 1).flatten(1) for pages in of_layer) for i, of_layer in self._pages.items()
        }

    def _allocate(self, layer_id: int, num_bytes: int) -> torch.Tensor:
        # All numbers are finite from the start. On CUDA, whole pages may be loaded, and a NaN in an unused slot would
        # pass through its weight of zero. After steps without the draft head, the head also reads slots that it never
        # wrote.
        if self.device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        # The system provides zero pages on first use, whereas torch would write all the memory at once.
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]

    def layer(self, layer_id: int) -> AttentionLayer:
        """The layer with this id. Recurrent layers have ids too, and are not in this pool."""
        return self._layers[layer_id]

    def pages(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """The layer's tensors, such as K and V [pages + 1, page_size, tp_k_head_num, head_dim]; writable."""
        return self._pages[layer_id]

    def slots(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """The layer's tensors as [(pages + 1) * page_size, elements of a token]."""
        return self._slots[layer_id]

    def set_kv(self, layer_id: int, out_cache_loc: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Writes k and v, or latents, to the slots `out_cache_loc` [num_tokens] int64. `set_index` writes index keys.

        Args:
            tensors: [num_tokens, elements of a token] each in `compute_dtype`, in the order in which the method `slots`
                returns the layer's tensors.
        """
        layer, of_layer = self.layer(layer_id), self._slots[layer_id]
        if self.dtype is FP8:
            tensors = tuple(_bytes(*it) for it in zip(tensors, (layer.k_scale, layer.v_scale), strict=False))
            of_layer = tuple(slots.view(torch.uint8) for slots in of_layer)
        for slots, values in zip(of_layer[: self._num_values(layer_id)], tensors, strict=True):
            slots.index_copy_(0, out_cache_loc, values)

    def set_index(self, layer_id: int, out_cache_loc: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes index keys [num_tokens, index_dim] in `compute_dtype` to the slots `out_cache_loc` [num_tokens]
        int64."""
        _, slots = self._slots[layer_id]
        slots.index_copy_(0, out_cache_loc, keys)

    def _num_values(self, layer_id: int) -> int:
        """Number of tensors that attention reads: k and v, or latents. Index keys come after these."""
        return 1 if isinstance(self.layer(layer_id), LatentLayer) else 2

    def read(self, layer_id: int, slots: torch.Tensor | slice) -> list[torch.Tensor]:
        """Reads k and v, or latents, in `slots`: [num_tokens, elements of a token] each, in `compute_dtype`. FP8 values
        are still divided by the layer's factors.

        Args:
            slots: [num_tokens] int64, or a slice.
        """
        # Torch cannot select rows of FP8 tensors on all devices
        as_bits = torch.uint8 if self.dtype is FP8 else self.dtype
        held = [it.view(as_bits) for it in self._slots[layer_id][: self._num_values(layer_id)]]
        found = [it[slots] if isinstance(slots, slice) else it.index_select(0, slots) for it in held]
        return [it.view(self.dtype).to(self.compute_dtype) for it in found]


def _bytes(values: torch.Tensor, scale: float) -> torch.Tensor:
    """The bytes of values / scale in FP8. torch's own cast does not clamp to the largest number on all devices."""
    return (values.float() / scale).clamp_(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8)
