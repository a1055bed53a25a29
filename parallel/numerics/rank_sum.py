"""Sums the ranks' partial sums of an output [num_tokens, out_features].

The caller passes `part`, a function that makes this rank's partial sum. It receives the tensor to fill, or None if it
should allocate one, and returns the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel.collectives.group import TensorParallelGroup
from parallel.collectives.interface import PartialSum
from parallel.tree import SumTree


class RankSum(Protocol):
    """A sum over the ranks, fast or exact."""

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        """Returns the sum [num_tokens, out_features]."""

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        """Returns the input of `RMSNorm.add`: the sum, or a pending sum that the norm's kernel finishes."""


class FastSum:
    """Adds partial sums [num_tokens, out_features] in the activations' dtype, by the group's all-reduce."""

    def __init__(self, out_features: int, group: TensorParallelGroup, dtype: torch.dtype) -> None:
        self._out_features = out_features
        self._dtype = dtype
        self._group = group
        # CPU groups never have a fused sum, and asking would cost a call per layer.
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
    """Adds all ranks' nodes of `tree`. Each node is [num_tokens, out_features] fp32. The sum is fp32 too, not rounded.

    Args:
        leaf: inputs per leaf, if a NodeWeight makes the nodes: then `for_norm` may use the smaller parts of
            `node_gemm.subtrees`. None for other weights.
    """

    def __init__(self, group: TensorParallelGroup, out_features: int, tree: SumTree, *, leaf: int | None) -> None:
        self.out_features = out_features
        self.tree = tree
        self._group = group
        self._leaf = leaf
        self._num_nodes = tree.counts[group.rank]

    def tree_for(self, num_tokens: int) -> SumTree:
        """Tree of the nodes that `for_norm` adds for this number of tokens. Its root has the same bits as `tree`'s."""
        return self.tree

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        nodes = self._group.node_buffer((self._num_nodes, num_tokens, self.out_features))
        return self._group.sum_nodes(part(nodes), self.tree)

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        return self(num_tokens, part)


class CudaExactSum(ExactSum):
    """An exact sum on GPUs. The norm that follows finishes the tree in its kernel, with the same bits wherever the
    nodes are."""

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        group, tree, shape = self._group, self.tree_for(num_tokens), (num_tokens, self.out_features)
        fused = group.partial_sum(shape, tree)
        if fused is not None:
            part(fused.summand)
            return fused
        num_nodes = tree.counts[group.rank]
        # Messages have equal sizes; the unused part is never read.
        own = torch.empty(max(tree.counts), *shape, device=group.device)
        part(own[:num_nodes])
        places = [rank * len(own) + i for rank, count in enumerate(tree.counts) for i in range(count)]
        return NodeSum(group.all_gather(own).flatten(0, 1), tree, places)

    def tree_for(self, num_tokens: int) -> SumTree:
        """With few rows, a tree with more nodes is used: sending them costs less than a kernel that adds them."""
        from parallel.numerics.kernels.node_gemm import FEW_ROWS, subtrees

        if self._leaf is None or (self._group.size > 1 and num_tokens > FEW_ROWS):
            return self.tree
        return SumTree.of_parts(
            tuple(subtrees(cover, self._leaf, num_tokens, self.out_features) for cover in self.tree.covers)
        )


class NodeSum(PartialSum):
    """A pending sum of a tree. Node i is `nodes[places[i]]`; `nodes` is [num_places, num_rows, size] fp32."""

    __slots__ = ("_nodes", "_places", "_tree", "num_rows")

    def __init__(self, nodes: Tensor, tree: SumTree, places: Sequence[int]) -> None:
        self._nodes = nodes
        self._tree = tree
        self._places = places
        self.num_rows = nodes.shape[1]

    def add_norm(self, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        from parallel.kernels.tree_sum import sum_add_norm

        return sum_add_norm(self._nodes, self._tree.additions, residual, weight, eps, places=self._places)
