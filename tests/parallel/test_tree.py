"""Exact sums over ranks: the tree, what each rank sends of it, and that any number of ranks gives the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from configs.layers import Axis, HeadGroups
from configs.numerics import leaf_columns
from parallel.collectives import shared_memory
from parallel.collectives.group import Strategy, TensorParallelGroup
from parallel.plan import Span
from parallel.tree import SumTree, halves
from tests.helpers.rank_threads import on_ranks


def _spans(num_leaves: int, size: int) -> tuple[Span, ...]:
    borders = [num_leaves * rank // size for rank in range(size + 1)]
    return tuple(Span(*borders) for borders in itertools.pairwise(borders))


def _value(leaves: Tensor, node: Span) -> Tensor:
    if node.size == 1:
        return leaves[node.start]
    left, right = halves(node)
    return _value(leaves, left) + _value(leaves, right)


def _leaves(num_leaves: int, *shape: int) -> Tensor:
    """Of sizes so different that another order would show."""
    generator = torch.Generator().manual_seed(num_leaves)
    return torch.randn(num_leaves, *shape, generator=generator) * 10.0 ** torch.randint(
        -4, 5, (num_leaves, *shape), generator=generator
    )


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 6, 9, 12, 24, 28, 50])
def test_any_deal_of_the_leaves_gives_the_same_bits(num_leaves: int) -> None:
    leaves = _leaves(num_leaves, 40)
    expected = _value(leaves, Span(0, num_leaves))
    for size in range(1, 10):
        spans = _spans(num_leaves, size)
        tree = SumTree.of(spans)
        nodes = []
        for span, cover in zip(spans, tree.covers, strict=True):
            assert [leaf for node in cover for leaf in range(*node)] == list(range(*span))
            nodes += [_value(leaves, node) for node in cover]
        assert torch.equal(tree.finish(nodes, torch.empty(40)), expected), f"{size} ranks"
        assert len(tree.additions) == len(nodes) - 1


def test_two_four_and_eight_ranks_send_one_node_of_leaves_that_eight_divides() -> None:
    for num_leaves, size in itertools.product((8, 24, 32, 96), (2, 4, 8)):
        assert {len(cover) for cover in SumTree.of(_spans(num_leaves, size)).covers} == {1}


def test_a_rank_without_leaves_sends_nothing() -> None:
    tree = SumTree.of((Span(0, 2), Span(2, 2), Span(2, 3)))
    assert tree.covers == ((Span(0, 2),), (), (Span(2, 3),))


@pytest.mark.parametrize("size", range(1, 9))
def test_two_trees_are_joined_by_the_sum_of_their_roots(size: int) -> None:
    few, many = _leaves(4, 40), _leaves(11, 40)
    trees = [(leaves, SumTree.of(_spans(len(leaves), size))) for leaves in (few, many)]
    nodes = [_value(leaves, node) for rank in range(size) for leaves, tree in trees for node in tree.covers[rank]]
    expected = _value(few, Span(0, 4)) + _value(many, Span(0, 11))
    joined = SumTree.joined(*(tree for _, tree in trees))
    assert sum(map(len, joined.covers)) == len(nodes)
    assert torch.equal(joined.finish(nodes, torch.empty(40)), expected)
    if size == 1:
        assert torch.equal(TensorParallelGroup.single().sum_nodes(torch.stack(nodes), joined), expected)


@pytest.mark.parametrize(
    ("size", "leaf"),
    [
        *((28672, 1792), (25600, 1600), (18944, 2368), (14336, 1792), (12288, 1536), (9728, 1216), (4096, 512)),
        *((11008, 256), (10944, 576), (3072, 256), (1536, 128), (768, 64), (100, 4), (7, 1)),
    ],
)
def test_leaves_follow_from_the_columns_alone(size: int, leaf: int) -> None:
    assert leaf_columns(size) == leaf


@pytest.mark.parametrize(
    ("num_heads", "num_groups", "leaf"),
    [(32, 8, 4), (64, 8, 8), (40, 8, 5), (16, 8, 2), (32, 4, 4), (28, 4, 1), (9, 3, 1), (32, 32, 1), (4, 2, 1)],
)
def test_leaves_of_heads_are_of_one_group_and_eight_or_one_head(num_heads: int, num_groups: int, leaf: int) -> None:
    assert HeadGroups(Axis.QUERY_HEADS, num_heads, Axis.KV_HEADS, num_groups).leaf_heads == leaf


@pytest.mark.parametrize(
    ("strategy", "spans"),
    [
        *(("shared_memory", _spans(9, size)) for size in (2, 3, 5)),
        ("shared_memory", (Span(0, 4), Span(4, 8), Span(8, 9))),  # 2, 3 and 1 nodes
        ("gloo", _spans(9, 3)),
    ],
)
@pytest.mark.parametrize("num_rows", [17, 6000])  # of the last, two nodes fit a buffer and three do not
def test_ranks_sum_their_nodes_to_the_bits_of_one(
    strategy: Strategy, spans: tuple[Span, ...], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_SLICED_BYTES", 100_000)  # so that more than one row in slices is cheap
    num_leaves, width, size = 9, 72, len(spans)
    leaves = _leaves(num_leaves, num_rows, width)
    expected = _value(leaves, Span(0, num_leaves))
    tree = SumTree.of(spans)

    def body(group: TensorParallelGroup) -> list[Tensor]:
        cover, sums = tree.covers[group.rank], []
        for in_buffer in (True, False, True):
            nodes = torch.stack([_value(leaves, node) for node in cover])
            if in_buffer:
                nodes = group.node_buffer(tuple(nodes.shape)).copy_(nodes)  # type: ignore[arg-type]
            sums.append(group.sum_nodes(nodes, tree).clone())
        group.barrier()
        return sums

    for sums in on_ranks(size, body, strategy=strategy):
        assert all(torch.equal(total, expected) for total in sums)
