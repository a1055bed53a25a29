"""The torch-native backend against a plain fp32 oracle, over a pool whose unused parts are poisoned."""

from __future__ import annotations

import itertools
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
from tests.helpers.batches import batch_of
from tests.helpers.paged_case import PagedCase, grouped_layer

CPU = torch.device("cpu")
SCALE = 0.44
"""By which scores spread as widely as a sharp head's."""
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (1, 1), (16, 1), (63, 1), (64, 1), (100, 1)],
    "decode_alone": [(37, 1)],
    "extend": [(0, 5), (0, 33)],
    "extend_with_prefix": [(16, 20), (7, 2), (0, 18)],
    "mixed": [(20, 1), (0, 17), (90, 1), (33, 9), (0, 1)],
}


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


def _run(case: PagedCase) -> torch.Tensor:
    """[num_tokens, Hq, D] of every row, by the backend."""
    pool, batch = case.in_pool()
    backend = create_backend("torch_native", "torch_native", pool)
    backend.init_forward_metadata(batch)
    q = torch.cat(case.q[:-1])
    out = backend.attend(q.flatten(1), case.layer)
    assert out.is_contiguous()
    return out.view(q.shape)


def _expected(case: PagedCase) -> torch.Tensor:
    rows = zip(case.q[:-1], case.keys, case.values, case.rows[:-1], strict=True)
    return torch.cat([_oracle(q.float(), k.float(), v.float(), prefix, case.layer) for q, k, v, (prefix, _) in rows])


def _check(layer: AttentionLayer, batch: str, page_size: int = 16) -> None:
    case = PagedCase(layer, page_size, BATCHES[batch], CPU)
    torch.testing.assert_close(_run(case), _expected(case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_the_oracle_for_every_page_size_window_softcap_and_batch(
    batch: str, page_size: int, window: int | None, softcap: float | None
) -> None:
    _check(grouped_layer(scale=SCALE, window=window, softcap=softcap), batch, page_size)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("chunk", [None, 1, 16, 19])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_sinks_and_chunks_equal_the_oracle(
    batch: str, chunk: int | None, window: int | None, softcap: float | None
) -> None:
    # Of the size of the scores, whose spread is SCALE * sqrt(64).
    sinks = 3.5 * torch.randn(6, generator=torch.Generator().manual_seed(2))
    _check(grouped_layer(scale=SCALE, window=window, softcap=softcap, chunk=chunk, sinks=sinks), batch)


@pytest.mark.parametrize("batch", list(BATCHES))
def test_chunks_without_sinks_equal_the_oracle(batch: str) -> None:
    _check(grouped_layer(scale=SCALE, chunk=16), batch)


def test_layers_that_see_different_keys_share_a_step() -> None:
    sights: list[dict[str, Any]] = [{}, {"window": 3}, {"chunk": 4}]
    layers = [
        replace(grouped_layer(kv_heads=1, group=2, head_dim=8, **sight), layer_id=i) for i, sight in enumerate(sights)
    ]
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
    _check(grouped_layer(kv_heads=kv_heads, group=group, head_dim=head_dim, scale=SCALE), batch)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-4.0, 4.0, 6)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("batch", ["decode", "extend", "mixed"])
def test_bfloat16_stays_within_its_own_rounding(batch: str, softcap: float | None, sinks: torch.Tensor | None) -> None:
    layer = grouped_layer(scale=SCALE, softcap=softcap, sinks=sinks)
    case = PagedCase(layer, 16, BATCHES[batch], CPU, torch.bfloat16)
    ours = _run(case)
    assert ours.dtype is torch.bfloat16
    # Outputs are averages of values of scale 1: two bf16 roundings of the largest.
    torch.testing.assert_close(ours.float(), _expected(case), atol=0.015, rtol=0.015)


def test_a_forward_batch_names_mode_positions_slots_and_sampled_tokens() -> None:
    def create(rows: list[tuple[int, int]]) -> ForwardBatch:
        return PagedCase(grouped_layer(), 4, rows, CPU).in_pool()[1]

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
