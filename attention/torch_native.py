"""The reference backend: plain torch, on any device, for GQA, sliding windows, softcap and any scale.

Decodes run together: their keys are gathered into one padded block and query heads that share a KV head stand as rows
of one product. Each longer row runs alone. Padding repeats a row's own last slot, so nothing but its own tokens is
ever read, whatever lies in unused pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from attention.backend import AttentionBackend, register
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.kv_pool import TokenToKVPool
from attention.layer import AttentionLayer

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length."""

    tokens: torch.Tensor | None
    """[num_rows] int64: their tokens in the batch. None: all of them, in order."""
    num_rows: int
    slots: torch.Tensor | slice
    """[num_rows * num_keys] int64: KV slots each row reads. A slice where they follow one another, to copy nothing."""
    mask: torch.Tensor | None
    """[num_rows, 1, 1, num_keys] in the pool's dtype: 0 or -inf. None: no padding."""


@dataclass(frozen=True, slots=True)
class _Extend:
    """One row with several input tokens."""

    start: int
    stop: int
    """Its tokens in the batch."""
    slots: torch.Tensor | slice
    """[num_keys] int64, or a slice as above."""
    mask: torch.Tensor | None
    """[num_tokens, num_keys] in the pool's dtype: 0 or -inf. None: plainly causal, as many keys as tokens."""


@dataclass(frozen=True, slots=True)
class _Metadata:
    """One step's indices for all layers of one window."""

    decodes: tuple[_DecodeGroup, ...]
    extends: tuple[_Extend, ...]


@register("torch_native")
class TorchNativeBackend(AttentionBackend):
    """Attention by `scaled_dot_product_attention`, or by two products where there is a softcap."""

    def __init__(self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> None:
        super().__init__(layers, token_to_kv_pool)
        self._windows = {layer.window for layer in layers}
        self._metadata: dict[int | None, _Metadata] = {}
        self._mode = ForwardMode.DECODE
        self._dtype = token_to_kv_pool.dtype
        self._device = token_to_kv_pool.device

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self._mode = batch.mode
        self._metadata = {window: self._plan(batch.seen_by(window), window) for window in self._windows}

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        metadata = self._metadata[layer.window]
        if self._mode is ForwardMode.DECODE and len(metadata.decodes) == 1:
            return self._decode(q, metadata.decodes[0], layer)
        out = q.new_empty(q.shape)
        for group in metadata.decodes:
            rows = q if group.tokens is None else q.index_select(0, group.tokens)
            attended = self._decode(rows, group, layer)
            if group.tokens is None:
                return attended
            out.index_copy_(0, group.tokens, attended)
        for extend in metadata.extends:
            out[extend.start : extend.stop] = self._extend(q[extend.start : extend.stop], extend, layer)
        return out

    def _decode(self, q: torch.Tensor, group: _DecodeGroup, layer: AttentionLayer) -> torch.Tensor:
        """q [num_rows, tp_q_head_num * head_dim] -> the same shape."""
        k_slots, v_slots = self.token_to_kv_pool.slots(layer.layer_id)
        num_rows, kv_heads, head_dim = group.num_rows, layer.tp_k_head_num, layer.head_dim
        kv_shape = (num_rows, -1, kv_heads, head_dim)
        out = _attend(
            # Query heads of one KV head stand where a prompt's tokens would: one product reads each key once.
            q.reshape(num_rows, kv_heads, -1, head_dim),
            _read(k_slots, group.slots).view(kv_shape).transpose(1, 2),
            _read(v_slots, group.slots).view(kv_shape).transpose(1, 2),
            group.mask,
            layer,
            is_causal=False,
        )
        return out.reshape(num_rows, -1)

    def _extend(self, q: torch.Tensor, extend: _Extend, layer: AttentionLayer) -> torch.Tensor:
        """q [num_tokens, tp_q_head_num * head_dim] of one row -> the same shape."""
        k_slots, v_slots = self.token_to_kv_pool.slots(layer.layer_id)
        kv_heads, head_dim = layer.tp_k_head_num, layer.head_dim
        group_size = layer.tp_q_head_num // kv_heads
        k, v = _read(k_slots, extend.slots), _read(v_slots, extend.slots)
        num_tokens, num_keys = len(q), len(k)
        # [tp_k_head_num, group_size, num_keys, head_dim]: KV heads as the batch, each repeated for its query heads.
        kv_shape = (num_keys, kv_heads, 1, head_dim)
        wide = (kv_heads, group_size, num_keys, head_dim)
        out = _attend(
            q.reshape(num_tokens, kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
            k.view(kv_shape).permute(1, 2, 0, 3).expand(wide),
            v.view(kv_shape).permute(1, 2, 0, 3).expand(wide),
            extend.mask,
            layer,
            is_causal=extend.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(num_tokens, -1)

    def _plan(self, batch: ForwardBatch, window: int | None) -> _Metadata:
        first_keys = np.zeros_like(batch.prefix_lens)
        if window is not None:
            first_keys = np.maximum(batch.prefix_lens - (window - 1), 0)
        decode_rows = np.flatnonzero(batch.extend_lens == 1)
        extend_rows = np.flatnonzero(batch.extend_lens > 1)
        num_keys = batch.seq_lens - first_keys
        return _Metadata(
            decodes=tuple(
                self._plan_decode(batch, rows, first_keys[rows]) for rows in _similar_lengths(decode_rows, num_keys)
            ),
            extends=tuple(self._plan_extend(batch, int(row), int(first_keys[row]), window) for row in extend_rows),
        )

    def _slots(self, page_table: torch.Tensor, positions: Int64Array) -> torch.Tensor | slice:
        """KV slots, flattened, of `positions` [num_rows, num_keys] of the rows of `page_table`."""
        page_size = self.token_to_kv_pool.page_size
        pages = page_table.gather(1, self._upload(positions // page_size)).long()
        slots = (pages * page_size + self._upload(positions % page_size)).view(-1)
        if self._device.type == "cpu":
            first, stop = int(slots[0]), int(slots[-1]) + 1
            if stop - first == len(slots) and np.array_equal(slots.numpy(), np.arange(first, stop)):
                return slice(first, stop)  # the pages of one row that had the pool to itself
        return slots

    def _upload(self, array: Int64Array) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _plan_decode(self, batch: ForwardBatch, rows: Int64Array, first_keys: Int64Array) -> _DecodeGroup:
        last_keys = batch.seq_lens[rows] - 1
        num_keys = int((last_keys - first_keys).max()) + 1
        positions = first_keys[:, None] + np.arange(num_keys)
        padding = positions > last_keys[:, None]
        mask = None
        if padding.any():
            np.minimum(positions, last_keys[:, None], out=positions)
            mask = self._mask(padding).view(len(rows), 1, 1, num_keys)
        page_table = batch.paged.page_table
        everything = batch.mode is ForwardMode.DECODE and len(rows) == batch.batch_size
        return _DecodeGroup(
            tokens=None if everything else self._upload(batch.cu_seqlens_q[rows]),
            num_rows=len(rows),
            slots=self._slots(page_table if everything else page_table[self._upload(rows)], positions),
            mask=mask,
        )

    def _plan_extend(self, batch: ForwardBatch, row: int, first_key: int, window: int | None) -> _Extend:
        prefix_len, seq_len = int(batch.prefix_lens[row]), int(batch.seq_lens[row])
        keys = np.arange(first_key, seq_len)
        mask = None
        if prefix_len > 0 or (window is not None and window < seq_len):
            queries = np.arange(prefix_len, seq_len)[:, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = self._mask(hidden)
        return _Extend(
            start=int(batch.cu_seqlens_q[row]),
            stop=int(batch.cu_seqlens_q[row + 1]),
            slots=self._slots(batch.paged.page_table[row : row + 1], keys[None]),
            mask=mask,
        )

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        """-inf where hidden, in the pool's dtype: a boolean mask would be turned into this once a layer."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self._device), float("-inf"))


def _read(slots: torch.Tensor, which: torch.Tensor | slice) -> torch.Tensor:
    """[num_slots, tp_k_head_num * head_dim] of a layer's keys or values."""
    return slots[which] if isinstance(which, slice) else slots.index_select(0, which)


def _similar_lengths(rows: Int64Array, lengths: Int64Array) -> list[Int64Array]:
    """Cuts `rows` into groups none of whose `lengths` is below half its longest: padding at most doubles the work."""
    groups: list[Int64Array] = []
    if len(rows) == 0:
        return groups
    if 2 * lengths[rows].min() >= lengths[rows].max():
        return [rows]
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    while len(rows):
        count = int((2 * lengths[rows] >= lengths[rows[0]]).sum())
        groups.append(rows[:count])
        rows = rows[count:]
    return groups


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    layer: AttentionLayer,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """softmax(softcap(q @ k.T * scale) + mask) @ v over the last two dimensions; q, k, v have four."""
    if layer.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=layer.scale)
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * layer.scale
    scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(v.dtype), v)
