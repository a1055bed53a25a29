"""Products over the experts that tokens chose, expert after expert: two kernels over blocks of an expert's pairs.

For exact numerics (moe.py), the second kernel can store the sums over leaves of an expert's columns separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.kernels.fp8_groups import GROUP_COLUMNS, first_scales, groups_of, quantised, sum_groups
from parallel.numerics.kernels.fp8_tile import AnyWeight, pieces_of, plain_tile, scales_of
from parallel.numerics.kernels.mxfp4_groups import sum_blocks
from parallel.numerics.mxfp4 import GROUP, Mxfp4Matrix
from worker.kernels.gate_and_up import activated, gate_and_up
from worker.kernels.routing import (
    SOFTMAX,
    Routes,
    Scoring,
    find_block,
    max_blocks,
    route,
)

ExpertWeight = AnyWeight | Mxfp4Matrix
MMA_ROWS = 16
"""Rows of the smallest tile."""
_LEAST_BLOCK_K = 64
_Arguments = dict[str, Any]


@triton.jit(do_not_specialize=["num_tokens", "scale_stride"])
def _grouped_gate_up_kernel(
    hidden_ptr, x_ptr, x_scales_ptr, w13_ptr, scales_ptr, blocks_ptr, b13_ptr, factors_ptr, pairs_ptr, counts_ptr,
    num_tokens, num_experts, x_stride, scale_stride, num_blocks, expert_scales, width, size, FORMAT: tl.constexpr,
    FP8: tl.constexpr, MXFP4: tl.constexpr, ONE_BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    HAS_GATE: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """hidden[pair] for a block of pairs of one expert and BLOCK_N columns. Without a gate, only up is computed.

    With factors w [num_pairs], computes the activation of w times the pair's input, divided by w, because the down
    product is weighted by w in any case. With FP8, uses `sum_groups`; with MXFP4, `sum_blocks`.
    """
    NUM_PARTS: tl.constexpr = 2 if HAS_GATE else 1
    follow(DEPENDENT)
    # Consecutive programs share the rows of x, and the programs after them share the expert.
    num_column_blocks = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // num_column_blocks
    expert, first, count = find_block(counts_ptr, block, num_experts, BLOCK_E, BLOCK_M)
    places = first + tl.arange(0, BLOCK_M)
    if first >= count:
        return
    expert = expert.to(tl.int64)
    # Lanes without a pair multiply the first token's row, and their result is not stored.
    pair = tl.load(pairs_ptr + expert * num_tokens + places, mask=places < count, other=0)
    columns = tl.program_id(0) % num_column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (pair // TOP_K).to(tl.int64)
    x_rows = x_ptr + token[:, None] * x_stride
    if MXFP4 is not None:
        first_row = tl.program_id(0) % num_column_blocks * 2 * BLOCK_N
        rows = tl.minimum(first_row + tl.arange(0, 2 * BLOCK_N), 2 * width - 1)  # gate and up alternate
        is_row = (places < count)[:, None]
        both = sum_blocks(x_rows, is_row, w13_ptr, scales_ptr, expert, rows, 2 * width, size, MXFP4, STAGES)
        gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
    elif FP8 is None:
        rows = tl.minimum(columns, width - 1)
        w_gate = w13_ptr + expert * (NUM_PARTS * width * size) + rows.to(tl.int64)[:, None] * size
        w_up = w_gate + (NUM_PARTS - 1) * width.to(tl.int64) * size
        gate_scales = scales_of(scales_ptr, blocks_ptr, rows, FORMAT)
        up_scales = scales_of(scales_ptr, blocks_ptr, rows + (NUM_PARTS - 1) * width, FORMAT)
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
            if HAS_GATE:
                gate = tl.dot(x, g.T, gate, input_precision="ieee")
            up = tl.dot(x, u.T, up, input_precision="ieee")
    else:
        first_column = tl.program_id(0) % num_column_blocks * BLOCK_N
        w_rows, gate_scales, up_scales, is_up = gate_and_up(
            w13_ptr, scales_ptr, blocks_ptr, expert, first_column, width, size, num_blocks, expert_scales, ONE_BLOCK,
            BLOCK_N, HAS_GATE,
        )  # fmt: skip
        both = sum_groups(
            tl.zeros([BLOCK_M, NUM_PARTS * BLOCK_N], tl.float32), x_rows, x_scales_ptr + token, places < count, w_rows,
            gate_scales, up_scales, is_up, 0, tl.cdiv(FP8[0] + size, FP8[1]), size, scale_stride, FP8, BLOCK_K, EVEN_K,
            STAGES,
        )  # fmt: skip
        if HAS_GATE:
            gate, up = tl.split(both.reshape(BLOCK_M, BLOCK_N, 2))
        else:
            gate = both
            up = both
    let_next_start(DEPENDENT)
    if factors_ptr is not None:
        gate *= tl.load(factors_ptr + pair, mask=places < count, other=0.0)[:, None]
    hidden = activated(gate, up, b13_ptr, expert, columns, width, HAS_GATE, LIMIT, ALPHA)
    hidden = hidden.to(hidden_ptr.dtype.element_ty)
    stored = (places < count)[:, None] & (columns < width)[None, :]
    tl.store(hidden_ptr + pair.to(tl.int64)[:, None] * width + columns[None, :], hidden, mask=stored)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "scale_stride", "first_column"])
def _grouped_down_kernel(
    y_ptr, hidden_ptr, hidden_scales_ptr, w2_ptr, scales_ptr, blocks_ptr, b2_ptr, weights_ptr, pairs_ptr, counts_ptr,
    num_tokens, num_pairs, num_experts, scale_stride, num_blocks, expert_scales, width, size, first_column, num_columns,
    FORMAT: tl.constexpr, FP8: tl.constexpr, MXFP4: tl.constexpr, ONE_BLOCK: tl.constexpr, LEAF: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    EVICTION: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y[pair] = weight * (w2[expert] @ hidden[pair]) for a block of pairs of one expert and BLOCK_N columns.

    With a LEAF, y[leaf, pair] = w2[expert] @ hidden[pair] over each LEAF columns of the width, unweighted. y has
    `num_columns` of the output's columns, from `first_column` on. A bias is part of the product, or of the first
    leaf's. With FP8, uses `sum_groups`; with MXFP4, `sum_blocks`.
    """
    follow(DEPENDENT)
    num_column_blocks = tl.cdiv(num_columns, BLOCK_N)
    block = tl.program_id(0) // num_column_blocks
    expert, first, count = find_block(counts_ptr, block, num_experts, BLOCK_E, BLOCK_M)
    places = first + tl.arange(0, BLOCK_M)
    if first >= count:
        return
    expert = expert.to(tl.int64)
    # Lanes without a pair multiply the first token's row, and their result is not stored.
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
    if MXFP4 is not None:
        is_row = (places < count)[:, None]
        acc = sum_blocks(hidden_rows, is_row, w2_ptr, scales_ptr, expert, rows, size, width, MXFP4, STAGES)
    elif FP8 is not None:
        of_scales = first_column + tl.program_id(0) % num_column_blocks * BLOCK_N if ONE_BLOCK else rows[None, :]
        acc = sum_groups(
            acc, hidden_rows, hidden_scales_ptr + pair, places < count, w_rows,
            first_scales(scales_ptr + expert * expert_scales, blocks_ptr, of_scales, num_blocks), None, None, 0,
            tl.cdiv(FP8[0] + width, FP8[1]), width, scale_stride, FP8, BLOCK_K, EVEN_K, STAGES,
        )  # fmt: skip
    else:
        num_steps = tl.cdiv(width, BLOCK_K)
        if LEAF is not None:
            leaf_steps: tl.constexpr = (LEAF + BLOCK_K - 1) // BLOCK_K
            num_steps = width // LEAF * leaf_steps
        # One loop over all leaves, so that the next leaf's loads start before this one ends.
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
    """How a product is divided into programs. Rows are pairs, columns the output's, and steps go along the inputs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of the two products for one range of pairs per expert."""

    block_m: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True, slots=True)
class Biases:
    """Parameters of experts with biases, as in gpt-oss. Their activation is (up + 1) * gate * sigmoid(alpha * gate).
    Gate and up include their biases; up is clamped to +-limit, and gate to at most limit."""

    router: torch.Tensor
    """[num_experts] fp32, added to the router's logits."""
    gate_up: torch.Tensor
    """[num_experts, 2 * width] of this rank's columns: gate, then up."""
    down: torch.Tensor | None
    """[num_experts, size] on the rank with the first columns, which adds it. None on other ranks."""
    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """A layer's tokens and their routing, for all kernels."""

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
    has_gate: bool = True

    @property
    def activation(self) -> tuple[torch.Tensor | None, dict[str, float | bool | None]]:
        """The biases of gate and up, and the kernels' arguments for the activation."""
        if self.biases is None:
            return None, {"HAS_GATE": self.has_gate, "LIMIT": None, "ALPHA": None}
        return self.biases.gate_up, {"HAS_GATE": True, "LIMIT": self.biases.limit, "ALPHA": self.biases.alpha}

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor | None, int, int, int, int]:
        """Kernel arguments: logits, slots, first slot, number of experts, and strides of rows and parts."""
        _, num_tokens, num_logits = self.logits.shape
        return self.logits, self.slots, self.first_slot, self.num_experts, num_logits, num_tokens * num_logits

    @property
    def has_shared_gate(self) -> bool:
        """Whether the last column of the logits is the shared expert's gate."""
        return self.logits.shape[2] > self.num_experts


def pieces_for(weight: ExpertWeight, tile: Tile, block_k: int, leaf: int | None) -> tuple[tuple[Any, ...], _Arguments]:
    """Elements, scales and blocks of experts' weights as kernel arguments, and the arguments that select how they are
    multiplied. In fast numerics, weights in FP8 are multiplied in groups, and in four bits in blocks; else as in
    `pieces_of`.

    Args:
        block_k: maximum number of columns of a step.
        leaf: columns after which steps restart. 0 if exact numerics need no restart. If None, numerics are fast.
    """
    num_columns = weight.shape[2]
    how: _Arguments = {"STAGES": tile.num_stages, "MXFP4": None, "FP8": None}
    none = {"FORMAT": None, "ONE_BLOCK": False, "num_blocks": 0, "expert_scales": 0}
    if isinstance(weight, Mxfp4Matrix):
        assert leaf is None, "exact numerics read four bits as bf16"
        how |= none | {"MXFP4": not triton.knobs.runtime.interpret, "BLOCK_K": GROUP, "EVEN_K": False}
        return (weight.codes, weight.exponents, None), how
    if isinstance(weight, Fp8Matrix) and leaf is None:
        groups = groups_of(weight)
        is_even = groups.is_even(num_columns) and groups.count(num_columns) % (tile.block_k // GROUP_COLUMNS) == 0
        how |= {"FORMAT": None, "FP8": groups, "ONE_BLOCK": tile.block_n <= weight.even_rows}
        how |= {"num_blocks": weight.scales.shape[-1], "expert_scales": weight.scales.stride(0)}
        return (weight.values, weight.scales, weight.blocks), how | {"BLOCK_K": groups.step, "EVEN_K": is_even}
    *pieces, block_k, weight_format = pieces_of(weight, block_k, leaf or 0)
    how |= none | {"FORMAT": weight_format}
    return tuple(pieces), how | {"BLOCK_K": block_k, "EVEN_K": (leaf or num_columns) % block_k == 0}


def grouped_gate_up(
    tokens: Tokens, counts: torch.Tensor, w13: ExpertWeight, tiles: Tiles, *, exact: bool
) -> tuple[Routes, torch.Tensor]:
    """The routes, and every pair's input of the down product [num_pairs, width]; undefined for padding. `counts`: as in
    `route`."""
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
    num_tokens, (_, num_rows, size) = len(tokens.x), w13.shape
    width, dependent = num_rows // (1 + tokens.has_gate), has_dependent_launch(w13.device)
    num_blocks = max_blocks(num_tokens, tokens.top_k, tokens.num_experts, tiles.block_m)
    hidden = torch.empty((num_tokens * tokens.top_k, width), dtype=tokens.x.dtype, device=w13.device)
    tile = tiles.gate_up
    pieces, how = pieces_for(w13, tile, tile.block_k, 0 if exact else None)
    x, x_scales, scale_stride = _rows_for(tokens.x, w13, exact)
    bias, activation = tokens.activation
    _grouped_gate_up_kernel[(num_blocks * triton.cdiv(width, tile.block_n),)](
        hidden,
        x,
        x_scales,
        *pieces,
        bias,
        routes.weights if tokens.scoring.scales_input else None,
        routes.pairs,
        routes.counts,
        num_tokens,
        tokens.num_experts,
        x.stride(0),
        scale_stride,
        width=width,
        size=size,
        TOP_K=tokens.top_k,
        BLOCK_E=triton.next_power_of_2(tokens.num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tile.block_n,
        **how,
        **activation,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    return routes, hidden


def grouped_down(
    hidden: torch.Tensor,
    w2: ExpertWeight,
    routes: Routes,
    tiles: Tiles,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    first_column: int = 0,
    leaf: int | None = None,
) -> None:
    """Computes every pair's down product with `bias`, times the pair's weight, into `y` [num_pairs, size]. With a
    `leaf`, computes unweighted products over each leaf of the width into `y` [num_leaves, num_pairs, num_columns] fp32,
    of less than 2 ** 31 elements: columns from `first_column` on."""
    (num_pairs, width), (num_experts, size, _) = hidden.shape, w2.shape
    (num_tokens, top_k), num_columns = routes.weights.shape, y.shape[-1]
    tile, dependent = tiles.down, has_dependent_launch(y.device)
    num_blocks = max_blocks(num_tokens, top_k, num_experts, tiles.block_m)
    block_k = fitting(tile.block_k, width) if leaf is None else fitting_leaf(tile.block_k, leaf)
    pieces, how = pieces_for(w2, tile, block_k, leaf)
    x, x_scales, scale_stride = _rows_for(hidden, w2, leaf is not None)
    _grouped_down_kernel[(num_blocks * triton.cdiv(num_columns, tile.block_n),)](
        y,
        x,
        x_scales,
        *pieces,
        bias,
        routes.weights,
        routes.pairs,
        routes.counts,
        num_tokens,
        num_pairs,
        num_experts,
        scale_stride,
        width=width,
        size=size,
        first_column=first_column,
        num_columns=num_columns,
        LEAF=leaf,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tile.block_n,
        **how,
        # Leaves' sums are read again, weights usually are not.
        EVICTION="evict_first" if leaf is not None and tiles.block_m == MMA_ROWS else "",
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )


def _rows_for(x: torch.Tensor, weight: ExpertWeight, exact: bool) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Rows as kernel arguments for a weight. If they are in FP8, their scales and the scales' stride follow."""
    if exact or not isinstance(weight, Fp8Matrix):
        return x, None, 0
    q = quantised(x, groups_of(weight))
    return q.values, q.scales, q.scales.stride(0)


def fitting(block_k: int, width: int) -> int:
    """The largest step up to `block_k` that divides a rank's columns, or the smallest step allowed."""
    while width % block_k and block_k > _LEAST_BLOCK_K:
        block_k //= 2
    return block_k


def fitting_leaf(block_k: int, leaf: int) -> int:
    """A step along a leaf: `block_k`, or less if the leaf is shorter, but at least an MMA's."""
    return max(min(block_k, triton.next_power_of_2(leaf)), MMA_ROWS)
