"""The torch-native backend against a plain fp32 oracle, over a pool whose unused parts are poisoned."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attention.forward_batch import ForwardBatch, ForwardMode
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.layer import AttentionLayer
from attention.registry import create_backend
from configs.errors import EngineError
from tests.batches import batch_of

CPU = torch.device("cpu")
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (1, 1), (16, 1), (63, 1), (64, 1), (100, 1)],
    "decode_alone": [(37, 1)],
    "extend": [(0, 5), (0, 33)],
    "extend_with_prefix": [(16, 20), (7, 2), (0, 18)],
    "mixed": [(20, 1), (0, 17), (90, 1), (33, 9), (0, 1)],
}


def _layer(
    q_heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None, **more: Any
) -> AttentionLayer:
    return AttentionLayer(
        layer_id=0,
        tp_q_head_num=q_heads,
        tp_k_head_num=kv_heads,
        head_dim=head_dim,
        scale=0.11,
        window=window,
        softcap=softcap,
        **more,
    )


def _oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix_len: int, layer: AttentionLayer) -> torch.Tensor:
    """q [n, Hq, D] at positions prefix_len.. over k, v [L, Hkv, D], all fp32, one head and one query at a time."""
    out = torch.empty_like(q)
    group = layer.tp_q_head_num // layer.tp_k_head_num
    for i, head in itertools.product(range(len(q)), range(layer.tp_q_head_num)):
        position = prefix_len + i
        first = 0 if layer.window is None else max(0, position - layer.window + 1)
        if layer.chunk is not None:
            first = max(first, position // layer.chunk * layer.chunk)
        keys, values = k[first : position + 1, head // group], v[first : position + 1, head // group]
        scores = keys @ q[i, head] * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks[head : head + 1]))
        out[i, head] = torch.softmax(scores, 0)[: len(values)] @ values
    return out


class Setup:
    """A pool with poisoned slots and rows of random keys and values."""

    def __init__(self, layer: AttentionLayer, page_size: int, rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.layer, self.page_size, self.rows, self.dtype = layer, page_size, rows, dtype
        max_pages = math.ceil(max(prefix + extend for prefix, extend in rows) / page_size) + 2
        num_pages = max_pages * len(rows)
        self.table = ReqToTokenPool(len(rows), max_pages, CPU)
        # Unused entries would be far outside the pool.
        self.table.page_table[:] = 1 << 30
        self.pool = TokenToKVPool([layer], num_pages=num_pages, page_size=page_size, dtype=dtype, device=CPU)
        for poisoned in self.pool.pages(0):
            poisoned.fill_(float("nan"))
        shuffled = np.random.default_rng(0).permutation(np.arange(1, num_pages + 1, dtype=np.int32))
        generator = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = [], [], []
        for i, (prefix, extend) in enumerate(rows):
            used = math.ceil((prefix + extend) / page_size)
            self.table.page_table[i + 1, :used] = torch.from_numpy(shuffled[i * max_pages : i * max_pages + used])
            heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_k_head_num)
            lens = (extend, prefix + extend, prefix + extend)
            for target, num_heads, length in zip((self.q, self.k, self.v), heads, lens, strict=True):
                values = 2 * torch.randn(length, num_heads, layer.head_dim, generator=generator)
                target.append(values.to(dtype))
            slots = torch.tensor([self._slot(i + 1, position) for position in range(prefix)], dtype=torch.int64)
            self.pool.set_kv(0, slots, self.k[i][:prefix].flatten(1), self.v[i][:prefix].flatten(1))

    def _slot(self, row: int, position: int) -> int:
        return int(self.table.page_table[row, position // self.page_size]) * self.page_size + position % self.page_size

    def batch(self) -> ForwardBatch:
        batch = batch_of(self.table, [(i + 1, *lens) for i, lens in enumerate(self.rows)], self.page_size)
        # With the poison behind each row's last page.
        return replace(batch, paged=replace(batch.paged, page_table=self.table.page_table[1:]))

    def run(self) -> list[torch.Tensor]:
        """[extend_len, Hq, D] of each row, by the backend."""
        backend = create_backend("torch_native", "torch_native", self.pool)
        batch = self.batch()
        backend.init_forward_metadata(batch)
        k, v = (
            torch.cat([whole[prefix:] for whole, (prefix, _) in zip(wholes, self.rows, strict=True)]).flatten(1)
            for wholes in (self.k, self.v)
        )
        self.pool.set_kv(0, batch.out_cache_loc, k, v)
        out = backend.attend(torch.cat(self.q).flatten(1), self.layer)
        assert out.is_contiguous()
        shaped = out.view(-1, self.layer.tp_q_head_num, self.layer.head_dim)
        return list(shaped.split([extend for _, extend in self.rows]))

    def expected(self) -> list[torch.Tensor]:
        return [
            _oracle(q.float(), k.float(), v.float(), prefix, self.layer)
            for q, k, v, (prefix, _) in zip(self.q, self.k, self.v, self.rows, strict=True)
        ]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_the_oracle_for_every_page_size_window_softcap_and_batch(
    batch: str, page_size: int, window: int | None, softcap: float | None
) -> None:
    setup = Setup(_layer(6, 2, 64, window, softcap), page_size, BATCHES[batch], torch.float32)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("chunk", [None, 1, 16, 19])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_sinks_and_chunks_equal_the_oracle(
    batch: str, chunk: int | None, window: int | None, softcap: float | None
) -> None:
    # Of the size of the scores, whose spread is 0.11 * 4 * sqrt(64).
    sinks = 3.5 * torch.randn(6, generator=torch.Generator().manual_seed(2))
    layer = _layer(6, 2, 64, window, softcap, chunk=chunk, sinks=sinks)
    setup = Setup(layer, 16, BATCHES[batch], torch.float32)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("batch", list(BATCHES))
def test_chunks_without_sinks_equal_the_oracle(batch: str) -> None:
    setup = Setup(_layer(6, 2, 64, None, None, chunk=16), 16, BATCHES[batch], torch.float32)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def test_layers_that_see_different_keys_share_a_step() -> None:
    layers = [_layer(2, 1, 8, *sight) for sight in ((None, None), (3, None))]
    layers = [replace(layer, layer_id=i) for i, layer in enumerate([*layers, replace(layers[0], chunk=4)])]
    table = ReqToTokenPool(1, 3, CPU)
    table.page_table[1] = torch.tensor([2, 1, 3])
    pool = TokenToKVPool(layers, num_pages=3, page_size=4, dtype=torch.float32, device=CPU)
    backend = create_backend("torch_native", "torch_native", pool)
    backend.init_forward_metadata(batch := batch_of(table, [(1, 0, 10)], 4))
    q, k, v = torch.randn(3, 10, 2, 8, generator=torch.Generator().manual_seed(0))
    for layer in layers:
        pool.set_kv(layer.layer_id, batch.out_cache_loc, k[:, :1].flatten(1), v[:, :1].flatten(1))
        expected = _oracle(q, k[:, :1], v[:, :1], 0, layer)
        torch.testing.assert_close(backend.attend(q.flatten(1), layer).view(10, 2, 8), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("batch", ["decode", "extend_with_prefix", "mixed"])
def test_equals_the_oracle_for_every_head_geometry(batch: str, kv_heads: int, group: int, head_dim: int) -> None:
    setup = Setup(_layer(kv_heads * group, kv_heads, head_dim, None, None), 16, BATCHES[batch], torch.float32)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-4.0, 4.0, 6)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("batch", ["decode", "extend", "mixed"])
def test_bfloat16_stays_within_its_own_rounding(batch: str, softcap: float | None, sinks: torch.Tensor | None) -> None:
    setup = Setup(_layer(6, 2, 64, None, softcap, sinks=sinks), 16, BATCHES[batch], torch.bfloat16)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        assert ours.dtype is torch.bfloat16
        # Outputs are averages of values of scale 2: two bf16 roundings of the largest.
        torch.testing.assert_close(ours.float(), expected, atol=0.03, rtol=0.03)


def test_a_forward_batch_names_mode_positions_slots_and_sampled_tokens() -> None:
    def create(rows: list[tuple[int, int]]) -> ForwardBatch:
        return Setup(_layer(1, 1, 8, None, None), 4, rows, torch.float32).batch()

    assert create([(3, 1), (0, 1)]).mode is ForwardMode.DECODE
    assert create([(3, 2), (0, 3)]).mode is ForwardMode.EXTEND
    batch = create([(3, 2), (9, 1)])
    assert batch.mode is ForwardMode.MIXED
    assert (batch.batch_size, batch.num_tokens) == (2, 3)
    assert batch.seq_lens.tolist() == [5, 10]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3]
    assert batch.positions.tolist() == [3, 4, 9]
    assert (batch.out_cache_loc % 4).tolist() == [3, 0, 1]
    assert batch.sample_indices.tolist() == [1, 2]


def test_the_page_table_refuses_deltas_outside_it() -> None:
    table = ReqToTokenPool(2, 3, CPU)
    table.check(np.array([[1, 0, 5], [2, 2, 1]], np.int32), num_pages=5)
    for wrong in ([0, 0, 1], [3, 0, 1], [1, 3, 1], [1, -1, 1], [1, 0, 0], [1, 0, 6]):
        with pytest.raises(EngineError, match="page delta"):
            table.check(np.array([[2, 2, 1], wrong], np.int32), num_pages=5)
