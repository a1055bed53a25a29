"""Linear layers of one rank: which rows or columns of a weight it holds, and where the ranks' sums meet.

A weight of a checkpoint is [out_features, in_features]. Column-parallel layers hold a span of its rows (outputs),
row-parallel layers a span of its columns (inputs) and end in one all-reduce. Spans come from the ShardPlan; nothing
here divides by the number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from parallel.fused_sum import PartialSum
from parallel.group import TensorParallelGroup
from parallel.plan import Span


class TensorSource(Protocol):
    """Where a layer reads its shard of a checkpoint tensor from."""

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Fills `out`, cast to its dtype, with tensor `name` or the given rows or columns of it; both never."""


class Matmul:
    """y = x @ weight.T + bias for a weight that never changes, by the fastest kernel of the device.

    On CPU, oneDNN with the weight reordered once for it: on two Zen 5 cores a SmolLM2 decode step's products take
    8 ms in fp32 against 24 ms for `F.linear` at one row, and 15 against 44 at 16 rows. On Intel's, fp32 goes to MKL,
    which `F.linear` calls: 20 ms against 26 at one row on two Sapphire Rapids cores, 46 against 41 at four.
    On CUDA, cuBLAS, or for a few rows a kernel that reads the weight once at nearly the memory's speed.

    Args:
        weight: [out_features, in_features]. Shared, not copied, when `pack` is False.
        bias: [out_features] or None.
        pack: reorder into a copy of the kernel's own layout; the caller drops the plain weight.
    """

    __slots__ = ("_bias", "_few_rows", "_onednn", "_transposed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, pack: bool = True) -> None:
        self._onednn = (
            weight.device.type == "cpu"
            and (weight.dtype is torch.bfloat16 or (weight.dtype is torch.float32 and not _mkl_is_faster()))
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch left it out
            and weight.numel() > 0
        )
        if self._onednn and pack:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._few_rows = weight.is_cuda and weight.dtype is not torch.float32 and weight.numel() > 0
        self._weight = weight
        self._transposed = weight if self._onednn else weight.t()  # [in_features, out_features], a view
        self._bias = bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], contiguous; `out` if one is given."""
        if self._onednn:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y if out is None else out.copy_(y)
        if self._few_rows and _is_skinny(x, self._weight):
            return _skinny(x, self._weight, self._bias, x.dtype, out)
        if out is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)

    def in_fp32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The same in fp32: on CUDA as the product was summed, elsewhere rounded to the weight's type before."""
        if self._few_rows and _is_skinny(x, self._weight):
            return _skinny(x, self._weight, self._bias, torch.float32, out)
        if self._weight.device.type == "cuda" and self._bias is None and x.dtype is not torch.float32:
            return torch.mm(x, self._transposed, out_dtype=torch.float32, out=out)
        y = self(x).float()
        return y if out is None else out.copy_(y)


@functools.cache
def _mkl_is_faster() -> bool:
    """Whether MKL's fp32 products are faster than oneDNN's here: it is slow on processors that are not Intel's."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]  # as above
        return False
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    # A CPU install has no Triton.
    from parallel.kernels.skinny_gemm import is_faster

    return is_faster(len(x), *weight.shape)


def _skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    from parallel.kernels.skinny_gemm import skinny_gemm

    if out is None:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    return skinny_gemm(x, weight, bias, out=out)


class ColumnParallelLinear:
    """This rank's span of the output rows of one weight; the output is this rank's part, nothing is reduced.

    y [num_tokens, span.size] = x [num_tokens, in_features] @ W[span].T + b[span]
    """

    def __init__(self, in_features: int, span: Span, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self._parts = _ColumnParts(in_features, (span,), bias=bias, dtype=dtype, device=device)

    def load(self, source: TensorSource, name: str) -> None:
        """Reads `name`.weight (and .bias)."""
        self._parts.load(source, (name,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._parts(x)


class MergedColumnParallelLinear:
    """Several column-parallel weights of one input as one product; outputs lie side by side in the given order.

    y [num_tokens, sum of spans] = x @ cat(W_0[span_0], W_1[span_1], ...).T
    """

    def __init__(
        self, in_features: int, spans: Sequence[Span], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = _ColumnParts(in_features, spans, bias=bias, dtype=dtype, device=device)

    def load(self, source: TensorSource, names: Sequence[str]) -> None:
        """Reads each name's .weight (and .bias), one for each span."""
        self._parts.load(source, names)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._parts(x)


class QKVParallelLinear:
    """Query, key and value projections of this rank's heads as one product.

    y [num_tokens, (q_heads.size + 2 * kv_heads.size) * head_dim], ordered q | k | v. A KV head that several ranks
    share is simply read by each of them.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        q_heads: Span,
        kv_heads: Span,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        q = Span(q_heads.start * head_dim, q_heads.stop * head_dim)
        kv = Span(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        self._parts = _ColumnParts(hidden_size, (q, kv, kv), bias=bias, dtype=dtype, device=device)

    def load(self, source: TensorSource, q: str, k: str, v: str) -> None:
        """Reads the .weight (and .bias) of the three names."""
        self._parts.load(source, (q, k, v))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._parts(x)


class RowParallelLinear:
    """This rank's span of the input columns of one weight; partial products are summed over the group.

    y [num_tokens, out_features] = all_reduce(x [num_tokens, span.size] @ W[:, span].T) + b
    """

    def __init__(
        self,
        span: Span,
        out_features: int,
        *,
        bias: bool,
        group: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._span = span
        self._out_features = out_features
        self._has_bias = bias
        self._group = group
        self._dtype = dtype
        self._device = device
        # Asking costs a call a layer, and on CPU no group has one.
        self._asks_for_buffer = group.device.type == "cuda" and group.size > 1
        self._bias: torch.Tensor | None = None
        self._matmul: Matmul | None = None

    def load(self, source: TensorSource, name: str) -> None:
        """Reads `name`.weight's columns (and the whole .bias, which is added once, after the sum)."""
        weight = torch.empty(self._out_features, self._span.size, dtype=self._dtype, device=self._device)
        source.read(f"{name}.weight", weight, columns=self._span)
        if self._has_bias:
            self._bias = torch.empty(self._out_features, dtype=self._dtype, device=self._device)
            source.read(f"{name}.bias", self._bias)
        self._matmul = Matmul(weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum; on CUDA perhaps in the group's reduce_buffer, so valid until the group's next reduction."""
        assert self._matmul is not None, "forward before load"
        if self._asks_for_buffer:
            out = self._group.reduce_buffer((len(x), self._out_features), self._dtype)
            y = self._group.all_reduce(self._matmul(x, out))
        else:
            y = self._matmul(x)
            if self._group.size > 1:
                y = self._group.all_reduce(y)
        return y if self._bias is None else y.add_(self._bias)

    def for_norm(self, x: torch.Tensor) -> torch.Tensor | PartialSum:
        """What `RMSNorm.add` takes: the sum, as a call returns it, or its summand where norm and sum are one kernel."""
        if self._asks_for_buffer and not self._has_bias:
            partial_sum = self._group.partial_sum((len(x), self._out_features), self._dtype)
            if partial_sum is not None:
                assert self._matmul is not None, "forward before load"
                self._matmul(x, partial_sum.summand)
                return partial_sum
        return self(x)


class _ColumnParts:
    """One fused product over spans of rows of several weights."""

    def __init__(
        self, in_features: int, spans: Sequence[Span], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._in_features = in_features
        self._spans = tuple(spans)
        self._has_bias = bias
        self._dtype = dtype
        self._device = device
        self._matmul: Matmul | None = None

    def load(self, source: TensorSource, names: Sequence[str]) -> None:
        assert len(names) == len(self._spans), "one name for each span"
        num_rows = sum(span.size for span in self._spans)
        weight = torch.empty(num_rows, self._in_features, dtype=self._dtype, device=self._device)
        bias = torch.empty(num_rows, dtype=self._dtype, device=self._device) if self._has_bias else None
        offset = 0
        for name, span in zip(names, self._spans, strict=True):
            source.read(f"{name}.weight", weight[offset : offset + span.size], rows=span)
            if bias is not None:
                source.read(f"{name}.bias", bias[offset : offset + span.size], rows=span)
            offset += span.size
        self._matmul = Matmul(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._matmul is not None, "forward before load"
        return self._matmul(x)
