"""The decode-attention kernel against plain attention: fp32 in Triton's interpreter, bf16 on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.kernels.decode import DecodeTuning, choose, paged_decode
from attention.layer import AttentionLayer
from tests.helpers.paged_case import PADDING, PagedCase, grouped_layer

LARGE = DecodeTuning(block_n=64, num_warps=4, num_stages=3, num_splits=1)
SMALL = DecodeTuning(block_n=32, num_warps=2, num_stages=3, num_splits=1)
LENS = [1, 130, 16, 65, 64, 33]


def _split(tuning: DecodeTuning, num_splits: int) -> DecodeTuning:
    return dataclasses.replace(tuning, num_splits=num_splits, early_join=num_splits > 1)


class Case(PagedCase):
    """Rows of so many keys each, the last of them new."""

    def __init__(
        self,
        layer: AttentionLayer,
        page_size: int,
        lens: Sequence[int],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layer, page_size, [(length - 1, 1) for length in lens], device, dtype)
        self.lens = list(lens)

    def run(self, tuning: DecodeTuning | None, rows: Sequence[int] | None = None) -> torch.Tensor:
        """[rows, Hq, D] of `rows`, None: all but padding."""
        rows = range(len(self.lens)) if rows is None else rows
        q = self.queries(rows)
        out = torch.full(q.shape, math.nan, dtype=self.dtype, device=self.device)
        paged = self.paged(rows)
        assert paged_decode(q, self.k, self.v, paged, self.layer, out=out, tuning=tuning) is out
        return out


@pytest.mark.parametrize(
    ("page_size", "tuning", "window", "softcap"),
    [
        *((page_size, LARGE, None, None) for page_size in (1, 64)),
        *((page_size, _split(SMALL, 3), None, None) for page_size in (16, 128)),
        (16, dataclasses.replace(_split(SMALL, 8), min_blocks=2), None, None),
        *((page_size, LARGE, 40, 5.0) for page_size in (16, 128)),
        *((page_size, _split(SMALL, 3), 40, 5.0) for page_size in (1, 64)),
        *((page_size, LARGE, 1, None) for page_size in (1, 128)),
        *((page_size, _split(SMALL, 3), 1, None) for page_size in (16, 64)),
    ],
)
def test_equals_plain_attention_for_every_page_size_window_and_softcap(
    page_size: int, tuning: DecodeTuning, window: int | None, softcap: float | None, device: torch.device
) -> None:
    case = Case(grouped_layer(window=window, softcap=softcap), page_size, LENS, device)
    case.check(case.run(tuning))


@pytest.mark.parametrize(
    ("group", "head_dim", "tuning"),
    [
        (group, head_dim, _split(LARGE, 2) if (i + j) % 2 else SMALL)
        for i, group in enumerate((1, 4, 8, 16))
        for j, head_dim in enumerate((64, 80, 128))
    ],
)
def test_equals_plain_attention_for_every_head_geometry(
    group: int, head_dim: int, tuning: DecodeTuning, device: torch.device
) -> None:
    case = Case(grouped_layer(kv_heads=1 if group > 4 else 3, group=group, head_dim=head_dim), 16, [70, 1, 40], device)
    case.check(case.run(tuning))


@pytest.mark.parametrize(
    ("features", "with_sinks"),
    [({"chunk": 24}, True), ({"chunk": 64, "window": 40}, False), ({"chunk": 64, "softcap": 5.0}, True)],
)
@pytest.mark.parametrize("tuning", [SMALL, _split(SMALL, 3)], ids=["one run", "three runs"])
def test_equals_plain_attention_in_chunks_and_with_sinks(
    tuning: DecodeTuning, features: dict[str, Any], with_sinks: bool, device: torch.device
) -> None:
    sinks = torch.linspace(-1.0, 3.0, 3, device=device) if with_sinks else None
    case = Case(grouped_layer(kv_heads=1, **features, sinks=sinks), 16, [1, 130, 64, 65, 33], device)
    case.check(case.run(tuning))


@pytest.mark.parametrize("tuning", [SMALL, _split(SMALL, 3)], ids=["one run", "three runs"])
def test_a_sink_takes_its_share_once_however_large_or_small_it_is(tuning: DecodeTuning, device: torch.device) -> None:
    sinks = torch.tensor([-math.inf, -500.0, -3.0, 0.0, 5.0, 500.0], device=device)
    case = Case(grouped_layer(kv_heads=1, group=6, sinks=sinks), 16, [130, 1], device)
    out = case.run(tuning)
    case.check(out)
    assert bool((out[:, 5] == 0).all())


@pytest.mark.parametrize(("group", "tuning"), [(17, SMALL), (17, _split(SMALL, 2)), (48, LARGE)])
def test_groups_of_more_heads_than_the_smallest_tile_has_rows(
    group: int, tuning: DecodeTuning, device: torch.device
) -> None:
    case = Case(grouped_layer(kv_heads=2, group=group), 16, [70, 1], device)
    case.check(case.run(tuning))


@pytest.mark.usefixtures("chains")  # numpy's products of some processors err further than the check allows
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("group", "head_dim", "v_dim", "num_splits"),
    [(1, 40, 32, 1), (3, 76, 48, 3), (20, 40, 24, 1), (2, 576, 512, 3), (70, 288, 272, 1)],
)
def test_values_may_be_the_first_columns_of_keys(
    num_splits: int, group: int, head_dim: int, v_dim: int, dtype: torch.dtype | None, device: torch.device
) -> None:
    """70 heads of more than 256 columns are two programs', or in fp32 five."""
    case = Case(grouped_layer(kv_heads=1, group=group, head_dim=head_dim), 16, LENS[:4], device, dtype)
    case.values = case.keys
    q, rows = torch.cat(case.q[:-1]), range(4)
    out = torch.full((*q.shape[:2], v_dim), math.nan, dtype=case.dtype, device=device)
    tuning = dataclasses.replace(_split(SMALL, num_splits), num_warps=8)
    paged_decode(q, case.k, None, case.paged(rows), case.layer, out=out, tuning=tuning)
    case.check(out)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_float16_errs_at_most_twice_as_far_as_torch(num_splits: int, device: torch.device) -> None:
    case = Case(grouped_layer(), 16, LENS, device, torch.float16)
    case.check(case.run(_split(SMALL, num_splits)))


def test_rows_with_fewer_blocks_than_runs_leave_the_others_empty(device: torch.device) -> None:
    case = Case(grouped_layer(), 16, [1, 31, 150], device)
    case.check(case.run(_split(SMALL, 20)))


def test_large_scores_of_either_sign_stay_finite(device: torch.device) -> None:
    case = Case(grouped_layer(), 16, LENS, device)
    case.q = [200.0 * q for q in case.q]  # scores of several hundreds, which fp32 rounds to about 1e-4
    exact, _ = case.expected(torch.float32)
    for tuning in (LARGE, _split(SMALL, 3)):
        torch.testing.assert_close(case.run(tuning).float(), exact, atol=0.02, rtol=0.01)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the NaN of the padding page, in numpy
@pytest.mark.parametrize("tuning", [LARGE, _split(SMALL, 3)], ids=["one run", "three runs"])
def test_a_row_alone_equals_the_row_between_others_and_padding_bit_for_bit(
    tuning: DecodeTuning, device: torch.device
) -> None:
    case = Case(grouped_layer(), 16, LENS, device)
    together = case.run(tuning)
    padded = case.run(tuning, [4, PADDING, 1, 0, PADDING])
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
    case = Case(grouped_layer(kv_heads=8, group=4, head_dim=128), page_size, lens, GPU)
    case.check(case.run(None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("group", [4, 20, 48])
@pytest.mark.parametrize("batch_size", [1, 16, 90])
def test_every_geometry_fits_as_it_tunes_itself(batch_size: int, group: int, head_dim: int, dtype: torch.dtype) -> None:
    sinks = torch.linspace(-1.0, 3.0, 2 * group, device=GPU)
    case = Case(
        grouped_layer(group=group, head_dim=head_dim, chunk=200, sinks=sinks), 16, [300, 70] * batch_size, GPU, dtype
    )
    case.check(case.run(None))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1000])
def test_one_long_row_errs_at_most_twice_as_far_as_torch(window: int | None) -> None:
    case = Case(grouped_layer(kv_heads=2, group=8, head_dim=128, window=window), 64, [33_000], GPU)
    case.check(case.run(None))


@pytest.mark.gpu
def test_a_join_that_starts_early_waits_for_all_parts() -> None:
    case = Case(grouped_layer(kv_heads=8, group=4, head_dim=128), 64, [700, 3, 1500, 64] * 4, GPU)
    tuning = choose(16, 8)
    assert tuning.early_join
    rows = range(len(case.lens))
    paged = case.paged(rows)
    queries = [torch.randn_like(torch.cat(case.q[:-1])) for _ in range(50)]

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
    case = Case(grouped_layer(kv_heads=8, group=4, head_dim=128), 16, lens, GPU)
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
