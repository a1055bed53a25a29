"""Sums the ranks' parts of an output [num_tokens, out_features].

A part is made by a function that gets the tensor to fill, or None for one of its own, and returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel.collectives.fused_sum import PartialSum
from parallel.collectives.group import TensorParallelGroup
from parallel.tree import SumTree


class RankSum(Protocol):
    """A sum over the ranks, as the arithmetic has it."""

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        """The sum."""

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        """Makes `RMSNorm.add`'s input: the sum, as a call returns it, or its summand where norm and sum are one
        kernel."""


class FastSum:
    """Parts [num_tokens, out_features] in the activations' type, added by the group's all-reduce."""

    def __init__(self, out_features: int, group: TensorParallelGroup, dtype: torch.dtype) -> None:
        self._out_features = out_features
        self._dtype = dtype
        self._group = group
        # Asking costs a call a layer, and on CPU no group has one.
        self._asks_group = group.device.type == "cuda" and group.size > 1

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        return self._group.all_reduce(part(None))

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        if self._asks_group:
            partial_sum = self._group.partial_sum((num_tokens, self._out_features), self._dtype)
            if partial_sum is not None:
                part(partial_sum.summand)
                return partial_sum
        return self(num_tokens, part)


class ExactSum:
    """Parts [num_nodes, num_tokens, out_features] in fp32, this rank's nodes of `tree`; so is the sum, not rounded.

    Args:
        leaf: of a NodeWeight, inputs of a leaf: `for_norm` may take the parts of `node_gemm.subtrees`. None: of another
            weight.
    """

    def __init__(self, group: TensorParallelGroup, out_features: int, tree: SumTree, *, leaf: int | None) -> None:
        self.out_features = out_features
        self.tree = tree
        self._group = group
        self._leaf = leaf
        self._num_nodes = tree.counts[group.rank]

    def tree_for(self, num_tokens: int) -> SumTree:
        """The tree of whose nodes `for_norm` takes the parts of so many tokens; it has the same root."""
        return self.tree

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        nodes = self._group.node_buffer((self._num_nodes, num_tokens, self.out_features))
        return self._group.sum_nodes(part(nodes), self.tree)

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        return self(num_tokens, part)


class CudaExactSum(ExactSum):
    """An exact sum on GPUs, where each norm of a sum finishes its tree: one kernel's bits, wherever the nodes lie."""

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        group, tree, shape = self._group, self.tree_for(num_tokens), (num_tokens, self.out_features)
        fused = group.partial_sum(shape, tree)
        if fused is not None:
            part(fused.summand)
            return fused
        num_nodes = tree.counts[group.rank]
        own = torch.empty(max(tree.counts), *shape, device=group.device)  # equal messages; nobody reads the rest
        part(own[:num_nodes])
        places = [rank * len(own) + i for rank, count in enumerate(tree.counts) for i in range(count)]
        return NodeSum(group.all_gather(own).flatten(0, 1), tree, places)

    def tree_for(self, num_tokens: int) -> SumTree:
        """A tree with more nodes where rows are few: what they cost to send is less than a kernel that adds them."""
        from parallel.numerics.kernels.node_gemm import FEW_ROWS, subtrees

        if self._leaf is None or (self._group.size > 1 and num_tokens > FEW_ROWS):
            return self.tree
        return SumTree.of_parts(
            tuple(subtrees(cover, self._leaf, num_tokens, self.out_features) for cover in self.tree.covers)
        )


class NodeSum(PartialSum):
    """The sum of a tree whose nodes lie at `places` of `nodes` [num_places, num_rows, size] fp32."""

    __slots__ = ("_nodes", "_places", "_tree", "num_rows")

    def __init__(self, nodes: Tensor, tree: SumTree, places: Sequence[int]) -> None:
        self._nodes = nodes
        self._tree = tree
        self._places = places
        self.num_rows = nodes.shape[1]

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        from parallel.kernels.tree_sum import sum_add_norm

        return sum_add_norm(self._nodes, self._tree.additions, residual, weight, eps, places=self._places)
