"""The decode-attention kernel against plain attention: fp32 in Triton's interpreter, bf16 on a GPU.

Whatever a row does not own is poisoned: unused page-table entries point far outside the pool, unused slots are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.forward_batch import PagedMetadata
from attention.kernels.decode import MAX_GROUP, DecodeTuning, choose, paged_decode
from attention.layer import AttentionLayer

LARGE = DecodeTuning(block_n=64, num_warps=4, num_stages=3, num_splits=1)
SMALL = DecodeTuning(block_n=32, num_warps=2, num_stages=3, num_splits=1)
LENS = [1, 130, 16, 65, 64, 33]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernel runs: interpreted on CPU tensors, or compiled for a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("interpreter")
    return torch.device(request.param)


def _layer(
    *, kv_heads: int = 2, group: int = 3, head_dim: int = 64, window: int | None = None, softcap: float | None = None
) -> AttentionLayer:
    return AttentionLayer(
        layer_id=0,
        tp_q_head_num=kv_heads * group,
        tp_k_head_num=kv_heads,
        head_dim=head_dim,
        scale=0.11,
        window=window,
        softcap=softcap,
    )


def _split(tuning: DecodeTuning, num_splits: int) -> DecodeTuning:
    return dataclasses.replace(tuning, num_splits=num_splits, early_join=num_splits > 1)


class Case:
    """Rows of so many random keys and values each, on pages in random order. Row -1 is the padding row."""

    def __init__(
        self,
        layer: AttentionLayer,
        page_size: int,
        lens: Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.layer, self.lens, self.device = layer, list(lens), device
        # numpy, which the interpreter computes with, has no bf16.
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        generator = torch.Generator().manual_seed(0)
        num_pages = [math.ceil(length / page_size) for length in lens]
        self.table = torch.full((len(lens) + 1, max(num_pages) + 2), 1 << 30, dtype=torch.int32)
        self.table[-1, 0] = 0
        pool = (sum(num_pages) + 2, page_size, layer.tp_k_head_num, layer.head_dim)
        self.k, self.v = (torch.full(pool, math.nan, dtype=self.dtype) for _ in range(2))
        free = (1 + torch.randperm(sum(num_pages) + 1, generator=generator)).int()
        self.keys, self.values = [], []
        for i, (length, count) in enumerate(zip(lens, num_pages, strict=True)):
            pages = free[sum(num_pages[:i]) :][:count]
            self.table[i, :count] = pages
            slots = (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            for target, rows in ((self.k, self.keys), (self.v, self.values)):
                new = torch.randn(length, *pool[2:], generator=generator).to(self.dtype)
                target.flatten(0, 1)[slots] = new
                rows.append(new.to(device))
        self.q = torch.randn(len(lens) + 1, layer.tp_q_head_num, layer.head_dim, generator=generator)
        self.q, self.k, self.v = (x.to(device, self.dtype) for x in (self.q, self.k, self.v))

    def paged(self, rows: Sequence[int]) -> PagedMetadata:
        return PagedMetadata(
            cache_seqlens=torch.tensor([1 if i < 0 else self.lens[i] for i in rows], dtype=torch.int32).to(self.device),
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32).to(self.device),
            page_table=self.table[list(rows)].to(self.device),
            max_seqlen_q=1,
        )

    def queries(self, rows: Sequence[int]) -> torch.Tensor:
        """[rows, Hq, D], a slice of wider rows, as of a fused projection."""
        q = self.q[list(rows)]
        return torch.cat([q, q], dim=1)[:, : q.shape[1]]

    def run(self, tuning: DecodeTuning | None, rows: Sequence[int] | None = None) -> torch.Tensor:
        """[rows, Hq, D] of `rows`, None: all but padding."""
        rows = range(len(self.lens)) if rows is None else rows
        q = self.queries(rows)
        out = torch.full(q.shape, math.nan, dtype=self.dtype, device=self.device)
        paged = self.paged(rows)
        assert paged_decode(q, self.k, self.v, paged, self.layer, out=out, tuning=tuning) is out
        return out

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows, Hq, D] of every row, computed in `dtype`, one row at a time."""
        layer, outs = self.layer, []
        group = layer.tp_q_head_num // layer.tp_k_head_num
        for q, keys, values in zip(self.q[:-1], self.keys, self.values, strict=True):
            first = 0 if layer.window is None else max(len(keys) - layer.window, 0)
            k, v = (x[first:].to(dtype).repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,lhd->hl", q.to(dtype), k) * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            outs.append(torch.einsum("hl,lhd->hd", torch.softmax(scores, -1), v))
        return torch.stack(outs).float()

    def check(self, out: torch.Tensor) -> None:
        """Asserts that `out` errs as fp32 does, or at most twice as far as torch in the same 16-bit dtype."""
        exact = self.expected(torch.float32)
        if self.dtype is torch.float32:
            torch.testing.assert_close(out, exact, atol=2e-6, rtol=2e-5)
            return
        # torch's max, unlike Python's, never passes over a NaN.
        error, bound = (float((x.float() - exact).abs().max()) for x in (out, self.expected(self.dtype)))
        assert error <= 2 * bound + 1e-3, f"error {error:.5f}, {bound:.5f} by torch in {self.dtype}"


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (1, None), (40, 5.0)])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("tuning", [LARGE, _split(SMALL, 3)], ids=["one run", "three runs"])
def test_equals_plain_attention_for_every_page_size_window_and_softcap(
    tuning: DecodeTuning, page_size: int, window: int | None, softcap: float | None, device: torch.device
) -> None:
    case = Case(_layer(window=window, softcap=softcap), page_size, LENS, device)
    case.check(case.run(tuning))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 4, 8, MAX_GROUP])
@pytest.mark.parametrize("tuning", [SMALL, _split(LARGE, 2)], ids=["one run", "two runs"])
def test_equals_plain_attention_for_every_head_geometry(
    tuning: DecodeTuning, group: int, head_dim: int, device: torch.device
) -> None:
    case = Case(_layer(kv_heads=1 if group > 4 else 3, group=group, head_dim=head_dim), 16, [70, 1, 40], device)
    case.check(case.run(tuning))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_float16_errs_at_most_twice_as_far_as_torch(num_splits: int, device: torch.device) -> None:
    case = Case(_layer(), 16, LENS, device, torch.float16)
    case.check(case.run(_split(SMALL, num_splits)))


def test_rows_with_fewer_blocks_than_runs_leave_the_others_empty(device: torch.device) -> None:
    case = Case(_layer(), 16, [1, 31, 150], device)
    case.check(case.run(_split(SMALL, 20)))


def test_large_scores_of_either_sign_stay_finite(device: torch.device) -> None:
    case = Case(_layer(), 16, LENS, device)
    case.q *= 200.0  # scores of several hundreds, which fp32 rounds to about 1e-4
    for tuning in (LARGE, _split(SMALL, 3)):
        torch.testing.assert_close(case.run(tuning).float(), case.expected(torch.float32), atol=0.02, rtol=0.01)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the NaN of the padding page, in numpy
@pytest.mark.parametrize("tuning", [LARGE, _split(SMALL, 3)], ids=["one run", "three runs"])
def test_a_row_alone_equals_the_row_between_others_and_padding_bit_for_bit(
    tuning: DecodeTuning, device: torch.device
) -> None:
    case = Case(_layer(), 16, LENS, device)
    together = case.run(tuning)
    padded = case.run(tuning, [4, -1, 1, 0, -1])
    assert bool(padded[[1, 4]].isnan().all()), "the padding page is NaN here: a padding row reads nothing else"
    for i, j in ((0, 3), (1, 2), (4, 0)):
        [alone] = case.run(tuning, [i])
        assert torch.equal(alone, together[i])
        assert torch.equal(alone, padded[j])


def test_batches_of_every_size_keep_the_device_busy_in_little_memory() -> None:
    for num_kv_heads in (1, 2, 3, 8):
        for batch_size in range(1, 600):
            tuning, rows = choose(batch_size, num_kv_heads), batch_size * num_kv_heads
            programs = rows * tuning.num_splits
            assert programs >= 128, f"{rows} rows in {tuning.num_splits} runs"
            if tuning.num_splits > 1:
                assert programs <= 512, f"{rows} rows in {tuning.num_splits} runs"
            assert tuning.early_join == (tuning.num_splits > 1)


# On a GPU only: the sizes that `choose` tells apart, and what the interpreter has not.

GPU = torch.device("cuda")
SIZES = [1, 4, 8, 12, 20, 28, 60, 180, 200]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("batch_size", SIZES)
def test_as_it_tunes_itself_errs_at_most_twice_as_far_as_torch(batch_size: int, page_size: int) -> None:
    lens = torch.randint(1, 700, (batch_size,), generator=torch.Generator().manual_seed(2)).tolist()
    case = Case(_layer(kv_heads=8, group=4, head_dim=128), page_size, lens, GPU)
    case.check(case.run(None))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000])
def test_one_long_row_errs_at_most_twice_as_far_as_torch(window: int | None) -> None:
    case = Case(_layer(kv_heads=2, group=8, head_dim=128, window=window), 64, [33_000], GPU)
    case.check(case.run(None))


@pytest.mark.gpu
def test_a_join_that_starts_early_waits_for_all_parts() -> None:
    case = Case(_layer(kv_heads=8, group=4, head_dim=128), 64, [700, 3, 1500, 64] * 4, GPU)
    tuning = choose(16, 8)
    assert tuning.early_join
    rows = range(len(case.lens))
    paged = case.paged(rows)
    queries = [torch.randn_like(case.q[:-1]) for _ in range(50)]

    def outs(tuning: DecodeTuning) -> list[torch.Tensor]:
        # The parts' memory is the same in each call: whoever does not wait reads those of the call before.
        return [
            paged_decode(q, case.k, case.v, paged, case.layer, out=torch.empty_like(q), tuning=tuning) for q in queries
        ]

    late = outs(dataclasses.replace(tuning, early_join=False))
    for ours, theirs in zip(outs(tuning), late, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_replayed_graph_reads_lengths_and_pages_written_in_place(num_rows: int) -> None:
    """3 rows of 8 KV heads are split, 40 are not."""
    lens = torch.randint(1, 900, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    case = Case(_layer(kv_heads=8, group=4, head_dim=128), 16, lens, GPU)
    assert (choose(num_rows, 8).num_splits > 1) == (num_rows == 3)
    first = list(range(num_rows))
    static, q = case.paged(first), case.queries(first).clone()
    outs = [torch.empty_like(q) for _ in range(3)]

    def step() -> None:
        # Three layers: each next one takes the parts' memory of the one before.
        for i, out in enumerate(outs):
            paged_decode(q if i == 0 else outs[i - 1], case.k, case.v, static, case.layer, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    results = []
    for shift in (0, 7, 10):
        rows = [(i + shift) % 50 for i in first]
        paged = case.paged(rows)
        static.cache_seqlens.copy_(paged.cache_seqlens)
        static.page_table.copy_(paged.page_table)
        q.copy_(case.queries(rows))
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        results.append([out.clone() for out in outs])
        step()
        for replayed, eager in zip(results[-1], outs, strict=True):
            assert bool(replayed.isfinite().all())
            assert torch.equal(replayed, eager)
    assert not torch.equal(results[0][0], results[1][0])
