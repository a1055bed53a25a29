"""The reference backend in plain torch, for any device: GQA and MLA, windows, chunks, sinks, softcap and any scale.

Decodes run together: their keys are gathered into one padded block, and the query heads of a KV head are rows of one
product. Longer rows run one by one. Padding repeats a row's own last slot, so the contents of unused pages never
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from attention.backend import AttentionBackend, register
from attention.forward_batch import ForwardBatch, ForwardMode, PagedMetadata
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer, VisibleRange
from attention.sparse import IndexInputs, SparseStep

Int64Array = npt.NDArray[np.int64]

_OWN_KEY_ELEMENTS = 1 << 24
"""Largest number of key elements that are expanded from latents at once, unless one head has more: 64 MiB in fp32. The
keys of a long prompt would not fit beside the pool."""


@dataclass(frozen=True, slots=True)
class _Masked:
    """One row's part of a step's mask."""

    visible: npt.NDArray[np.bool_]
    """[num_tokens, num_tokens]: whether each new token of the row sees each of its new tokens."""
    positions: Int64Array
    """[num_tokens]: position of each new token of the row."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length."""

    tokens: torch.Tensor | None
    """[num_rows] int64: indices of the rows' tokens in the batch. If None, all tokens in order."""
    num_rows: int
    slots: torch.Tensor | slice
    """[num_rows * num_keys] int64: KV slots that each row reads. A slice if they are consecutive, which avoids a
    copy."""
    mask: torch.Tensor | None
    """[num_rows, 1, 1, num_keys] in the pool's compute_dtype: 0 or -inf. None if nothing is padded."""


@dataclass(frozen=True, slots=True)
class _Extend:
    """One row with several input tokens."""

    start: int
    stop: int
    """The row's tokens are those from `start` to before `stop` in the batch."""
    slots: torch.Tensor | slice
    """[num_keys] int64: KV slots that the row reads. A slice if they are consecutive."""
    mask: torch.Tensor | None
    """[num_tokens, num_keys] in the pool's compute_dtype: 0 or -inf. None if the row is causal and has as many keys as
    tokens."""


@dataclass(frozen=True, slots=True)
class _Metadata:
    """One step's indices for all layers with the same visible range."""

    decodes: tuple[_DecodeGroup, ...]
    extends: tuple[_Extend, ...]


@register("torch_native")
class TorchNativeBackend(AttentionBackend):
    """Attention by `scaled_dot_product_attention`, or by two products if the layer has a softcap or sinks."""

    def __init__(self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool) -> None:
        super().__init__(layers, token_to_kv_pool)
        ranges = [layer.visible_range for layer in layers]
        self._ranges = set(ranges)
        self._range_of = {layer.layer_id: visible for layer, visible in zip(layers, ranges, strict=True)}
        self._metadata: dict[int, _Metadata] = {}
        self._mode = ForwardMode.DECODE
        self._dtype = token_to_kv_pool.compute_dtype
        self._device = token_to_kv_pool.device

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self._mode = batch.mode
        masked = _masked_rows(batch)
        planned = {visible: self._plan(batch.seen_by(visible.window), visible, masked) for visible in self._ranges}
        self._metadata = {layer_id: planned[visible] for layer_id, visible in self._range_of.items()}

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        metadata = self._metadata[layer.layer_id]
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

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        if self._mode is ForwardMode.DECODE:
            return heads.values(self.attend(heads.absorb(q), layer))
        metadata = self._metadata[layer.layer_id]
        out = q.new_empty(len(q), layer.tp_q_head_num * layer.v_dim)
        for group in metadata.decodes:
            assert group.tokens is not None, "rows beside others are named"
            rows = heads.absorb(q.index_select(0, group.tokens))
            out.index_copy_(0, group.tokens, heads.values(self._decode(rows, group, layer)))
        for extend in metadata.extends:
            out[extend.start : extend.stop] = self._extend_latent(q[extend.start : extend.stop], extend, layer, heads)
        return out

    def choose_keys(self, index: IndexInputs, layer: LatentLayer, step: SparseStep) -> torch.Tensor:
        assert layer.top_k is not None, "a sparse layer"
        page_size, scores = self.token_to_kv_pool.page_size, torch.zeros(len(step.rows), step.most_keys)
        _, kept = self.token_to_kv_pool.slots(layer.layer_id)
        for i, (row, last) in enumerate(zip(step.rows.tolist(), step.positions.tolist(), strict=True)):
            keys = np.arange(last + 1)
            k = kept[self._slots(step.page_table[row : row + 1], keys[None])].float()
            scores[i, : last + 1] = index.weights[i] @ (index.q[i].float() @ k.T).relu_()
        return step.choose(scores.to(self._device), layer.top_k, page_size)

    def attend_chosen(self, q: torch.Tensor, layer: LatentLayer, chosen: PagedMetadata) -> torch.Tensor:
        out, index = torch.empty_like(q), torch.arange(chosen.page_table.shape[1], device=self._device)
        for i in range(len(q)):
            slots = chosen.page_table[i].masked_select(index < chosen.cache_seqlens[i]).long()
            out[i : i + 1] = self._decode(q[i : i + 1], _DecodeGroup(None, 1, slots, None), layer)
        return out

    def _decode(self, q: torch.Tensor, group: _DecodeGroup, layer: AttentionLayer) -> torch.Tensor:
        """q [num_rows, tp_q_head_num * head_dim] -> the same shape."""
        k, v = self._keys_values(layer, group.slots)
        num_rows, kv_heads, head_dim = group.num_rows, layer.tp_k_head_num, layer.head_dim
        kv_shape = (num_rows, -1, kv_heads, head_dim)
        out = _attend(
            # The query heads of a KV head stand where a prompt's tokens would, so one product reads each key once.
            q.reshape(num_rows, kv_heads, -1, head_dim),
            k.view(kv_shape).transpose(1, 2),
            v.view(kv_shape).transpose(1, 2),
            group.mask,
            layer,
            is_causal=False,
            sinks=None if layer.sinks is None else layer.sinks.view(kv_heads, -1, 1),
        )
        return out.reshape(num_rows, -1)

    def _extend(self, q: torch.Tensor, extend: _Extend, layer: AttentionLayer) -> torch.Tensor:
        """q [num_tokens, tp_q_head_num * head_dim] of one row -> the same shape."""
        kv_heads, head_dim = layer.tp_k_head_num, layer.head_dim
        group_size = layer.tp_q_head_num // kv_heads
        k, v = self._keys_values(layer, extend.slots)
        num_tokens, num_keys = len(q), len(k)
        # Keys and values become [tp_k_head_num, group_size, num_keys, head_dim]: a KV head is repeated, without a copy,
        # for each of its query heads.
        kv_shape = (num_keys, kv_heads, 1, head_dim)
        wide = (kv_heads, group_size, num_keys, head_dim)
        out = _attend(
            q.reshape(num_tokens, kv_heads, group_size, head_dim).permute(1, 2, 0, 3),
            k.view(kv_shape).permute(1, 2, 0, 3).expand(wide),
            v.view(kv_shape).permute(1, 2, 0, 3).expand(wide),
            extend.mask,
            layer,
            is_causal=extend.mask is None,
            sinks=None if layer.sinks is None else layer.sinks.view(kv_heads, -1, 1, 1),
        )
        return out.permute(2, 0, 1, 3).reshape(num_tokens, -1)

    def _extend_latent(self, q: torch.Tensor, extend: _Extend, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        """q [num_tokens, tp_q_head_num, nope_dim + rope_dim] of one row -> [num_tokens, tp_q_head_num * v_dim]."""
        num_keys = len(q) if extend.mask is None else extend.mask.shape[1]
        if layer.absorbs(len(q), num_keys):
            return heads.values(self._extend(heads.absorb(q), extend, layer))
        kept, _ = self._keys_values(layer, extend.slots)
        out = q.new_empty(len(q), layer.tp_q_head_num, layer.v_dim)
        num_heads = max(1, _OWN_KEY_ELEMENTS // (num_keys * q.shape[-1]))
        for first in range(0, layer.tp_q_head_num, num_heads):
            its_heads = slice(first, first + num_heads)
            k, v = heads.keys_values(kept, its_heads)
            # If keys and values have the same width, torch attends without a matrix of scores: 384 ms instead of 800
            # for 512 tokens that see 2048, 16 heads of 192 and 128 columns, fp32, one core of an AMD EPYC.
            v = F.pad(v, (0, max(k.shape[-1] - v.shape[-1], 0)))
            own_q, k, v = (it.transpose(0, 1).unsqueeze(0) for it in (q[:, its_heads], k, v))
            attended = _attend(own_q, k, v, extend.mask, layer, is_causal=extend.mask is None)
            out[:, its_heads] = attended[0, ..., : layer.v_dim].transpose(0, 1)
        return out.flatten(1)

    def _keys_values(self, layer: AttentionLayer, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_slots, tp_k_head_num * head_dim] each, in the pool's compute_dtype. Both are one tensor if the pool
        stores one."""
        kept = self.token_to_kv_pool.read(layer.layer_id, slots)
        return kept[0], kept[-1]

    def _plan(self, batch: ForwardBatch, visible: VisibleRange, masked: dict[int, _Masked]) -> _Metadata:
        first_keys = visible.first_keys(batch.prefix_lens)
        decode_rows = np.flatnonzero(batch.extend_lens == 1)
        extend_rows = np.flatnonzero(batch.extend_lens > 1)
        num_keys = batch.seq_lens - first_keys
        return _Metadata(
            decodes=tuple(
                self._plan_decode(batch, rows, first_keys[rows]) for rows in _similar_lengths(decode_rows, num_keys)
            ),
            extends=tuple(
                self._plan_extend(batch, int(row), int(first_keys[row]), visible, masked.get(int(row)))
                for row in extend_rows
            ),
        )

    def _slots(self, page_table: torch.Tensor, positions: Int64Array) -> torch.Tensor | slice:
        """KV slots, flattened, of `positions` [num_rows, num_keys] in the rows of `page_table`."""
        page_size = self.token_to_kv_pool.page_size
        pages = page_table.gather(1, self._upload(positions // page_size)).long()
        slots = (pages * page_size + self._upload(positions % page_size)).view(-1)
        if self._device.type == "cpu":
            first, stop = int(slots[0]), int(slots[-1]) + 1
            if stop - first == len(slots) and np.array_equal(slots.numpy(), np.arange(first, stop)):
                return slice(first, stop)  # consecutive pages of a row that had the pool to itself
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

    def _plan_extend(
        self, batch: ForwardBatch, row: int, first_key: int, visible: VisibleRange, masked: _Masked | None
    ) -> _Extend:
        prefix_len, seq_len = int(batch.prefix_lens[row]), int(batch.seq_lens[row])
        start, stop = int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1])
        keys, queries = np.arange(first_key, seq_len), np.arange(prefix_len, seq_len)
        seen_from = visible.first_keys(queries if masked is None else masked.positions)
        mask = None
        if masked is not None:
            hidden = keys < seen_from[:, None]
            hidden[:, prefix_len - first_key :] = ~masked.visible
            mask = self._mask(hidden)
        elif prefix_len > first_key or seen_from[-1] > first_key:
            mask = self._mask((keys > queries[:, None]) | (keys < seen_from[:, None]))
        return _Extend(
            start=start,
            stop=stop,
            slots=self._slots(batch.paged.page_table[row : row + 1], keys[None]),
            mask=mask,
        )

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        """-inf where a key is hidden, in the pool's compute_dtype. torch would convert a boolean mask to this once per
        layer."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(torch.from_numpy(hidden).to(self._device), float("-inf"))


def _masked_rows(batch: ForwardBatch) -> dict[int, _Masked]:
    """The parts of the mask, by row. Waits for the device if it is a GPU."""
    if (mask := batch.mask) is None:
        return {}
    visible, positions, starts = (it.cpu().numpy() for it in (mask.visible, mask.positions, mask.starts))
    rows = {}
    for row in np.flatnonzero(starts >= 0):
        first, num_tokens = int(batch.cu_seqlens_q[row]), int(batch.extend_lens[row])
        part = visible[starts[row] :][: num_tokens**2].reshape(num_tokens, num_tokens)
        rows[int(row)] = _Masked(part != 0, positions[first : first + num_tokens])
    return rows


def _similar_lengths(rows: Int64Array, lengths: Int64Array) -> list[Int64Array]:
    """Groups `rows` such that no length in a group is below half the longest. So padding at most doubles the work."""
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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(softcap(q @ k.T * scale) + mask) @ v over the last two of four dimensions.

    Scores are multiplied by the layer's `scale` and `k_scale`, and the output by its `v_scale`. A sink counts as one
    more key without a value. `sinks` are the layer's, in a shape that broadcasts to q's.
    """
    scale = layer.scale * layer.k_scale
    if layer.softcap is None and sinks is None:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
        return attended if layer.v_scale == 1.0 else attended * layer.v_scale
    num_keys = k.shape[-2]
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if is_causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    attended = torch.matmul(torch.softmax(scores, dim=-1)[..., :num_keys].to(v.dtype), v)
    return attended if layer.v_scale == 1.0 else attended * layer.v_scale
