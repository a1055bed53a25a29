"""How a rank computes, in one object that is passed as the group is: fast, or exact.

Exact fixes the order of every sum, whatever the number of ranks and whatever else is in the batch; fast takes what is
fastest. Weights and sums over ranks ask it; nothing else asks which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.layers import Axis, Cut, HeadGroups, Linear
from parallel.group import TensorParallelGroup
from parallel.plan import LayerShard, Span, leaf_columns
from parallel.rank_sum import CudaExactSum, ExactSum, FastSum, RankSum
from parallel.tree import SumTree
from parallel.weight import ChainWeight, CpuLeaves, CpuWeight, CudaWeight, NodeWeight, TensorSource, Weight


@dataclass(frozen=True, slots=True)
class Leaves:
    """How a rank sums its inputs of a matrix that ranks cut."""

    width: int
    """Inputs of a leaf."""
    nodes: tuple[Span, ...]
    """The leaves below each, counted from the rank's first one."""


class Arithmetic(ABC):
    """Makes the weights and the sums of one rank's layers."""

    def weight(self, weight: Tensor, bias: Tensor | None) -> Weight:
        """Of [out_features, in_features] with all of its inputs, whose memory it takes, and a bias or None."""
        return CudaWeight(weight, bias) if weight.is_cuda else CpuWeight(weight, bias)

    @abstractmethod
    def part(self, weight: Tensor, cut: Cut, place: LayerPlace) -> Weight:
        """Of [out_features, this rank's inputs], cut so: what it returns is a part of `rank_sum`'s."""

    @abstractmethod
    def leaves(self, cut: Cut, place: LayerPlace) -> Leaves:
        """Of `part`'s, for who multiplies without a Weight, on CPU."""

    @abstractmethod
    def rank_sum(self, out_features: int, cut: Cut, place: LayerPlace, *, of_weight: bool) -> RankSum:
        """The sum over the ranks of products whose inputs are cut so; `of_weight`: which are `part`'s."""


class FastArithmetic(Arithmetic):
    """Whatever is fastest."""

    def part(self, weight: Tensor, cut: Cut, place: LayerPlace) -> Weight:
        return self.weight(weight, None)

    def leaves(self, cut: Cut, place: LayerPlace) -> Leaves:
        return Leaves(place.shard.span_of(cut).size, (Span(0, 1),))

    def rank_sum(self, out_features: int, cut: Cut, place: LayerPlace, *, of_weight: bool) -> RankSum:
        return FastSum(out_features, place.group, place.dtype)


class ExactArithmetic(Arithmetic):
    """One ascending chain for each leaf, and the tree above the leaves.

    On CUDA it also tells cuBLAS, for the whole process, to add chains only.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            from parallel.kernels.chain_gemm import use_chain_cublas  # a CPU install has no Triton

            use_chain_cublas()

    def weight(self, weight: Tensor, bias: Tensor | None) -> Weight:
        return ChainWeight(weight, bias) if weight.is_cuda else CpuWeight(weight, bias)

    def part(self, weight: Tensor, cut: Cut, place: LayerPlace) -> Weight:
        leaves = self.leaves(cut, place)
        return (NodeWeight if weight.is_cuda else CpuLeaves)(weight, leaves.width, leaves.nodes)

    def leaves(self, cut: Cut, place: LayerPlace) -> Leaves:
        width, tree = place.tree(cut)
        cover = tree.covers[place.group.rank]
        first = cover[0].start if cover else 0
        return Leaves(width, tuple(Span(node.start - first, node.stop - first) for node in cover))

    def rank_sum(self, out_features: int, cut: Cut, place: LayerPlace, *, of_weight: bool) -> RankSum:
        leaf, tree = place.tree(cut)
        if place.device.type == "cuda":
            return CudaExactSum(out_features, place.group, tree, leaf=leaf if of_weight else None)
        return ExactSum(out_features, place.group, tree)


FAST = FastArithmetic()


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where the modules of a layer are made."""

    shards: tuple[LayerShard, ...]
    """Every rank's part of the layer."""
    group: TensorParallelGroup
    arithmetic: Arithmetic
    dtype: torch.dtype
    """The activations' type."""
    device: torch.device

    @property
    def shard(self) -> LayerShard:
        """This rank's part of the layer."""
        return self.shards[self.group.rank]

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor there, of the activations' type."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tree(self, cut: Cut) -> tuple[int, SumTree]:
        """Inputs of a leaf, which is `leaf_heads` or `leaf_columns`, and the tree of a matrix whose inputs are cut so.

        The plan is exact.
        """
        spans = [shard[cut.axis] for shard in self.shards]
        if cut.axis is Axis.QUERY_HEADS:
            num_groups = self.shards[-1][Axis.KV_HEADS].stop
            indices = HeadGroups(cut.axis, spans[-1].stop, Axis.KV_HEADS, num_groups).leaf_heads
        else:
            indices = leaf_columns(spans[-1].stop)
        dealt = tuple(Span(span.start // indices, span.stop // indices) for span in spans)
        return indices * cut.width, SumTree.of(dealt)

    def load(self, source: TensorSource, prefix: str, *linears: Linear) -> Weight:
        """Reads this rank's part of one weight, or of several of one input, whose rows come to lie after one another.

        A bias is read only where rows are cut: after a product over cut columns, whoever sums over the ranks adds it.

        Args:
            prefix: of the checkpoint's names.
            linears: rows of all of them are cut, or columns of the only one.
        """
        spans = [self.shard.span_of(linear.cut) for linear in linears]
        first = linears[0]
        if first.cut.dim == 1:
            weight = self.empty(first.out_features, spans[0].size)
            source.read(f"{prefix}{first.name}.weight", weight, columns=spans[0])
            return self.arithmetic.part(weight, first.cut, self)
        weight = self.empty(sum(span.size for span in spans), first.in_features)
        bias = self.empty(len(weight)) if first.bias else None
        end = 0
        for linear, span in zip(linears, spans, strict=True):
            begin, end = end, end + span.size
            source.read(f"{prefix}{linear.name}.weight", weight[begin:end], rows=span)
            if bias is not None:
                source.read(f"{prefix}{linear.name}.bias", bias[begin:end], rows=span)
        return self.arithmetic.weight(weight, bias)
