"""The tree of exact sums over a dimension that is divided among ranks: which nodes a rank sends, and how nodes are
added.

The inputs of such a matrix are divided in leaves, each a run of inputs that no rank cuts. Leaves and tree depend on the
matrix alone. T(a, b) = T(a, mid) + T(mid, b), where the first half is the larger one. So the order of additions, and
every bit of the sum, is the same for any number of ranks. A rank with leaves [a, b) sends the fewest subtrees that
cover them, its nodes. Every rank adds all nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.plan import Span

Additions = tuple[tuple[int, int], ...]
"""Each addition appends values[a] + values[b] to the values, which start with the nodes."""


def halves(leaves: Span) -> tuple[Span, Span]:
    """The two subtrees of a tree with at least two leaves."""
    middle = leaves.start + (leaves.size + 1) // 2
    return Span(leaves.start, middle), Span(middle, leaves.stop)


@functools.lru_cache(maxsize=256)
def additions_of(parts: tuple[Span, ...], roots: tuple[Span, ...]) -> tuple[Additions, tuple[int, ...]]:
    """The additions that compute `roots` from their subtrees `parts`, and the index of each root among the values."""
    values = {part: i for i, part in enumerate(parts)}
    additions: list[tuple[int, int]] = []

    def value_of(node: Span) -> int:
        if node not in values:
            assert node.size > 1, f"the parts do not make up {node}"
            left, right = map(value_of, halves(node))
            additions.append((left, right))
            values[node] = len(parts) + len(additions) - 1
        return values[node]

    numbers = tuple(map(value_of, roots))
    return tuple(additions), numbers


@functools.lru_cache(maxsize=256)
def cut(nodes: tuple[Span, ...], most: int) -> tuple[Span, ...]:
    """The largest subtrees of `nodes` with at most `most` leaves, in order."""

    def parts(node: Span) -> list[Span]:
        return [node] if node.size <= most else [part for half in halves(node) for part in parts(half)]

    return tuple(part for node in nodes for part in parts(node))


@dataclass(frozen=True, eq=False)
class SumTree:
    """The tree of a matrix with leaves that are divided among ranks."""

    covers: tuple[tuple[Span, ...], ...]
    """[rank]: the rank's nodes in order, each as a range of leaves."""
    additions: Additions
    """Additions from all ranks' nodes, in rank order, to the root. Each appends values[a] + values[b] to the values."""

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """[rank]: number of the rank's nodes."""
        return tuple(map(len, self.covers))

    @classmethod
    @functools.cache
    def of(cls, spans: tuple[Span, ...]) -> SumTree:
        """The tree in which rank r has the leaves spans[r]. The spans are consecutive and start at 0."""
        root = Span(0, spans[-1].stop)
        covers = tuple(tuple(_cover(root, span)) for span in spans)
        return cls(covers, additions_of(tuple(node for cover in covers for node in cover), (root,))[0])

    @classmethod
    @functools.cache
    def of_parts(cls, parts: tuple[tuple[Span, ...], ...]) -> SumTree:
        """A tree in which rank r contributes parts[r]: smaller subtrees that cover the rank's leaves in order."""
        return cls(parts, cls.of(tuple(part for of_rank in parts for part in of_rank)).additions)

    @classmethod
    @functools.cache
    def joined(cls, first: SumTree, second: SumTree) -> SumTree:
        """A tree that adds the roots of two trees. A rank's nodes are those of the first tree, then those of the
        second."""
        covers = tuple(a + b for a, b in zip(first.covers, second.covers, strict=True))
        numbers: tuple[list[int], list[int]] = ([], [])  # index of each tree's values among those of the joined tree
        num_nodes = 0
        for of_rank in zip(first.covers, second.covers, strict=True):
            for values, cover in zip(numbers, of_rank, strict=True):
                values.extend(range(num_nodes, num_nodes + len(cover)))
                num_nodes += len(cover)
        additions: list[tuple[int, int]] = []
        for tree, values in zip((first, second), numbers, strict=True):
            for left, right in tree.additions:
                additions.append((values[left], values[right]))
                values.append(num_nodes + len(additions) - 1)
        return cls(covers, (*additions, (numbers[0][-1], numbers[1][-1])))

    def shapes(self, of_node: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """[rank]: shape of the rank's nodes, if one node has the shape `of_node`."""
        return tuple((count, *of_node) for count in self.counts)

    def finish(self, nodes: Sequence[Tensor], out: Tensor) -> Tensor:
        """Adds all nodes and writes the root to `out`.

        Args:
            nodes: all ranks' nodes in rank order, fp32, each of `out`'s shape.
        """
        if not self.additions:
            return out.copy_(nodes[0])
        values = list(nodes)
        for left, right in self.additions[:-1]:
            values.append(values[left] + values[right])
        left, right = self.additions[-1]
        return torch.add(values[left], values[right], out=out)


def _cover(tree: Span, leaves: Span) -> list[Span]:
    """The largest subtrees of `tree` that cover the leaves which it shares with `leaves`, in order."""
    if leaves.start <= tree.start and tree.stop <= leaves.stop:
        return [tree]
    if leaves.stop <= tree.start or tree.stop <= leaves.start or tree.size == 0:
        return []
    return [node for half in halves(tree) for node in _cover(half, leaves)]
