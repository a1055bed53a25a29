"""The Triton backend, on batches as a step makes them; its kernels have tests of their own, and what it serves in fast
numerics is in test_attention_matrix."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.forward_batch import ForwardBatch
from attention.layer import AttentionLayer
from attention.triton_backend import TritonBackend
from tests.helpers.paged_case import PagedCase

CPU = torch.device("cpu")
PAGE_SIZE = 16
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (15, 1), (40, 1)],
    "extend": [(0, 5), (16, 20)],
    "mixed": [(20, 1), (0, 17), (33, 9)],
}


def _layer(**features: Any) -> AttentionLayer:
    shape = {"layer_id": 0, "tp_q_head_num": 6, "tp_k_head_num": 2, "head_dim": 64, "scale": 0.11}
    return AttentionLayer(**{**shape, **features})


def _with_pool(case: PagedCase, *, exact: bool = False) -> tuple[TritonBackend, ForwardBatch]:
    """A backend over the pages of `case`, and the batch of all its rows but padding."""
    pool, batch = case.in_pool()
    return TritonBackend([case.layer], pool, exact=exact), batch


@pytest.mark.parametrize("with_features", [False, True])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_plain_attention_with_all_features_and_without_in_exact_numerics(
    batch: str, with_features: bool, device: torch.device
) -> None:
    sinks = torch.linspace(-1.0, 3.0, 6, device=device)
    features = {"window": 20, "chunk": 32, "softcap": 2.0, "sinks": sinks} if with_features else {}
    case = PagedCase(_layer(**features), PAGE_SIZE, BATCHES[batch], device)
    backend, forward_batch = _with_pool(case, exact=True)
    backend.init_forward_metadata(forward_batch)
    q = case.queries(range(len(case.rows) - 1)).flatten(1)
    out = backend.attend(q, case.layer)
    assert out.shape == q.shape
    assert out.is_contiguous()
    case.check(out.view(-1, 6, 64))


@pytest.mark.parametrize(("exact", "expected"), [(False, ["decode", "extend", "extend"]), (True, ["exact"] * 3)])
def test_steps_of_decodes_go_to_the_decode_kernel_and_no_others_but_exact_ones_all_to_one(
    exact: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch, interpreter: None
) -> None:
    calls: list[str] = []
    for module, function in (("decode", "paged_decode"), ("extend", "paged_extend"), ("exact", "paged_exact")):
        monkeypatch.setattr(f"attention.kernels.{module}.{function}", lambda *_, m=module, **__: calls.append(m))
    for rows in BATCHES.values():
        case = PagedCase(_layer(), PAGE_SIZE, rows, CPU)
        backend, batch = _with_pool(case, exact=exact)
        backend.init_forward_metadata(batch)
        backend.attend(torch.cat(case.q[:-1]).flatten(1), case.layer)
    assert calls == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_seqlens": torch.ones(3, dtype=torch.int64)},
        {"cache_seqlens": torch.ones(2, dtype=torch.int32)},
        {"page_table": torch.ones(4, 3, dtype=torch.int32).T},
    ],
    ids=["int64 lengths", "lengths of another batch", "a transposed table"],
)
def test_refuses_paged_metadata_that_a_kernel_would_misread(wrong: dict[str, torch.Tensor], interpreter: None) -> None:
    backend, batch = _with_pool(PagedCase(_layer(), PAGE_SIZE, BATCHES["decode"], CPU))
    with pytest.raises(AssertionError):
        backend.init_forward_metadata(dataclasses.replace(batch, paged=dataclasses.replace(batch.paged, **wrong)))
