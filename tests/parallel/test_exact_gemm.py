"""Products of exact numerics: the same bits whatever the rows beside a row, the tiles, and the ranks that share leaves.

In Triton's interpreter, whose dot is made an ascending chain, and in bf16 on a GPU.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="a CPU install has no Triton")

from parallel.kernels.tree_sum import sum_subtrees
from parallel.numerics.kernels.chain_gemm import chain_gemm, cublas_is_faster, use_chain_cublas
from parallel.numerics.kernels.node_gemm import Tile, is_by_cublas, node_gemm, subtrees
from parallel.plan import Span
from parallel.tree import Additions

FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16
SMALL = Tile(16, 16, 16, 1, 2)
pytestmark = pytest.mark.usefixtures("chains")


@pytest.fixture(params=[False, True], ids=["", "fp16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Of the interpreter fp32, for it holds no bf16."""
    return FP16 if request.param else FP32 if device.type == "cpu" else BF16


def random_of(*shape: int, like: tuple[torch.device, torch.dtype]) -> Tensor:
    """With some elements 50 times the others, so that another order of additions rounds otherwise."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    return (x * torch.where(torch.rand(shape, generator=generator) < 0.05, 50.0, 1.0)).to(*like)


def rows_of(num_rows: int, k: int, like: tuple[torch.device, torch.dtype]) -> Tensor:
    """Rows that lie in wider rows of NaN."""
    wide = torch.full((num_rows, k + 16), torch.nan, device=like[0], dtype=like[1])
    return wide[:, :k].copy_(random_of(num_rows, k, like=like))


def ascending(x: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = total + x[:, k, None].float() * weight[None, :, k].float()
    return total


def halving(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    middle = (len(values) + 1) // 2
    return halving(values[:middle]) + halving(values[middle:])


Leaves = tuple[int, int]


def spans(nodes: Iterable[Leaves]) -> tuple[Span, ...]:
    return tuple(Span(*node) for node in nodes)


def cover(start: int, stop: int, node: Leaves) -> list[Leaves]:
    """The largest subtrees of `node` that lie in the leaves [start, stop)."""
    a, b = node
    if start <= a and b <= stop:
        return [node]
    if b <= start or stop <= a:
        return []
    middle = a + (b - a + 1) // 2
    return cover(start, stop, (a, middle)) + cover(start, stop, (middle, b))


def adds_of(nodes: list[Leaves], root: Leaves) -> Additions:
    """Additions in any order that finishes the tree."""
    adds: list[tuple[int, int]] = []

    def value(node: Leaves) -> int:
        if node in nodes:
            return nodes.index(node)
        a, b = node
        middle = a + (b - a + 1) // 2
        right, left = value((middle, b)), value((a, middle))
        adds.append((left, right))
        return len(nodes) + len(adds) - 1

    value(root)
    return tuple(adds)


def nodes_of(x: Tensor, weight: Tensor, leaf: int, nodes: list[Leaves], **schedule: object) -> Tensor:
    out = torch.full((len(nodes), len(x), len(weight)), torch.nan, device=x.device)
    assert node_gemm(x, weight, leaf=leaf, nodes=spans(nodes), out=out, **schedule) is out  # type: ignore[arg-type]
    return out


def leaf_sums(x: Tensor, weight: Tensor, leaf: int, tile: Tile | None = None) -> list[Tensor]:
    """Each leaf by itself."""
    sums = []
    for start in range(0, x.shape[1], leaf):
        columns = slice(start, start + leaf)
        sums.append(nodes_of(x[:, columns], weight[:, columns].contiguous(), leaf, [(0, 1)], tile=tile)[0])
    return sums


@pytest.mark.parametrize(("leaf", "k"), [(16, 48), (64, 128), (24, 72), (40, 100), (128, 256), (96, 200)])
def test_a_leaf_is_one_ascending_chain(device: torch.device, dtype: torch.dtype, leaf: int, k: int) -> None:
    x, weight = rows_of(3, k, (device, dtype)), random_of(24, k, like=(device, dtype))
    sums = nodes_of(x, weight, leaf, [(i, i + 1) for i in range(-(-k // leaf))])
    if device.type == "cpu":
        for i, total in enumerate(sums):
            columns = slice(i * leaf, (i + 1) * leaf)
            assert torch.equal(total, ascending(x[:, columns], weight[:, columns]))
    for total, alone in zip(sums, leaf_sums(x, weight, leaf), strict=True):
        assert torch.equal(total, alone)


@pytest.mark.parametrize(
    "num_leaves",
    [1, 2, 3, 5, 8, 13, 32, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 7, 9, 12, 16, 17, 24, 25, 31))],
)
def test_a_node_is_the_halving_tree_of_its_leaves(device: torch.device, num_leaves: int) -> None:
    like = (device, FP16)
    x, weight = rows_of(2, 16 * num_leaves, like), random_of(8, 16 * num_leaves, like=like)
    node = [(5, 5 + num_leaves)]
    total = nodes_of(x, weight, 16, node, tile=SMALL, parts=spans(node))[0]
    assert torch.equal(total, halving(leaf_sums(x, weight, 16, SMALL)))


def cut(node: Leaves, most: int) -> tuple[Leaves, ...]:
    a, b = node
    if b - a <= most:
        return (node,)
    middle = (a + b + 1) // 2
    return cut((a, middle), most) + cut((middle, b), most)


@pytest.mark.parametrize(
    ("tile", "num_leaves"),
    [
        (SMALL, 7),
        (Tile(16, 32, 64, 2, 4), 12),
        pytest.param(SMALL, 12, marks=pytest.mark.slow),
        pytest.param(Tile(64, 64, 32, 4, 4), 7, marks=pytest.mark.slow),
        (Tile(128, 64, 32, 8, 3), 7),
    ],
)
def test_every_schedule_has_the_same_bits(device: torch.device, tile: Tile, num_leaves: int) -> None:
    like, leaf = (device, FP16), 32
    x, weight = rows_of(18, num_leaves * leaf, like), random_of(24, num_leaves * leaf, like=like)
    expected = halving(leaf_sums(x, weight, leaf, SMALL))
    for most in (num_leaves, 3):
        parts = cut((0, num_leaves), most)
        total = nodes_of(x, weight, leaf, [(0, num_leaves)], tile=tile, parts=spans(parts))[0]
        assert torch.equal(total, expected), parts


@pytest.mark.parametrize("nodes", [[(0, 6)], [(3, 4), (4, 8), (8, 9)]])
def test_a_row_has_the_bits_that_it_has_among_any_others(
    device: torch.device, dtype: torch.dtype, nodes: list[Leaves]
) -> None:
    like = (device, dtype)
    k = 64 * (nodes[-1][1] - nodes[0][0])
    x, weight = rows_of(300, k, like), random_of(72, k, like=like)
    among_all = nodes_of(x, weight, 64, nodes)
    for num_rows in (1, 17, 128, 129):
        assert torch.equal(nodes_of(x[:num_rows], weight, 64, nodes), among_all[:, :num_rows])
    assert len(subtrees(spans(nodes), 64, 1, 72)) > len(nodes)


class OnGpu(Tensor):
    """A tensor that says so."""

    is_cuda = True


def test_cublas_gets_no_leaves_in_fp32_which_it_might_split() -> None:
    for num_rows, dtype in itertools.product((128, 129, 512, 513), (FP16, BF16, FP32)):
        x = torch.empty(num_rows, 2048, dtype=dtype).as_subclass(OnGpu)
        assert is_by_cublas(x, 1024, 2) == (num_rows in (129, 512) and dtype is not FP32)
    assert not is_by_cublas(x[:256], 512, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("leaf", [1024, 1536])
@pytest.mark.parametrize("nodes", [[(0, 8)], [(3, 4), (4, 6)]])
def test_a_wide_leaf_of_cublas_has_the_bits_of_the_tree(leaf: int, nodes: list[Leaves], dtype: torch.dtype) -> None:
    like = (torch.device("cuda"), dtype)
    use_chain_cublas()
    k = leaf * (nodes[-1][1] - nodes[0][0])
    x, weight = rows_of(600, k, like), random_of(4096, k, like=like)
    expected = nodes_of(x, weight, leaf, nodes, tile=Tile(64, 64, 64, 4, 4 if dtype is BF16 else 2))
    for num_rows in (1, 16, 64, 128, 129, 256, 512, 600):
        assert torch.equal(nodes_of(x[:num_rows], weight, leaf, nodes), expected[:, :num_rows])


def test_many_leaves_are_cut_into_few_enough_parts() -> None:
    for num_leaves, num_rows in itertools.product((28, 64, 100), (1, 64, 65, 129, 4096)):
        parts = subtrees((Span(0, num_leaves),), 128, num_rows, 4096)
        assert len(parts) <= 15
        assert (parts[0][0], parts[-1][1]) == (0, num_leaves)


@pytest.mark.parametrize(
    ("num_ranks", "num_leaves"),
    [(2, 9), (5, 9), (7, 24), *(pytest.param(size, 9, marks=pytest.mark.slow) for size in (1, 3, 4, 6, 7, 8, 9))],
)
def test_any_number_of_ranks_finishes_the_tree_with_the_same_bits(
    device: torch.device, num_leaves: int, num_ranks: int
) -> None:
    like, leaf, root = (device, FP16), 16, (0, num_leaves)
    x, weight = rows_of(2, num_leaves * leaf, like), random_of(24, num_leaves * leaf, like=like)
    whole = nodes_of(x, weight, leaf, [root])[0]
    choose = random.Random(num_ranks)
    for _ in range(3):
        borders = [0, *sorted(choose.randint(0, num_leaves) for _ in range(num_ranks - 1)), num_leaves]
        covers = [cover(a, b, root) if a < b else [] for a, b in itertools.pairwise(borders)]
        most = max(len(nodes) for nodes in covers)
        gathered = torch.full((num_ranks, most, *whole.shape), torch.nan, device=device)
        for rank, (nodes, a, b) in enumerate(zip(covers, borders[:-1], borders[1:], strict=True)):
            columns = slice(a * leaf, b * leaf)
            gathered[rank, : len(nodes)] = nodes_of(x[:, columns], weight[:, columns].contiguous(), leaf, nodes)
        places = [rank * most + i for rank, nodes in enumerate(covers) for i in range(len(nodes))]
        adds = adds_of([node for nodes in covers for node in nodes], root)
        out = torch.full_like(whole, torch.nan)
        sum_subtrees(gathered.flatten(0, 1), adds, (2 * len(adds),), out=out[None], places=tuple(places))
        assert torch.equal(out, whole)


def chain(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.full((len(x), len(weight)), torch.nan, device=x.device, dtype=dtype or x.dtype)
    assert chain_gemm(x, weight, bias, out=out) is out
    return out


@pytest.mark.parametrize("k", [64, 256, 200])
def test_a_product_that_is_not_cut_is_one_chain(device: torch.device, dtype: torch.dtype, k: int) -> None:
    like = (device, dtype)
    x, weight, bias = rows_of(3, k, like), random_of(40, k, like=like), random_of(40, like=like)
    total = chain(x, weight, None, FP32)
    if device.type == "cpu":
        assert torch.equal(total, ascending(x, weight))
    torch.testing.assert_close(total.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-2)
    assert torch.equal(chain(x, weight, bias), (total + bias.float()).to(dtype))
    assert torch.equal(nodes_of(x, weight, k, [(0, 1)])[0], total)


def test_a_row_of_a_chain_has_the_bits_that_it_has_among_any_others(device: torch.device, dtype: torch.dtype) -> None:
    x, weight = rows_of(270, 192, (device, dtype)), random_of(40, 192, like=(device, dtype))
    among_all = chain(x, weight)
    for num_rows in (1, 2, 16, 17, 256):
        assert torch.equal(chain(x[:num_rows], weight), among_all[:num_rows])
    assert chain(x[:0], weight).shape == (0, 40)


def test_cublas_takes_many_rows_and_wide_weights() -> None:
    assert not cublas_is_faster(1, 151936)
    assert not cublas_is_faster(16, 6144)
    assert not cublas_is_faster(2, 24576)
    assert cublas_is_faster(17, 4096)
    assert not cublas_is_faster(64, 1536)
    assert cublas_is_faster(8192, 1536)


def test_cublas_is_told_not_to_cut_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    matmul = torch.backends.cuda.matmul
    before = [
        (getattr(matmul, name), getattr(matmul, f"{name}_split_k"))
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    ]
    try:
        use_chain_cublas()
        assert chosen == ["cublaslt"]
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            assert not getattr(matmul, name)
            assert not getattr(matmul, f"{name}_split_k")
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


@pytest.mark.gpu
@pytest.mark.parametrize("out_features", [1536, 3072, 6144])
def test_cublas_without_split_k_has_the_chains_bits(out_features: int) -> None:
    like = (torch.device("cuda"), BF16)
    use_chain_cublas()
    weight, bias = random_of(out_features, 4096, like=like), random_of(out_features, like=like)
    x = random_of(256, 4096, like=like)
    for num_rows in (2, 17, 64, 256):
        assert torch.equal(torch.mm(x[:num_rows], weight.t()), chain(x[:num_rows], weight))
        assert torch.equal(torch.addmm(bias, x[:num_rows], weight.t()), chain(x[:num_rows], weight, bias))
