"""Weights of one rank: how a format is read, how it lies on the device and how it is multiplied with.

A layer asks for the weight of a spec and calls it; ranges, packing and the choice of a kernel stay in here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from configs.layers import Linear
from parallel.group import TensorParallelGroup
from parallel.plan import LayerShard, Span


class TensorSource(Protocol):
    """Where a layer reads its shard of a checkpoint tensor from."""

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Fills `out`, cast to its dtype, with tensor `name` or the given rows or columns of it; both never.

        Rows and columns are those of `as_matrix`, of tensor and `out` alike.
        """


def as_matrix(shape: Sequence[int]) -> tuple[int, ...]:
    """Rows and columns of a tensor: one of more dimensions is matrices below one another, a vector has rows alone."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) > 1 else tuple(shape)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where the modules of a layer are made."""

    shard: LayerShard
    """This rank's part of the layer."""
    group: TensorParallelGroup
    dtype: torch.dtype
    """The activations' type."""
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialised tensor there, of the activations' type."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class DenseWeight:
    """y = x @ weight.T + bias for a weight in the activations' own type, by the fastest kernel of the device.

    On CPU, oneDNN with the weight reordered once for it: on two Zen 5 cores a SmolLM2 decode step's products take
    8 ms in fp32 against 24 ms for `F.linear` at one row, and 15 against 44 at 16 rows. On Intel's, fp32 goes to MKL: 20
    ms against 26 at one row on two Sapphire Rapids cores, 46 against 41 at four; with the inputs' rows one after the
    other, 5 % less of both.
    On CUDA, cuBLAS, or for a few rows a kernel that reads the weight once at nearly the memory's speed.

    Args:
        weight: [out_features, in_features]. Shared, not copied, when `pack` is False; never changes.
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
        elif weight.device.type == "cpu" and pack:
            weight = weight.t().contiguous().t()
        self._few_rows = weight.is_cuda and weight.dtype is not torch.float32 and weight.numel() > 0
        self._weight = weight
        self._transposed = weight if self._onednn else weight.t()  # [in_features, out_features], a view
        self._bias = bias

    @classmethod
    def load(cls, source: TensorSource, prefix: str, place: LayerPlace, *linears: Linear) -> DenseWeight:
        """Reads this rank's part of one weight, or of several of one input, whose rows come to lie after one another.

        A bias is read only where rows are cut: after a product over cut columns, whoever sums over the ranks adds it.

        Args:
            prefix: of the checkpoint's names.
            linears: rows of all of them are cut, or columns of the only one.
        """
        spans = [place.shard.span_of(linear.cut) for linear in linears]
        first = linears[0]
        if first.cut.dim == 1:
            weight = place.empty(first.out_features, spans[0].size)
            source.read(f"{prefix}{first.name}.weight", weight, columns=spans[0])
            return cls(weight, None)
        weight = place.empty(sum(span.size for span in spans), first.in_features)
        bias = place.empty(len(weight)) if first.bias else None
        end = 0
        for linear, span in zip(linears, spans, strict=True):
            begin, end = end, end + span.size
            source.read(f"{prefix}{linear.name}.weight", weight[begin:end], rows=span)
            if bias is not None:
                source.read(f"{prefix}{linear.name}.bias", bias[begin:end], rows=span)
        return cls(weight, bias)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], contiguous; `out` if one is given."""
        if self._onednn:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y if out is None else out.copy_(y)
        if self._few_rows and _is_skinny(x, self._weight):
            return _skinny(x, self._weight, self._bias, x.dtype, out)
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
