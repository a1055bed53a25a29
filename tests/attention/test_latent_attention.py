"""Latent attention of the torch-native backend against a plain fp32 oracle, over a pool whose unused parts are NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention import torch_native
from attention.kv_pool import TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import AttentionLayer, LatentLayer
from tests.helpers.latent_case import BATCHES, LITE, LatentCase, layer_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads_at_once", [1, 2])
def test_heads_of_a_long_row_are_made_a_few_at_a_time(heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(20, 30), (0, 50)]
    monkeypatch.setattr(torch_native, "_OWN_KEY_ELEMENTS", heads_at_once * 50 * 20)
    case = LatentCase(layer_of(5), 16, rows, torch.float32)
    made: list[int] = []
    keys_values = LatentHeads.keys_values

    def counted(self: LatentHeads, kept: torch.Tensor, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = keys_values(self, kept, which)
        made.append(k.shape[1])
        return k, v

    monkeypatch.setattr(LatentHeads, "keys_values", counted)
    for ours, expected in zip(case.run(), case.expected(), strict=True):
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
    case = LatentCase(layer_of(3), page_size, BATCHES[batch], torch.float32)
    for ours, expected in zip(case.run(), case.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("v_dim", [8, 20, 30])
def test_values_may_be_narrower_or_wider_than_keys(num_heads: int, v_dim: int) -> None:
    case = LatentCase(layer_of(num_heads, v_dim=v_dim), 16, BATCHES["mixed"], torch.float32)
    for ours, expected in zip(case.run(), case.expected(), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("batch", ["decode", "extend", "mixed"])
def test_bfloat16_stays_within_its_own_rounding(batch: str) -> None:
    case = LatentCase(layer_of(3), 16, BATCHES[batch], torch.bfloat16)
    for ours, expected in zip(case.run(), case.expected(), strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.float(), expected, atol=0.06, rtol=0.03)


def test_decodes_absorb_and_prompts_do_not() -> None:
    layer = layer_of(16, **LITE)
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
