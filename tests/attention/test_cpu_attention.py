"""The C backend: the bits of a token's answer in every step that may hold it, and its error against fp64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention.cpu_backend import CpuBackend
from attention.kv_pool import FP8, ReqToTokenPool, TokenToKVPool
from attention.latent import exact_heads
from attention.layer import AttentionLayer
from tests.helpers.batches import batch_of
from tests.helpers.latent_case import LatentCase, layer_of
from tests.helpers.paged_case import NewTokens, PagedCase, both_ways, in_order, mask_of, tree

CPU = torch.device("cpu")
LENGTH = 600  # of a row: three of the chunks that the contract cuts keys into, the last in part
HEADS, KV_HEADS = 6, 2
SINKS = torch.linspace(-1.0, 3.0, HEADS)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 290},
    "short window": {"window": 5},
    "chunk": {"chunk": 200},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": SINKS},
    "all": {"window": 290, "chunk": 400, "softcap": 3.0, "sinks": SINKS},
    "heads of 40": {"head_dim": 40},
}
DTYPES = (torch.float32, torch.bfloat16)


class Rows:
    """Rows of LENGTH random tokens, of which steps hold some."""

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, **features: Any) -> None:
        given = {"layer_id": 0, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "head_dim": 64, "scale": 0.11}
        self.layer = AttentionLayer(**{**given, **features})
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        generator = torch.Generator().manual_seed(0)

        def random(heads: int) -> torch.Tensor:
            return torch.randn(3, LENGTH, heads, self.layer.head_dim, generator=generator).to(dtype)

        self.q, self.k, self.v = random(HEADS), random(KV_HEADS), random(KV_HEADS)

    def of_head(self, head: int) -> Rows:
        """Those of a rank that has one query head and its KV head alone."""
        rank = object.__new__(Rows)
        rank.dtype, rank.kv_dtype = self.dtype, self.kv_dtype
        sinks = None if self.layer.sinks is None else self.layer.sinks[head : head + 1]
        rank.layer = replace(self.layer, tp_q_head_num=1, tp_k_head_num=1, sinks=sinks)
        kv_head = head // (HEADS // KV_HEADS)
        rank.q = self.q[:, :, head : head + 1]
        rank.k, rank.v = (it[:, :, kv_head : kv_head + 1] for it in (self.k, self.v))
        return rank

    def answers(
        self, step: Sequence[tuple[int, int, int]], page_size: int = 16, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[tokens of the step, heads, head_dim] of (row, first token, end) each, on pages of their own; what these
        rows do not hold is NaN.

        Args:
            visible: which of its new tokens each of the first row's sees.
        """
        num_pages = math.ceil(LENGTH / page_size)
        table = ReqToTokenPool(len(step), num_pages, CPU)
        order = 1 + torch.randperm(num_pages * len(step), generator=torch.Generator().manual_seed(1))
        table.page_table[1:] = order.view(len(step), -1)
        pool = TokenToKVPool(
            [self.layer],
            num_pages=len(order),
            page_size=page_size,
            dtype=self.kv_dtype,
            device=CPU,
            compute_dtype=self.dtype,
        )
        for pages in pool.pages(0):
            pages.copy_(torch.full(pages.shape, math.nan))
        for i, (row, _, end) in enumerate(step):
            slots = (table.page_table[i + 1].long()[:, None] * page_size + torch.arange(page_size)).flatten()
            pool.set_kv(0, slots[:end], self.k[row, :end].flatten(1), self.v[row, :end].flatten(1))
        batch = batch_of(table, [(i + 1, first, end - first) for i, (_, first, end) in enumerate(step)], page_size)
        if visible is not None:
            parts = [in_order(step[0][1], visible), *[None] * (len(step) - 1)]
            batch = replace(batch, mask=mask_of(parts, batch.extend_lens.tolist(), CPU))
        backend = CpuBackend([self.layer], pool)
        backend.init_forward_metadata(batch)
        q = torch.cat([self.q[row, first:end] for row, first, end in step])
        return backend.attend(q.flatten(1), self.layer).view(q.shape)

    def whole(self, row: int = 0) -> torch.Tensor:
        """[LENGTH, heads, head_dim]: a row's answers as one prompt."""
        return self.answers([(row, 0, LENGTH)])


@pytest.fixture(params=[(name, dtype) for name in VARIANTS for dtype in DTYPES], ids=lambda it: f"{it[0]}-{it[1]}")
def rows(request: pytest.FixtureRequest) -> Rows:
    name, dtype = request.param
    return Rows(dtype, **VARIANTS[name])


@pytest.fixture
def two_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's threads, for the test alone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(expected).all()
    assert torch.equal(ours, expected), f"{int((ours != expected).sum())} of {ours.numel()} differ"


def test_a_decode_has_the_bits_of_the_prompt(rows: Rows) -> None:
    whole, other = rows.whole(), rows.whole(1)
    for position in (0, 1, 15, 16, 255, 256, 257, 511, 512, LENGTH - 1):
        _same(rows.answers([(0, position, position + 1)]), whole[position : position + 1])
    among = rows.answers([(1, 40, 41), (0, 599, 600), (1, 0, 1), (1, 300, 301)])
    _same(among, torch.stack((other[40], whole[599], other[0], other[300])))
    beside_prompts = rows.answers([(1, 40, 141), (0, 256, 257), (2, 0, 3)])
    _same(beside_prompts[:102], torch.cat((other[40:141], whole[256:257])))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_of_a_prompt_have_its_bits(rows: Rows, size: int) -> None:
    first = 0 if size == 64 else 490
    parts = [rows.answers([(0, start, min(start + size, LENGTH))]) for start in range(first, LENGTH, size)]
    _same(torch.cat(parts), rows.whole()[first:])


def test_what_follows_a_cached_prefix_has_the_bits_of_the_prompt(rows: Rows) -> None:
    whole = rows.whole()
    for prefix in (16, 250, 256, 512, 592):
        _same(rows.answers([(0, prefix, LENGTH)]), whole[prefix:])


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_pages_of_any_size_have_the_same_bits(rows: Rows, page_size: int) -> None:
    _same(rows.answers([(0, 0, LENGTH)], page_size), rows.whole())
    _same(rows.answers([(0, 599, 600)], page_size), rows.whole()[599:])


def test_a_rank_with_one_head_has_the_bits_of_all(rows: Rows) -> None:
    whole = rows.whole()
    for head in range(HEADS):
        rank = rows.of_head(head)
        _same(rank.whole(), whole[:, head : head + 1])
        _same(rank.answers([(0, 520, 521)]), whole[520:521, head : head + 1])


def test_any_number_of_threads_has_the_same_bits(rows: Rows, two_threads: Callable[[int], None]) -> None:
    two_threads(1)
    whole, decode = rows.whole(), rows.answers([(0, 599, 600), (1, 300, 301)])
    two_threads(2)
    _same(rows.whole(), whole)
    _same(rows.answers([(0, 599, 600), (1, 300, 301)]), decode)


def test_a_causal_mask_has_the_bits_of_none(rows: Rows) -> None:
    if rows.layer.window is not None or rows.layer.chunk is not None:
        pytest.skip("they hide no new tokens of rows with a mask")
    step = [(0, 230, 300), (1, 10, 11)]
    _same(rows.answers(step, visible=torch.ones(70, 70, dtype=torch.bool).tril()), rows.answers(step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_keys_and_values_have_the_same_bits_in_every_step(dtype: torch.dtype) -> None:
    rows = Rows(dtype, FP8, k_scale=0.5, v_scale=2.0)
    whole = rows.whole()
    _same(torch.cat([rows.answers([(0, start, start + 60)], 1) for start in range(0, LENGTH, 60)]), whole)
    _same(rows.answers([(1, 3, 4), (0, 599, 600)])[1:], whole[599:])


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, FP8)])
def test_latents_have_the_same_bits_in_every_step_and_on_a_rank_with_one_head(
    dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    scale = 1.0 if kv_dtype is None else 0.03
    case = LatentCase(layer_of(3, k_scale=scale, v_scale=scale), 16, [(0, LENGTH)], dtype, kv_dtype=kv_dtype)
    backend = CpuBackend([case.layer], case.pool)
    made = (lambda layer, pool: CpuBackend([layer], pool)), exact_heads
    backend.init_forward_metadata(case.batch)
    case.check(case.run(backend))  # which fills the pool
    whole = case.again(0, LENGTH, *made)
    for first, end in ((0, 1), (255, 257), (LENGTH - 1, LENGTH), (100, 370)):
        _same(case.again(first, end, *made), whole[first:end])
        _same(case.again(first, end, *made, slice(1, 2)), whole[first:end, 1:2])


def test_hidden_tokens_of_the_same_prompt_add_nothing(rows: Rows) -> None:
    whole = rows.whole()
    rows.k[0, 300], rows.v[0, 300] = math.nan, math.inf
    changed = rows.whole()
    _same(changed[:300], whole[:300])
    assert changed[300].isnan().all()
    window, chunk = rows.layer.window, rows.layer.chunk
    again = min(300 + window if window else LENGTH, 300 // chunk * chunk + chunk if chunk else LENGTH)
    assert changed[300:again].isnan().all()
    _same(changed[again:], whole[again:])
    if again < LENGTH:
        _same(rows.answers([(0, LENGTH - 1, LENGTH)]), whole[-1:])


def _check(case: PagedCase, masks: Sequence[NewTokens | None] | None = None) -> None:
    """Against fp64: what fp32 errs, and one rounding to the dtype."""
    pool, batch = case.in_pool()
    if masks is not None:
        batch = replace(batch, mask=mask_of(masks, batch.extend_lens.tolist(), CPU))
    backend = CpuBackend([case.layer], pool)
    backend.init_forward_metadata(batch)
    q = case.queries(range(len(case.rows) - 1))
    out = backend.attend(q.flatten(1), case.layer).view(q.shape)
    exact = case.expected(torch.float64, masks)[0]
    rounding = 0.0 if case.dtype is torch.float32 else torch.finfo(case.dtype).eps / 2
    torch.testing.assert_close(out.float(), exact, atol=2e-6, rtol=rounding + 2e-6)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(
    "features",
    [
        *VARIANTS.values(),
        {"head_dim": 1},
        {"head_dim": 192},
        {"tp_q_head_num": 2},
        {"tp_q_head_num": 70, "tp_k_head_num": 1},
        {"softcap": 50.0},
    ],
    ids=str,
)
def test_errs_as_fp32_does_and_rounds_once(features: dict[str, Any], dtype: torch.dtype) -> None:
    given = {"layer_id": 0, "tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "head_dim": 64, "scale": 0.11}
    case = PagedCase(
        AttentionLayer(**{**given, **features}), 16, [(0, 270), (700, 1), (254, 5), (511, 40), (0, 1)], CPU, dtype
    )
    _check(case)


@pytest.mark.parametrize("features", [{}, {"window": 20}, {"chunk": 64}], ids=str)
@pytest.mark.parametrize("new_tokens", [tree, both_ways])
def test_masks_err_as_fp32_does(new_tokens: Callable[[int, int], NewTokens], features: dict[str, Any]) -> None:
    layer = AttentionLayer(layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, head_dim=64, scale=0.11, **features)
    rows = [(250, 40), (0, 300), (90, 9)]
    _check(PagedCase(layer, 16, rows, CPU, torch.float32), [new_tokens(*rows[0]), new_tokens(*rows[1]), None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_errs_as_fp32_does(dtype: torch.dtype) -> None:
    layer = AttentionLayer(
        layer_id=0, tp_q_head_num=6, tp_k_head_num=2, head_dim=40, scale=0.11, k_scale=0.03, v_scale=0.7
    )
    _check(PagedCase(layer, 16, [(0, 270), (300, 1)], CPU, dtype, kv_dtype=FP8))
