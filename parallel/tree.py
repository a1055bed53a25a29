"""The tree by which exact sums over a cut dimension are added: which parts a rank sends, and how all are put together.

A matrix whose inputs ranks cut has leaves, each a run of inputs that no rank cuts; leaves and tree follow from the
matrix alone. T(a, b) = T(a, mid) + T(mid, b), halves of which the first is the larger one: so the order of additions,
and with it every bit of the sum, is the same for any number of ranks. A rank with leaves [a, b) sends the fewest
subtrees that make them up, its nodes; every rank adds the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.plan import Span

Additions = tuple[tuple[int, int], ...]
"""Each makes values[a] + values[b] the next value; the first ones are nodes."""


def halves(leaves: Span) -> tuple[Span, Span]:
    """The two subtrees of a tree of at least two leaves."""
    middle = leaves.start + (leaves.size + 1) // 2
    return Span(leaves.start, middle), Span(middle, leaves.stop)


@functools.lru_cache(maxsize=256)
def additions_of(parts: tuple[Span, ...], roots: tuple[Span, ...]) -> tuple[Additions, tuple[int, ...]]:
    """The additions that make the sums of `roots` from their subtrees `parts`, and which values those are."""
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
    """The largest subtrees of `nodes` of at most so many leaves, in order."""

    def parts(node: Span) -> list[Span]:
        return [node] if node.size <= most else [part for half in halves(node) for part in parts(half)]

    return tuple(part for node in nodes for part in parts(node))


@dataclass(frozen=True, eq=False)
class SumTree:
    """The tree of a matrix whose leaves are dealt to ranks."""

    covers: tuple[tuple[Span, ...], ...]
    """[rank]: its nodes, in order, by the leaves below each."""
    additions: Additions
    """Additions from all ranks' nodes, which come first, to the root: each makes values[a] + values[b] the next
    value."""

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """[rank]: its number of nodes."""
        return tuple(map(len, self.covers))

    @classmethod
    @functools.cache
    def of(cls, spans: tuple[Span, ...]) -> SumTree:
        """The tree of leaves 0 to the last span's stop, of which rank r has spans[r]; one after the other."""
        root = Span(0, spans[-1].stop)
        covers = tuple(tuple(_cover(root, span)) for span in spans)
        return cls(covers, additions_of(tuple(node for cover in covers for node in cover), (root,))[0])

    @classmethod
    @functools.cache
    def of_parts(cls, parts: tuple[tuple[Span, ...], ...]) -> SumTree:
        """One of which rank r brings parts[r], smaller subtrees that in order make up its cover."""
        return cls(parts, cls.of(tuple(part for of_rank in parts for part in of_rank)).additions)

    @classmethod
    @functools.cache
    def joined(cls, first: SumTree, second: SumTree) -> SumTree:
        """The sum of two trees' roots; a rank's nodes are those of the first tree, and then those of the second."""
        covers = tuple(a + b for a, b in zip(first.covers, second.covers, strict=True))
        numbers: tuple[list[int], list[int]] = ([], [])  # each tree's values among the joined one's
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
        """[rank]: that of its nodes, each of shape `of_node`."""
        return tuple((count, *of_node) for count in self.counts)

    def finish(self, nodes: Sequence[Tensor], out: Tensor) -> Tensor:
        """The root, written to `out`.

        Args:
            nodes: all ranks', rank by rank, fp32, each of `out`'s shape.
        """
        if not self.additions:
            return out.copy_(nodes[0])
        values = list(nodes)
        for left, right in self.additions[:-1]:
            values.append(values[left] + values[right])
        left, right = self.additions[-1]
        return torch.add(values[left], values[right], out=out)


def _cover(tree: Span, leaves: Span) -> list[Span]:
    """The largest subtrees of `tree` that make up its part of `leaves`, in order."""
    if leaves.start <= tree.start and tree.stop <= leaves.stop:
        return [tree]
    if leaves.stop <= tree.start or tree.stop <= leaves.start or tree.size == 0:
        return []
    return [node for half in halves(tree) for node in _cover(half, leaves)]
