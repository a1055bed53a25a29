"""Products over the experts that tokens go to, expert after expert: two kernels that walk blocks of an expert's pairs.

The second one may keep the sums over leaves of an expert's columns apart, for exact numerics (moe.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start
from parallel.numerics.kernels.fp8_tile import AnyWeight, pieces_of, plain_tile, scales_of
from worker.kernels.routing import (
    SOFTMAX,
    Routes,
    Scoring,
    find_block,
    max_blocks,
    route,
)

MMA_ROWS = 16
"""Rows of the smallest tile."""
_LEAST_BLOCK_K = 64


@triton.jit
def silu_and_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def activated(gate, up, bias_ptr, expert, columns, width, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """The activation of `Biases` of gate and up [..., columns]; silu(gate) * up where there are none."""
    if LIMIT is None:
        hidden = silu_and_mul(gate, up)
    else:
        bias = bias_ptr + expert * (2 * width) + tl.minimum(columns, width - 1)
        gate = tl.minimum(gate + tl.load(bias).to(tl.float32), LIMIT)
        up = tl.minimum(tl.maximum(up + tl.load(bias + width).to(tl.float32), -LIMIT), LIMIT)
        hidden = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    return hidden


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_gate_up_kernel(
    hidden_ptr, x_ptr, w13_ptr, scales_ptr, blocks_ptr, b13_ptr, factors_ptr, pairs_ptr, counts_ptr, num_tokens,
    num_experts, x_stride, width, size, FORMAT: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """hidden[pair] of a block of pairs of one expert, BLOCK_N columns of it.

    With factors [num_pairs], of w times the pair's input that is hidden / w: the down product is weighted by it anyway.
    """
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
    rows = tl.minimum(columns, width - 1)
    w_gate = w13_ptr + expert * (2 * width * size) + rows.to(tl.int64)[:, None] * size
    w_up = w_gate + width.to(tl.int64) * size
    gate_scales = scales_of(scales_ptr, blocks_ptr, rows, FORMAT)
    up_scales = scales_of(scales_ptr, blocks_ptr, rows + width, FORMAT)
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
        g = plain_tile(g, gate_scales, expert, step * BLOCK_K, k, x.dtype, FORMAT)
        u = plain_tile(u, up_scales, expert, step * BLOCK_K, k, x.dtype, FORMAT)
        gate = tl.dot(x, g.T, gate, input_precision="ieee")
        up = tl.dot(x, u.T, up, input_precision="ieee")
    let_next_start(DEPENDENT)
    if factors_ptr is not None:
        gate *= tl.load(factors_ptr + pair, mask=places < count, other=0.0)[:, None]
    hidden = activated(gate, up, b13_ptr, expert, columns, width, LIMIT, ALPHA).to(hidden_ptr.dtype.element_ty)
    stored = (places < count)[:, None] & (columns < width)[None, :]
    tl.store(hidden_ptr + pair.to(tl.int64)[:, None] * width + columns[None, :], hidden, mask=stored)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "first_column"])
def _grouped_down_kernel(
    y_ptr, hidden_ptr, w2_ptr, scales_ptr, blocks_ptr, b2_ptr, weights_ptr, pairs_ptr, counts_ptr, num_tokens,
    num_pairs, num_experts, width, size, first_column, num_columns, FORMAT: tl.constexpr, LEAF: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    EVICTION: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y[pair] = weight * (w2[expert] @ hidden[pair]) of a block of pairs of one expert, BLOCK_N columns of it.

    With a LEAF, y[leaf, pair] = w2[expert] @ hidden[pair] over each LEAF of the width, unweighted. Of the output's
    columns, y has `num_columns` from `first_column` on. A bias is part of the product, or of the first leaf's.
    """
    follow(DEPENDENT)
    num_column_blocks = tl.cdiv(num_columns, BLOCK_N)
    block = tl.program_id(0) // num_column_blocks
    expert, first, count = find_block(counts_ptr, block, num_experts, BLOCK_E, BLOCK_M)
    places = first + tl.arange(0, BLOCK_M)
    if first >= count:
        return
    expert = expert.to(tl.int64)
    # Places without a pair multiply the first token's row, which nobody stores.
    pair = tl.load(pairs_ptr + expert * num_tokens + places, mask=places < count, other=0)
    columns = tl.program_id(0) % num_column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    stored = (places < count)[:, None] & (columns < num_columns)[None, :]
    hidden_rows = hidden_ptr + pair.to(tl.int64)[:, None] * width
    rows = tl.minimum(first_column + columns, size - 1)
    w_rows = w2_ptr + expert * width * size + rows.to(tl.int64)[:, None] * width
    w_scales = scales_of(scales_ptr, blocks_ptr, rows, FORMAT)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if b2_ptr is not None:
        bias = tl.load(b2_ptr + expert * size + rows).to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    num_steps = tl.cdiv(width, BLOCK_K)
    if LEAF is not None:
        leaf_steps: tl.constexpr = (LEAF + BLOCK_K - 1) // BLOCK_K
        num_steps = width // LEAF * leaf_steps
    # One loop over all leaves: loads of the next leaf are under way while this one ends.
    for step in tl.range(0, num_steps, num_stages=STAGES):
        if LEAF is None:
            stop_k = width
            first_k = step * BLOCK_K
        else:
            leaf = step // leaf_steps
            stop_k = (leaf + 1) * LEAF
            first_k = leaf * LEAF + step % leaf_steps * BLOCK_K
        k = first_k + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            h, w = tl.load(hidden_rows + k), tl.load(w_rows + k, eviction_policy=EVICTION)
        else:
            h = tl.load(hidden_rows + k, mask=k < stop_k, other=0.0)
            w = tl.load(w_rows + k, mask=k < stop_k, other=0.0, eviction_policy=EVICTION)
        w = plain_tile(w, w_scales, expert, first_k, k, h.dtype, FORMAT)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
        if LEAF is not None:
            leaf_ends = step % leaf_steps == leaf_steps - 1
            if leaf_ends:
                y_leaf = y_ptr + leaf.to(tl.int64) * num_pairs * num_columns
                if b2_ptr is not None:
                    acc += tl.where(leaf == 0, bias, 0.0)[None, :]
                tl.store(y_leaf + pair[:, None] * num_columns + columns[None, :], acc, mask=stored)
                acc = tl.zeros_like(acc)
    let_next_start(DEPENDENT)
    if LEAF is None:
        weight = tl.load(weights_ptr + pair, mask=places < count, other=0.0)
        if b2_ptr is not None:
            acc += bias[None, :]
        y = (acc * weight[:, None]).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + pair.to(tl.int64)[:, None] * num_columns + columns[None, :], y, mask=stored)


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


@dataclass(frozen=True, slots=True)
class Biases:
    """The rest of experts with biases, as gpt-oss has them. Their activation is (up + 1) * gate * sigmoid(alpha *
    gate), of gate and up with their biases, clamped to the limit, gate from above alone."""

    router: torch.Tensor
    """[num_experts] fp32."""
    gate_up: torch.Tensor
    """[num_experts, 2 * width] of this rank's columns: gate, then up."""
    down: torch.Tensor | None
    """[num_experts, size], on the one rank that adds it, which is that of the first columns."""
    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """A layer's tokens and their routing, as every kernel knows them."""

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
    scoring: Scoring = SOFTMAX
    biases: Biases | None = None

    @property
    def activation(self) -> tuple[torch.Tensor | None, dict[str, float | None]]:
        """The biases of gate and up, and the kernels' arguments for the activation."""
        if self.biases is None:
            return None, {"LIMIT": None, "ALPHA": None}
        return self.biases.gate_up, {"LIMIT": self.biases.limit, "ALPHA": self.biases.alpha}

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor | None, int, int, int, int]:
        """Logits and slots as the kernels take them: with the first slot, experts, and strides of rows and parts."""
        _, num_tokens, num_logits = self.logits.shape
        return self.logits, self.slots, self.first_slot, self.num_experts, num_logits, num_tokens * num_logits

    @property
    def has_shared_gate(self) -> bool:
        """Whether the logits' last column is the shared expert's gate."""
        return self.logits.shape[2] > self.num_experts


def grouped_gate_up(tokens: Tokens, counts: torch.Tensor, w13: AnyWeight, tiles: Tiles) -> tuple[Routes, torch.Tensor]:
    """The routes, for which `counts` are as `route` wants them, and of every pair what its expert's down product takes
    [num_pairs, width]; undefined for padding tokens."""
    routes = route(
        tokens.logits,
        counts,
        top_k=tokens.top_k,
        normalise=tokens.normalise,
        weight_scale=tokens.weight_scale,
        round_to=tokens.round_to,
        scoring=tokens.scoring,
        slots=tokens.slots,
        first_slot=tokens.first_slot,
    )
    num_tokens, (_, two_widths, size) = len(tokens.x), w13.shape
    width, dependent = two_widths // 2, has_dependent_launch(w13.device)
    num_blocks = max_blocks(num_tokens, tokens.top_k, tokens.num_experts, tiles.block_m)
    hidden = torch.empty((num_tokens * tokens.top_k, width), dtype=tokens.x.dtype, device=w13.device)
    tile = tiles.gate_up
    values, scales, blocks, block_k, weight_format = pieces_of(w13, tile.block_k)
    bias, activation = tokens.activation
    _grouped_gate_up_kernel[(num_blocks * triton.cdiv(width, tile.block_n),)](
        hidden,
        tokens.x,
        values,
        scales,
        blocks,
        bias,
        routes.weights if tokens.scoring.scales_input else None,
        routes.pairs,
        routes.counts,
        num_tokens,
        tokens.num_experts,
        tokens.x.stride(0),
        width,
        size,
        FORMAT=weight_format,
        TOP_K=tokens.top_k,
        BLOCK_E=triton.next_power_of_2(tokens.num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=size % block_k == 0,
        STAGES=tile.num_stages,
        **activation,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    return routes, hidden


def grouped_down(
    hidden: torch.Tensor,
    w2: AnyWeight,
    routes: Routes,
    tiles: Tiles,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    first_column: int = 0,
    leaf: int | None = None,
) -> None:
    """Every pair's down product and `bias`, in `y` [num_pairs, size] times its weight; or over each `leaf` of the width
    alone, in `y` [num_leaves, num_pairs, num_columns] fp32, of less than 2 ** 31 elements: columns from `first_column`
    on."""
    (num_pairs, width), (num_experts, size, _) = hidden.shape, w2.shape
    (num_tokens, top_k), num_columns = routes.weights.shape, y.shape[-1]
    tile, dependent = tiles.down, has_dependent_launch(y.device)
    num_blocks = max_blocks(num_tokens, top_k, num_experts, tiles.block_m)
    block_k = fitting(tile.block_k, width) if leaf is None else fitting_leaf(tile.block_k, leaf)
    values, scales, blocks, block_k, weight_format = pieces_of(w2, block_k, leaf or 0)
    _grouped_down_kernel[(num_blocks * triton.cdiv(num_columns, tile.block_n),)](
        y,
        hidden,
        values,
        scales,
        blocks,
        bias,
        routes.weights,
        routes.pairs,
        routes.counts,
        num_tokens,
        num_pairs,
        num_experts,
        width,
        size,
        first_column,
        num_columns,
        FORMAT=weight_format,
        LEAF=leaf,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=block_k,
        EVEN_K=(width if leaf is None else leaf) % block_k == 0,
        # Leaves' sums are read again, weights most often not.
        EVICTION="evict_first" if leaf is not None and tiles.block_m == MMA_ROWS else "",
        STAGES=tile.num_stages,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )


def fitting(block_k: int, width: int) -> int:
    """The largest step up to `block_k` that a rank's columns are a multiple of, or the smallest that is used."""
    while width % block_k and block_k > _LEAST_BLOCK_K:
        block_k //= 2
    return block_k


def fitting_leaf(block_k: int, leaf: int) -> int:
    """A step along a leaf: `block_k`, or less where the leaf is shorter, but not less than an MMA's."""
    return max(min(block_k, triton.next_power_of_2(leaf)), MMA_ROWS)
