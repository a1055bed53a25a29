"""The kernel for all but steps of decodes against plain attention: fp32 in Triton's interpreter, bf16 on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.kernels.extend import ExtendTuning, paged_extend
from attention.kernels.merge import merge_states
from attention.layer import AttentionLayer
from tests.helpers.paged_case import PADDING, NewTokens, PagedCase, both_ways, grouped_layer, in_order, mask_of, tree
from tests.helpers.pairs import pairs

SMALL = ExtendTuning(block_m=16, block_n=16, num_warps=4, num_stages=2)
MEDIUM = ExtendTuning(block_m=32, block_n=16, num_warps=4, num_stages=2)
LARGE = ExtendTuning(block_m=64, block_n=32, num_warps=4, num_stages=2)
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (15, 1), (16, 1), (40, 1)],
    "extend": [(0, 5), (0, 33)],
    "extend_with_prefix": [(16, 20), (7, 2), (45, 18)],
    "mixed": [(20, 1), (0, 17), (37, 1), (33, 9), (0, 1)],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window of 1": {"window": 1},
    "window": {"window": 13},
    "chunk": {"chunk": 24},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 20, "chunk": 32, "softcap": 2.0, "sinks": True},
}
LSES = [70.0, -math.inf, math.log(3.0) - 90.0], [-math.inf, -math.inf, -90.0]


def layer_of(device: torch.device, *, kv_heads: int = 1, sinks: bool = False, **features: Any) -> AttentionLayer:
    return grouped_layer(kv_heads=kv_heads, sinks=device if sinks else None, **features)


def run(
    case: PagedCase,
    rows: Sequence[int] | None = None,
    cuts: Sequence[tuple[int, int]] | None = None,
    *,
    tuning: ExtendTuning | None = SMALL,
    masks: Sequence[NewTokens | None] | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """[num_tokens, Hq, D] of `rows` (None: all but padding) and of each the new tokens of its cut (None: all)."""
    rows = range(len(case.rows) - 1) if rows is None else rows
    q = case.queries(rows, cuts)
    out = torch.full(q.shape, math.nan, dtype=case.dtype, device=case.device)
    mask = None if masks is None else mask_of(masks, [case.rows[i][1] for i in rows], case.device)
    paged = case.paged(rows, cuts)
    assert paged_extend(q, case.k, case.v, paged, case.layer, out=out, lse=lse, mask=mask, tuning=tuning) is out
    return out


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_plain_attention_for_every_batch_and_variant(batch: str, variant: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, BATCHES[batch], device)
    case.check(run(case, tuning=LARGE))


@pytest.mark.parametrize("variant", ["causal", "all"])
@pytest.mark.parametrize("page_size", [1, 8, 64, 128])
def test_equals_plain_attention_for_every_page_size(page_size: int, variant: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), page_size, [(20, 1), (33, 19)], device)
    case.check(run(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "page_size", "variant", "tuning"), pairs([*BATCHES], [1, 16, 64], [*VARIANTS], [SMALL, LARGE])
)
def test_equals_plain_attention_in_every_combination_of_two(
    batch: str, page_size: int, variant: str, tuning: ExtendTuning, device: torch.device
) -> None:
    case = PagedCase(layer_of(device, kv_heads=2, **VARIANTS[variant]), page_size, BATCHES[batch], device)
    case.check(run(case, tuning=tuning))


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim"), [(3, 1, 64), (2, 5, 80), (1, 8, 96), (1, 20, 128), (2, 2, 256), (1, 40, 16)]
)
def test_equals_plain_attention_for_every_head_geometry(
    kv_heads: int, group: int, head_dim: int, device: torch.device
) -> None:
    """Tiles of 16 pairs are parts of one token, for groups of 20 and of 40."""
    case = PagedCase(layer_of(device, kv_heads=kv_heads, group=group, head_dim=head_dim), 16, [(20, 3), (0, 1)], device)
    case.check(run(case))


@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_float16_errs_at_most_twice_as_far_as_torch(batch: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS["all"]), 16, BATCHES[batch], device, torch.float16)
    case.check(run(case, tuning=LARGE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_as_it_tunes_itself_equals_plain_attention(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    case = PagedCase(layer_of(device, head_dim=head_dim), 16, [(150, 5), (0, 1), (0, 70)], device, dtype)
    case.check(run(case, tuning=None))


def test_large_scores_of_either_sign_stay_finite(device: torch.device) -> None:
    case = PagedCase(layer_of(device), 16, [(0, 40)], device)
    case.q[0] *= 200.0  # scores of several hundreds, which fp32 rounds to about 1e-4
    exact, _ = case.expected(torch.float32)
    torch.testing.assert_close(run(case, tuning=LARGE).float(), exact, atol=0.02, rtol=0.01)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the NaN of the padding page, in numpy
@pytest.mark.parametrize("variant", ["causal", "all"])
def test_a_row_alone_equals_the_row_between_others_and_padding_bit_for_bit(variant: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, BATCHES["mixed"], device)
    lens = [extend for _, extend in case.rows[:-1]]
    together = run(case, tuning=MEDIUM).split(lens)
    order = [4, PADDING, 1, 3, PADDING]
    padded = run(case, order, tuning=MEDIUM).split([case.rows[i][1] for i in order])
    assert bool(padded[1].isnan().all()), "the padding page is NaN here: a padding row reads nothing else"
    for i, j in ((1, 2), (3, 3), (4, 0)):
        alone = run(case, [i], tuning=MEDIUM)
        assert torch.equal(alone, together[i])
        assert torch.equal(alone, padded[j])


@pytest.mark.usefixtures("chains")  # numpy's products of some processors depend on the number of rows
@pytest.mark.parametrize("variant", ["causal", "window", "all"])
def test_a_prompt_in_chunks_equals_the_whole_prompt_bit_for_bit(variant: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, [(9, 45), (0, 20)], device)
    whole, _ = run(case, tuning=MEDIUM).split([45, 20])
    for cuts in ([(0, 7), (7, 45)], [(0, 30), (30, 31), (31, 45)]):
        pieces = [run(case, [0], [cut], tuning=MEDIUM) for cut in cuts]
        assert torch.equal(torch.cat(pieces), whole), f"cut into {cuts}"
    # A chunk beside another row, and one of a single token beside rows that have none, as in a captured step.
    assert torch.equal(run(case, [1, 0], [(0, 20), (10, 25)], tuning=MEDIUM)[20:], whole[10:25])
    assert torch.equal(run(case, [1, 0, 1, 1], [(3, 3), (44, 45), (0, 0), (20, 20)], tuning=MEDIUM), whole[44:])


def test_a_program_finds_its_row_among_more_than_it_looks_at_at_a_time(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attention.kernels.extend.ROWS_AT_ONCE", 2)
    case = PagedCase(layer_of(device), 16, BATCHES["mixed"], device)
    case.check(run(case, tuning=LARGE))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
@pytest.mark.parametrize("variant", ["causal", "all"])
def test_a_mask_says_which_new_tokens_see_each_other(variant: str, dtype: torch.dtype, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, [(40, 9), (0, 1), (0, 20), (21, 30), (9, 21)], device)
    masks = [*(tree(*lens) for lens in case.rows[:3]), both_ways(*case.rows[3]), None]
    as_dtype = [None if it is None else NewTokens(it.visible.to(dtype), it.positions) for it in masks]
    case.check(run(case, masks=as_dtype, tuning=LARGE), masks)


def test_a_causal_mask_equals_none_bit_for_bit(device: torch.device) -> None:
    case = PagedCase(layer_of(device, sinks=True), 16, [(40, 9), (0, 20)], device)
    masks = [in_order(prefix, torch.ones(extend, extend).tril().bool()) for prefix, extend in case.rows[:-1]]
    for some in (masks, [masks[0], None], [None, masks[1]]):
        assert torch.equal(run(case, masks=some), run(case))


@pytest.mark.parametrize("variant", ["causal", "softcap", "sinks"])
def test_says_the_logarithm_of_the_sum_that_it_divided_by(variant: str, device: torch.device) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, BATCHES["mixed"], device)
    _, expected = case.expected(torch.float32)
    lse = torch.full_like(expected, math.nan)
    run(case, lse=lse, tuning=LARGE)
    torch.testing.assert_close(lse, expected, atol=1e-5, rtol=1e-5)


def test_merged_parts_equal_the_whole(device: torch.device) -> None:
    """New tokens of even and of odd places; some queries see none of a part, which then has zeros and -inf."""
    case = PagedCase(layer_of(device, kv_heads=2), 16, [(0, 21), (0, 1), (0, 6)], device)
    causal = [torch.ones(extend, extend, dtype=torch.bool).tril() for _, extend in case.rows[:-1]]
    parts = []
    for place in (0, 1):
        masks = [in_order(0, it & (torch.arange(len(it)) % 2 == place)) for it in causal]
        lse = torch.full((28, 6), math.nan, device=device)
        parts += [run(case, masks=masks, lse=lse, tuning=LARGE), lse]
    assert bool((parts[2][0] == 0).all())
    assert bool((parts[3][0] == -math.inf).all())
    out, lse = torch.full_like(parts[0], math.nan), torch.full_like(parts[1], math.nan)
    assert merge_states(*parts, out=out, lse=lse) is out
    merge_states(*parts, out=parts[0], lse=parts[1])
    assert torch.equal(parts[0], out)
    assert torch.equal(parts[1], lse)
    case.check(out)
    torch.testing.assert_close(lse, case.expected(torch.float32)[1], atol=1e-5, rtol=1e-5)


def test_a_part_without_a_key_is_not_read_and_two_of_them_give_zeros(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 2, 80, generator=generator).to(device) for _ in range(2))
    lse_a, lse_b = (torch.tensor(it, device=device)[:, None].expand(3, 2).contiguous() for it in LSES)
    b[:2] = math.nan
    a[1] = math.nan
    out, lse = torch.full_like(a, math.nan), torch.full_like(lse_a, math.nan)
    merge_states(a, lse_a, b, lse_b, out=out, lse=lse)
    assert torch.equal(out[0], a[0])
    assert bool((out[1] == 0).all())
    torch.testing.assert_close(out[2], (3 * a[2] + b[2]) / 4, atol=1e-4, rtol=1e-4)  # of logarithms of some 90
    torch.testing.assert_close(lse[:, 0].cpu(), torch.tensor([70.0, -math.inf, math.log(4.0) - 90.0]))


# On a GPU only: the sizes of production, and what the interpreter has not.

GPU = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("page_size", "head_dim", "variant"), pairs([1, 16, 64], [64, 96, 128, 256], [*VARIANTS]))
def test_long_rows_err_at_most_twice_as_far_as_torch(page_size: int, head_dim: int, variant: str) -> None:
    rows = [(699, 1), (0, 130), (90, 1), (1200, 300), (0, 1), (0, 777)]
    case = PagedCase(layer_of(GPU, kv_heads=2, group=4, head_dim=head_dim, **VARIANTS[variant]), page_size, rows, GPU)
    case.check(run(case, tuning=None))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_long_prompt_in_chunks_equals_the_whole_bit_for_bit(head_dim: int, variant: str) -> None:
    case = PagedCase(layer_of(GPU, head_dim=head_dim, **VARIANTS[variant]), 16, [(0, 1000), (77, 300)], GPU)
    whole = run(case, tuning=None)[:1000]
    for size in (1, 100, 333, 512):
        ends = [*range(0, 1000, size), 1000]
        pieces = [run(case, [0], [cut], tuning=None) for cut in itertools.pairwise(ends)]
        assert torch.equal(torch.cat(pieces), whole), f"chunks of {size}"


@pytest.mark.gpu
def test_many_rows_err_at_most_twice_as_far_as_torch() -> None:
    """More than a program looks at at a time when it looks for its own."""
    generator = torch.Generator().manual_seed(2)
    rows = [(int(prefix), int(extend)) for prefix, extend in torch.randint(1, 90, (300, 2), generator=generator)]
    case = PagedCase(layer_of(GPU, group=4, head_dim=128), 16, rows, GPU)
    case.check(run(case, tuning=None))


@pytest.mark.gpu
def test_a_replayed_graph_reads_lengths_starts_and_pages_written_in_place() -> None:
    case = PagedCase(layer_of(GPU, kv_heads=2, group=4, head_dim=128), 16, [(300, 60), (0, 60), (50, 60)], GPU)
    cuts = {(0, 1, 2): [(0, 20), (0, 60), (10, 11)], (2, 0, 1): [(59, 60), (0, 60), (20, 40)]}
    first, *_ = cuts
    static, q = case.paged(first, cuts[first]), case.queries(first, cuts[first]).clone()
    out = torch.empty_like(q)

    def step() -> None:
        paged_extend(q, case.k, case.v, static, case.layer, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rows, row_cuts in cuts.items():
        paged = case.paged(rows, row_cuts)
        static.cache_seqlens.copy_(paged.cache_seqlens)
        static.cu_seqlens_q.copy_(paged.cu_seqlens_q)
        static.page_table.copy_(paged.page_table)
        q.copy_(case.queries(rows, row_cuts))
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, run(case, rows, row_cuts, tuning=None))
