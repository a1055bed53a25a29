"""The arithmetic of a rank, fast or exact, in one object that every layer receives.

Exact fixes the order of every sum, independent of the number of ranks and of the batch. Fast uses what is fastest.
Weights and sums over ranks come from this object. Other code with two variants calls `choose`; none asks which
arithmetic it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from configs.layers import GROUPS_OF, Cut, HeadGroups, Linear
from configs.numerics import leaf_columns
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.rank_sum import CudaExactSum, ExactSum, FastSum, RankSum
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import (
    ChainWeight,
    CpuLeaves,
    CpuWeight,
    CudaWeight,
    Fp8Weight,
    NodeWeight,
    Weight,
)
from parallel.plan import LayerShard, ShardPlan, Span
from parallel.tree import SumTree

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Leaves:
    """How a rank sums over its inputs of a matrix whose inputs are divided among ranks."""

    width: int
    """Inputs per leaf."""
    nodes: tuple[Span, ...]
    """The rank's nodes: each is a range of leaves, counted from the rank's first one."""


class Arithmetic(ABC):
    """Creates the weights and the sums over ranks of one rank's layers."""

    def __init__(self) -> None:
        self.chains: dict[tuple[int, ...], Tensor | Fp8Matrix] = {}
        """One exact weight on a GPU for each shape, among weights with all of their inputs. The self-test multiplies
        with them."""
        self.sums: dict[tuple[TensorParallelGroup, int, SumTree, int | None], ExactSum] = {}
        """The different exact sums over ranks, by group, outputs, tree and leaf width."""

    def weight(self, weight: Tensor | Fp8Matrix, bias: Tensor | None) -> Weight:
        """A weight [out_features, in_features] with all of its inputs, and its bias if there is one. The result owns
        the memory of `weight`."""
        if isinstance(weight, Fp8Matrix):
            return Fp8Weight(weight, bias)
        return CudaWeight(weight, bias) if weight.is_cuda else CpuWeight(weight, bias)

    @abstractmethod
    def choose(self, *, fast: _T, exact: _T) -> _T:
        """Returns `fast` if this arithmetic is fast, else `exact`."""

    @abstractmethod
    def part(self, weight: Tensor | Fp8Matrix, cut: Cut, context: LayerContext) -> Weight:
        """A weight [out_features, this rank's inputs]; `cut` says how the inputs are divided. Its products are the
        partial sums of `rank_sum`."""

    @abstractmethod
    def leaves(self, cut: Cut, context: LayerContext) -> Leaves:
        """The leaves of a weight made by `part`, for CPU code that multiplies without a Weight."""

    @abstractmethod
    def rank_sum(
        self, out_features: int, cut: Cut, context: LayerContext, *, of_weight: bool, beside: Cut | None = None
    ) -> RankSum:
        """The sum over the ranks of products whose inputs have this cut.

        Args:
            of_weight: whether the products come from a weight made by `part`.
            beside: cut of a second product that is added to the first one; its nodes follow the first one's. None if
                there is none.
        """


class FastArithmetic(Arithmetic):
    """Adds in the order that is fastest."""

    def choose(self, *, fast: _T, exact: _T) -> _T:
        return fast

    def part(self, weight: Tensor | Fp8Matrix, cut: Cut, context: LayerContext) -> Weight:
        return self.weight(weight, None)

    def leaves(self, cut: Cut, context: LayerContext) -> Leaves:
        return Leaves(context.shard.span_of(cut).size, (Span(0, 1),))

    def rank_sum(
        self, out_features: int, cut: Cut, context: LayerContext, *, of_weight: bool, beside: Cut | None = None
    ) -> RankSum:
        return FastSum(out_features, context.group, context.dtype)


class ExactArithmetic(Arithmetic):
    """Adds one ascending chain per leaf, then the leaves in their tree.

    On CUDA it also restricts cuBLAS to such chains, for the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        if device.type == "cuda":
            from parallel.numerics.kernels.chain_gemm import use_chain_cublas

            use_chain_cublas()

    def choose(self, *, fast: _T, exact: _T) -> _T:
        return exact

    def weight(self, weight: Tensor | Fp8Matrix, bias: Tensor | None) -> Weight:
        if isinstance(weight, Tensor) and not weight.is_cuda:
            return CpuWeight(weight, bias)
        self.chains.setdefault(tuple(weight.shape), weight)
        return ChainWeight(weight, bias)

    def part(self, weight: Tensor | Fp8Matrix, cut: Cut, context: LayerContext) -> Weight:
        leaves = self.leaves(cut, context)
        if isinstance(weight, Fp8Matrix) or weight.is_cuda:
            return NodeWeight(weight, leaves.width, leaves.nodes)
        return CpuLeaves(weight, leaves.width, leaves.nodes)

    def leaves(self, cut: Cut, context: LayerContext) -> Leaves:
        width, tree = context.tree(cut)
        cover = tree.covers[context.group.rank]
        first = cover[0].start if cover else 0
        return Leaves(width, tuple(Span(node.start - first, node.stop - first) for node in cover))

    def rank_sum(
        self, out_features: int, cut: Cut, context: LayerContext, *, of_weight: bool, beside: Cut | None = None
    ) -> ExactSum:
        width, tree = context.tree(cut)
        if beside is not None:
            tree = SumTree.joined(tree, context.tree(beside)[1])
        key = (context.group, out_features, tree, width if of_weight else None)
        if key not in self.sums:
            made = CudaExactSum if context.device.type == "cuda" else ExactSum
            self.sums[key] = made(context.group, out_features, tree, leaf=key[-1])
        return self.sums[key]


FAST = FastArithmetic()


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What a layer's modules are built for: the ranks' shards, arithmetic, dtype and device."""

    shards: tuple[LayerShard, ...]
    """Every rank's part of the layer."""
    group: TensorParallelGroup
    arithmetic: Arithmetic
    dtype: torch.dtype
    """Dtype of the activations."""
    device: torch.device

    @property
    def shard(self) -> LayerShard:
        """This rank's part of the layer."""
        return self.shards[self.group.rank]

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor on the device, in the activations' dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def tree(self, cut: Cut) -> tuple[int, SumTree]:
        """Inputs per leaf (`leaf_heads` or `leaf_columns`), and the tree of a matrix whose inputs have this cut. The
        plan must be exact."""
        spans = [shard[cut.axis] for shard in self.shards]
        groups = GROUPS_OF.get(cut.axis)
        if groups is not None:
            num_groups = self.shards[-1].spans.get(groups, Span(0, 1)).stop  # else all heads share a latent
            indices = HeadGroups(cut.axis, spans[-1].stop, groups, num_groups).leaf_heads
        else:
            indices = leaf_columns(spans[-1].stop)
        dealt = tuple(Span(span.start // indices, span.stop // indices) for span in spans)
        return indices * cut.width, SumTree.of(dealt)

    def load(self, source: TensorSource, prefix: str, *linears: Linear) -> Weight:
        """Reads this rank's part of one weight, or of several weights with the same input, whose rows are stacked.

        A bias is read only if rows are cut. If columns are cut, the code that sums over the ranks reads and adds it.

        Args:
            prefix: prefix of the tensors' names in the checkpoint.
            linears: any number of linears with cut rows, or one with cut columns.
        """
        names = [f"{prefix}{linear.name}.weight" for linear in linears]
        spans = [self.shard.span_of(linear.cut) for linear in linears]
        first = linears[0]
        rows = [
            Span(it.first_row + span.start, it.first_row + span.stop) for it, span in zip(linears, spans, strict=True)
        ]
        columns = None
        if first.cut.dim == 1:
            rows, columns = [Span(0, first.out_features)], spans[0]
        weight = self._read(source, names, rows, columns, first.in_features)
        if columns is not None:
            return self.arithmetic.part(weight, first.cut, self)
        bias = self.empty(len(weight)) if first.bias else None
        if bias is not None:
            for linear, span, part in zip(linears, rows, torch.split(bias, [it.size for it in rows]), strict=True):
                source.read(f"{prefix}{linear.name}.bias", part, rows=span)
        return self.arithmetic.weight(weight, bias)

    @property
    def keeps_fp8(self) -> bool:
        """Whether FP8 weights stay FP8. CPUs cannot multiply with them, and read them in the activations' dtype."""
        return self.device.type == "cuda"

    @property
    def keeps_mxfp4(self) -> bool:
        """Whether MXFP4 experts stay MXFP4. GPUs have kernels for them, in fast numerics and bf16."""
        is_fast = self.arithmetic.choose(fast=True, exact=False)
        return is_fast and self.device.type == "cuda" and self.dtype is torch.bfloat16

    def fp8_blocks(self, source: TensorSource, names: Sequence[str]) -> list[tuple[int, int]] | None:
        """Rows and columns per scale block of each matrix, if all of them can stay in FP8 together. None otherwise."""
        found = [source.scale_block(name) for name in names if self.keeps_fp8]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(names) and len({width for _, width in blocks}) == 1 else None

    def _read(
        self, source: TensorSource, names: Sequence[str], rows: Sequence[Span], columns: Span | None, in_features: int
    ) -> Tensor | Fp8Matrix:
        """Reads rows of each of `names`, stacked, or columns of the only name."""
        taken, blocks = columns or Span(0, in_features), self.fp8_blocks(source, names)
        if blocks is not None:
            in_fp8 = Fp8Matrix.empty(blocks, rows, taken, self.device)
            in_fp8.read(source, names, rows, taken)
            return in_fp8
        weight = self.empty(sum(span.size for span in rows), taken.size)
        for name, span, part in zip(names, rows, torch.split(weight, [it.size for it in rows]), strict=True):
            source.read(name, part, rows=span if columns is None else None, columns=columns)
        return weight


def most_nodes(plan: ShardPlan) -> int:
    """The largest number of nodes that a rank of `plan` contributes to an exact sum. Counts the sums over columns of
    one layer together, since they may be joined."""
    most = 1
    for layer, shards in zip(plan.model.all_layers, plan.layers, strict=True):
        context = LayerContext(shards, TensorParallelGroup.single(), FAST, torch.float32, torch.device("cpu"))
        axes = {axis.heads if isinstance(axis, HeadGroups) else axis.axis for axis in layer.axes}
        counts = {axis: max(context.tree(Cut(axis, 1))[1].counts) for axis in axes}
        of_columns = sum(count for axis, count in counts.items() if axis not in GROUPS_OF)
        most = max(most, of_columns, *counts.values())
    return most
