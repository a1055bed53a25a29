"""The FlashMLA backend: on CPUs over an emulation of the library, on Hopper GPUs over the library itself."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention import flash_mla
from attention.flash_mla import FlashMlaBackend
from attention.kernels import decode
from attention.latent import LatentHeads
from attention.step_shape import StepShape
from attention.triton_latent import TritonLatent
from configs.errors import ConfigError
from tests.attention.test_sparse import SparseCase
from tests.helpers.latent_case import BATCHES, LITE, LatentCase, layer_of
from tests.helpers.paged_case import mask_of, tree

PAGE_SIZE = 64
ROWS = {**BATCHES, "drafts": [(70, 5), (3, 1), (128, 8), (0, 2)]}


class Emulated:
    """What `sgl_kernel.flash_mla` does, in fp32, with the limits of its kernels for Hopper."""

    @staticmethod
    def get_mla_metadata() -> tuple[dict[str, Any], None]:
        return {}, None

    @staticmethod
    def flash_mla_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        schedule: dict[str, Any],
        *,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, None]:
        assert (k_cache.shape[1:], head_dim_v) == ((PAGE_SIZE, 1, 576), 512)
        assert block_table.dtype is cache_seqlens.dtype is torch.int32
        assert len(block_table) == len(cache_seqlens) == len(q)
        assert schedule.setdefault("shape", q.shape[:3]) == q.shape[:3], "the schedule is that of other sizes"
        out = q.new_empty(*q.shape[:3], head_dim_v)
        for row, num_keys in enumerate(cache_seqlens.tolist()):
            pages = block_table[row, : -(-num_keys // PAGE_SIZE)].long()
            out[row, 0] = _attended(q[row, 0], k_cache[pages].flatten(0, 2)[:num_keys], softmax_scale)
        return out, None

    @staticmethod
    def flash_mla_sparse_fwd(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, *, topk_length: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        assert (q.shape[1] % 64, indices.shape[2] % 128) == (0, 0)
        assert q.dtype is not torch.float16
        assert indices.dtype is topk_length.dtype is torch.int32
        out = q.new_empty(*q.shape[:2], 512)
        for token, num_keys in enumerate(topk_length.tolist()):
            out[token] = _attended(q[token], kv[indices[token, 0, :num_keys].long(), 0], sm_scale)
        return out, None, None


def _attended(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(q.float() @ keys.float().T * scale, 1) @ keys[:, :512].float()


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        pytest.importorskip("sgl_kernel", reason="sglang-kernel is not installed")
    elif "device" in request.fixturenames:
        monkeypatch.setattr(flash_mla, "_load", lambda: Emulated)
        monkeypatch.setattr(decode, "_MAX_SPLITS", 2)  # each is a turn of the interpreter's loop


def _case(num_heads: int, batch: str, device: torch.device) -> LatentCase:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return LatentCase(layer_of(num_heads, **LITE), PAGE_SIZE, ROWS[batch], dtype, device)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", ["decode", "drafts", "mixed"])
@pytest.mark.parametrize(
    "num_heads", [3, pytest.param(16, marks=pytest.mark.gpu), pytest.param(128, marks=pytest.mark.gpu)]
)
def test_errs_at_most_twice_as_far_as_torch(num_heads: int, batch: str, captured: bool, device: torch.device) -> None:
    case = _case(num_heads, batch, device)
    backend = FlashMlaBackend([case.layer], case.pool)
    if captured:
        backend.prepare_capture(case.batch, StepShape(case.batch.num_tokens, len(case.rows), len(case.rows)))
    else:
        backend.init_forward_metadata(case.batch)
    case.check(case.run(backend))


@pytest.mark.parametrize(("batch", "is_served"), [("decode", True), ("drafts", True), ("extend", False)])
def test_flash_mla_attends_in_steps_with_few_tokens_of_a_row_and_triton_in_all_others(
    batch: str, is_served: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, by_triton = _case(3, batch, device), list[str]()
    backend = FlashMlaBackend([case.layer], case.pool)
    for name in ("extend", "decode"):
        right = getattr(TritonLatent, name)
        counted = lambda *given, name=name, right=right: by_triton.append(name) or right(*given)  # noqa: E731
        monkeypatch.setattr(TritonLatent, name, counted)
    backend.init_forward_metadata(case.batch)
    case.run(backend)
    assert by_triton == ([] if is_served else ["extend"])


def test_triton_serves_masks(device: torch.device) -> None:
    case = _case(2, "drafts", device)
    parts = [tree(*row) if row[1] > 1 else None for row in case.rows]
    case.batch = dataclasses.replace(case.batch, mask=mask_of(parts, [extend for _, extend in case.rows], device))
    backend = FlashMlaBackend([case.layer], case.pool)
    backend.init_forward_metadata(case.batch)
    bound = 2e-5 if device.type == "cpu" else 0.03
    torch.testing.assert_close(case.run(backend), case.run(), atol=bound, rtol=bound)


@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_sparse_layers_attend_to_the_keys_that_were_chosen(batch: str, device: torch.device) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    case = SparseCase(batch, PAGE_SIZE, dtype, device, widths=LITE)
    backend, heads = FlashMlaBackend([case.layer], case.pool), LatentHeads(case.layer, case.weight)
    backend.init_forward_metadata(case.batch)
    out = backend.attend_stored(torch.cat(case.q), case.layer, heads, case.index)
    bound = 2e-5 if device.type == "cpu" else 0.03
    torch.testing.assert_close(
        out.view(len(out), -1, case.layer.v_dim).float(), case.attended(), atol=bound, rtol=bound
    )


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["decode", "drafts"])
def test_a_replayed_graph_attends_as_the_eager_step(batch: str) -> None:
    """After the capture, rows have other lengths, so the graph must plan again."""
    device = torch.device("cuda")
    case = _case(16, batch, device)
    backend, heads = FlashMlaBackend([case.layer], case.pool), LatentHeads(case.layer, case.weight)
    expected = torch.cat(case.run()).flatten(1)  # the new tokens are in the pool then
    static, q = case.batch, torch.cat(case.q)
    lens, positions = static.paged.cache_seqlens.clone(), static.positions.clone()
    static.paged.cache_seqlens.fill_(1)
    static.positions.fill_(0)
    graph = torch.cuda.CUDAGraph()
    for capturing in (False, True):
        with torch.cuda.graph(graph) if capturing else torch.cuda.stream(torch.cuda.Stream()):
            backend.prepare_capture(static, StepShape(static.num_tokens, len(case.rows), len(case.rows)))
            out = backend.attend_latent(q, case.layer, heads)
        torch.cuda.synchronize()
    static.paged.cache_seqlens.copy_(lens)
    static.positions.copy_(positions)
    graph.replay()
    torch.testing.assert_close(out, expected, atol=0.03, rtol=0.03)


def test_a_host_without_the_library_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(ConfigError, match=r"finds no FlashMLA .* install sglang-kernel .* attention.backend=triton"):
        flash_mla._load()
