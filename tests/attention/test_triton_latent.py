"""Latent attention of the Triton backend against the same oracle as torch's."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention import triton_latent
from attention.kernels import decode, exact
from attention.kv_pool import FP8, TokenToKVPool
from attention.latent import LatentHeads
from attention.layer import LatentLayer
from attention.step_shape import StepShape
from attention.triton_backend import TritonBackend
from parallel.kernels import shared_memory
from tests.helpers.latent_case import BATCHES, LITE, LatentCase, layer_of
from tests.helpers.paged_case import both_ways, mask_of, tree

GPU = torch.device("cuda")


def run(case: LatentCase, *, captured: bool = False) -> list[torch.Tensor]:
    """Every row's answers; `captured`: as a step of which only the shape is known."""
    backend, batch = TritonBackend([case.layer], case.pool), case.batch
    if captured:
        backend.prepare_capture(batch, StepShape(batch.num_tokens, batch.batch_size, batch.batch_size))
    else:
        backend.init_forward_metadata(batch)
    return case.run(backend)


def check(case: LatentCase, *, captured: bool = False) -> None:
    """Runs and checks it."""
    case.check(run(case, captured=captured))


@pytest.mark.parametrize(
    ("batch", "page_size"),
    [
        *((batch, 16) for batch in BATCHES),
        *(pytest.param(*it, marks=pytest.mark.slow) for it in itertools.product(("decode", "mixed"), (1, 64))),
    ],
)
def test_equals_the_oracle(batch: str, page_size: int, device: torch.device) -> None:
    check(LatentCase(layer_of(3), page_size, BATCHES[batch], torch.float32, device))


@pytest.mark.parametrize(
    ("form", "batch"),
    [
        ("absorbed", "extend"),
        ("own heads", "extend_with_prefix"),
        ("captured", "mixed"),
        pytest.param("absorbed", "mixed", marks=pytest.mark.slow),
        pytest.param("own heads", "mixed", marks=pytest.mark.slow),
        pytest.param("captured", "extend_with_prefix", marks=pytest.mark.slow),
    ],
)
def test_cached_tokens_are_seen_in_either_form(
    batch: str, form: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "captured":
        absorbs = form == "absorbed"
        monkeypatch.setattr(LatentLayer, "absorbs", lambda _, queries, keys: (queries > 0) & absorbs)
    # Chunks of 20 tokens: some of a row's middle, some of two rows.
    monkeypatch.setattr(triton_latent, "_CHUNK_ELEMENTS", 20 * 2 * 40)
    check(LatentCase(layer_of(2), 16, BATCHES[batch], torch.float32, device), captured=form == "captured")


@pytest.mark.parametrize(
    ("num_heads", "batch"),
    [(1, "mixed"), (5, "decode"), pytest.param(2, "decode", marks=pytest.mark.slow), (17, "mixed")],
)
def test_a_rank_has_any_number_of_heads(num_heads: int, batch: str, device: torch.device) -> None:
    check(LatentCase(layer_of(num_heads), 16, BATCHES[batch][:3], torch.float32, device))


@pytest.mark.parametrize("v_dim", [8, 30])
def test_values_may_be_narrower_or_wider_than_keys(v_dim: int, device: torch.device) -> None:
    check(LatentCase(layer_of(2, v_dim=v_dim), 16, BATCHES["mixed"], torch.float32, device))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_float16_errs_at_most_twice_as_far_as_torch(batch: str, captured: bool, device: torch.device) -> None:
    check(LatentCase(layer_of(3), 16, BATCHES[batch], torch.float16, device), captured=captured and batch == "mixed")


@pytest.mark.parametrize("num_heads", [3, 17])
@pytest.mark.parametrize(("batch", "captured"), [("decode", False), ("extend_with_prefix", False), ("mixed", True)])
def test_latents_in_fp8_are_what_the_pool_holds(
    batch: str, captured: bool, num_heads: int, device: torch.device
) -> None:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    layer = layer_of(num_heads, k_scale=0.03, v_scale=0.03)
    check(LatentCase(layer, 16, BATCHES[batch], dtype, device, FP8), captured=captured)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [[(70, 1), (3, 1)], [(40, 1), (0, 5), (20, 7)]], ids=["decodes", "mixed"])
def test_heads_of_deepseek_v2_lite(rows: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
    check(LatentCase(layer_of(3, **LITE), 16, rows, dtype, device))


@pytest.mark.parametrize("rows", [[(70, 1), (3, 1)], [(40, 1), (0, 5)]], ids=["decodes", "mixed"])
def test_a_gpu_with_little_shared_memory_gets_smaller_tiles(
    rows: list[tuple[int, int]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (shared_memory, decode):
        monkeypatch.setattr(module, "shared_bytes", lambda device: 99 << 10)
    assert shared_memory.has_little(device)
    check(LatentCase(layer_of(20, **LITE), 16, rows, torch.float16, device))


def exact_backend(layer: LatentLayer, pool: TokenToKVPool) -> TritonBackend:
    return TritonBackend([layer], pool, exact=True)


def check_exact(case: LatentCase, spans: list[tuple[int, int]], heads: slice) -> None:
    """Checks a row, and that tokens of it have the same bits in steps of their own, among some heads too."""
    backend, heads_of = exact_backend(case.layer, case.pool), functools.partial(LatentHeads, exact=True)
    backend.init_forward_metadata(case.batch)
    [whole] = case.run(backend, exact=True)
    case.check([whole])
    for first, end in spans:
        assert torch.equal(case.again(first, end, exact_backend, heads_of), whole[first:end])
        assert torch.equal(case.again(first, end, exact_backend, heads_of, heads), whole[first:end, heads])


@pytest.mark.usefixtures("chains")
@pytest.mark.parametrize(
    ("num_heads", "kv_dtype", "spans"),
    [
        (3, None, [(0, 1), (41, 42), (31, 33), (20, 40)]),
        (3, FP8, [(41, 42), (31, 33)]),
        (37, None, [(41, 42)]),
    ],
)
def test_exact_decodes_and_chunks_have_the_bits_of_the_prompt(
    num_heads: int,
    kv_dtype: torch.dtype | None,
    spans: list[tuple[int, int]],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "SPAN", 32)
    monkeypatch.setattr(exact, "tile_of", lambda *_: 16)
    scale = 1.0 if kv_dtype is None else 0.03
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    case = LatentCase(layer_of(num_heads, k_scale=scale, v_scale=scale), 16, [(0, 42)], dtype, device, kv_dtype)
    check_exact(case, spans, slice(1, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_long_exact_rows_have_the_same_bits_however_they_come(num_heads: int, kv_dtype: torch.dtype | None) -> None:
    case = LatentCase(layer_of(num_heads, **LITE), 64, [(0, 1900)], torch.bfloat16, GPU, kv_dtype)
    spans = [(0, 1), (511, 512), (512, 513), (1899, 1900), (1890, 1900), (500, 600), (1000, 1900)]
    for heads in (slice(3, 4), slice(5, 10)):
        check_exact(case, spans, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("num_heads", [5, 16])
def test_long_rows_err_at_most_twice_as_far_as_torch(
    num_heads: int, page_size: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_latent, "_CHUNK_ELEMENTS", 500 * num_heads * 320)
    rows = [(699, 1), (0, 130), (90, 1), (1200, 300), (0, 1), (300, 20), (0, 200), (777, 250)]
    check(LatentCase(layer_of(num_heads, **LITE), page_size, rows, torch.bfloat16, GPU), captured=captured)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("num_heads", [3, 16, 32, 128])
@pytest.mark.parametrize("batch_size", [1, 16, 64, 200])
def test_long_decodes_err_at_most_twice_as_far_as_torch(
    batch_size: int, num_heads: int, kv_dtype: torch.dtype | None
) -> None:
    lens = torch.randint(1, 3000, (batch_size,), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [(length, 1) for length in lens]
    check(LatentCase(layer_of(num_heads, **LITE), 64, rows, torch.bfloat16, GPU, kv_dtype))


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "k", "n", "rest", "transposed"),
    [(1, 3, 12, 32, 8, False), (5, 3, 32, 20, 0, True), (70, 2, 128, 512, 64, False), (16, 2, 512, 128, 0, True)],
)
def test_each_head_is_multiplied_with_its_weight_and_the_rest_copied(
    num_tokens: int, num_heads: int, k: int, n: int, rest: int, transposed: bool, device: torch.device
) -> None:
    from attention.kernels.latent_heads import head_products

    x = torch.randn(num_tokens, num_heads, k + rest + 3, device=device)[..., : k + rest]
    weight = torch.randn(num_heads, *((n, k) if transposed else (k, n)), device=device)
    weight = weight.transpose(1, 2) if transposed else weight
    out = torch.full((num_tokens, num_heads, n + rest), torch.nan, device=device)
    head_products(x, weight, out)
    torch.testing.assert_close(out[..., :n], torch.einsum("thk,hkn->thn", x[..., :k], weight), atol=1e-4, rtol=1e-5)
    assert torch.equal(out[..., n:], x[..., k:])


@pytest.mark.gpu
def test_a_replayed_graph_equals_the_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph absorbs all that is cached, as the eager steps do here."""
    monkeypatch.setattr(LatentLayer, "absorbs", lambda _, queries, keys: queries > 0)
    layer, batches = layer_of(4, **LITE), ([(0, 30), (40, 2)], [(41, 1), (3, 31)])
    first, second = (LatentCase(layer, 16, rows, torch.bfloat16, GPU) for rows in batches)
    expected = [torch.cat(run(case)).flatten(1) for case in (first, second)]  # the new tokens are in the pools then
    backend, static, q = TritonBackend([layer], first.pool), first.batch, torch.cat(first.q)
    heads, [pages] = LatentHeads(layer, first.weight), first.pool.pages(0)

    def step() -> torch.Tensor:
        backend.prepare_capture(static, StepShape(32, 2, 2))
        return backend.attend_latent(q, layer, heads)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    graph.replay()
    assert torch.equal(replayed, expected[0])
    for ours, theirs in (
        (pages, second.pool.pages(0)[0]),
        (q, torch.cat(second.q)),
        (static.out_cache_loc, second.batch.out_cache_loc),
        (static.paged.cache_seqlens, second.batch.paged.cache_seqlens),
        (static.paged.cu_seqlens_q, second.batch.paged.cu_seqlens_q),
        (static.paged.page_table, second.batch.paged.page_table),
    ):
        ours.copy_(theirs)
    graph.replay()
    assert torch.equal(replayed, expected[1])


def test_large_steps_with_prompts_are_not_captured(interpreter: None) -> None:
    case = LatentCase(layer_of(2), 16, [(0, 1)], torch.float32)
    backend = TritonBackend([case.layer], case.pool)
    for shape in (StepShape(4096, 4096, 4096), StepShape(512, 9, 8)):
        assert backend.capture_shapes(shape, 8192) == [shape]
    assert backend.capture_shapes(StepShape(576, 9, 8), 8192) == []


def test_a_mask_says_which_new_tokens_see_each_other(device: torch.device) -> None:
    rows = [(20, 9), (0, 1), (33, 4), (0, 6)]
    case = LatentCase(layer_of(2), 16, rows, torch.float32, device)
    parts = [tree(*rows[0]), None, None, both_ways(*rows[3])]
    case.batch = replace(case.batch, mask=mask_of(parts, [extend for _, extend in rows], device))
    torch.testing.assert_close(run(case), case.run(), atol=2e-5, rtol=2e-5)
