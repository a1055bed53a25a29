"""The attention backend of CPU ranks: one C kernel. A token's output has equal bits in all steps and on all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attention.backend import AttentionBackend, register
from attention.forward_batch import ForwardBatch, Int64Array, PagedMetadata
from attention.kernels.cpu_attention import TYPES, LayerArgs, StepArgs, library
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer, VisibleRange
from attention.sparse import IndexInputs, SparseStep

_LINES = 64
"""Number of (token, query head) pairs that share one read of a KV head's keys, unless one token alone has more."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The step's arguments for layers with the same visible range and the same number of query heads per KV head."""

    args: StepArgs
    address: int
    kept: tuple[object, ...]
    """The arrays that `args` points into. Holding them here keeps their memory alive."""


@register("cpu")
class CpuBackend(AttentionBackend):
    """Attention by attention/kernels/cpu_attention.c, for every row of every step. It reads keys directly from the
    pool.

    The bits of an output depend only on its query, the keys that the query sees, and their positions in the row. For
    latent layers, which are always absorbed, the products of `LatentHeads` have to be exact as well.

    Args:
        exact: has no effect, because the kernel is always exact.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], token_to_kv_pool: TokenToKVPool, *, exact: bool = False
    ) -> None:
        super().__init__(layers, token_to_kv_pool)
        self._library = library()
        self._attend = self._library.attend
        self._args = {layer.layer_id: _args_of(layer, token_to_kv_pool) for layer in layers}
        self._addresses = {layer_id: ctypes.addressof(args) for layer_id, args in self._args.items()}
        self._kinds = {
            layer.layer_id: (layer.visible_range, layer.tp_q_head_num // layer.tp_k_head_num) for layer in layers
        }
        sparse = [layer for layer in layers if isinstance(layer, LatentLayer) and layer.top_k is not None]
        self._chosen_args = {layer.layer_id: _args_of(layer, token_to_kv_pool, page_size=1) for layer in sparse}
        self._index_args = {
            layer.layer_id: _index_args_of(layer, token_to_kv_pool) for layer in sparse if layer.index_heads
        }
        groups = (*(group for _, group in self._kinds.values()), *(layer.index_heads for layer in sparse))
        self._most_lines = max((_LINES, *groups))
        widest = max((*(layer.head_dim for layer in layers), *(layer.index_dim for layer in sparse)), default=0)
        self._scratch_floats = self._library.scratch_floats(self._most_lines, widest)
        self._scratch = torch.empty(0)
        self._plans: dict[int, _Plan] = {}

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        threads = torch.get_num_threads()
        if len(self._scratch) < threads * self._scratch_floats:
            self._scratch = torch.empty(threads * self._scratch_floats)
        plans = {kind: self._plan(batch.seen_by(kind[0].window), batch, *kind) for kind in set(self._kinds.values())}
        self._plans = {layer_id: plans[kind] for layer_id, kind in self._kinds.items()}

    def attend(self, q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        assert q.stride(1) == 1, "the elements of a token lie side by side"
        out = torch.empty(q.shape, dtype=q.dtype)
        layer_id = layer.layer_id
        self._attend(
            self._addresses[layer_id], self._plans[layer_id].address, q.data_ptr(), q.stride(0), out.data_ptr()
        )
        return out

    def attend_latent(self, q: torch.Tensor, layer: LatentLayer, heads: LatentHeads) -> torch.Tensor:
        return heads.values(self.attend(heads.absorb(q), layer))

    def choose_keys(self, index: IndexInputs, layer: LatentLayer, step: SparseStep) -> torch.Tensor:
        assert layer.top_k is not None, "a sparse layer"
        assert index.q[0].is_contiguous(), "the heads of a token lie side by side"
        plan = self._one_token_rows(step.page_table, step.rows.numpy(), step.positions.numpy() + 1)
        scores, q, weights = torch.empty(len(index.q), step.most_keys), index.q, index.weights
        args = ctypes.addressof(self._index_args[layer.layer_id])
        self._library.index_scores(
            args, plan.address, q.data_ptr(), q.stride(0), weights.data_ptr(), scores.data_ptr(), step.most_keys
        )
        return step.choose(scores, layer.top_k, self.token_to_kv_pool.page_size)

    def attend_chosen(self, q: torch.Tensor, layer: LatentLayer, chosen: PagedMetadata) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        plan = self._one_token_rows(chosen.page_table, np.arange(len(q)), chosen.cache_seqlens.numpy())
        args = ctypes.addressof(self._chosen_args[layer.layer_id])
        self._attend(args, plan.address, q.data_ptr(), q.stride(0), out.data_ptr())
        return out

    def _one_token_rows(self, table: torch.Tensor, rows: Int64Array, lens: npt.NDArray[np.integer[Any]]) -> _Plan:
        """The plan of tokens that see the first `lens` keys of `rows` of `table`."""
        index, ranges = np.arange(len(rows)), np.zeros((len(rows), 4), np.int64)
        ranges[:, 1] = ranges[:, 2] = lens
        return self._step(table, ranges, None, np.stack((rows, index, index + 1), axis=1))

    def _plan(self, batch: ForwardBatch, whole: ForwardBatch, visible: VisibleRange, group: int) -> _Plan:
        """Args for one visible range. `batch` has the pages of these layers' pool, and `whole` has the step's mask."""
        ranges, mask = _visible_ranges(batch, visible), whole.mask
        marks = None if mask is None else mask.visible
        if mask is not None:
            _mask(ranges, whole, visible)
        batch.paged.check()
        return self._step(batch.paged.page_table, ranges, marks, _blocks(batch, max(1, _LINES // group)))

    def _step(self, table: torch.Tensor, ranges: Int64Array, marks: torch.Tensor | None, blocks: Int64Array) -> _Plan:
        args = StepArgs(
            page_table=table.data_ptr(),
            ranges=ranges.ctypes.data,
            marks=None if marks is None else marks.data_ptr(),
            blocks=blocks.ctypes.data,
            scratch=self._scratch.data_ptr(),
            table_stride=table.stride(0),
            num_blocks=len(blocks),
            most_tokens=int((blocks[:, 2] - blocks[:, 1]).max()),
            most_lines=self._most_lines,
            threads=torch.get_num_threads(),
        )
        return _Plan(args, ctypes.addressof(args), (ranges, marks, blocks, table, self._scratch))


def _index_args_of(layer: LatentLayer, pool: TokenToKVPool) -> LayerArgs:
    """Arguments as if index heads were the query heads and index keys the one KV head."""
    _, keys = pool.pages(layer.layer_id)
    args = LayerArgs.from_buffer_copy(_args_of(layer, pool))
    args.keys = args.values = keys.data_ptr()
    args.group, args.head_dim = layer.index_heads, layer.index_dim
    return args


def _args_of(layer: AttentionLayer, pool: TokenToKVPool, page_size: int | None = None) -> LayerArgs:
    pages = pool.pages(layer.layer_id)
    keys, values = pages[0], pages[0 if isinstance(layer, LatentLayer) else 1]
    assert all(it.is_contiguous() for it in (keys, values)), "the kernel reads pages that are contiguous"
    assert layer.sinks is None or layer.sinks.is_contiguous(), "the kernel reads sinks that are contiguous"
    return LayerArgs(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        kv_type=TYPES[pool.dtype],
        type=TYPES[pool.compute_dtype],
        kv_heads=layer.tp_k_head_num,
        group=layer.tp_q_head_num // layer.tp_k_head_num,
        head_dim=layer.head_dim,
        page_size=page_size or pool.page_size,
        scale=layer.scale * layer.k_scale,
        softcap=layer.softcap or 0.0,
        v_scale=layer.v_scale,
    )


def _visible_ranges(batch: ForwardBatch, visible: VisibleRange) -> Int64Array:
    """The VisibleRange (see cpu_attention.c) of each token of causal rows: [num_tokens, 4]."""
    starts = batch.prefix_lens - batch.cu_seqlens_q[:-1]
    positions = np.arange(batch.num_tokens) + np.repeat(starts, batch.extend_lens)
    ranges = np.zeros((batch.num_tokens, 4), np.int64)
    ranges[:, 0] = visible.first_keys(positions)
    ranges[:, 1] = ranges[:, 2] = positions + 1
    return ranges


def _mask(ranges: Int64Array, batch: ForwardBatch, visible: VisibleRange) -> None:
    """Overwrites `ranges` for rows that the step's mask covers."""
    assert batch.mask is not None, "a step without a mask"
    starts, positions = batch.mask.starts.numpy(), batch.mask.positions.numpy()
    for row in np.flatnonzero(starts >= 0):
        prefix_len, num_tokens = batch.prefix_lens[row], batch.extend_lens[row]
        tokens = slice(batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1])
        # Between new tokens, only the mask decides: window and chunk hide none of them.
        ranges[tokens, 0] = np.minimum(visible.first_keys(positions[tokens]), prefix_len)
        ranges[tokens, 1] = batch.seq_lens[row]
        ranges[tokens, 2] = prefix_len
        ranges[tokens, 3] = starts[row] + np.arange(num_tokens) * num_tokens


def _blocks(batch: ForwardBatch, most_tokens: int) -> Int64Array:
    """Cuts rows into blocks of at most `most_tokens` tokens. Returns [num_blocks, 3]: row, first token, end."""
    counts = -(-batch.extend_lens // most_tokens)
    rows = np.repeat(np.arange(batch.batch_size), counts)
    firsts = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = batch.cu_seqlens_q[rows] + firsts * most_tokens
    return np.stack((rows, firsts, np.minimum(firsts + most_tokens, batch.cu_seqlens_q[rows + 1])), axis=1)
