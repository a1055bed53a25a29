"""The kernel of exact numerics: a token's answer has the same bits however it comes; and is right.

Triton's interpreter has products by numpy, which adds in an order that follows their shapes. Here they are chains over
ascending keys, as tensor cores have them; on a GPU they are what they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="a CPU install has no Triton")

from attention.kernels import exact
from attention.kernels.exact import Schedule, paged_exact
from attention.kv_pool import FP8
from attention.layer import AttentionLayer
from tests.helpers.paged_case import PADDING, PagedCase, grouped_layer

pytestmark = pytest.mark.usefixtures("chains")
SMALL = Schedule(block_m=16, num_warps=4, num_stages=2)
LARGE = Schedule(block_m=64, num_warps=4, num_stages=2)
SCHEDULES = [
    SMALL,
    Schedule(block_m=32, num_warps=2, num_stages=3),
    Schedule(block_m=128, num_warps=8, num_stages=2),
]
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window of 1": {"window": 1},
    "window": {"window": 39},
    "chunk": {"chunk": 24},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 40, "chunk": 96, "softcap": 2.0, "sinks": True},
}
BATCHES = {
    # (prefix_len, extend_len) of each row
    "decode": [(0, 1), (15, 1), (32, 1), (119, 1)],
    "extend": [(0, 5), (0, 37)],
    "mixed": [(70, 1), (0, 17), (33, 40), (0, 1)],
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of 32 positions and tiles of 16, so that short rows have many."""
    monkeypatch.setattr(exact, "SPAN", 32)
    monkeypatch.setattr(exact, "tile_of", lambda *_: 16)


def layer_of(device: torch.device, *, sinks: bool = False, **features: Any) -> AttentionLayer:
    shape = {"kv_heads": 1, "head_dim": 16, "scale": 0.31, **features}
    return grouped_layer(sinks=device if sinks else None, **shape)


def run(
    case: PagedCase,
    rows: Sequence[int] | None = None,
    cuts: Sequence[tuple[int, int]] | None = None,
    schedule: Schedule | None = LARGE,
) -> torch.Tensor:
    """[num_tokens, Hq, D] of `rows` (None: all but padding) and of each the new tokens of its cut (None: all)."""
    rows = range(len(case.rows) - 1) if rows is None else rows
    q, paged = case.queries(rows, cuts), case.paged(rows, cuts)
    out = torch.full(q.shape, math.nan, dtype=case.dtype, device=case.device)
    assert paged_exact(q, case.k, case.v, paged, case.layer, out=out, schedule=schedule) is out
    return out


def decodes(case: PagedCase, tokens: Sequence[int], num_runs: int = 1) -> torch.Tensor:
    """Answers of some new tokens of the first row, each as a row of one token, all in one step."""
    schedule = dataclasses.replace(SMALL, num_runs=num_runs)
    return run(case, [0] * len(tokens), [(i, i + 1) for i in tokens], schedule)


def pieces(case: PagedCase, size: int, num_runs: int = 1) -> torch.Tensor:
    """Answers of the first row's new tokens, so many a step, beside other rows of none, one and more."""
    length, schedule = case.rows[0][1], dataclasses.replace(SMALL, num_runs=num_runs)
    cuts = [(at, min(at + size, length)) for at in range(0, length, size)]
    found = [run(case, [0] * 4, [(0, 1), (4, 4), (first, end), (0, 5)], schedule) for first, end in cuts]
    return torch.cat([part[1:-5] for part in found])


def on_pages(case: PagedCase, page_size: int, layer: AttentionLayer | None = None, kv_head: int = 0) -> PagedCase:
    """The same tokens on pages of another size; `layer`: of as many KV heads and query heads from there on."""
    layer = case.layer if layer is None else layer
    other = PagedCase(layer, page_size, case.rows[:-1], case.device, case.dtype, case.kv_dtype)
    heads = slice(kv_head, kv_head + layer.tp_k_head_num)
    for i, pages in enumerate(other.table[:-1].long()):
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[: len(case.keys[i])].to(case.device)
        for target, values in ((other.k, case.keys), (other.v, case.values)):
            target.flatten(0, 1)[slots] = values[i][:, heads]
    group = case.layer.tp_q_head_num // case.layer.tp_k_head_num
    first = kv_head * group
    other.q = [q[:, first : first + layer.tp_q_head_num] for q in case.q]
    return other


def check(case: PagedCase, out: torch.Tensor) -> None:
    """Asserts that `out` errs, against fp64, at most twice as far as torch in the same dtype."""
    right, same_dtype = (case.expected(dtype)[0] for dtype in (torch.float64, case.dtype))
    error, bound = (float((it.float() - right).abs().max()) for it in (out, same_dtype))
    # A GPU's exponential is not the nearest fp32.
    slack = 1e-6 if case.device.type == "cpu" else 1e-5 if case.dtype is torch.float32 else 1e-3
    assert error <= 2 * bound + slack, f"error {error:.2e}, {bound:.2e} by torch in {case.dtype}"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("batch", list(BATCHES))
def test_equals_attention_in_fp64(
    batch: str, variant: str, dtype: torch.dtype, device: torch.device, small: None
) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, BATCHES[batch], device, dtype)
    check(case, run(case, schedule=dataclasses.replace(LARGE, num_runs=2)))


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, None) for variant in VARIANTS if variant not in ("causal", "all")),
        ("causal", torch.float16),
        ("all", None),
        pytest.param("causal", None, marks=pytest.mark.slow),
        pytest.param("all", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_decodes_equal_prompts_in_any_chunks_bit_for_bit(
    variant: str, dtype: torch.dtype | None, device: torch.device, small: None
) -> None:
    case = PagedCase(layer_of(device, group=2, **VARIANTS[variant]), 16, [(40, 75)], device, dtype)
    whole = run(case)
    for size, num_runs in (64, 1), (11, 3), *[(11, 1), (3, 2)] * (variant == "all"):
        assert torch.equal(pieces(case, size, num_runs), whole), f"{size} tokens a step, {num_runs} runs"
    # Around borders of tiles, spans and chunks; 74 is the last.
    tokens = [0, 7, 8, 23, 24, 55, 56, 74]
    assert torch.equal(decodes(case, tokens, 3), whole[tokens])
    assert torch.equal(decodes(case, tokens[-2:], 1), whole[tokens[-2:]])


@pytest.mark.parametrize("variant", ["causal", "all"])
def test_no_schedule_changes_a_bit(variant: str, device: torch.device, small: None) -> None:
    case = PagedCase(layer_of(device, group=5, **VARIANTS[variant]), 16, [(39, 20), (0, 8)], device)
    whole = run(case)
    for schedule in SCHEDULES:
        assert torch.equal(run(case, schedule=schedule), whole)
        runs = dataclasses.replace(schedule, num_runs=2)
        assert torch.equal(run(case, [0], [(19, 20)], runs), whole[19:20])


@pytest.mark.parametrize("variant", ["causal", "all"])
def test_no_page_size_changes_a_bit(variant: str, device: torch.device, small: None) -> None:
    case = PagedCase(layer_of(device, **VARIANTS[variant]), 16, [(33, 20), (0, 5)], device)
    whole = run(case)
    for page_size in (1, 8, 64):
        other = on_pages(case, page_size)
        assert torch.equal(run(other), whole)
        assert torch.equal(decodes(other, [19], 2), whole[[19]])


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN")  # the padding page, in numpy
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_no_neighbour_changes_a_bit(batch: str, device: torch.device, small: None) -> None:
    case = PagedCase(layer_of(device, **VARIANTS["all"]), 16, BATCHES[batch], device)
    lens = [extend for _, extend in case.rows[:-1]]
    schedule = dataclasses.replace(LARGE, num_runs=2)
    together = run(case, schedule=schedule).split(lens)
    order = [3, PADDING, 1, 2, PADDING]
    padded = run(case, order, schedule=schedule).split([case.rows[i][1] for i in order])
    assert bool(padded[1].isnan().all()), "the padding page is NaN here: a padding row reads nothing else"
    for i, j in ((1, 2), (2, 3), (3, 0)):
        alone = run(case, [i])
        assert torch.equal(alone, together[i])
        assert torch.equal(alone, padded[j])


@pytest.mark.parametrize("group", [4, 20])
def test_a_head_alone_has_the_bits_that_it_has_among_all(group: int, device: torch.device, small: None) -> None:
    case = PagedCase(layer_of(device, kv_heads=2, group=group), 16, [(40, 9)], device)
    whole = run(case)
    last = run(case, [0], [(8, 9)], dataclasses.replace(SMALL, block_m=64, num_runs=2))
    assert torch.equal(last, whole[8:])
    for kv_head in range(2):
        first = kv_head * group
        a_kv_head = on_pages(case, 16, layer_of(device, group=group), kv_head)
        assert torch.equal(run(a_kv_head), whole[:, first : first + group])
        one = on_pages(case, 16, layer_of(device, group=1), kv_head)
        assert torch.equal(run(one), whole[:, first : first + 1])
        assert torch.equal(decodes(one, [8], 3), whole[8:, first : first + 1])


def test_what_lies_before_a_window_is_not_read(device: torch.device, small: None) -> None:
    case = PagedCase(layer_of(device, window=40), 8, [(90, 12)], device)
    whole = run(case)
    pages = case.table[0, : (90 - 39) // 8].long()
    case.k[pages] = case.v[pages] = math.nan
    case.table[0, : len(pages)] = 1 << 30
    assert torch.equal(run(case), whole)
    assert torch.equal(decodes(case, [0, 11], 2), whole[[0, 11]])


@pytest.mark.parametrize("num_runs", [1, 3])
def test_a_sink_takes_its_share_once_however_large_or_small_it_is(
    num_runs: int, device: torch.device, small: None
) -> None:
    sinks = torch.tensor([-math.inf, -500.0, -3.0, 0.0, 5.0, 500.0], device=device)
    layer = dataclasses.replace(layer_of(device, group=6), sinks=sinks)
    case = PagedCase(layer, 16, [(129, 1), (0, 1)], device)
    out = run(case, schedule=dataclasses.replace(SMALL, num_runs=num_runs))
    check(case, out)
    assert bool((out[:, 5] == 0).all())


def test_large_scores_of_either_sign_stay_finite(device: torch.device, small: None) -> None:
    case = PagedCase(layer_of(device), 16, [(0, 70)], device)
    case.q[0] *= 200.0  # scores of several hundreds, which fp32 rounds to about 1e-4
    right, _ = case.expected(torch.float64)
    torch.testing.assert_close(run(case).float(), right, atol=0.02, rtol=0.01)
    assert torch.equal(decodes(case, [69], 3), run(case)[69:])


def test_fp8_keys_and_values_have_the_same_bits_too(device: torch.device, small: None) -> None:
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    layer = layer_of(device, k_scale=0.5, v_scale=2.0)
    case = PagedCase(layer, 16, [(20, 50)], device, dtype, kv_dtype=FP8)
    whole = run(case)
    check(case, whole)
    assert torch.equal(pieces(case, 7), whole)
    assert torch.equal(decodes(case, [0, 44, 49], 2), whole[[0, 44, 49]])


def test_spans_and_tiles_are_part_of_the_contract(
    device: torch.device, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others give other bits, which is what the comparisons above are able to see."""
    case = PagedCase(layer_of(device), 16, [(60, 40)], device, torch.float32)
    whole = run(case)
    with monkeypatch.context() as patch:
        patch.setattr(exact, "SPAN", 64)
        assert not torch.equal(run(case), whole)
    monkeypatch.setattr(exact, "tile_of", lambda *_: 32)
    assert not torch.equal(run(case), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_several_spans_at_the_contract_s_own_sizes(dtype: torch.dtype, device: torch.device) -> None:
    case = PagedCase(layer_of(device, group=2), 64, [(1060, 9), (511, 1)], device, dtype)
    whole = run(case, schedule=None)
    check(case, whole)
    for num_runs in (1, 3):
        last = decodes(case, [0, 8], num_runs)
        assert torch.equal(last, whole[[0, 8]])
        assert torch.equal(pieces(case, 4, num_runs), whole[:9])


def test_steps_of_all_sizes_keep_the_device_busy_in_little_memory() -> None:
    for num_rows in range(1, 600):
        schedule = exact.choose(128, torch.bfloat16, 4, num_rows)
        assert num_rows * schedule.num_runs >= 128
        assert schedule.num_runs == 1 or num_rows * schedule.num_runs <= 512


# On a GPU only: the sizes of production, and what the interpreter has not.

GPU = torch.device("cuda")


LONG = [
    *((128, variant, torch.bfloat16) for variant in VARIANTS),
    *((head_dim, variant, torch.bfloat16) for head_dim in (64, 96, 256) for variant in ("causal", "all")),
    *((128, variant, dtype) for dtype in (torch.float16, torch.float32) for variant in ("causal", "all")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "variant", "dtype"), LONG)
def test_long_rows_have_the_same_bits_however_they_come(head_dim: int, variant: str, dtype: torch.dtype) -> None:
    features = {**VARIANTS[variant], **({"window": 700, "chunk": 1024} if variant == "all" else {})}
    layer = layer_of(GPU, kv_heads=2, group=4, head_dim=head_dim, **features)
    case = PagedCase(dataclasses.replace(layer, scale=head_dim**-0.5), 64, [(300, 2000), (0, 77)], GPU, dtype)
    whole = run(case, schedule=None)
    check(case, whole)
    whole = whole[:2000]
    for size in (64, 333):
        assert torch.equal(pieces(case, size), whole), f"{size} tokens a step"
    tokens = [0, 211, 212, 723, 724, 1300, 1999]
    for num_runs in (1, 3, 100):
        assert torch.equal(decodes(case, tokens, num_runs), whole[tokens]), f"{num_runs} runs"
    for tuned in ([tokens[-1]], tokens * 40):  # as few rows and many tune themselves
        assert torch.equal(run(case, [0] * len(tuned), [(i, i + 1) for i in tuned], None), whole[tuned])
    for schedule in SCHEDULES if dtype.itemsize == 2 else []:
        assert torch.equal(run(case, [0], schedule=schedule), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 8, 20, 71])
def test_groups_of_all_sizes_have_the_bits_of_a_head_alone(group: int) -> None:
    case = PagedCase(layer_of(GPU, group=group, head_dim=128), 16, [(1500, 40)], GPU)
    whole = run(case, schedule=None)
    check(case, whole)
    assert torch.equal(run(case, [0], [(39, 40)], None), whole[39:])
    one = on_pages(case, 64, layer_of(GPU, group=1, head_dim=128))
    assert torch.equal(run(one, schedule=None), whole[:, :1])
    assert torch.equal(run(one, [0], [(39, 40)], None), whole[39:, :1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_replayed_graph_has_the_bits_of_eager_steps_and_of_prompts(num_rows: int) -> None:
    """3 rows of 8 KV heads are cut into runs, 40 are not."""
    lens = torch.randint(1, 1900, (50,), generator=torch.Generator().manual_seed(3)).tolist()
    layer = layer_of(GPU, kv_heads=8, group=4, head_dim=128)
    case = PagedCase(layer, 16, [(length - 1, 1) for length in lens], GPU)
    first = list(range(num_rows))
    static, q = case.paged(first), case.queries(first).clone()
    outs = [torch.empty_like(q) for _ in range(3)]

    def step() -> None:
        # Three layers: each next one takes the parts' memory of the one before.
        for i, out in enumerate(outs):
            paged_exact(q if i == 0 else outs[i - 1], case.k, case.v, static, layer, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shift in (0, 7, 10):
        rows = [(i + shift) % 50 for i in first]
        paged = case.paged(rows)
        static.cache_seqlens.copy_(paged.cache_seqlens)
        static.page_table.copy_(paged.page_table)
        q.copy_(case.queries(rows))
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        replayed = [out.clone() for out in outs]
        step()
        for ours, eager in zip(replayed, outs, strict=True):
            assert torch.equal(ours, eager)
        as_prompts = dataclasses.replace(paged, max_seqlen_q=2)  # the kernel then looks for the rows of its tiles
        out = paged_exact(q, case.k, case.v, as_prompts, layer, out=torch.empty_like(q))
        assert torch.equal(out, replayed[0])
