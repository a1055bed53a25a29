"""The weights of one rank: their layout on the device, and the kernel that multiplies with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from parallel.numerics.fp8 import Fp8Matrix, Fp8Rows
from parallel.numerics.kernels.cpu_products import TILE, node_products, pack, pack_in_place, product
from parallel.plan import Span

if TYPE_CHECKING:
    from parallel.numerics.kernels.fp8_groups import Groups

_MOST_FP8_ROWS = 128
"""Number of rows above which an exact product first dequantises its FP8 weight. That costs reading and writing the
weight once, and then the product is as fast as with a plain weight. benchmarks/fp8_gemm.py measures both."""


class Weight(Protocol):
    """y = x @ weight.T + bias for a weight [out_features, in_features]."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features], contiguous. Returns `out` if given."""

    def in_fp32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product in fp32, without rounding."""


class CudaWeight:
    """Multiplies with cuBLAS. For few rows, with a kernel that reads the weight once at nearly the memory's speed.

    Args:
        weight: [out_features, in_features] on a GPU. Shared, not copied.
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_few_rows", "_transposed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._few_rows = weight.dtype is not torch.float32 and weight.numel() > 0
        self._weight = weight
        self._transposed = weight.t()  # [in_features, out_features], a view
        self._bias = bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._few_rows and _is_skinny(x, self._weight):
            return _skinny(x, self._weight, self._bias, x.dtype, out)
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)

    def in_fp32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Implements Weight. The bias must be in the weight's dtype."""
        if self._few_rows and _is_skinny(x, self._weight):
            return _skinny(x, self._weight, self._bias, torch.float32, out)
        if self._bias is None and x.dtype is not torch.float32:
            return torch.mm(x, self._transposed, out_dtype=torch.float32, out=out)
        y = self(x).float()
        return y if out is None else out.copy_(y)


class Fp8Weight:
    """An FP8 weight for fast numerics on a GPU. Activations are quantised too (see fp8_groups.py).

    cuBLAS has such products on Hopper for weights whose 128 x 128 blocks no rank cuts.

    Args:
        weight: [out_features, in_features]. Shared, not copied.
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_by_cublas", "_weight")

    def __init__(self, weight: Fp8Matrix, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        # cuBLAS accepts rows of scales only for a multiple of 4 blocks (pytorch/pytorch#166752).
        is_whole = (
            weight.even_rows == weight.width == 128 and weight.first == len(weight) % 128 == weight.shape[1] % 512 == 0
        )
        is_square = weight.scales.numel() * 128 * 128 == weight.values.numel()
        is_hopper = weight.values.is_cuda and torch.cuda.get_device_capability(weight.device) == (9, 0)
        self._by_cublas = is_whole and is_square and is_hopper and bias is None

    def __call__(self, x: torch.Tensor | Fp8Rows, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, x.dtype, out)

    def in_fp32(self, x: torch.Tensor | Fp8Rows, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, torch.float32, out)

    def row_groups(self) -> Groups | None:
        """The groups of columns in which the code that makes the input may quantise its rows. None if only the product
        may."""
        from parallel.numerics.kernels.fp8_gemm import row_groups

        return row_groups(self._weight)

    def _product(self, x: torch.Tensor | Fp8Rows, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        from parallel.numerics.kernels.fp8_gemm import cublas_is_faster, fp8_gemm, scaled_mm

        if self._by_cublas and dtype is torch.bfloat16 and cublas_is_faster(len(x), len(self._weight)):
            y = scaled_mm(x, self._weight)
            return y if out is None else out.copy_(y)
        if out is None:
            out = torch.empty(len(x), len(self._weight), dtype=dtype, device=self._weight.device)
        return fp8_gemm(x, self._weight, self._bias, out=out)


class ChainWeight:
    """A weight for exact numerics on a GPU. `use_chain_cublas` must have been called. Outputs are ascending chains.

    Args:
        weight: [out_features, in_features] on a GPU. Shared, not copied.
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor | Fp8Matrix, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, x.dtype, out)

    def in_fp32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._product(x, torch.float32, out)

    def _product(self, x: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        from parallel.numerics.kernels.chain_gemm import chain_gemm, cublas_is_chain, cublas_is_faster

        weight = _for_rows(self._weight, x)
        if (
            isinstance(weight, torch.Tensor)
            and cublas_is_chain(x, self._bias, dtype)
            and cublas_is_faster(len(x), len(weight))
        ):
            if self._bias is not None:
                return torch.addmm(self._bias, x, weight.t(), out=out)
            return torch.mm(x, weight.t(), out_dtype=dtype, out=out)
        if out is None:
            out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
        return chain_gemm(x, weight, self._bias, out=out)


class NodeWeight:
    """Computes a rank's nodes of an exact sum [num_nodes, num_tokens, out_features] fp32 on a GPU, like CpuLeaves.

    If `out` has more parts than nodes, those of `node_gemm.subtrees` are computed, which saves a kernel that adds them.
    """

    __slots__ = ("_nodes", "_weight", "_width")

    def __init__(self, weight: torch.Tensor | Fp8Matrix, width: int, nodes: Sequence[Span]) -> None:
        self._weight = weight
        self._nodes = tuple(nodes)
        self._width = width

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        from parallel.numerics.kernels.node_gemm import node_gemm, subtrees

        num_columns = len(self._weight)
        if out is None:
            out = torch.empty(len(self._nodes), len(x), num_columns, dtype=torch.float32, device=x.device)
        nodes = self._nodes
        if len(out) != len(nodes):
            nodes = subtrees(nodes, self._width, len(x), num_columns)
        return node_gemm(x, _for_rows(self._weight, x), leaf=self._width, nodes=nodes, out=out)

    in_fp32 = __call__


class CpuWeight:
    """Multiplies on a CPU. Each output is one ascending chain, for any number of rows, columns and threads.

    Args:
        weight: [out_features, in_features], contiguous. It is packed in place, so the caller must not use it any more.
        bias: [out_features] or None.
    """

    __slots__ = ("_bias", "_num_columns", "_packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = _packed(weight)
        self._num_columns = len(weight)
        self._bias = bias

    @classmethod
    def of_packed(cls, packed: torch.Tensor, num_columns: int, bias: torch.Tensor | None = None) -> CpuWeight:
        """A weight over the first rows of a packed one, which shares its memory."""
        self = cls.__new__(cls)
        self._packed, self._num_columns, self._bias = packed[: -(-num_columns // TILE)], num_columns, bias
        return self

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, self._packed, self._num_columns, self._bias, out)

    def in_fp32(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, self._packed, self._num_columns, self._bias, out, torch.float32)


class CpuLeaves:
    """Computes a rank's nodes of an exact sum [num_nodes, num_tokens, out_features]; a leaf has `width` inputs.

    Args:
        weight: [out_features, in_features of this rank]. It may be packed in place: do not use it any more.
        nodes: ranges of this rank's leaves.
    """

    __slots__ = ("_nodes", "_num_columns", "_packed", "_width")

    def __init__(self, weight: torch.Tensor, width: int, nodes: Sequence[Span]) -> None:
        self._packed = _packed(weight)
        self._num_columns = len(weight)
        self._width = width
        self._nodes = tuple(nodes)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(len(self._nodes), len(x), self._num_columns)
        node_products(x, self._packed, self._num_columns, self._width, self._nodes, out)
        return out

    in_fp32 = __call__


def _for_rows(weight: torch.Tensor | Fp8Matrix, x: torch.Tensor) -> torch.Tensor | Fp8Matrix:
    """The weight in the form that is fastest for the rows of `x`. Both forms give the same bits."""
    if isinstance(weight, torch.Tensor) or len(x) <= _MOST_FP8_ROWS:
        return weight
    from parallel.numerics.kernels.fp8_tile import plain

    return plain(weight, x.dtype)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    # A last tile with fewer rows does not fit in the weight's memory.
    return pack(weight) if len(weight) % TILE else pack_in_place(weight)


def _is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    from parallel.numerics.kernels.skinny_gemm import is_faster

    return is_faster(len(x), *weight.shape)


def _skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    from parallel.numerics.kernels.skinny_gemm import skinny_gemm

    if out is None:
        out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    return skinny_gemm(x, weight, bias, out=out)
