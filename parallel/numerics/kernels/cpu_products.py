"""Products on CPUs: every output is one chain of fused multiply-adds, or a halving tree of such chains.

A row's bits depend on that row and the weight, not on other rows, on the shard's columns or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel.numerics.kernels.c_library import TYPES, load

TILE = 64
"""Rows of a weight that are interleaved when it is packed."""
_PIECE = 1 << 18
"""Elements that are copied at a time while a weight is packed in place, to stay in the caches. At least one tile."""


def pack(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Packs a weight [N, K] for the products: [ceil(N / 64), K, 64], with rows as lanes and zeros after the last row.

    Args:
        weight: fp32, bf16 or fp16.
        out: filled and returned if given.
    """
    num_rows, num_inputs = weight.shape
    if out is None:
        out = weight.new_empty(-(-num_rows // TILE), num_inputs, TILE)
    whole, rest = divmod(num_rows, TILE)
    if whole:
        out[:whole] = weight[: whole * TILE].unflatten(0, (whole, TILE)).transpose(1, 2)
    if rest:
        out[whole, :, :rest] = weight[whole * TILE :].t()
        out[whole, :, rest:] = 0
    return out


def pack_in_place(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight [N, K] in its own memory, so that loading needs no second copy. The weight itself is overwritten.

    Args:
        weight: contiguous; N is a multiple of 64.
    """
    num_rows, num_inputs = weight.shape
    packed = weight.view(num_rows // TILE, num_inputs, TILE)
    for tiles in packed.split(max(1, _PIECE // max(1, num_inputs * TILE))):
        tiles.copy_(tiles.clone().view(len(tiles), TILE, num_inputs).transpose(1, 2))
    return packed


def product(
    x: torch.Tensor,
    packed: torch.Tensor,
    num_columns: int,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias [M, num_columns]: a chain over ascending K, then the bias, in fp32, rounded once.

    Args:
        x: [M, K] fp32, bf16 or fp16; the elements of a row are contiguous, the row stride is free.
        packed: `pack` of the weight [num_columns, K], in x's dtype.
        bias: [num_columns] in x's dtype or fp32.
        out: contiguous. If None, a new tensor of `out_dtype`, or of x's dtype.
    """
    if out is None:
        out = torch.empty(len(x), num_columns, dtype=out_dtype or x.dtype)
    assert out.shape == (len(x), num_columns), f"{tuple(out.shape)} are not {len(x)} rows of {num_columns}"
    job = _job(x, packed, bias, out, leaf=x.shape[1], nodes=((0, 1),))
    _library().products(ctypes.byref(job), torch.get_num_threads())
    return out


def node_products(
    x: torch.Tensor,
    packed: torch.Tensor,
    num_columns: int,
    leaf: int,
    nodes: Sequence[tuple[int, int]],
    out: torch.Tensor,
) -> None:
    """Values of nodes of the halving tree. Its leaves are products over `leaf` columns of x each.

    Args:
        x: [M, K] as for `product`: this rank's leaves. The last leaf may be shorter.
        packed: `pack` of the weight's columns for these leaves.
        leaf: columns per leaf.
        nodes: half-open ranges of leaves, counted from x's first; each is an aligned subtree.
        out: [num_nodes, M, num_columns] fp32, contiguous.
    """
    assert out.shape == (len(nodes), len(x), num_columns), f"{tuple(out.shape)} are not {len(nodes)} nodes of {len(x)}"
    assert out.dtype is torch.float32, f"nodes are fp32, not {out.dtype}"
    job = _job(x, packed, None, out, leaf=leaf, nodes=tuple(nodes))
    _library().products(ctypes.byref(job), torch.get_num_threads())


def mixed_products(
    x: torch.Tensor,
    packed: torch.Tensor,
    leaf: int,
    nodes: Sequence[tuple[int, int]],
    mixture: Mixture,
    out: torch.Tensor,
) -> None:
    """For each row of `out`, the sum over its pairs of (row of x @ the pair's weight) times the pair's factor.

    A leaf is a chain of fused multiply-adds of the factors and the leaves that `node_products` would compute, over
    ascending weights. Nodes are built from leaves as in `node_products`.

    Args:
        x: [num_pairs, K], sorted by weight.
        packed: [num_weights, tiles, K, 64]: `pack` of each weight.
        leaf: columns per leaf.
        nodes: as in `node_products`.
        out: [num_nodes, M, num_columns], contiguous.
    """
    depth, threads = (
        1 + max(((end - begin - 1).bit_length() for begin, end in nodes), default=0),
        torch.get_num_threads(),
    )
    room = torch.empty(threads, depth, out.shape[1], TILE)
    job = _job(x, packed, None, out, leaf=leaf, nodes=tuple(nodes))
    pairs = _Mixture(
        mixture.ends.data_ptr(),
        mixture.rows.data_ptr(),
        mixture.factors.data_ptr(),
        room.data_ptr(),
        len(packed),
        depth,
    )
    _library().mixed_products(ctypes.byref(job), ctypes.byref(pairs), threads)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Pairs of a row and a weight, sorted by weight."""

    ends: torch.Tensor
    """[num_weights] int64: number of pairs of this weight and all weights before it."""
    rows: torch.Tensor
    """[num_pairs] int64: row of each pair. No row occurs twice with one weight."""
    factors: torch.Tensor
    """[num_pairs] fp32: factor of each pair."""


class _Job(ctypes.Structure):
    """The C source's struct Job."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "packed", "bias", "out")),
        *((name, ctypes.c_size_t) for name in ("x_stride", "num_rows", "num_columns", "num_inputs", "leaf")),
        ("nodes", ctypes.c_void_p),
        ("num_nodes", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("type", "bias_type", "out_type")),
    ]


class _Mixture(ctypes.Structure):
    """The C source's struct Mixture."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("ends", "rows", "factors", "room")),
        *((name, ctypes.c_size_t) for name in ("num_weights", "depth")),
    ]


def _job(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    leaf: int,
    nodes: tuple[tuple[int, int], ...],
) -> _Job:
    num_rows, num_columns = out.shape[-2:]
    num_inputs = x.shape[1]
    assert x.stride(1) == 1 or num_inputs <= 1, f"the elements of a row lie side by side, not {x.stride(1)} apart"
    assert packed.shape[-3:] == (-(-num_columns // TILE), num_inputs, TILE), f"{tuple(packed.shape)} is another weight"
    assert packed.dtype is x.dtype, f"x is {x.dtype}, the weight {packed.dtype}"
    assert out.is_contiguous(), "rows of the output follow one another"
    return _Job(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        num_rows,
        num_columns,
        num_inputs,
        leaf,
        ctypes.addressof(_leaves(nodes)),
        len(nodes),
        TYPES[x.dtype],
        0 if bias is None else TYPES[bias.dtype],
        TYPES[out.dtype],
    )


@functools.cache
def _leaves(nodes: tuple[tuple[int, int], ...]) -> ctypes.Array[ctypes.c_size_t]:
    """Cached for the life of the process, because its address is cached too. A rank has few node lists."""
    ends = [end for node in nodes for end in node]
    return (ctypes.c_size_t * len(ends))(*ends)


@functools.cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_suffix(".c"))
    library.products.argtypes = [ctypes.POINTER(_Job), ctypes.c_int]
    library.mixed_products.argtypes = [ctypes.POINTER(_Job), ctypes.POINTER(_Mixture), ctypes.c_int]
    library.products.restype = library.mixed_products.restype = None
    return library
