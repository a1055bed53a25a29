"""Where the ranks' parts of an output [num_tokens, out_features] are summed.

A part is made by a function that gets the tensor to fill, or None for one of its own, and returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from parallel.fused_sum import PartialSum
from parallel.group import TensorParallelGroup
from parallel.tree import SumTree


class RankSum(Protocol):
    """A sum over the ranks, as the arithmetic has it."""

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        """The sum; perhaps in memory of the group's, so valid until its next sum."""

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        """What `RMSNorm.add` takes: the sum, as a call returns it, or its summand where norm and sum are one kernel."""


class FastSum:
    """Parts [num_tokens, out_features] in the activations' type, added by the group's all-reduce."""

    def __init__(self, out_features: int, group: TensorParallelGroup, dtype: torch.dtype) -> None:
        self._out_features = out_features
        self._dtype = dtype
        self._group = group
        # Asking costs a call a layer, and on CPU no group has one.
        self._asks_for_buffer = group.device.type == "cuda" and group.size > 1

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        out = None
        if self._asks_for_buffer:
            out = self._group.reduce_buffer((num_tokens, self._out_features), self._dtype)
        y = part(out)
        return self._group.all_reduce(y) if self._group.size > 1 else y

    def for_norm(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor | PartialSum:
        if self._asks_for_buffer:
            partial_sum = self._group.partial_sum((num_tokens, self._out_features), self._dtype)
            if partial_sum is not None:
                part(partial_sum.summand)
                return partial_sum
        return self(num_tokens, part)


class ExactSum:
    """Parts [num_nodes, num_tokens, out_features] in fp32, this rank's nodes of `tree`; so is the sum, not rounded."""

    def __init__(self, out_features: int, group: TensorParallelGroup, tree: SumTree) -> None:
        self._out_features = out_features
        self._group = group
        self._tree = tree
        self._num_nodes = len(tree.covers[group.rank])

    def __call__(self, num_tokens: int, part: Callable[[Tensor | None], Tensor]) -> Tensor:
        nodes = self._group.node_buffer((self._num_nodes, num_tokens, self._out_features))
        return self._group.sum_nodes(part(nodes), self._tree)

    for_norm = __call__
