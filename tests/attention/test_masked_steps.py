"""Masks over a step's new tokens, by every backend that serves them, against plain attention in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention import registry
from attention.layer import AttentionLayer
from configs.attention import BACKENDS, Feature
from tests.helpers.paged_case import PagedCase, both_ways, mask_of, tree

ROWS = [(40, 9), (20, 1), (0, 17), (33, 14), (3, 1), (18, 12)]
"""(prefix_len, extend_len): trees behind a prefix and without one, a block that sees itself both ways, and between them
rows without a part, one of them a prompt."""
SINKS = torch.linspace(-1.0, 3.0, 6)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 13},
    "chunk": {"chunk": 24},
    "sinks": {"sinks": SINKS},
    "softcap": {"softcap": 2.0},
    "all": {"window": 20, "chunk": 32, "softcap": 2.0, "sinks": SINKS},
}
# Kernels of optional packages have files of their own beside this one.
SERVING = [name for name, spec in BACKENDS.items() if Feature.MASK in spec.features and spec.package is None]


def _case(device: torch.device, features: dict[str, Any], page_size: int = 16) -> PagedCase:
    on_device = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in features.items()}
    layer = AttentionLayer(layer_id=0, tp_q_head_num=6, tp_k_head_num=2, head_dim=64, scale=0.11, **on_device)
    return PagedCase(layer, page_size, ROWS, device)


@pytest.mark.parametrize("page_size", [16, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("features", list(FEATURES))
@pytest.mark.parametrize("name", SERVING)
def test_trees_and_blocks_seen_both_ways_equal_plain_attention_beside_causal_rows(
    name: str, features: str, page_size: int, device: torch.device
) -> None:
    if name == "triton":
        pytest.importorskip("triton", reason="a CPU install has no Triton")
    case = _case(device, FEATURES[features], page_size)
    parts = [tree(*ROWS[0]), None, tree(*ROWS[2]), both_ways(*ROWS[3]), both_ways(*ROWS[4]), None]
    pool, batch = case.in_pool()
    backend = registry.IMPLEMENTATIONS[name](pool.layers, pool)
    backend.init_forward_metadata(replace(batch, mask=mask_of(parts, [extend for _, extend in ROWS], device)))
    out = backend.attend(case.queries(range(len(ROWS))).flatten(1), case.layer)
    case.check(out.view(-1, 6, 64), parts)
