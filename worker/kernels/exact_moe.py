"""A mixture of experts in exact numerics: nodes of the sum over an expert's columns, which ranks cut.

The columns of an expert are leaves of one width. A token's leaf is a chain of fused multiply-adds over its experts, the
likeliest first, of each one's weight and its down product over the leaf, itself one ascending chain of MMAs; nodes are
halving trees of leaves, as in node_gemm.py. What comes before is cut nowhere: logits, weights, and the first products,
which are ascending chains of MMAs. So the bits of a token's node follow from the token and the weights alone.

For few tokens two kernels follow the logits, which add in registers; a third one adds where programs would be too few.
For more, the grouped products keep every pair's leaves apart and a last kernel adds them, both for as many of the
output's columns at a time as fit a bound.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from parallel.numerics.kernels.node_gemm import add_leaf, border, cut_nodes, pack_parts
from parallel.numerics.kernels.tree_sum import sum_subtrees
from parallel.numerics.tree import additions_of
from parallel.plan import Span
from worker.kernels.grouped_experts import (
    MMA_ROWS,
    Tile,
    Tiles,
    Tokens,
    fitting_leaf,
    grouped_down,
    grouped_gate_up,
    silu_and_mul,
)
from worker.kernels.moe import choose_tiles, pair_gate_up, sigmoid
from worker.kernels.routing import follow, is_live, let_next_start, load_logits, router_logits, starts_early

_ROWS = tl.constexpr(MMA_ROWS)

# Chosen by reckoning: of an indirect load half the stages are under way. `python -m benchmarks.moe --exact --sweep`
# times others; no such run is among the results.
_PAIR = Tiles(1, gate_up=Tile(16, 128, 2, 6), down=Tile(32, 64, 2, 10))
# In place of the table's where pairs' leaves are stored on the way, which takes shared memory.
_DOWN = {16: Tile(128, 64, 4, 4), 32: Tile(128, 64, 4, 4), 64: Tile(128, 64, 8, 4), 128: Tile(128, 64, 8, 4)}
# A node is cut until so many programs share a token's experts, but into no more than some parts.
_ENOUGH_PROGRAMS = 512
_MAX_CUTS = 4
MOST_BYTES = 24 << 20
"""Of pairs' leaves at a time, which are then still in the L2 cache; those of a block of columns may be more."""
_COMBINE_BLOCK = 1024
_ACT_BLOCK = 1024


@triton.jit(do_not_specialize=["first_slot", "low", "high"])
def _pair_nodes_kernel(
    out_ptr, hidden_ptr, w2_ptr, experts_ptr, weights_ptr, slots_ptr, first_slot, low, high, width, size,
    LEAF: tl.constexpr, DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[part, token] = the subtree of this part, BLOCK_N columns of it; 0 for padding."""
    token, part = tl.program_id(0), tl.program_id(2)
    first, stop = border(low, high, part), border(low, high, part + 1)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    follow(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    w_rows = tl.minimum(columns, size - 1).to(tl.int64)[:, None] * width
    # Of an MMA the first row is the pair's, and the others are zeros.
    mma_rows = tl.arange(0, _ROWS)[:, None]
    is_row = mma_rows == 0
    hidden_rows = hidden_ptr + mma_rows * 0
    product = tl.zeros([_ROWS, BLOCK_N], tl.float32)
    acc = product
    waiting = (acc,) * DEPTH
    steps: tl.constexpr = (LEAF + BLOCK_K - 1) // BLOCK_K
    for step in tl.range(0, tl.where(live, (stop - first) * TOP_K * steps, 0), num_stages=STAGES):
        leaf = first + step // (TOP_K * steps)
        pair = token * TOP_K + step // steps % TOP_K
        k = leaf * LEAF + step % steps * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        expert = w2_ptr + tl.load(experts_ptr + pair).to(tl.int64) * width * size
        if EVEN_K:
            h = tl.load(hidden_rows + pair * width + k, mask=is_row, other=0.0)
            w = tl.load(expert + w_rows + k, eviction_policy="evict_first")
        else:
            present = k < (leaf + 1) * LEAF
            h = tl.load(hidden_rows + pair * width + k, mask=present & is_row, other=0.0)
            w = tl.load(expert + w_rows + k, mask=present, other=0.0, eviction_policy="evict_first")
        product = tl.dot(h, w.T, product, input_precision="ieee")
        if step % steps == steps - 1:
            acc = tl.fma(tl.load(weights_ptr + pair), product, acc)
            product = tl.zeros_like(product)
            if step % (TOP_K * steps) == TOP_K * steps - 1:
                waiting, acc = add_leaf(waiting, acc, leaf - first, stop - first, DEPTH)
    let_next_start(DEPENDENT)
    out_row = out_ptr + (part * tl.num_programs(0) + token).to(tl.int64) * size
    tl.store(out_row + mma_rows * size + columns[None, :], acc, mask=is_row & (columns < size)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "first_slot", "low", "high", "first_column"])
def _combine_nodes_kernel(
    out_ptr, y_ptr, weights_ptr, slots_ptr, num_tokens, first_slot, low, high, size, first_column, num_columns,
    DEPTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[node, token] = the node over y [num_leaves, num_pairs, num_columns], whose first column is `first_column`."""
    token, node = tl.program_id(0).to(tl.int64), tl.program_id(2)
    first, stop = border(low, high, node), border(low, high, node + 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    follow(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    acc = tl.zeros([BLOCK], tl.float32)
    waiting = (acc,) * DEPTH
    for leaf in tl.range(0, tl.where(live, stop - first, 0)):
        for choice in tl.static_range(TOP_K):
            pair = token * TOP_K + choice
            row = ((first + leaf) * num_tokens * TOP_K + pair) * num_columns
            product = tl.load(y_ptr + row + columns, mask=inside, other=0.0)
            acc = tl.fma(tl.load(weights_ptr + pair), product, acc)
        waiting, acc = add_leaf(waiting, acc, leaf, stop - first, DEPTH)
    out_row = out_ptr + (node * num_tokens + token) * size + first_column
    tl.store(out_row + columns, acc, mask=inside)


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _gated_silu_and_mul_kernel(
    out_ptr, x_ptr, logits_ptr, slots_ptr, first_slot, gate_column, logits_stride, part_stride, size, x_stride,
    PARTS: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = is_live(slots_ptr, token, True, first_slot)
    inside = live & (columns < size)
    gate_ptrs = x_ptr + token * x_stride + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=inside, other=0.0).to(tl.float32)
    hidden = silu_and_mul(gate, up)
    if GATED:
        hidden *= sigmoid(load_logits(logits_ptr + token * logits_stride + gate_column, live, part_stride, PARTS))
    tl.store(out_ptr + token * size + columns, hidden.to(out_ptr.dtype.element_ty), mask=columns < size)


def node_mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    leaf: int,
    nodes: tuple[Span, ...],
    top_k: int,
    normalise: bool,
    round_to: torch.dtype,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
    first_slot: int = 0,
    weight_scale: float = 1.0,
    tiles: Tiles | None = None,
    parts: tuple[Span, ...] | None = None,
    most_bytes: int = MOST_BYTES,
) -> torch.Tensor:
    """Nodes of the sum over each token's top k experts of weight * w2 @ (silu(gate) * up), summed as the module says.

    Args:
        x, router, w13, w2, top_k, normalise, round_to, slots, first_slot, weight_scale: as in `moe.mixture`.
        leaf: columns of a leaf, which divide the width.
        nodes: one after the other, from the rank's first leaf to its last.
        out: [len(nodes), num_tokens, size] fp32, contiguous; written.
        tiles: for measurements, as `parts` and `most_bytes`; chosen by shape by default.

    Returns:
        The router's logits, as `router_logits` does: for `gated_silu_and_mul`.
    """
    (num_experts, _, width), num_tokens = w2.shape, len(x)
    num_leaves = nodes[-1].stop - nodes[0].start if nodes else 0
    assert width == leaf * num_leaves, f"{nodes} of {leaf} are not {width} columns"
    assert out.dtype is torch.float32, f"nodes are fp32, not {out.dtype}"
    if num_tokens == 0:
        return torch.empty((1, 0, len(router)), device=x.device)
    tiles = tiles or choose_exact_tiles(num_tokens, top_k, num_experts)
    counts = None
    if nodes and tiles.block_m > 1:
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    logits = router_logits(x, router, counts)
    tokens = Tokens(x, logits, slots, first_slot, num_experts, top_k, normalise, weight_scale, round_to, None)
    if counts is not None:
        _group_nodes(tokens, counts, w13, w2, leaf, nodes, tiles, most_bytes, out)
    elif nodes:
        _pair_nodes(tokens, w13, w2, leaf, nodes, tiles, parts, out)
    return logits


def choose_exact_tiles(num_tokens: int, top_k: int, num_experts: int) -> Tiles:
    """As `moe.choose_tiles`."""
    tiles = choose_tiles(num_tokens, top_k, num_experts)
    return _PAIR if tiles.block_m == 1 else replace(tiles, down=_DOWN[tiles.block_m])


def _pair_nodes(
    tokens: Tokens,
    w13: torch.Tensor,
    w2: torch.Tensor,
    leaf: int,
    nodes: tuple[Span, ...],
    tiles: Tiles,
    parts: tuple[Span, ...] | None,
    out: torch.Tensor,
) -> None:
    hidden, experts, weights = pair_gate_up(tokens, w13, tiles.gate_up, exact=True)
    _, num_tokens, size = out.shape
    tile, dependent = tiles.down, starts_early(out.device)
    blocks_n = triton.cdiv(size, tile.block_n)
    parts = parts or cut_nodes(nodes, min(triton.cdiv(_ENOUGH_PROGRAMS, num_tokens * blocks_n), _MAX_CUTS))
    sums = out if parts == nodes else torch.empty((len(parts), num_tokens, size), device=out.device)
    low, high, depth = pack_parts(parts)
    block_k = fitting_leaf(tile.block_k, leaf)
    _pair_nodes_kernel[(num_tokens, blocks_n, len(parts))](
        sums,
        hidden,
        w2,
        experts,
        weights,
        tokens.slots,
        tokens.first_slot,
        low,
        high,
        w2.shape[2],
        size,
        LEAF=leaf,
        DEPTH=depth,
        TOP_K=tokens.top_k,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=leaf % block_k == 0,
        STAGES=tile.num_stages,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    if sums is not out:
        sum_subtrees(sums, *additions_of(parts, nodes), out=out)


def _group_nodes(
    tokens: Tokens,
    counts: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    leaf: int,
    nodes: tuple[Span, ...],
    tiles: Tiles,
    most_bytes: int,
    out: torch.Tensor,
) -> None:
    routes, hidden = grouped_gate_up(tokens, counts, w13, tiles)
    _, num_tokens, size = out.shape
    dependent, block_n = starts_early(out.device), tiles.down.block_n
    low, high, depth = pack_parts(nodes)
    num_leaves = w2.shape[2] // leaf
    fitting_columns = most_bytes // (4 * num_leaves * len(hidden)) // block_n * block_n
    step = min(max(fitting_columns, block_n), size)
    room = torch.empty(num_leaves * len(hidden) * step, device=out.device)
    for first_column in range(0, size, step):
        num_columns = min(step, size - first_column)
        y = room[: num_leaves * len(hidden) * num_columns].view(num_leaves, len(hidden), num_columns)
        grouped_down(hidden, w2, routes, tiles, y, first_column=first_column, leaf=leaf)
        block = min(triton.next_power_of_2(num_columns), _COMBINE_BLOCK)
        _combine_nodes_kernel[(num_tokens, triton.cdiv(num_columns, block), len(nodes))](
            out,
            y,
            routes.weights,
            tokens.slots,
            num_tokens,
            tokens.first_slot,
            low,
            high,
            size,
            first_column,
            num_columns,
            DEPTH=depth,
            TOP_K=tokens.top_k,
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=max(block // 256, 1),
            launch_pdl=dependent,
        )


def gated_silu_and_mul(
    x: torch.Tensor, logits: torch.Tensor, num_experts: int, slots: torch.Tensor | None, first_slot: int
) -> torch.Tensor:
    """silu(gate) * up times the shared expert's gate, rounded once, 0 for padding: what follows is a sum like others.

    Args:
        x: [num_tokens, 2 * size], gate then up; elements of a row side by side, rows any distance apart.
        logits: as `router_logits` returns; with more than `num_experts`, the next one is the gate's.
        slots, first_slot: as in `moe.mixture`.

    Returns:
        [num_tokens, size], contiguous, of x's dtype.
    """
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    parts, _, num_logits = logits.shape
    _gated_silu_and_mul_kernel[(num_tokens, triton.cdiv(size, _ACT_BLOCK))](
        out,
        x,
        logits,
        slots,
        first_slot,
        num_experts,
        num_logits,
        num_tokens * num_logits,
        size,
        x.stride(0),
        PARTS=parts,
        GATED=num_logits > num_experts,
        BLOCK=_ACT_BLOCK,
        num_warps=4,
    )
    return out
