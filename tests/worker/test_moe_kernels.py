"""The kernels of a mixture of experts against torch in fp32: in the interpreter on CPU tensors, or in bf16 on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="a CPU install has no Triton")

from worker.kernels.grouped_experts import Biases, Tile, Tiles
from worker.kernels.moe import choose_tiles, mixture
from worker.kernels.routing import SOFTMAX, Routes, Scoring, max_blocks, route, router_logits

FIRST_SLOT = 16

_interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels compiled for a GPU take no CPU tensors"
)
# bf16, which NumPy and so the interpreter lacks, runs on the GPU only.
WHERE = [
    pytest.param("cpu", torch.float32, id="cpu-fp32", marks=_interpreted),
    pytest.param("cpu", torch.float16, id="cpu-fp16", marks=_interpreted),
    pytest.param("cuda", torch.bfloat16, id="cuda-bf16", marks=pytest.mark.gpu),
]
on_each = pytest.mark.parametrize(("device", "dtype"), WHERE)
on_either = pytest.mark.parametrize(("device", "dtype"), [WHERE[0], WHERE[2]])  # where fp16 would add time only
on_each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=_interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)


# Rows that nobody stores may hold anything.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _computed_bounds(request: pytest.FixtureRequest) -> None:
    """Lets the interpreter loop to bounds that a kernel has computed."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        request.getfixturevalue("interpreter")


@dataclass(frozen=True)
class Shape:
    """Of a layer, and how its weights are made."""

    num_experts: int
    top_k: int
    hidden: int
    columns: int
    normalise: bool = True
    weight_scale: float = 1.0
    shared_gate: bool = True
    """Of a shared expert, where there is one."""
    top_groups: int = 0
    """Of four, from which a token's experts are; then they are chosen by sigmoids and a bias."""
    scales_input: bool = False
    """With sigmoids."""
    biased: bool = False
    """As gpt-oss has them."""
    has_gate: bool = True


QWEN3 = Shape(128, 8, 32, 32)
QWEN2 = Shape(60, 4, 48, 96, normalise=False)  # numbers that no tile divides
MIXTRAL = Shape(8, 2, 64, 160)
DEEPSEEK = Shape(16, 6, 48, 96, normalise=False, weight_scale=2.5, shared_gate=False)
DEEPSEEK_V3 = Shape(20, 3, 48, 96, weight_scale=2.5, shared_gate=False, top_groups=2)
GPT_OSS = Shape(6, 3, 48, 96, biased=True)
NEMOTRON = Shape(20, 3, 48, 96, weight_scale=2.5, shared_gate=False, top_groups=2, has_gate=False)
LLAMA4 = Shape(6, 1, 48, 96, normalise=False, shared_gate=False, scales_input=True)
SLOW = pytest.mark.slow  # takes the interpreter seconds


class Case:
    """A random layer and tokens."""

    def __init__(
        self, shape: Shape, num_tokens: int, device: str, dtype: torch.dtype, *, shared: bool = False, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int, fan_in: int = 1) -> torch.Tensor:
            return (torch.randn(sizes, generator=generator) / fan_in**0.5).to(device, dtype)

        experts, hidden, columns = shape.num_experts, shape.hidden, shape.columns
        self.shape = shape
        # Rows of a wider matrix, NaN beside them.
        wide = torch.full((num_tokens, hidden + 16), torch.nan, device=device, dtype=dtype)
        self.x = wide[:, :hidden].copy_(random(num_tokens, hidden))
        self.x[:, 0] = 1.0
        self.router = 2 * random(experts + (shared and shape.shared_gate), hidden, fan_in=hidden)
        self.w13 = random(experts, (1 + shape.has_gate) * columns, hidden, fan_in=hidden)
        self.w2 = random(experts, hidden, columns, fan_in=max(columns, 1))
        self.shared = random(num_tokens, hidden) if shared else None
        self.slots: torch.Tensor | None = None
        self.scoring = Scoring(True, scales_input=True) if shape.scales_input else SOFTMAX
        self.biases = None
        if shape.biased:
            of_router = random(experts).float()
            self.biases = Biases(of_router, random(experts, 2 * columns), random(experts, hidden), 0.7, 1.5)
        if shape.top_groups:
            self.scoring = Scoring(True, torch.randn(experts, generator=generator).to(device), 4, shape.top_groups)

    def run(self, tiles: Tiles | None = None, round_to: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.full(self.x.shape, torch.nan, device=self.x.device, dtype=self.x.dtype)
        mixture(
            self.x,
            self.router,
            self.w13,
            self.w2,
            top_k=self.shape.top_k,
            normalise=self.shape.normalise,
            weight_scale=self.shape.weight_scale,
            scoring=self.scoring,
            biases=self.biases,
            round_to=round_to,
            out=out,
            slots=self.slots,
            first_slot=FIRST_SLOT,
            shared=self.shared,
            tiles=tiles,
        )
        return out

    def reference(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """By torch, expert after expert, every product of the experts in `dtype`."""
        num_experts, top_k = self.shape.num_experts, self.shape.top_k
        logits = self.x.float() @ self.router.float().T
        if self.biases is not None:
            logits += self.biases.router
        weights, chosen = logits[:, :num_experts].softmax(1).topk(top_k)
        if self.shape.scales_input:
            weights = logits[:, :num_experts].topk(top_k).values.sigmoid()
        if self.scoring.bias is not None:
            scores = logits[:, :num_experts].sigmoid()
            by_group = (scores + self.scoring.bias).unflatten(1, (4, -1))
            best = by_group.topk(2).values.sum(2).topk(self.shape.top_groups).indices
            is_closed = torch.ones_like(by_group[:, :, 0], dtype=torch.bool).scatter(1, best, value=False)
            chosen = by_group.masked_fill(is_closed[:, :, None], -torch.inf).flatten(1).topk(top_k).indices
            weights = scores.gather(1, chosen)
        if self.shape.normalise:
            weights = weights / weights.sum(1, keepdim=True)
        weights = weights * self.shape.weight_scale
        x = self.x.to(dtype)
        y = torch.zeros_like(x)
        for expert in range(num_experts):
            tokens, choices = (chosen == expert).nonzero(as_tuple=True)
            weight, given = weights[tokens, choices, None].to(dtype), x[tokens]
            both = F.linear(weight * given if self.shape.scales_input else given, self.w13[expert].to(dtype))
            gate, up = both.chunk(2, dim=1)
            down, bias = self.w2[expert].to(dtype), None
            if not self.shape.has_gate:
                hidden = both.relu().square()
            elif (biases := self.biases) is None:
                hidden = F.silu(gate) * up
            else:
                of_gate, of_up = biases.gate_up[expert].to(dtype).chunk(2)
                gate, up = (gate + of_gate).clamp(max=biases.limit), (up + of_up).clamp(-biases.limit, biases.limit)
                hidden = (up + 1) * gate * (biases.alpha * gate).sigmoid()
                assert biases.down is not None
                bias = biases.down[expert].to(dtype)
            part = F.linear(hidden, down, bias) * (1 if self.shape.scales_input else weight)
            y.index_add_(0, tokens, part)
        if self.shared is not None:
            gate = logits[:, num_experts:].sigmoid().to(dtype) if self.shape.shared_gate else 1.0
            y += gate * self.shared.to(dtype)
        return y if self.slots is None else y.masked_fill((self.slots < FIRST_SLOT)[:, None], 0.0)

    def assert_right(self, y: torch.Tensor) -> None:
        """At most twice the error that torch's own products have in the dtype."""
        expected = self.reference()
        if y.dtype == torch.float32:
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            return
        theirs = (self.reference(y.dtype).float() - expected).abs().max()
        assert (y.float() - expected).abs().max() <= 2 * theirs


@on_either
@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [
        (QWEN3, 1),
        (QWEN2, 3),
        (MIXTRAL, 3),
        (DEEPSEEK_V3, 5),
        (DEEPSEEK_V3, 12),
        (NEMOTRON, 5),
        (NEMOTRON, 12),
        (LLAMA4, 5),
        (LLAMA4, 12),
        (GPT_OSS, 5),
        (GPT_OSS, 12),
        *(pytest.param(*it, marks=SLOW) for it in ((QWEN3, 5), (QWEN2, 17), (MIXTRAL, 300))),
    ],
)
def test_sums_the_top_experts_of_every_token(shape: Shape, num_tokens: int, device: str, dtype: torch.dtype) -> None:
    case = Case(shape, num_tokens, device, dtype)
    case.assert_right(case.run())


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_sums_in_fp32_what_is_fp16(interpreter: None, num_tokens: int) -> None:
    case = Case(MIXTRAL, num_tokens, "cpu", torch.float16, shared=True)
    case.assert_right(case.run(round_to=torch.float16))


@on_either
@pytest.mark.parametrize(("columns", "num_tokens"), [(32, 9), (288, 1), pytest.param(64, 9, marks=SLOW)])
def test_takes_any_multiple_of_32_columns(columns: int, num_tokens: int, device: str, dtype: torch.dtype) -> None:
    case = Case(Shape(8, 2, 80, columns), num_tokens, device, dtype)
    case.assert_right(case.run())


@on_either
@pytest.mark.parametrize("num_tokens", [2, 9, pytest.param(70, marks=SLOW)])
def test_one_expert_may_have_all_tokens_and_others_none(num_tokens: int, device: str, dtype: torch.dtype) -> None:
    case = Case(MIXTRAL, num_tokens, device, dtype)
    case.router[5, 0] += 50.0
    case.router[:3, 0] -= 50.0
    case.w13[:3] = torch.nan  # and whom nobody chose is not read
    case.w2[:3] = torch.nan
    y = case.run()
    case.w13[:3] = 0.0
    case.w2[:3] = 0.0
    case.assert_right(y)


@on_either
@pytest.mark.parametrize(("num_tokens", "shared"), [(1, True), (4, False), pytest.param(40, True, marks=SLOW)])
def test_padding_goes_to_no_expert_and_its_rows_are_zero(
    num_tokens: int, shared: bool, device: str, dtype: torch.dtype
) -> None:
    case = Case(QWEN2, num_tokens, device, dtype, shared=shared)
    slots = torch.randint(0, 2 * FIRST_SLOT, (num_tokens,), generator=torch.Generator().manual_seed(1))
    slots[-1] = 0
    case.slots = slots.to(device)
    padding = case.slots < FIRST_SLOT
    case.x[padding] = torch.nan
    if case.shared is not None:
        case.shared[padding] = torch.nan
    y = case.run()
    assert not y[padding].any()
    case.x[padding] = 0.0
    case.assert_right(y)


@on_either
@pytest.mark.parametrize(("shape", "num_tokens"), [(QWEN2, 3), (DEEPSEEK, 9)], ids=["gated", "whole"])
def test_adds_the_shared_expert(num_tokens: int, shape: Shape, device: str, dtype: torch.dtype) -> None:
    case = Case(shape, num_tokens, device, dtype, shared=True)
    case.assert_right(case.run())


@on_either
@pytest.mark.parametrize(("num_tokens", "shared"), [(3, True), (20, False)])
def test_a_rank_without_columns_adds_the_shared_expert_alone(
    num_tokens: int, shared: bool, device: str, dtype: torch.dtype
) -> None:
    case = Case(Shape(8, 2, 64, 0), num_tokens, device, dtype, shared=shared)
    case.slots = torch.full((num_tokens,), FIRST_SLOT, device=device)
    case.slots[1] = 0
    y = case.run()
    gate = (case.x.float() @ case.router[8:].float().T).sigmoid()
    expected = torch.zeros_like(y) if case.shared is None else (gate * case.shared.float()).to(dtype)
    expected[1] = 0.0
    torch.testing.assert_close(y, expected)


@on_either
def test_no_tokens_are_no_rows(device: str, dtype: torch.dtype) -> None:
    case = Case(MIXTRAL, 0, device, dtype)
    assert case.run().shape == (0, MIXTRAL.hidden)


@on_either
@pytest.mark.slow
def test_every_tile_gives_the_same_sums(device: str, dtype: torch.dtype) -> None:
    case = Case(MIXTRAL, 6, device, dtype)
    for block_m in (1, 16, 32, 128):
        tile = Tile(32, 64, 4, 3)
        case.assert_right(case.run(Tiles(block_m, gate_up=tile, down=tile)))


def _route(logits: torch.Tensor, top_k: int, num_experts: int | None = None, **options: Any) -> Routes:
    counts = torch.zeros(num_experts or logits.shape[2], dtype=torch.int32, device=logits.device)
    return route(logits, counts, **{"top_k": top_k, "normalise": True, "round_to": torch.float32} | options)


def _experts(routes: Routes) -> list[list[int]]:
    """The experts of every token, the likeliest first; -1 for padding."""
    num_tokens, top_k = routes.weights.shape
    experts = torch.full((num_tokens * top_k,), -1)
    for expert, count in enumerate(routes.counts.tolist()):
        pairs = routes.pairs[expert, :count].cpu().long()
        assert (experts[pairs] == -1).all(), "a pair in two places"
        experts[pairs] = expert
    return experts.view(num_tokens, top_k).tolist()


@on_each_device
def test_weights_are_shares_of_all_or_of_the_top_and_rounded_where_a_family_does(device: str) -> None:
    logits = torch.randn(1, 9, 8, generator=torch.Generator().manual_seed(0)).to(device)
    exact, rounded = _route(logits, 3), _route(logits, 3, round_to=torch.float16)
    torch.testing.assert_close(exact.weights.sum(1), torch.ones(9, device=device))
    assert torch.equal(rounded.weights, exact.weights.half().float())
    shares = _route(logits, 3, normalise=False)
    torch.testing.assert_close(shares.weights, logits[0].softmax(1).sort(1, descending=True).values[:, :3])


@on_each_device
@pytest.mark.parametrize("num_tokens", [1, 7, pytest.param(400, marks=SLOW)])
@pytest.mark.parametrize("num_experts", [8, 60])
def test_every_experts_pairs_are_those_of_the_tokens_that_chose_it(
    num_tokens: int, num_experts: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(2, num_tokens, num_experts + 1, generator=generator)  # in two parts, with a gate's
    logits[0, :, 3] += 4.0
    slots = torch.randint(0, 5 * FIRST_SLOT, (num_tokens,), generator=generator)
    routes = _route(logits.to(device), 4, num_experts, slots=slots.to(device), first_slot=FIRST_SLOT)
    expected = logits.sum(0)[:, :num_experts].topk(4).indices
    assert _experts(routes) == expected.masked_fill((slots < FIRST_SLOT)[:, None], -1).tolist()


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("num_tokens", [5, 100])
def test_the_pairs_of_any_choice_fit_in_the_blocks_there_are_for_them(num_tokens: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for spread in (1, 4, 60):
        chosen = torch.stack([torch.randperm(max(spread, 4), generator=generator)[:4] for _ in range(num_tokens)])
        needed = (chosen.flatten().bincount() + block_m - 1).div(block_m, rounding_mode="floor").sum()
        assert needed <= max_blocks(num_tokens, 4, 60, block_m)


@on_each_device
def test_of_equal_logits_the_first_experts_are_chosen_and_nan_is_below_all(device: str) -> None:
    logits = torch.zeros(1, 3, 12, device=device)
    logits[0, 1, [2, 7, 11]] = 1.0
    logits[0, 2, :10] = torch.nan
    assert _experts(_route(logits, 3)) == [[0, 1, 2], [2, 7, 11], [10, 11, 0]]


@on_each_device
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_sigmoids_that_are_all_tiny_have_weights_of_sum_one_and_nan_reads_no_expert_that_is_none(device: str) -> None:
    scoring = Scoring(True, torch.zeros(12, device=device), 4, 2)
    logits = torch.full((1, 3, 12), -30.0, device=device)
    logits[0, 1] = torch.nan
    logits[0, 2, 6:] = -torch.inf
    routes = _route(logits, 4, scoring=scoring)
    assert _experts(routes) == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    torch.testing.assert_close(routes.weights[[0, 2]], torch.full((2, 4), 0.25, device=device))


@on_each_device
@pytest.mark.parametrize("normalise", [False, True])
def test_one_tokens_program_chooses_and_weighs_as_the_routing_of_many_does(normalise: bool, device: str) -> None:
    # Logits are a multiple of 1 / 2, so most have equals; expert e gives unit vector e, so y shows its weight.
    shape = Shape(12, 5, 16, 32, normalise=normalise)
    case = Case(shape, 4, device, torch.float32 if device == "cpu" else torch.bfloat16)
    case.x[:, 1:] = torch.tensor([[1.0], [-1.0], [0.5], [0.0]])
    case.router = (4 * case.router).round() / 2
    case.w13.fill_(1 / 16)
    case.w2.zero_()
    for expert in range(12):
        case.w2[expert, expert] = 1.0
    alone = case.run()
    together = case.run(Tiles(16, gate_up=Tile(16, 32, 4, 2), down=Tile(16, 64, 4, 2)))
    assert torch.equal(alone != 0, together != 0)
    assert (alone != 0).sum().item() == 4 * 5
    torch.testing.assert_close(alone, together)


@on_each
@pytest.mark.parametrize(("num_logits", "hidden", "num_tokens"), [(8, 64, 1), (61, 300, 40), (61, 64, 300)])
def test_router_logits_are_the_products_in_fp32(
    num_logits: int, hidden: int, num_tokens: int, device: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)
    weight = torch.randn(num_logits, hidden, generator=generator).to(device, dtype)
    logits = router_logits(x, weight)
    torch.testing.assert_close(logits.sum(0).double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-3)


@on_either
def test_a_tokens_logits_do_not_depend_on_the_tokens_beside_it(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = 160 if device == "cpu" else 640
    x = torch.randn(300, hidden, generator=generator).to(device, dtype)
    weight = torch.randn(61, hidden, generator=generator).to(device, dtype)
    # The interpreter sums by NumPy, in an order that depends on the size of a tile, which changes at 256 tokens.
    together = router_logits(x[:256] if device == "cpu" else x, weight)
    for rows in (1, 30, 256):
        assert torch.equal(router_logits(x[:rows], weight), together[:, :rows])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [768, 384])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64, 256, 1024])
def test_is_as_exact_as_torch_in_the_size_of_a_model(num_tokens: int, columns: int) -> None:
    case = Case(Shape(128, 8, 2048, columns), num_tokens, "cuda", torch.bfloat16)
    case.assert_right(case.run(round_to=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 40])
def test_a_graph_follows_its_inputs(num_tokens: int) -> None:
    case = Case(QWEN2, num_tokens, "cuda", torch.bfloat16, shared=True)
    case.slots = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run()
    for seed in (1, 2):
        other = Case(QWEN2, num_tokens, "cuda", torch.bfloat16, shared=True, seed=seed)
        other.slots = torch.arange(num_tokens, device="cuda") + FIRST_SLOT - seed
        for name in ("x", "router", "w13", "w2", "shared", "slots"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        other.assert_right(y)
        assert torch.equal(y, other.run())


def test_more_tokens_take_larger_blocks() -> None:
    blocks = [choose_tiles(num_tokens, 8, 128).block_m for num_tokens in (1, 4, 16, 256, 1024, 8192)]
    assert blocks == [1, 1, 16, 32, 64, 128]
    assert choose_tiles(1, 10, 512).block_m == 16  # more experts than one program compares
