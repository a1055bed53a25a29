"""A mixture of experts over one rank's columns: router logits to the sum over each token's experts.

For few tokens three kernels, in which each (token, expert) pair reads its expert's weights by itself: the choice of
experts is part of the first product over them, the sum over experts part of the second. For more tokens five: pairs are
gathered by expert (worker/kernels/routing.py), and two grouped products walk blocks of an expert's pairs, so that its
weights are read once for all its tokens. The weights of experts that nobody chose are not read. Nothing waits for the
device, and grids follow from shapes alone: everything can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.routing import (
    TRITON_DTYPES,
    compare_logits,
    find_block,
    follow,
    is_live,
    let_next_start,
    load_logits,
    max_blocks,
    nth_expert,
    route,
    router_logits,
    starts_early,
    weight_of,
)


@triton.jit
def _silu_and_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _pair_gate_up_kernel(
    hidden_ptr,
    experts_ptr,
    weights_ptr,
    x_ptr,
    w13_ptr,
    logits_ptr,
    slots_ptr,
    first_slot,
    num_experts,
    logits_stride,
    part_stride,
    x_stride,
    width,
    size,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr,
    ROUND_TO: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden[pair] = silu(w13[expert, :width] @ x[token]) * (w13[expert, width:] @ x[token]), and who the expert is."""
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
        gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for step in tl.range(0, tl.cdiv(size, BLOCK_K), num_stages=STAGES):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            if EVEN_K:
                x = tl.load(x_row + k)
                g = tl.load(w_gate + k, eviction_policy="evict_first")
                u = tl.load(w_up + k, eviction_policy="evict_first")
            else:
                x = tl.load(x_row + k, mask=k < size, other=0.0)
                g = tl.load(w_gate + k, mask=k < size, other=0.0, eviction_policy="evict_first")
                u = tl.load(w_up + k, mask=k < size, other=0.0, eviction_policy="evict_first")
            gate += g.to(tl.float32) * x.to(tl.float32)
            up += u.to(tl.float32) * x.to(tl.float32)
        let_next_start(DEPENDENT)
        hidden = _silu_and_mul(tl.sum(gate, 1), tl.sum(up, 1))
        tl.store(hidden_ptr + pair * width + columns, hidden.to(hidden_ptr.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _pair_down_kernel(
    out_ptr,
    hidden_ptr,
    w2_ptr,
    experts_ptr,
    weights_ptr,
    shared_ptr,
    logits_ptr,
    slots_ptr,
    first_slot,
    num_experts,
    logits_stride,
    part_stride,
    width,
    size,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
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
            shared *= _sigmoid(gate)
        total += shared
    tl.store(out_ptr + out, total.to(out_ptr.dtype.element_ty), mask=columns < size)


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_gate_up_kernel(
    hidden_ptr,
    x_ptr,
    w13_ptr,
    pairs_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    x_stride,
    width,
    size,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """hidden[pair] of a block of pairs of one expert, BLOCK_N columns of it."""
    follow(DEPENDENT)
    # Programs that follow each other share the rows of x, and those after them the expert.
    num_column_blocks = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // num_column_blocks
    expert, first, count = find_block(counts_ptr, block, num_experts, BLOCK_E, BLOCK_M)
    places = first + tl.arange(0, BLOCK_M)
    if first >= count:
        return
    expert = expert.to(tl.int64)
    # Places without a pair multiply the first token's row, which nobody stores.
    pair = tl.load(pairs_ptr + expert * num_tokens + places, mask=places < count, other=0)
    columns = tl.program_id(0) % num_column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    rows = tl.minimum(columns, width - 1).to(tl.int64)[:, None] * size
    w_gate = w13_ptr + expert * (2 * width * size) + rows
    w_up = w_gate + width.to(tl.int64) * size
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, tl.cdiv(size, BLOCK_K), num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            x, g, u = tl.load(x_rows + k), tl.load(w_gate + k), tl.load(w_up + k)
        else:
            x = tl.load(x_rows + k, mask=k < size, other=0.0)
            g = tl.load(w_gate + k, mask=k < size, other=0.0)
            u = tl.load(w_up + k, mask=k < size, other=0.0)
        gate = tl.dot(x, g.T, gate, input_precision="ieee")
        up = tl.dot(x, u.T, up, input_precision="ieee")
    let_next_start(DEPENDENT)
    hidden = _silu_and_mul(gate, up).to(hidden_ptr.dtype.element_ty)
    stored = (places < count)[:, None] & (columns < width)[None, :]
    tl.store(hidden_ptr + pair.to(tl.int64)[:, None] * width + columns[None, :], hidden, mask=stored)


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_down_kernel(
    y_ptr,
    hidden_ptr,
    w2_ptr,
    weights_ptr,
    pairs_ptr,
    counts_ptr,
    num_tokens,
    num_experts,
    width,
    size,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[pair] = weight * (w2[expert] @ hidden[pair]) of a block of pairs of one expert, BLOCK_N columns of it."""
    follow(DEPENDENT)
    num_column_blocks = tl.cdiv(size, BLOCK_N)
    block = tl.program_id(0) // num_column_blocks
    expert, first, count = find_block(counts_ptr, block, num_experts, BLOCK_E, BLOCK_M)
    places = first + tl.arange(0, BLOCK_M)
    if first >= count:
        return
    expert = expert.to(tl.int64)
    # Places without a pair multiply the first token's row, which nobody stores.
    pair = tl.load(pairs_ptr + expert * num_tokens + places, mask=places < count, other=0)
    columns = tl.program_id(0) % num_column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    hidden_rows = hidden_ptr + pair.to(tl.int64)[:, None] * width
    w_rows = w2_ptr + expert * width * size + tl.minimum(columns, size - 1).to(tl.int64)[:, None] * width
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, tl.cdiv(width, BLOCK_K), num_stages=STAGES):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            h, w = tl.load(hidden_rows + k), tl.load(w_rows + k)
        else:
            h = tl.load(hidden_rows + k, mask=k < width, other=0.0)
            w = tl.load(w_rows + k, mask=k < width, other=0.0)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    let_next_start(DEPENDENT)
    weight = tl.load(weights_ptr + pair, mask=places < count, other=0.0)
    y = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
    stored = (places < count)[:, None] & (columns < size)[None, :]
    tl.store(y_ptr + pair.to(tl.int64)[:, None] * size + columns[None, :], y, mask=stored)


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _combine_kernel(
    out_ptr,
    y_ptr,
    shared_ptr,
    logits_ptr,
    slots_ptr,
    first_slot,
    num_experts,
    logits_stride,
    part_stride,
    size,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    NUM_SUMMANDS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
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
            shared *= _sigmoid(gate)
        acc += shared
    tl.store(out_ptr + token * size + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs. Rows are pairs, columns those of an output, steps along the inputs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The two products for one number of pairs an expert."""

    block_m: int
    gate_up: Tile
    down: Tile


_PAIR_TOKENS = 8
"""Up to so many tokens, every pair reads its expert by itself: few experts are then chosen twice."""
_PAIR_EXPERTS = 128
"""Of so many at most: every program compares all with all then."""

# Measured on an H200 for Qwen3-30B-A3B, whole and halved (benchmarks/results/moe_h200_2026-11-23.txt).
_PAIR = Tiles(1, gate_up=Tile(8, 256, 4, 4), down=Tile(4, 128, 1, 8))
# Up to so many pairs for each expert of the model.
_GROUPED = (
    (8.0, Tiles(16, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3))),
    (16.0, Tiles(32, gate_up=Tile(64, 128, 4, 3), down=Tile(256, 64, 8, 3))),
    (128.0, Tiles(64, gate_up=Tile(128, 64, 8, 4), down=Tile(256, 64, 8, 3))),
    (float("inf"), Tiles(128, gate_up=Tile(128, 64, 8, 4), down=Tile(256, 64, 8, 3))),
)
_COMBINE_BLOCK = 1024
_LEAST_BLOCK_K = 64


def choose_tiles(num_tokens: int, top_k: int, num_experts: int) -> Tiles:
    """The table's tiles for so many tokens; `block_m` 1 is a program for every pair."""
    if num_tokens <= _PAIR_TOKENS and num_experts <= _PAIR_EXPERTS:
        return _PAIR
    pairs_each = num_tokens * top_k / num_experts
    return next(tiles for most, tiles in _GROUPED if pairs_each <= most)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What every kernel knows of a layer's tokens and their routing."""

    x: torch.Tensor
    logits: torch.Tensor
    slots: torch.Tensor | None
    first_slot: int
    num_experts: int
    top_k: int
    normalise: bool
    weight_scale: float
    round_to: torch.dtype
    shared: torch.Tensor | None

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor | None, int, int, int, int]:
        """Logits and slots as the kernels take them: with the first slot, experts, and strides of rows and parts."""
        _, num_tokens, num_logits = self.logits.shape
        return self.logits, self.slots, self.first_slot, self.num_experts, num_logits, num_tokens * num_logits

    @property
    def has_shared_gate(self) -> bool:
        """Whether the logits' last column is the shared expert's gate."""
        return self.logits.shape[2] > self.num_experts


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
    tokens = _Tokens(x, logits, slots, first_slot, num_experts, top_k, normalise, weight_scale, round_to, shared)
    if width == 0:
        _combine(None, 0, tokens, out)
    elif counts is None:
        _sum_pairs(tokens, w13, w2, tiles, out)
    else:
        _sum_groups(tokens, counts, w13, w2, tiles, out)
    return out


def _sum_pairs(tokens: _Tokens, w13: torch.Tensor, w2: torch.Tensor, tiles: Tiles, out: torch.Tensor) -> None:
    num_tokens, size = out.shape
    width, device = w2.shape[2], out.device
    num_pairs, dependent = num_tokens * tokens.top_k, starts_early(device)
    hidden = torch.empty((num_pairs, width), dtype=out.dtype, device=device)
    experts = torch.empty(num_pairs, dtype=torch.int32, device=device)
    weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    tile = tiles.gate_up
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
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    tile = tiles.down
    block_k = _fitting(tile.block_k, width)
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


def _sum_groups(
    tokens: _Tokens, counts: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, tiles: Tiles, out: torch.Tensor
) -> None:
    routes = route(
        tokens.logits,
        counts,
        top_k=tokens.top_k,
        normalise=tokens.normalise,
        weight_scale=tokens.weight_scale,
        round_to=tokens.round_to,
        slots=tokens.slots,
        first_slot=tokens.first_slot,
    )
    num_tokens, size = out.shape
    width, num_experts, device = w2.shape[2], tokens.num_experts, out.device
    num_pairs, dependent = num_tokens * tokens.top_k, starts_early(device)
    num_blocks = max_blocks(num_tokens, tokens.top_k, num_experts, tiles.block_m)
    block_e = triton.next_power_of_2(num_experts)
    hidden = torch.empty((num_pairs, width), dtype=out.dtype, device=device)
    tile = tiles.gate_up
    _grouped_gate_up_kernel[(num_blocks * triton.cdiv(width, tile.block_n),)](
        hidden,
        tokens.x,
        w13,
        routes.pairs,
        routes.counts,
        num_tokens,
        num_experts,
        tokens.x.stride(0),
        width,
        size,
        TOP_K=tokens.top_k,
        BLOCK_E=block_e,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=size % tile.block_k == 0,
        STAGES=tile.num_stages,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    y = torch.empty((num_pairs, size), dtype=out.dtype, device=device)
    tile = tiles.down
    block_k = _fitting(tile.block_k, width)
    _grouped_down_kernel[(num_blocks * triton.cdiv(size, tile.block_n),)](
        y,
        hidden,
        w2,
        routes.weights,
        routes.pairs,
        routes.counts,
        num_tokens,
        num_experts,
        width,
        size,
        BLOCK_E=block_e,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=width % block_k == 0,
        STAGES=tile.num_stages,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    _combine(y, tokens.top_k, tokens, out)


def _combine(y: torch.Tensor | None, num_summands: int, tokens: _Tokens, out: torch.Tensor) -> None:
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


def _fitting(block_k: int, width: int) -> int:
    """The largest step up to `block_k` that a rank's columns are a multiple of, or the smallest that is used."""
    while width % block_k and block_k > _LEAST_BLOCK_K:
        block_k //= 2
    return block_k
