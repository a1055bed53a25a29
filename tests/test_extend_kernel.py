"""The kernel of prompts, chunks and mixed steps against plain attention: fp32 in Triton's interpreter, bf16 on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.kernels.extend import ExtendTuning, NewTokenMask, choose, paged_extend
from attention.layer import AttentionLayer
from tests.paged_case import PADDING, PagedCase

SMALL = ExtendTuning(block_m=16, block_n=16, num_warps=4, num_stages=2)
WIDE = ExtendTuning(block_m=64, block_n=32, num_warps=4, num_stages=2)
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (15, 1), (16, 1), (40, 1)],
    "extend": [(0, 5), (0, 33)],
    "extend_with_prefix": [(16, 20), (7, 2), (45, 18)],
    "mixed": [(20, 1), (0, 17), (37, 1), (33, 9), (0, 1)],
}
VARIANTS = {
    "causal": {},
    "window 1": {"window": 1},
    "window": {"window": 13},
    "chunk": {"chunk": 24},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 20, "chunk": 32, "softcap": 2.0, "sinks": True},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs: interpreted on CPU tensors, or compiled for a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return torch.device(request.param)


def layer_of(
    device: torch.device,
    *,
    kv_heads: int = 1,
    group: int = 3,
    head_dim: int = 64,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> AttentionLayer:
    return AttentionLayer(
        layer_id=0,
        tp_q_head_num=kv_heads * group,
        tp_k_head_num=kv_heads,
        head_dim=head_dim,
        scale=0.11,
        window=window,
        softcap=softcap,
        chunk=chunk,
        sinks=torch.linspace(-1.0, 3.0, kv_heads * group, device=device) if sinks else None,
    )


def run(
    case: PagedCase,
    rows: Sequence[int] | None = None,
    cuts: Sequence[tuple[int, int]] | None = None,
    *,
    tuning: ExtendTuning | None = SMALL,
    masks: Sequence[torch.Tensor] | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_tokens, Hq, D] of `rows` (None: all but padding) and of each the new tokens of its cut (None: all)."""
    rows = range(len(case.rows) - 1) if rows is None else rows
    q = case.queries(rows, cuts)
    out = torch.full(q.shape, math.nan, dtype=case.dtype, device=case.device)
    mask = None
    if masks is not None:
        starts = list(itertools.accumulate((it.numel() for it in masks), initial=0))[:-1]
        visible = torch.cat([it.flatten() for it in masks])
        mask = NewTokenMask(
            visible=visible.to(case.device), starts=torch.tensor(starts, dtype=torch.int32, device=case.device)
        )
    paged = case.paged(rows, cuts)
    assert paged_extend(q, case.k, case.v, paged, case.layer, out=out, lse=lse, mask=mask, tuning=tuning) is out
    return out


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_plain_attention_for_every_batch_and_variant(batch: str, variant: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, kv_heads=2, **VARIANTS[variant]), 16, BATCHES[batch], device)
    case.check(run(case))
