"""Linear layers of one rank: the part of a weight that the rank multiplies with, and the all-reduce if there is one.

Column-parallel layers hold a span of a weight's rows (outputs). Row-parallel layers hold a span of its columns (inputs)
and end in one all-reduce. The specs say which kind a layer is, and the ShardPlan has the spans; nothing here divides by
the number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from configs.layers import Linear
from parallel.collectives.interface import PartialSum
from parallel.numerics.arithmetic import LayerContext
from parallel.numerics.fp8 import Fp8Rows
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import Fp8Weight, Weight

if TYPE_CHECKING:
    from parallel.numerics.kernels.fp8_groups import Groups


def _row_groups(weight: Weight | None) -> Groups | None:
    return weight.row_groups() if isinstance(weight, Fp8Weight) else None


def _product(weight: Weight | None, x: torch.Tensor | Fp8Rows, out: torch.Tensor | None = None) -> torch.Tensor:
    assert weight is not None, "forward before load"
    return weight(cast(torch.Tensor, x), out)  # FP8 rows are only passed to weights that asked for them by `row_groups`


class ColumnParallelLinear:
    """This rank's rows of one weight, or of several weights with the same input, as one product without all-reduce.

    y [num_tokens, sum of spans] = x [num_tokens, in_features] @ cat(W_0[span_0], W_1[span_1], ...).T. Outputs are side
    by side in the order of `linears`. Rows that several ranks share, such as those of a KV head, are read by each of
    them.
    """

    def __init__(self, *linears: Linear, context: LayerContext) -> None:
        self._linears = linears
        self._context = context
        self._weight: Weight | None = None

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads the tensors of the linears. Their names begin with `prefix`."""
        self._weight = self._context.load(source, prefix, *self._linears)

    def row_groups(self) -> Groups | None:
        """The groups in which the producer of the input may quantise its rows. None if it must not quantise them."""
        return _row_groups(self._weight)

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        return _product(self._weight, x)


class RowParallelLinear:
    """This rank's columns of one weight. The partial products are summed over the group.

    y [num_tokens, out_features] = all_reduce(x [num_tokens, span.size] @ W[:, span].T) + b
    """

    def __init__(self, linear: Linear, context: LayerContext) -> None:
        self._linear = linear
        self._context = context
        self._sum = context.arithmetic.rank_sum(linear.out_features, linear.cut, context, of_weight=True)
        self._bias: torch.Tensor | None = None
        self._weight: Weight | None = None

    def load(self, source: TensorSource, prefix: str) -> None:
        """Reads this rank's columns, and the whole bias, which is added once after the sum."""
        linear = self._linear
        self._weight = self._context.load(source, prefix, linear)
        if linear.bias:
            self._bias = self._context.empty(linear.out_features)
            source.read(f"{prefix}{linear.name}.bias", self._bias)

    def row_groups(self) -> Groups | None:
        """The groups in which the producer of the input may quantise its rows. None if it must not quantise them."""
        return _row_groups(self._weight)

    def __call__(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """[num_tokens, out_features]: the sum over the ranks, with the bias."""
        y = self._sum(len(x), lambda out: self.partial(x, out))
        return y if self._bias is None else y.add_(self._bias)

    def for_norm(self, x: torch.Tensor | Fp8Rows) -> torch.Tensor | PartialSum:
        """The input of `RMSNorm.add`. With a bias it is the finished sum, to which the bias is added."""
        return self(x) if self._linear.bias else self._sum.for_norm(len(x), lambda out: self.partial(x, out))

    def partial(self, x: torch.Tensor | Fp8Rows, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's partial sum, without the bias. Returns `out` if given."""
        return _product(self._weight, x, out)
