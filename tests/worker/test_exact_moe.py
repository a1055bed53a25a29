"""Exact mixtures of experts: a token's bits, whatever the tokens beside it, the tiles, and the ranks that share leaves.

In Triton's interpreter, whose dot is made an ascending chain, and in bf16 on a GPU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU install has no Triton")

from parallel.plan import Span
from parallel.tree import SumTree
from worker.kernels import moe
from worker.kernels.grouped_experts import Biases, Tile, Tiles, Tokens
from worker.kernels.moe import activate_shared, mixture
from worker.kernels.pair_experts import pair_gate_up
from worker.kernels.routing import SOFTMAX, Scoring, route, router_logits

FIRST_SLOT = 16
TOKENS = 12  # as a batch: more than take a program for every pair
# Rows that nobody stores may hold anything.
pytestmark = [
    pytest.mark.usefixtures("chains"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    hidden: int
    leaf: int
    num_leaves: int
    normalise: bool = True
    biased: bool = False
    """As gpt-oss has them."""
    has_gate: bool = True


SMALL = Shape(5, 3, 24, 16, 5)
WIDE_LEAVES = Shape(4, 2, 24, 48, 3, normalise=False)  # of more than one step, which is no multiple of them
NARROW_LEAVES = Shape(4, 2, 24, 8, 9)  # of less than an MMA's step
GPT_OSS = Shape(4, 3, 24, 16, 3, biased=True)
NEMOTRON = Shape(4, 2, 24, 16, 3, has_gate=False)
QWEN3 = Shape(128, 8, 2048, 64, 12)
SLOW = pytest.mark.slow  # takes the interpreter seconds
SHAPES = [NARROW_LEAVES, GPT_OSS, NEMOTRON, pytest.param(SMALL, marks=SLOW), pytest.param(WIDE_LEAVES, marks=SLOW)]


@dataclass
class Case:
    """A random layer and tokens."""

    shape: Shape
    x: Tensor
    router: Tensor
    w13: Tensor
    w2: Tensor
    slots: Tensor | None = None
    biases: Biases | None = None

    @classmethod
    def create(cls, shape: Shape, num_tokens: int, device: torch.device, *, seed: int = 0) -> Case:
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

        def random(*sizes: int) -> Tensor:
            x = torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5
            # Some are far from the others, so that another order of additions rounds otherwise.
            return (x * torch.where(torch.rand(sizes, generator=generator) < 0.05, 5.0, 1.0)).to(device, dtype)

        experts, columns = shape.num_experts, shape.leaf * shape.num_leaves
        biases = None
        if shape.biased:
            of_router = random(experts + 1).float()
            biases = Biases(of_router, random(experts, 2 * columns), random(experts, shape.hidden), 0.7, 1.5)
        return cls(
            shape,
            random(num_tokens, shape.hidden) * shape.hidden**0.5,
            0.2 * random(experts + 1, shape.hidden),
            random(experts, (1 + shape.has_gate) * columns, shape.hidden),
            random(experts, shape.hidden, columns),
            biases=biases,
        )

    def of(self, tokens: Any) -> Case:
        """Of these tokens alone."""
        return replace(self, x=self.x[tokens], slots=None if self.slots is None else self.slots[tokens])

    def of_leaves(self, start: int, stop: int) -> Case:
        """A rank's."""
        columns = slice(start * self.shape.leaf, stop * self.shape.leaf)
        w13 = torch.cat([part[:, columns] for part in self.w13.chunk(1 + self.shape.has_gate, 1)], 1)
        shape, biases = replace(self.shape, num_leaves=stop - start), self.biases
        if biases is not None:
            of_gate, of_up = biases.gate_up.chunk(2, 1)
            of_both = torch.cat((of_gate[:, columns], of_up[:, columns]), 1)
            biases = replace(biases, gate_up=of_both, down=None if start else biases.down)
        return replace(self, shape=shape, w13=w13, w2=self.w2[:, :, columns].contiguous(), biases=biases)

    def run(self, nodes: tuple[tuple[int, int], ...] | None = None, **schedule: Any) -> Tensor:
        nodes = tuple(Span(*node) for node in (((0, self.shape.num_leaves),) if nodes is None else nodes))
        out = torch.full((len(nodes), *self.x.shape), torch.nan, device=self.x.device)
        options = {"top_k": self.shape.top_k, "normalise": self.shape.normalise, "round_to": self.x.dtype}
        slots = {"slots": self.slots, "first_slot": FIRST_SLOT, "biases": self.biases}
        weights = self.router, self.w13, self.w2
        mixture(self.x, *weights, leaf=self.shape.leaf, nodes=nodes, out=out, **options, **slots, **schedule)
        return out

    def routed(self) -> tuple[Tensor, Tensor]:
        """Weights [num_tokens, top_k], and experts."""
        counts = torch.zeros(self.shape.num_experts, dtype=torch.int32, device=self.x.device)
        logits = router_logits(self.x, self.router)
        options = {"top_k": self.shape.top_k, "normalise": self.shape.normalise, "round_to": self.x.dtype}
        weights = route(logits, counts, **options).weights
        scores = logits.sum(0)[:, : self.shape.num_experts]
        return weights, scores.sort(dim=1, descending=True, stable=True).indices[:, : self.shape.top_k]

    def leaves(self) -> list[Tensor]:
        """By the contract's plain form, of which each is [num_tokens, hidden]: the interpreter fuses nothing."""
        weights, experts = self.routed()
        sums = []
        for leaf in range(self.shape.num_leaves):
            columns = slice(leaf * self.shape.leaf, (leaf + 1) * self.shape.leaf)
            total = torch.zeros(self.x.shape)
            for choice in range(self.shape.top_k):
                for token, expert in enumerate(experts[:, choice].tolist()):
                    gate, up = (chain(self.x[token], w[columns]) for w in self.w13[expert].chunk(2))
                    hidden = gate / (1.0 + torch.from_numpy(np.exp(-gate.numpy()))) * up
                    total[token] += weights[token, choice] * chain(hidden, self.w2[expert][:, columns])
            sums.append(total)
        return sums


def chain(x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(weight))
    for k in range(len(x)):
        total = total + x[k] * weight[:, k]
    return total


def halving(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    middle = (len(values) + 1) // 2
    return halving(values[:middle]) + halving(values[middle:])


def cut(node: tuple[int, int], most: int) -> tuple[tuple[int, int], ...]:
    a, b = node
    if b - a <= most:
        return (node,)
    middle = (a + b + 1) // 2
    return cut((a, middle), most) + cut((middle, b), most)


def tiles(block_m: int, gate_up: Tile, down: Tile) -> Tiles:
    return Tiles(block_m, gate_up=gate_up, down=down)


GROUPED = tiles(16, Tile(16, 32, 2, 3), Tile(16, 16, 2, 3))
SCHEDULES = [
    tiles(1, Tile(16, 16, 1, 2), Tile(16, 16, 1, 2)),
    pytest.param(tiles(1, Tile(16, 128, 2, 6), Tile(32, 64, 2, 6)), marks=SLOW),
    pytest.param(tiles(1, Tile(32, 64, 4, 3), Tile(64, 32, 4, 3)), marks=SLOW),
    tiles(16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    pytest.param(GROUPED, marks=SLOW),
    pytest.param(tiles(32, Tile(64, 128, 4, 3), Tile(128, 64, 4, 4)), marks=SLOW),
    pytest.param(tiles(64, Tile(128, 64, 8, 4), Tile(128, 64, 8, 3)), marks=SLOW),
    tiles(128, Tile(128, 64, 8, 4), Tile(128, 32, 8, 3)),
]


@pytest.mark.parametrize(
    ("shape", "num_tokens"), [(SMALL, 2), (NARROW_LEAVES, 9), pytest.param(WIDE_LEAVES, 9, marks=SLOW)]
)
def test_a_leaf_is_a_chain_over_experts_and_a_node_the_halving_tree(
    interpreter: None, shape: Shape, num_tokens: int
) -> None:
    case = Case.create(shape, num_tokens, torch.device("cpu"))
    leaves = case.leaves()
    separate = tuple((i, i + 1) for i in range(shape.num_leaves))
    assert torch.equal(case.run(separate), torch.stack(leaves))
    assert torch.equal(case.run()[0], halving(leaves))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_bits_that_it_has_among_any_others(device: torch.device, shape: Shape) -> None:
    case = Case.create(shape, TOKENS, device)
    together = case.run()
    for tokens in (slice(0, 1), slice(2, 10), [11, 0, 7]):
        assert torch.equal(case.of(tokens).run(), together[:, tokens])
    others = Case.create(shape, 5, device, seed=1)
    mixed = replace(case, x=torch.cat((others.x, case.x[4:5], others.x)))
    assert torch.equal(mixed.run()[:, 5], together[:, 4])


@pytest.mark.parametrize(
    ("shape", "num_tokens", "num_ranks"),
    [
        (SMALL, 2, 3),
        (SMALL, 12, 2),
        (GPT_OSS, 2, 2),
        (GPT_OSS, 12, 3),
        (NEMOTRON, 2, 2),
        (NEMOTRON, 12, 3),
        *(pytest.param(SMALL, *it, marks=SLOW) for it in ((12, 1), (2, 2), (12, 3), (2, 4), (12, 7))),
    ],
)
def test_any_number_of_ranks_has_the_same_sum(
    device: torch.device, shape: Shape, num_tokens: int, num_ranks: int
) -> None:
    case = Case.create(shape, num_tokens, device)
    whole, num_leaves = case.run()[0], shape.num_leaves
    borders = [num_leaves * rank // num_ranks for rank in range(num_ranks + 1)]
    tree = SumTree.of(tuple(Span(a, b) for a, b in itertools.pairwise(borders)))
    nodes: list[Tensor] = []
    for cover, (start, stop) in zip(tree.covers, itertools.pairwise(borders), strict=True):
        nodes += case.of_leaves(start, stop).run(tuple((a - start, b - start) for a, b in cover))
    assert torch.equal(tree.finish(nodes, torch.empty_like(whole)), whole)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_tile_has_the_same_bits(device: torch.device, schedule: Tiles) -> None:
    case = Case.create(SMALL if device.type == "cpu" else QWEN3, 3, device)
    assert torch.equal(case.run(tiles=schedule), case.run())


@pytest.mark.parametrize("most", [5, 2])
def test_however_programs_share_a_node_it_has_the_same_bits(device: torch.device, most: int) -> None:
    case = Case.create(SMALL, 2, device)
    parts = cut((0, SMALL.num_leaves), most)
    assert torch.equal(case.run(parts=tuple(Span(*part) for part in parts)), case.run(tiles=GROUPED))


@pytest.mark.parametrize("most_bytes", [pytest.param(0, marks=SLOW), 20_000])
def test_leaves_of_pairs_take_bounded_memory_and_the_bound_changes_no_bit(
    device: torch.device, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.create(SMALL, TOKENS, device)
    expected, sizes = case.run(), []
    grouped_down = moe.grouped_down

    def measured(*args: Any, **options: Any) -> None:
        sizes.append(args[4].numel() * 4)
        grouped_down(*args, **options)

    monkeypatch.setattr(moe, "grouped_down", measured)
    assert torch.equal(case.run(tiles=GROUPED, most_bytes=most_bytes), expected)
    assert len(sizes) > 1
    assert max(sizes) <= max(most_bytes, 16 * 4 * SMALL.num_leaves * TOKENS * SMALL.top_k)


@pytest.mark.parametrize("num_tokens", [5, TOKENS])
def test_padding_changes_nothing_and_its_rows_are_zero(device: torch.device, num_tokens: int) -> None:
    case = Case.create(SMALL, num_tokens, device)
    expected = case.run()
    padded = replace(case, x=torch.cat((case.x, torch.full_like(case.x, torch.nan))))
    padded.slots = torch.tensor([FIRST_SLOT] * num_tokens + [3] * num_tokens, device=device)
    y = padded.run()
    assert torch.equal(y[:, :num_tokens], expected)
    assert not y[:, num_tokens:].any()


def test_a_rank_without_leaves_has_no_nodes_and_no_tokens_no_rows(device: torch.device) -> None:
    case = Case.create(SMALL, 3, device)
    assert case.of_leaves(2, 2).run(()).shape == (0, 3, SMALL.hidden)
    assert case.of(slice(0, 0)).run().shape == (1, 0, SMALL.hidden)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(("normalise", "num_tokens"), [(False, 1), (True, 9)])
def test_both_kernels_that_weigh_experts_give_the_same_bits(
    device: torch.device, normalise: bool, num_tokens: int, sigmoid: bool
) -> None:
    shape = Shape(20 if device.type == "cpu" else 128, 8, 32, 16, 1, normalise)
    case = Case.create(shape, num_tokens, device)
    case.x[0] = 0.0  # all logits are equal
    logits = router_logits(case.x, case.router)
    # Of the biases, halves have equals among them.
    bias = torch.arange(shape.num_experts, device=device).remainder(3) / 2
    scoring = Scoring(True, bias, 4, 3) if sigmoid else SOFTMAX
    tokens = Tokens(
        case.x, logits, None, 0, shape.num_experts, shape.top_k, normalise, 2.5, torch.float32, None, scoring
    )
    _, experts, weights = pair_gate_up(tokens, case.w13, Tile(16, 32, 2, 2), exact=True)
    counts = torch.zeros(shape.num_experts, dtype=torch.int32, device=device)
    options = {"top_k": shape.top_k, "normalise": normalise, "weight_scale": 2.5, "round_to": torch.float32}
    options["scoring"] = scoring
    routes = route(logits, counts, **options)
    assert torch.equal(weights.view_as(routes.weights), routes.weights)
    assert torch.equal(experts.long().bincount(minlength=shape.num_experts), counts)
    alone = route(logits[:, -1:].contiguous(), counts.zero_(), **options)
    assert torch.equal(alone.weights[0], routes.weights[-1])


def test_a_shared_experts_gate_is_one_factor_of_what_down_takes(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x = torch.randn(4, 96, generator=generator).to(device, dtype)
    logits = torch.randn(2, 4, 6, generator=generator).to(device)
    slots = torch.tensor([FIRST_SLOT, 0, FIRST_SLOT, 99], device=device)
    x[1] = torch.nan
    gate, up = x.float().chunk(2, 1)
    hidden = torch.nn.functional.silu(gate) * up
    square = x.float().relu().square().nan_to_num().to(dtype)
    torch.testing.assert_close(activate_shared(x, logits, 6, slots, FIRST_SLOT, has_gate=False), square)
    whole = activate_shared(x, logits, 6, slots, FIRST_SLOT)
    gated = activate_shared(x, logits, 5, slots, FIRST_SLOT)
    assert not whole[1].any()
    assert not gated[1].any()
    live = [0, 2, 3]
    torch.testing.assert_close(whole[live], hidden[live].to(dtype))
    torch.testing.assert_close(gated[live], (hidden * logits.sum(0)[:, 5:].sigmoid())[live].to(dtype))
    assert torch.equal(activate_shared(x[3:], logits[:, 3:].contiguous(), 5, slots[3:], FIRST_SLOT), gated[3:])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [QWEN3, Shape(60, 4, 2048, 64, 22, normalise=False), Shape(8, 2, 1024, 512, 7)])
def test_in_the_size_of_a_model_a_token_has_the_bits_that_it_has_alone(shape: Shape) -> None:
    case = Case.create(shape, 2048, torch.device("cuda"))
    together = case.run()
    for num_tokens in (1, 2, 4, 8, 9, 64, 256, 700):
        assert torch.equal(case.of(slice(num_tokens)).run(), together[:, :num_tokens]), num_tokens
    half = (shape.num_leaves + 1) // 2
    halves = case.of_leaves(0, half).run(), case.of_leaves(half, shape.num_leaves).run()
    assert torch.equal(halves[0] + halves[1], together)
