"""Latent attention of the torch-native backend against a plain fp32 oracle, over a pool whose unused parts are NaN."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from attention import torch_native
from attention.backend import AttentionBackend
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from attention.registry import create_backend
from tests.batches import batch_of

CPU = torch.device("cpu")
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (1, 1), (16, 1), (63, 1), (64, 1), (100, 1)],
    "decode_alone": [(37, 1)],
    "extend": [(0, 5), (0, 33)],
    "extend_with_prefix": [(16, 20), (7, 2), (60, 3), (0, 18)],
    "mixed": [(20, 1), (0, 17), (90, 1), (33, 9), (0, 1)],
}


def layer_of(num_heads: int, **changes: Any) -> LatentLayer:
    dims = {"latent_dim": 32, "nope_dim": 12, "v_dim": 20, "head_dim": 40, **changes}
    return LatentLayer(layer_id=0, tp_q_head_num=num_heads, tp_k_head_num=1, scale=0.2, **dims)


class Setup:
    """A pool with poisoned slots, and rows of random latents and queries."""

    def __init__(
        self,
        layer: LatentLayer,
        page_size: int,
        rows: list[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        self.layer, self.rows = layer, rows
        max_pages = math.ceil(max(map(sum, rows)) / page_size) + 2
        num_pages = max_pages * len(rows)
        self.table = ReqToTokenPool(len(rows), max_pages, device)
        self.table.page_table[:] = 1 << 30  # unused entries are far outside the pool
        self.pool = TokenToKVPool([layer], num_pages=num_pages, page_size=page_size, dtype=dtype, device=device)
        [pages] = self.pool.pages(0)
        pages.fill_(math.nan)
        shuffled = np.random.default_rng(0).permutation(np.arange(1, num_pages + 1, dtype=np.int32))
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        rope_dim = layer.head_dim - layer.latent_dim
        self.weight = (
            random(layer.tp_q_head_num, layer.nope_dim + layer.v_dim, layer.latent_dim) / (layer.latent_dim / 2) ** 0.5
        )
        self.q = [random(extend, layer.tp_q_head_num, layer.nope_dim + rope_dim) for _, extend in rows]
        self.kept = [random(prefix + extend, layer.head_dim) for prefix, extend in rows]
        for i, ((prefix, extend), kept) in enumerate(zip(rows, self.kept, strict=True)):
            used = math.ceil((prefix + extend) / page_size)
            self.table.page_table[i + 1, :used] = torch.from_numpy(shuffled[i * max_pages : i * max_pages + used])
            pages_of_row = self.table.page_table[i + 1].long()
            at = torch.arange(prefix, device=device)
            self.pool.set_kv(0, pages_of_row[at // page_size] * page_size + at % page_size, kept[:prefix])
        batch = batch_of(self.table, [(i + 1, *lens) for i, lens in enumerate(rows)], page_size)
        # With the poison behind each row's last page.
        self.batch = replace(batch, paged=replace(batch.paged, page_table=self.table.page_table[1:]))

    def run(self, backend: AttentionBackend | None = None) -> list[torch.Tensor]:
        """[extend_len, tp_q_head_num, v_dim] of each row, by a backend, which stores the new tokens.

        None: by torch_native.
        """
        if backend is None:
            backend = create_backend("torch_native", "torch_native", self.pool)
            backend.init_forward_metadata(self.batch)
        new = torch.cat([kept[prefix:] for kept, (prefix, _) in zip(self.kept, self.rows, strict=True)])
        heads = LatentHeads(self.layer, self.weight)
        self.pool.set_kv(0, self.batch.out_cache_loc, new)
        out = backend.attend_latent(torch.cat(self.q), self.layer, heads)
        assert out.is_contiguous()
        return list(out.view(-1, self.layer.tp_q_head_num, self.layer.v_dim).split([extend for _, extend in self.rows]))

    def expected(self) -> list[torch.Tensor]:
        """In fp32, one head and one query at a time, each key and value made from its token's latent."""
        layer, weight, results = self.layer, self.weight.float(), []
        for q, kept, (prefix, extend) in zip(self.q, self.kept, self.rows, strict=True):
            latent, k_rope = kept.float().split((layer.latent_dim, layer.head_dim - layer.latent_dim), dim=1)
            out = torch.empty(extend, layer.tp_q_head_num, layer.v_dim, device=q.device)
            for i, head in itertools.product(range(extend), range(layer.tp_q_head_num)):
                own = latent[: prefix + i + 1] @ weight[head].T
                keys = torch.cat((own[:, : layer.nope_dim], k_rope[: prefix + i + 1]), dim=1)
                scores = keys @ q[i, head].float() * layer.scale
                out[i, head] = torch.softmax(scores, 0) @ own[:, layer.nope_dim :]
            results.append(out)
        return results


@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_of_a_long_row_are_made_a_few_at_a_time(heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(20, 30), (0, 50)]
    monkeypatch.setattr(torch_native, "_OWN_KEY_ELEMENTS", heads_at_once * 50 * 20)
    setup = Setup(layer_of(5), 16, rows, torch.float32)
    made: list[int] = []
    keys_values = LatentHeads.keys_values

    def counted(self: LatentHeads, kept: torch.Tensor, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = keys_values(self, kept, which)
        made.append(k.shape[1])
        return k, v

    monkeypatch.setattr(LatentHeads, "keys_values", counted)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)
    assert made == 2 * ([1] * 5 if heads_at_once == 1 else [2, 2, 1])


@pytest.mark.parametrize("absorbs", [None, True, False], ids=["as it chooses", "absorbed", "own heads"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_the_oracle_in_both_forms(
    batch: str, page_size: int, absorbs: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absorbs is not None:
        monkeypatch.setattr(LatentLayer, "absorbs", lambda *_: absorbs)
    setup = Setup(layer_of(3), page_size, BATCHES[batch], torch.float32)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("v_dim", [8, 20, 30])
def test_values_may_be_narrower_or_wider_than_keys(num_heads: int, v_dim: int) -> None:
    setup = Setup(layer_of(num_heads, v_dim=v_dim), 16, BATCHES["mixed"], torch.float32)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("batch", ["decode", "extend", "mixed"])
def test_bfloat16_stays_within_its_own_rounding(batch: str) -> None:
    setup = Setup(layer_of(3), 16, BATCHES[batch], torch.bfloat16)
    for ours, expected in zip(setup.run(), setup.expected(), strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.float(), expected, atol=0.06, rtol=0.03)


def test_decodes_absorb_and_prompts_do_not() -> None:
    layer = layer_of(16, latent_dim=512, nope_dim=128, v_dim=128, head_dim=576)
    assert all(layer.absorbs(1, num_keys) for num_keys in (2, 100, 100_000))
    assert not any(layer.absorbs(length, length) for length in (2, 100, 100_000))
    assert not any(layer.absorbs(512, num_keys) for num_keys in (512, 4096, 100_000))
    assert [layer.absorbs(num_queries, 2048) for num_queries in (32, 128, 170)] == [True, True, False]


def test_one_pool_holds_layers_of_both_kinds() -> None:
    layers = [
        AttentionLayer(layer_id=0, tp_q_head_num=4, tp_k_head_num=2, head_dim=64, scale=0.1),
        replace(layer_of(2), layer_id=1),
    ]
    pool = TokenToKVPool(layers, num_pages=3, page_size=16, dtype=torch.float16, device=CPU)
    assert [tuple(pages.shape) for pages in pool.pages(0)] == [(4, 16, 2, 64)] * 2
    assert [tuple(pages.shape) for pages in pool.pages(1)] == [(4, 16, 40)]
    kept = torch.randn(2, 40).half()
    pool.set_kv(1, torch.tensor([17, 40]), kept)
    assert torch.equal(pool.pages(1)[0][[1, 2], [1, 8]], kept)
