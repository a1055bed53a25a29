"""Kernels that finish the sum of a tree: the fp32 additions that remain after every rank has summed its subtrees.

The additions are compiled in, so the bits are those of the tree, whichever rank adds and wherever the nodes are. The
norm after a sum is part of the kernel. Its block size and warps depend only on the row length, and no product is fused
with an addition, so that `sum_add_norm` and the kernel that reads other ranks' memory (all_reduce_norm.py) give the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start, let_next_start_beside
from parallel.tree import Additions

_FEW_ELEMENTS = 1 << 18


@triton.jit
def append(values, value):
    values += (value,)
    return values


@triton.jit
def finish(values, ADDS: tl.constexpr):
    """`values`, followed by the results of ADDS. The last one is the root."""
    for i in tl.static_range(len(ADDS)):
        values = append(values, values[ADDS[i][0]] + values[ADDS[i][1]])
    return values


@triton.jit
def scale_of(total, eps, SIZE: tl.constexpr):
    """The RMS norm's factor for a row of SIZE elements."""
    return tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)


@triton.jit
def add_norm_row(out_ptr, residual_ptr, x, residual, weight, columns, inside, eps, SIZE: tl.constexpr):
    """Writes residual + x, rounded, and its norm. `x`, `residual` and `weight` are fp32."""
    rounded = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + columns, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    tl.store(out_ptr + columns, (total * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_elements"])
def _sum_kernel(
    out_ptr, nodes_ptr, num_elements, node_stride, PLACES: tl.constexpr, ADDS: tl.constexpr, ROOTS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < num_elements
    values = ()
    for i in tl.static_range(len(PLACES)):
        node = tl.load(nodes_ptr + PLACES[i] * node_stride + elements, mask=inside, other=0.0)
        values = append(values, node)
    values = finish(values, ADDS)
    let_next_start(DEPENDENT)
    for i in tl.static_range(len(ROOTS)):
        tl.store(out_ptr + i * num_elements + elements, values[ROOTS[i]].to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_add_norm_kernel(
    out_ptr, residual_ptr, weight_ptr, nodes_ptr, node_stride, row_stride, residual_stride, eps, PLACES: tl.constexpr,
    ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    residual_ptr += row * residual_stride
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    residual = tl.load(residual_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    values = ()
    for i in tl.static_range(len(PLACES)):
        node_ptr = nodes_ptr + PLACES[i] * node_stride + row * row_stride
        values = append(values, tl.load(node_ptr + columns, mask=inside, other=0.0))
    x = finish(values, ADDS)[2 * len(ADDS)]
    let_next_start(DEPENDENT)
    add_norm_row(out_ptr + row * SIZE, residual_ptr, x, residual, weight, columns, inside, eps, SIZE)


def sum_subtrees(
    nodes: torch.Tensor,
    adds: Additions,
    roots: tuple[int, ...],
    *,
    out: torch.Tensor,
    places: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Computes roots of trees and rounds each once.

    Args:
        nodes: [num_places, num_rows, size] fp32; each [num_rows, size] is contiguous.
        adds: additions over the nodes at `places`, in this order. The result of addition i is value len(places) + i.
        roots: indices of the values to write.
        out: [len(roots), num_rows, size], contiguous, any float dtype, written.
        places: indices into `nodes`, by default all. In a gathered tensor, the ones that ranks have filled.

    Returns:
        `out`.
    """
    num_elements = nodes.shape[1] * nodes.shape[2]
    block = 256 if num_elements <= _FEW_ELEMENTS else 1024
    dependent = is_dependent(nodes.device, nodes.shape[1])
    _sum_kernel[(triton.cdiv(num_elements, block),)](
        out,
        nodes,
        num_elements,
        nodes.stride(0),
        PLACES=tuple(range(len(nodes))) if places is None else places,
        ADDS=adds,
        ROOTS=roots,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=block // 128,
        launch_pdl=dependent,
    )
    return out


def sum_add_norm(
    nodes: torch.Tensor,
    adds: Additions,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    places: Sequence[int] | None = None,
) -> torch.Tensor:
    """Adds the root of a tree to `residual` in place and returns the RMS norm of the rounded result.

    The root stays fp32. residual + root is rounded once to the residual's dtype, and its norm once more. Rows are
    independent: any slice of them gives the same bits.

    Args:
        nodes: [num_places, num_rows, size] fp32; the elements of a row are contiguous.
        adds: additions over the nodes at `places`, in this order.
        residual: [num_rows, size] with any row stride.
        weight: [size] in the residual's dtype or fp32.
        places: indices into `nodes`, by default all. In a gathered tensor, the ones that ranks have filled.

    Returns:
        [num_rows, size], contiguous, in the residual's dtype.
    """
    num_rows, size = residual.shape
    assert nodes.dtype is torch.float32, f"nodes are fp32, not {nodes.dtype}"
    assert nodes.shape[1:] == residual.shape, f"cannot add {tuple(nodes.shape)} to {tuple(residual.shape)}"
    places = tuple(range(len(nodes)) if places is None else places)
    assert len(adds) == len(places) - 1, f"{len(adds)} additions do not make one sum of {len(places)} nodes"
    out = torch.empty((num_rows, size), dtype=residual.dtype, device=residual.device)
    block, num_warps = block_of_row(size)
    dependent = is_dependent(nodes.device, num_rows)
    _sum_add_norm_kernel[(num_rows,)](
        out,
        residual,
        weight,
        nodes,
        nodes.stride(0),
        nodes.stride(1),
        residual.stride(0),
        eps,
        PLACES=places,
        ADDS=adds,
        SIZE=size,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=num_warps,
        enable_fp_fusion=False,
        launch_pdl=dependent,
    )
    return out


def block_of_row(size: int) -> tuple[int, int]:
    """Block size and number of warps for a row in kernels with a norm: two 16-byte bf16 loads a thread, 8 warps at
    4096."""
    block = 1 << (size - 1).bit_length()
    return block, min(max(block // 512, 1), 16)
