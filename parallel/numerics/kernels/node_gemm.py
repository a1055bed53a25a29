"""Row-parallel exact products: fp32 sums over subtrees of a weight's leaves.

The columns of the weight are divided in leaves of one width. A leaf's sum is one ascending chain of MMAs that starts at
zero. T(a, b) = T(a, mid) + T(mid, b) with mid = a + ceil((b - a) / 2) adds leaves in fp32. The bits of a row's node
depend on the row, the weight and the leaves, but not on other rows or on the schedule: tiles, warps, programs per node.

A program walks the leaves of a subtree in order and holds left halves in registers until their right halves are done.
With few rows, a node is divided into several subtrees, and a second kernel adds them.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from configs.numerics import MOST_LEAVES
from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start
from parallel.kernels.shared_memory import fitting_stages, has_little
from parallel.kernels.tree_sum import append, sum_subtrees
from parallel.numerics.kernels.fp8_tile import AnyWeight, pieces_of, plain_tile, scales_of
from parallel.plan import Span
from parallel.tree import additions_of, cut


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is divided among programs. The bits do not depend on it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = 16
"""Largest number of rows that fit in an MMA's smallest tile."""
_SOME_ROWS = 64
_MORE_ROWS = 128
# The fastest of 6 to 8 tiles on an H200, with the norm after it, for 1 to 4 ranks of two 8B models, or within 5 % of it
# (benchmarks/results/exact_wide_leaves_h200_2026-11-23.txt). None spills registers at the tree depths used.
_FEW = Tile(16, 32, 128, 2, 4)
_FEW_DEEP = Tile(16, 64, 64, 2, 5)
_DEEP = 8192
_SOME = Tile(64, 64, 64, 4, 6)
_MORE = Tile(64, 128, 64, 4, 4)
_MANY = Tile(128, 128, 128, 8, 3)
_MAX_DEPTH = 5
_LARGE_DEPTH = 2  # used for _MORE and _MANY
_DESCRIBED_ROWS = 64
# A node is divided until this many programs share the weight, but into few parts, as each is written and read.
_ENOUGH_PROGRAMS = 256
_ENOUGH_LARGE_PROGRAMS = 128  # used for _MANY
_MAX_CUTS = 4
# For this many rows, cuBLASLt is faster if leaves are wide, with a separate fp32 product per leaf. For more rows it is
# faster by 3 %, but needs too much memory.
_BATCHED_ROWS = range(_MORE_ROWS + 1, 513)
_BATCHED_LEAF = 1024
_MAX_BATCHED = 8
_MAX_PARTS = 15  # the boundaries of 15 parts, 8 bits each, fit in two words


@triton.jit
def _place_in_tree(leaf, num_leaves, DEPTH: tl.constexpr):
    """Locates leaf `leaf` in T(0, num_leaves). Level `l` of DEPTH holds left halves of the subtrees above it.

    Returns:
        The levels, as bits, of the subtrees that end with this leaf, and the level at which their sum waits for its
        right half. DEPTH if it is the root.
    """
    ending = 0
    level = DEPTH
    for i in tl.static_range(DEPTH):
        half = (num_leaves + 1) // 2
        is_right = leaf >= half
        is_left = (leaf < half) & (num_leaves > 1)
        ending = tl.where(is_left, 0, tl.where(is_right, ending | (1 << (DEPTH - 1 - i)), ending))
        level = tl.where(is_left, DEPTH - 1 - i, level)
        leaf = tl.where(is_right, leaf - half, leaf)
        num_leaves = tl.where(is_right, num_leaves - half, half)
    return ending, level


@triton.jit
def add_leaf(waiting, acc, leaf, num_leaves, DEPTH: tl.constexpr):
    """Adds leaf `leaf` of T(0, num_leaves), `acc`, to the leaves before it, of which DEPTH left halves wait for their
    right halves.

    Returns:
        The left halves that wait now, and the start value of the next leaf's sum: 0, or after the last leaf the root.
    """
    ending, level = _place_in_tree(leaf, num_leaves, DEPTH)
    for i in tl.static_range(DEPTH):
        if (ending >> i) & 1:
            acc = waiting[i] + acc
    for i in tl.static_range(DEPTH):
        if level == i:
            waiting = append(waiting[:i], acc) + waiting[i + 1 :]
    if level < DEPTH:
        acc = tl.zeros_like(acc)
    return waiting, acc


@triton.jit
def block_of(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The row block and column block of a program. Programs that run together share 8 row blocks in the L2 cache."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = index // (8 * blocks_n) * 8
    group = tl.minimum(blocks_m - first_m, 8)
    return first_m + index % (8 * blocks_n) % group, index % (8 * blocks_n) // group


@triton.jit
def border(low, high, i):
    """Boundary `i` of `pack_parts`: 8 bits of one of the words."""
    word = tl.where(i < 8, low.to(tl.int64), high.to(tl.int64))
    return ((word >> (i % 8 * 8)) & 255).to(tl.int32)


@triton.jit(do_not_specialize=["M", "low", "high"])
def _tree_gemm_kernel(
    out_ptr, x_ptr, w_ptr, scales_ptr, blocks_ptr, bias_ptr, low, high, M, N, K, x_stride, FORMAT: tl.constexpr,
    LEAF: tl.constexpr, DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, DESCRIBED: tl.constexpr, ONE_BLOCK: tl.constexpr, EVICTION: tl.constexpr,
    STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    first, stop = border(low, high, part), border(low, high, part + 1)
    block_m, block_n = block_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    # Rows after the last one repeat it, in x and in the weight, and their results are not stored. If one block holds
    # all rows, they are masked instead: otherwise each program would read a step's only row 16 times from the L2.
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = (rows < M)[:, None]
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if not DESCRIBED:
        x_rows = x_ptr + tl.minimum(rows, M - 1).to(tl.int64)[:, None] * x_stride
        w_rows = w_ptr + tl.minimum(columns, N - 1).to(tl.int64)[:, None] * K
    w_scales = scales_of(scales_ptr, blocks_ptr, tl.minimum(columns, N - 1), FORMAT)
    follow(DEPENDENT)
    steps: tl.constexpr = (LEAF + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    waiting = (acc,) * DEPTH
    # One loop over all leaves, so that loads of the next leaf start while this one ends.
    for step in tl.range(first * steps, stop * steps, num_stages=STAGES):
        leaf = step // steps
        first_k = leaf * LEAF + step % steps * BLOCK_K
        k = first_k + tl.arange(0, BLOCK_K)[None, :]
        if DESCRIBED:
            x = x_ptr.load([block_m * BLOCK_M, step * BLOCK_K])
            w = w_ptr.load([block_n * BLOCK_N, step * BLOCK_K])
        elif EVEN_K:
            x = tl.load(x_rows + k, mask=is_row, other=0.0) if ONE_BLOCK else tl.load(x_rows + k)
            w = tl.load(w_rows + k, eviction_policy=EVICTION)
        else:
            present = k < tl.minimum((leaf + 1) * LEAF, K)
            x = tl.load(x_rows + k, mask=present & is_row, other=0.0)
            w = tl.load(w_rows + k, mask=present, other=0.0, eviction_policy=EVICTION)
        w = plain_tile(w, w_scales, 0, first_k, k, x.dtype, FORMAT)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if step % steps == steps - 1:
            waiting, acc = add_leaf(waiting, acc, leaf - first, stop - first, DEPTH)
    let_next_start(DEPENDENT)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + part.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    stored = is_row & (columns < N)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=stored)


def tree_gemm(
    x: torch.Tensor,
    weight: AnyWeight,
    bias: torch.Tensor | None,
    *,
    leaf: int,
    parts: tuple[Span, ...],
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """Writes each part's sum, plus `bias`, to its [num_rows, out_features] of `out`. One program per tile and part.

    Args:
        x: [num_rows, in_features]; the elements of a row are contiguous, the row stride is free.
        weight: [out_features, in_features] in x's dtype, contiguous; or in FP8.
        bias: [out_features] or None; added in fp32.
        leaf: columns per leaf. The last leaf may have fewer.
        parts: consecutive ranges of leaves that cover all of them, at most 32 leaves each.
        out: [len(parts), num_rows, out_features], contiguous, any float dtype, to which the sums are rounded.
    """
    num_rows, in_features = x.shape
    if num_rows == 0:
        return
    out_features = len(weight)
    low, high, depth = pack_parts(parts)
    blocks_m = triton.cdiv(num_rows, tile.block_m)
    values, scales, blocks, block_k, weight_format = pieces_of(weight, tile.block_k, leaf if leaf < in_features else 0)
    even = leaf % block_k == 0 and in_features % leaf == 0
    # Blocks of `x` and the weight that TMA loads need no addresses in registers, so the tree can use these registers.
    described = even and tile.block_m >= _DESCRIBED_ROWS and x.stride(0) % 8 == 0
    num_stages = fitting_stages(tile.num_stages, tile.block_m, x.device)
    dependent = blocks_m == 1 and not described and has_dependent_launch(x.device)
    described = described and (x.data_ptr() | values.data_ptr()) % 16 == 0 and in_features * values.itemsize % 16 == 0
    _tree_gemm_kernel[(blocks_m * triton.cdiv(out_features, tile.block_n), len(parts))](
        out,
        TensorDescriptor.from_tensor(x, [tile.block_m, block_k]) if described else x,
        TensorDescriptor.from_tensor(values, [tile.block_n, block_k]) if described else values,
        scales,
        blocks,
        bias,
        low,
        high,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        FORMAT=weight_format,
        LEAF=leaf,
        DEPTH=depth,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=even,
        DESCRIBED=described,
        ONE_BLOCK=blocks_m == 1,
        # A weight that is read once should leave the L2 cache first.
        EVICTION="evict_first" if blocks_m == 1 else "",
        STAGES=num_stages,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=num_stages,
        launch_pdl=dependent,
    )


def node_gemm(
    x: torch.Tensor,
    weight: AnyWeight,
    *,
    leaf: int,
    nodes: tuple[Span, ...],
    out: torch.Tensor,
    tile: Tile | None = None,
    parts: tuple[Span, ...] | None = None,
) -> torch.Tensor:
    """out[i] = x @ weight.T over the leaves of nodes[i], added as the module says. One or two kernels, no host sync.

    Args:
        x: [num_rows, in_features], this rank's leaves, with any row stride. fp32 is multiplied without tensor cores.
        weight: [out_features, in_features] in x's dtype, contiguous; or in FP8.
        leaf: columns per leaf. Only the rank's last leaf may have fewer.
        nodes: consecutive ranges of leaves, from the rank's first leaf to its last.
        out: [len(nodes), num_rows, out_features] fp32, contiguous, written.
        tile: for measurements, like `parts`. If None, it follows from the shape, and cuBLASLt may be used.

    Returns:
        `out`.
    """
    if not nodes:
        return out  # a rank without leaves
    num_rows, out_features = x.shape[0], len(weight)
    num_leaves = nodes[-1].stop - nodes[0].start
    assert num_leaves == -(-x.shape[1] // leaf), f"{num_leaves} leaves of {leaf} are not {x.shape[1]} columns"
    assert out.dtype is torch.float32, f"nodes are fp32, not {out.dtype}"
    parts = parts or subtrees(nodes, leaf, num_rows, out_features)
    sums = out
    if parts != nodes:
        sums = torch.empty((len(parts), num_rows, out_features), dtype=torch.float32, device=x.device)
    if tile is None and isinstance(weight, torch.Tensor) and is_by_cublas(x, leaf, len(parts)):
        of_leaves = weight.unflatten(1, (-1, leaf)).permute(1, 2, 0)
        torch.bmm(x.unflatten(1, (-1, leaf)).transpose(0, 1), of_leaves, out_dtype=torch.float32, out=sums)
    else:
        tile = tile or _choose_tile(x, leaf, parts)
        tree_gemm(x, weight, None, leaf=leaf, parts=parts, out=sums, tile=tile)
    return out if sums is out else sum_subtrees(sums, *additions_of(parts, nodes), out=out)


def subtrees(nodes: tuple[Span, ...], leaf: int, num_rows: int, out_features: int) -> tuple[Span, ...]:
    """The subtrees that programs of `node_gemm` sum for this number of rows: the nodes, or subtrees of them. A caller
    that adds nodes itself may request these, which saves a kernel."""
    if not nodes:
        return ()
    num_leaves = nodes[-1].stop - nodes[0].start
    if _is_batched(num_rows, leaf, num_leaves):
        return cut_nodes(nodes, num_leaves)
    tile = _tile_for(num_rows, leaf * num_leaves)
    num_tiles = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, tile.block_n)
    enough = _ENOUGH_LARGE_PROGRAMS if tile is _MANY else _ENOUGH_PROGRAMS
    depth = _LARGE_DEPTH if tile.block_n == 128 else _MAX_DEPTH
    cuts = min(triton.cdiv(enough, max(num_tiles, 1)), _MAX_CUTS)
    while len(parts := cut_nodes(nodes, cuts, depth)) > _MAX_PARTS:
        depth += 1  # this depth spills registers, but trees with that many leaves are rare
    return parts


def cut_nodes(nodes: tuple[Span, ...], num_parts: int, max_depth: int = _MAX_DEPTH) -> tuple[Span, ...]:
    """The largest subtrees of `nodes` that have no more leaves than an even share of `num_parts`."""
    return cut(nodes, min(triton.cdiv(nodes[-1].stop - nodes[0].start, num_parts), 1 << max_depth))


@functools.lru_cache(maxsize=256)
def pack_parts(parts: tuple[Span, ...]) -> tuple[int, int, int]:
    """The parts' boundaries, counted from the first leaf, in two words; and the depth of the deepest part's tree."""
    borders = [start - parts[0][0] for start, _ in parts] + [parts[-1][1] - parts[0][0]]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts)), f"{parts} do not follow one another"
    assert len(parts) <= _MAX_PARTS, f"{len(parts)} parts"
    assert borders[-1] <= MOST_LEAVES, f"{borders[-1]} leaves"
    low, high = (sum(b << (8 * i) for i, b in enumerate(word)) for word in (borders[:8], borders[8:]))
    return low, high, max(stop - start - 1 for start, stop in parts).bit_length()


def is_by_cublas(x: torch.Tensor, leaf: int, num_parts: int) -> bool:
    """Whether `node_gemm` leaves `x`, with each part a leaf, to cuBLAS. Not for fp32, where cuBLAS may split a leaf."""
    is_chain = x.is_cuda and x.dtype is not torch.float32
    return is_chain and _is_batched(len(x), leaf, num_parts) and num_parts * leaf == x.shape[1]


def _is_batched(num_rows: int, leaf: int, num_leaves: int) -> bool:
    return num_rows in _BATCHED_ROWS and leaf >= _BATCHED_LEAF and num_leaves <= _MAX_BATCHED


def _tile_for(num_rows: int, in_features: int) -> Tile:
    if num_rows <= FEW_ROWS:
        return _FEW_DEEP if in_features >= _DEEP else _FEW
    return _SOME if num_rows <= _SOME_ROWS else _MORE if num_rows <= _MORE_ROWS else _MANY


def _choose_tile(x: torch.Tensor, leaf: int, parts: tuple[Span, ...]) -> Tile:
    """The tile for the rows of `x`. Its iterations do not cross leaves and fit in shared memory."""
    tile = _tile_for(len(x), leaf * (parts[-1][1] - parts[0][0]))
    if tile is _MANY and (x.itemsize > 2 or has_little(x.device)):
        return replace(tile, block_k=64)
    if leaf % tile.block_k:
        return Tile(tile.block_m, tile.block_n, 64, tile.num_warps, tile.num_stages + 1)
    return tile
