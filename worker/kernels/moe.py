"""A mixture of experts over one rank's columns: router logits to the sum over each token's experts.

For few tokens three kernels, in which each (token, expert) pair reads its expert's weights by itself: the choice of
experts is part of the first product over them, the sum over experts part of the second. For more tokens five: pairs are
gathered by expert (worker/kernels/routing.py), and two grouped products walk blocks of an expert's pairs, so that its
weights are read once for all its tokens. The weights of experts that nobody chose are not read. Nothing waits for the
device, and grids follow from shapes alone: everything can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.grouped_experts import (
    MMA_ROWS,
    Tile,
    Tiles,
    Tokens,
    fitting,
    grouped_down,
    grouped_gate_up,
    silu_and_mul,
)
from worker.kernels.routing import (
    TRITON_DTYPES,
    compare_logits,
    follow,
    is_live,
    let_next_start,
    load_logits,
    nth_expert,
    router_logits,
    starts_early,
    weight_of,
)

_ROWS = tl.constexpr(MMA_ROWS)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _pair_gate_up_kernel(
    hidden_ptr, experts_ptr, weights_ptr, x_ptr, w13_ptr, logits_ptr, slots_ptr, first_slot, num_experts,
    logits_stride, part_stride, x_stride, width, size, PARTS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr, WEIGHT_SCALE: tl.constexpr, ROUND_TO: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """hidden[pair] = silu(w13[expert, :width] @ x[token]) * (w13[expert, width:] @ x[token]), and who the expert is.

    EXACT: by MMAs, of which the pair's row is the first and the others are zeros, so that the bits are those of a
    grouped product.
    """
    # Programs that follow each other read the same columns of the pairs' experts: two of one expert find them in L2.
    pair = tl.program_id(0)
    token, choice = pair // TOP_K, pair % TOP_K
    follow(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    if live:
        logits, num_above = compare_logits(logits_ptr + token * logits_stride, num_experts, part_stride, PARTS, BLOCK_E)
        expert = nth_expert(num_above, choice, BLOCK_E)
        if tl.program_id(1) == 0:
            weight = weight_of(expert, logits, num_above, num_experts, TOP_K, NORMALISE, BLOCK_E)
            tl.store(experts_ptr + pair, expert)
            tl.store(weights_ptr + pair, (weight * WEIGHT_SCALE).to(ROUND_TO).to(tl.float32))
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.minimum(columns, width - 1).to(tl.int64)[:, None] * size
        w_gate = w13_ptr + expert.to(tl.int64) * (2 * width * size) + rows
        w_up = w_gate + width.to(tl.int64) * size
        x_row = x_ptr + token * x_stride
        if EXACT:
            # Copies of the row would all be read from one place in the L2 cache, by every program.
            is_row = (tl.arange(0, _ROWS) == 0)[:, None]
            x_row += tl.zeros([_ROWS, 1], tl.int32)
            gate = tl.zeros([_ROWS, BLOCK_N], tl.float32)
        else:
            gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros_like(gate)
        for step in tl.range(0, tl.cdiv(size, BLOCK_K), num_stages=STAGES):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            if EVEN_K:
                x = tl.load(x_row + k, mask=is_row, other=0.0) if EXACT else tl.load(x_row + k)
                g = tl.load(w_gate + k, eviction_policy="evict_first")
                u = tl.load(w_up + k, eviction_policy="evict_first")
            else:
                x = tl.load(x_row + k, mask=(k < size) & is_row if EXACT else k < size, other=0.0)
                g = tl.load(w_gate + k, mask=k < size, other=0.0, eviction_policy="evict_first")
                u = tl.load(w_up + k, mask=k < size, other=0.0, eviction_policy="evict_first")
            if EXACT:
                gate = tl.dot(x, g.T, gate, input_precision="ieee")
                up = tl.dot(x, u.T, up, input_precision="ieee")
            else:
                gate += g.to(tl.float32) * x.to(tl.float32)
                up += u.to(tl.float32) * x.to(tl.float32)
        let_next_start(DEPENDENT)
        stored = columns < width
        if EXACT:
            hidden = silu_and_mul(gate, up)
            columns = tl.broadcast_to(columns[None, :], [_ROWS, BLOCK_N])
            stored = stored[None, :] & is_row
        else:
            hidden = silu_and_mul(tl.sum(gate, 1), tl.sum(up, 1))
        tl.store(hidden_ptr + pair * width + columns, hidden.to(hidden_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _pair_down_kernel(
    out_ptr, hidden_ptr, w2_ptr, experts_ptr, weights_ptr, shared_ptr, logits_ptr, slots_ptr, first_slot, num_experts,
    logits_stride, part_stride, width, size, PARTS: tl.constexpr, GATED: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over its pairs of weight * (w2[expert] @ hidden[pair]), and the shared expert, perhaps gated."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    follow(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    rows = tl.minimum(columns, size - 1).to(tl.int64)[:, None] * width
    steps = tl.cdiv(width, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.range(0, tl.where(live, TOP_K * steps, 0), num_stages=STAGES):
        pair = token * TOP_K + step // steps
        k = (step % steps) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        w_rows = w2_ptr + tl.load(experts_ptr + pair).to(tl.int64) * width * size + rows
        if EVEN_K:
            w = tl.load(w_rows + k, eviction_policy="evict_first")
            h = tl.load(hidden_ptr + pair * width + k)
        else:
            w = tl.load(w_rows + k, mask=k < width, other=0.0, eviction_policy="evict_first")
            h = tl.load(hidden_ptr + pair * width + k, mask=k < width, other=0.0)
        acc += w.to(tl.float32) * (h.to(tl.float32) * tl.load(weights_ptr + pair))
    total = tl.sum(acc, 1)
    out = token * size + columns
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + out, mask=live & (columns < size), other=0.0).to(tl.float32)
        if GATED:
            gate = load_logits(logits_ptr + token * logits_stride + num_experts, live, part_stride, PARTS)
            shared *= sigmoid(gate)
        total += shared
    tl.store(out_ptr + out, total.to(out_ptr.dtype.element_ty), mask=columns < size)


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _combine_kernel(
    out_ptr, y_ptr, shared_ptr, logits_ptr, slots_ptr, first_slot, num_experts, logits_stride, part_stride, size,
    PARTS: tl.constexpr, GATED: tl.constexpr, NUM_SUMMANDS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token] = its pairs' y, the likeliest expert's first, and the shared expert, perhaps gated; 0 for padding."""
    follow(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    live = is_live(slots_ptr, token, True, first_slot)
    acc = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(NUM_SUMMANDS):
        pair = token * NUM_SUMMANDS + choice
        acc += tl.load(y_ptr + pair * size + columns, mask=live & inside, other=0.0).to(tl.float32)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * size + columns, mask=live & inside, other=0.0).to(tl.float32)
        if GATED:
            gate = load_logits(logits_ptr + token * logits_stride + num_experts, live, part_stride, PARTS)
            shared *= sigmoid(gate)
        acc += shared
    tl.store(out_ptr + token * size + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)


_PAIR_TOKENS = 8
"""Up to so many tokens, every pair reads its expert by itself: few experts are then chosen twice."""
_PAIR_EXPERTS = 128
"""Of so many at most: every program compares all with all then."""

# Measured on an H200 for Qwen3-30B-A3B, whole and halved.
_PAIR = Tiles(1, gate_up=Tile(8, 256, 4, 4), down=Tile(4, 128, 1, 8))
# Up to so many pairs for each expert of the model.
_GROUPED = (
    (8.0, Tiles(16, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3))),
    (16.0, Tiles(32, gate_up=Tile(64, 128, 4, 3), down=Tile(256, 64, 8, 3))),
    (128.0, Tiles(64, gate_up=Tile(128, 64, 8, 4), down=Tile(256, 64, 8, 3))),
    (float("inf"), Tiles(128, gate_up=Tile(128, 64, 8, 4), down=Tile(256, 64, 8, 3))),
)
_COMBINE_BLOCK = 1024


def choose_tiles(num_tokens: int, top_k: int, num_experts: int) -> Tiles:
    """The table's tiles for so many tokens; `block_m` 1 is a program for every pair."""
    if num_tokens <= _PAIR_TOKENS and num_experts <= _PAIR_EXPERTS:
        return _PAIR
    pairs_each = num_tokens * top_k / num_experts
    return next(tiles for most, tiles in _GROUPED if pairs_each <= most)


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    top_k: int,
    normalise: bool,
    round_to: torch.dtype,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
    first_slot: int = 0,
    weight_scale: float = 1.0,
    shared: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Sum over each token's top k experts of weight * w2 @ (silu(gate) * up), and the shared expert, perhaps gated.

    Weights are a softmax over all experts. Sums over inputs and over experts are fp32.

    Args:
        x: [num_tokens, size], elements of a row side by side, rows any distance apart.
        router: [num_experts, size] of x's dtype, contiguous; with a gate of `shared` one row more.
        w13: [num_experts, 2 * width, size] of x's dtype, contiguous: this rank's gate rows of each expert, then its up
            rows. The width may be 0.
        w2: [num_experts, size, width] of x's dtype, contiguous.
        normalise: divide a token's weights by their sum.
        round_to: dtype to which the weights are rounded last.
        out: [num_tokens, size] of x's dtype, contiguous; written.
        slots: [num_tokens] int64, or None: tokens whose slot is below `first_slot` are padding. They read no expert and
            their rows become 0.
        weight_scale: factor of the weights, before they are rounded.
        shared: [num_tokens, size] of x's dtype, contiguous: the shared expert's part.
        tiles: for measurements; the table's by default.

    Returns:
        `out`.
    """
    num_tokens = len(x)
    if num_tokens == 0:
        return out
    num_experts, _, width = w2.shape
    if tiles is None:
        tiles = choose_tiles(num_tokens, top_k, num_experts)
    counts = None
    if width > 0 and tiles.block_m > 1:
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    logits = router_logits(x, router, counts)
    tokens = Tokens(x, logits, slots, first_slot, num_experts, top_k, normalise, weight_scale, round_to, shared)
    if width == 0:
        _combine(None, 0, tokens, out)
    elif counts is None:
        _sum_pairs(tokens, w13, w2, tiles, out)
    else:
        _sum_groups(tokens, counts, w13, w2, tiles, out)
    return out


def _sum_pairs(tokens: Tokens, w13: torch.Tensor, w2: torch.Tensor, tiles: Tiles, out: torch.Tensor) -> None:
    hidden, experts, weights = pair_gate_up(tokens, w13, tiles.gate_up, exact=False)
    num_tokens, size = out.shape
    width, dependent = w2.shape[2], starts_early(out.device)
    tile = tiles.down
    block_k = fitting(tile.block_k, width)
    _pair_down_kernel[(num_tokens, triton.cdiv(size, tile.block_n))](
        out,
        hidden,
        w2,
        experts,
        weights,
        tokens.shared,
        *tokens.places,
        width,
        size,
        PARTS=len(tokens.logits),
        GATED=tokens.has_shared_gate,
        TOP_K=tokens.top_k,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=width % block_k == 0,
        STAGES=tile.num_stages,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )


def pair_gate_up(
    tokens: Tokens, w13: torch.Tensor, tile: Tile, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every pair what its expert's down product takes [num_pairs, width], the expert [num_pairs] int32, and its
    weight [num_pairs] fp32; undefined for padding tokens."""
    num_pairs, width = len(tokens.x) * tokens.top_k, w13.shape[1] // 2
    size, device, dependent = w13.shape[2], w13.device, starts_early(w13.device)
    hidden = torch.empty((num_pairs, width), dtype=w13.dtype, device=device)
    experts = torch.empty(num_pairs, dtype=torch.int32, device=device)
    weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    _pair_gate_up_kernel[(num_pairs, triton.cdiv(width, tile.block_n))](
        hidden,
        experts,
        weights,
        tokens.x,
        w13,
        *tokens.places,
        tokens.x.stride(0),
        width,
        size,
        PARTS=len(tokens.logits),
        TOP_K=tokens.top_k,
        NORMALISE=tokens.normalise,
        WEIGHT_SCALE=tokens.weight_scale,
        ROUND_TO=TRITON_DTYPES[tokens.round_to],
        BLOCK_E=triton.next_power_of_2(tokens.num_experts),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=size % tile.block_k == 0,
        STAGES=tile.num_stages,
        EXACT=exact,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    return hidden, experts, weights


def _sum_groups(
    tokens: Tokens, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, tiles: Tiles, out: torch.Tensor
) -> None:
    routes, hidden = grouped_gate_up(tokens, counts, w13, tiles)
    y = torch.empty((len(hidden), out.shape[1]), dtype=out.dtype, device=out.device)
    grouped_down(hidden, w2, routes, tiles, y)
    _combine(y, tokens.top_k, tokens, out)


def _combine(y: torch.Tensor | None, num_summands: int, tokens: Tokens, out: torch.Tensor) -> None:
    num_tokens, size = out.shape
    dependent = starts_early(out.device)
    block = min(triton.next_power_of_2(size), _COMBINE_BLOCK)
    _combine_kernel[(num_tokens, triton.cdiv(size, block))](
        out,
        y,
        tokens.shared,
        *tokens.places,
        size,
        PARTS=len(tokens.logits),
        GATED=tokens.has_shared_gate,
        NUM_SUMMANDS=num_summands,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
