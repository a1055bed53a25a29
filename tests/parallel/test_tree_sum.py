"""Finishing a tree of nodes, and the norm behind it: in Triton's interpreter, and in bf16 on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="a CPU install has no Triton")

from parallel.kernels import tree_sum
from parallel.kernels.tree_sum import sum_add_norm, sum_subtrees
from parallel.tree import Additions
from worker.kernels.norm import add_rms_norm

FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5
LEFT_TO_RIGHT: Additions = ((0, 1), (4, 2), (5, 3))
RIGHT_TO_LEFT: Additions = ((2, 3), (1, 4), (0, 5))


class Case:
    """Nodes of unequal sizes, so that another order of additions rounds otherwise, and a residual stream."""

    def __init__(self, device: torch.device, num_rows: int, size: int, num_nodes: int = 4) -> None:
        generator = torch.Generator().manual_seed(num_rows + size)
        self.dtype = torch.float16 if device.type == "cpu" else BF16
        self.nodes = torch.randn(num_nodes, num_rows, size, generator=generator).to(device)
        self.nodes *= torch.tensor([3.0, 0.1, 30.0, 1.0], device=device)[:num_nodes, None, None]
        wide = torch.randn(num_rows, size + 16, generator=generator).to(device, self.dtype)
        self.residual = wide[:, :size]
        self.weight = torch.randn(size, generator=generator).to(device, self.dtype)

    def run(self, adds: Additions, rows: slice = slice(None), **options: object) -> tuple[Tensor, Tensor]:
        """The residual stream after it, and its norm."""
        residual = self.residual[rows].clone()
        normed = sum_add_norm(self.nodes[:, rows], adds, residual, self.weight, EPS, **options)  # type: ignore[arg-type]
        return residual, normed


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 576), (5, 1000)])
@pytest.mark.parametrize("few_elements", [0, 1 << 18])
def test_a_tree_is_added_in_its_order(
    device: torch.device,
    num_rows: int,
    size: int,
    few_elements: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_sum, "_FEW_ELEMENTS", few_elements)
    case = Case(device, num_rows, size)
    a, b, c, d = case.nodes
    for adds, total in ((LEFT_TO_RIGHT, ((a + b) + c) + d), (RIGHT_TO_LEFT, a + (b + (c + d)))):
        for dtype in (FP32, case.dtype):
            out = torch.full((num_rows, size), torch.nan, device=device, dtype=dtype)
            sum_subtrees(case.nodes, adds, (6,), out=out[None])
            assert torch.equal(out, total.to(dtype))
    out = torch.empty_like(a)
    sum_subtrees(case.nodes, ((0, 1),), (2,), out=out[None], places=(3, 1))
    assert torch.equal(out, d + b)
    trees = torch.empty(3, num_rows, size, device=device)
    sum_subtrees(case.nodes, ((0, 1), (2, 3)), (4, 5, 2), out=trees)
    assert torch.equal(trees, torch.stack((a + b, c + d, c)))


@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 576), (5, 1000), (2, 8192)])
def test_the_root_is_not_rounded_before_the_residual_is_added(device: torch.device, num_rows: int, size: int) -> None:
    case = Case(device, num_rows, size)
    a, b, c, d = case.nodes
    total = a + (b + (c + d))
    residual, normed = case.run(RIGHT_TO_LEFT)
    assert torch.equal(residual, (case.residual.float() + total).to(case.dtype))
    expected = F.rms_norm(residual.float(), (size,), case.weight.float(), EPS)
    torch.testing.assert_close(normed, expected.to(case.dtype))
    if device.type == "cpu":  # a GPU may contract this kernel's products
        before = case.residual.clone()
        assert torch.equal(normed, add_rms_norm(total, before, case.weight, EPS))
        assert torch.equal(residual, before)


def test_one_node_is_its_own_root(device: torch.device) -> None:
    case = Case(device, 3, 576, num_nodes=1)
    residual, _ = case.run(())
    assert torch.equal(residual, (case.residual.float() + case.nodes[0]).to(case.dtype))


def test_slices_of_rows_and_gathered_nodes_give_the_same_bits(device: torch.device) -> None:
    case = Case(device, 7, 576)
    expected = case.run(RIGHT_TO_LEFT)
    for rows in (slice(0, 1), slice(2, 5), slice(6, 7)):
        for whole, part in zip(expected, case.run(RIGHT_TO_LEFT, rows), strict=True):
            assert torch.equal(part, whole[rows])
    gathered = torch.full((8, *case.nodes.shape[1:]), torch.nan, device=device)
    places = (0, 2, 3, 6)
    gathered[list(places)] = case.nodes
    residual = case.residual.clone()
    normed = sum_add_norm(gathered, RIGHT_TO_LEFT, residual, case.weight, EPS, places=places)
    assert torch.equal(normed, expected[1])
    assert torch.equal(residual, expected[0])
