"""Products over the experts of few tokens: each (token, expert) pair reads its expert's weights separately.

The choice of a pair's expert is part of the first kernel, the sum over a token's experts part of the second. In exact
numerics these sums are subtrees of leaves of the experts' columns (moe.py describes the contract).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start
from parallel.kernels.tree_sum import sum_subtrees
from parallel.numerics.kernels.fp8_groups import GROUP_COLUMNS, first_scales, sum_side_by_side
from parallel.numerics.kernels.fp8_tile import plain_tile, scales_of
from parallel.numerics.kernels.mxfp4_groups import sum_blocks_side_by_side
from parallel.numerics.kernels.node_gemm import add_leaf, border, cut_nodes, pack_parts
from parallel.plan import Span
from parallel.tree import additions_of
from worker.kernels.gate_and_up import activated, gate_and_up
from worker.kernels.grouped_experts import (
    MMA_ROWS,
    ExpertWeight,
    Tile,
    Tiles,
    Tokens,
    fitting,
    fitting_leaf,
    pieces_for,
)
from worker.kernels.routing import (
    TRITON_DTYPES,
    compare_logits,
    is_live,
    nth_expert,
    shared_of,
    weight_of,
)

_ROWS = tl.constexpr(MMA_ROWS)
# A node is cut until this number of programs share a token's experts, but into at most _MAX_CUTS parts.
_ENOUGH_PROGRAMS = 512
_MAX_CUTS = 4


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _pair_gate_up_kernel(
    hidden_ptr, experts_ptr, weights_ptr, x_ptr, w13_ptr, scales_ptr, blocks_ptr, b13_ptr, bias_ptr, logits_ptr,
    slots_ptr, first_slot, num_experts, logits_stride, part_stride, x_stride, num_blocks, expert_scales, width, size,
    FORMAT: tl.constexpr, FP8: tl.constexpr, MXFP4: tl.constexpr, ONE_BLOCK: tl.constexpr, SIDE: tl.constexpr,
    PARTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, WEIGHT_SCALE: tl.constexpr,
    ROUND_TO: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, SCALES_INPUT: tl.constexpr, HAS_GATE: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """hidden[pair] = silu(w13[expert, :width] @ x[token]) * (w13[expert, width:] @ x[token]), and the pair's expert.
    With biases or without a gate, the activation is that in `activated`.

    SCALES_INPUT: uses the weight like the factors in `_grouped_gate_up_kernel`. EXACT: uses MMAs with the pair's row
    first and zeros in the other rows, so that the bits equal those of a grouped product. With FP8, uses
    `sum_side_by_side`; with MXFP4, `sum_blocks_side_by_side`.
    """
    NUM_PARTS: tl.constexpr = 2 if HAS_GATE else 1
    # Consecutive programs read the same columns of the pairs' experts, so two pairs of one expert find them in L2.
    pair = tl.program_id(0)
    token, choice = pair // TOP_K, pair % TOP_K
    follow(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    if live:
        logits, num_above = compare_logits(
            logits_ptr + token * logits_stride, bias_ptr, num_experts, part_stride, PARTS, BLOCK_E, GROUPS, TOP_GROUPS,
            BLOCK_G,
        )  # fmt: skip
        expert = nth_expert(num_above, choice, BLOCK_E)
        if SCALES_INPUT:
            weight = weight_of(expert, logits, num_above, num_experts, TOP_K, NORMALISE, BLOCK_E, SIGMOID)
            factor = (weight * WEIGHT_SCALE).to(ROUND_TO).to(tl.float32)
        if tl.program_id(1) == 0:
            weight = weight_of(expert, logits, num_above, num_experts, TOP_K, NORMALISE, BLOCK_E, SIGMOID)
            tl.store(experts_ptr + pair, expert)
            tl.store(weights_ptr + pair, (weight * WEIGHT_SCALE).to(ROUND_TO).to(tl.float32))
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_row = x_ptr + token * x_stride
        if MXFP4 is not None:
            turns = tl.program_id(1) * 2 * BLOCK_N + tl.arange(0, 2 * BLOCK_N)[None, :]  # gate and up alternate
            both = sum_blocks_side_by_side(
                x_row + tl.zeros([1, 1, 1], tl.int32), SIDE, w13_ptr, scales_ptr,
                expert.to(tl.int64), tl.minimum(turns, 2 * width - 1), 2 * width, size, SIDE, True, MXFP4, STAGES,
            )  # fmt: skip
            gate, up = tl.split(tl.sum(both, 0).reshape(BLOCK_N, 2))
        elif FP8 is not None:
            w_rows, gate_scales, up_scales, is_up = gate_and_up(
                w13_ptr, scales_ptr, blocks_ptr, expert.to(tl.int64), tl.program_id(1) * BLOCK_N, width, size,
                num_blocks, expert_scales, ONE_BLOCK, BLOCK_N, HAS_GATE,
            )  # fmt: skip
            both = sum_side_by_side(
                x_row + tl.zeros([1, 1, 1], tl.int32), None, tl.full([1, 1], True, tl.int1), w_rows[None, :, :],
                gate_scales, up_scales, is_up, tl.full([SIDE, 1, 1], True, tl.int1), tl.cdiv(FP8[0] + size, FP8[1]),
                size, 0, FP8, SIDE, True, BLOCK_K, EVEN_K, STAGES,
            )  # fmt: skip
            both = tl.sum(both, 0)
            if HAS_GATE:
                gate, up = tl.split(both.reshape(BLOCK_N, 2))
            else:
                gate = both.reshape(BLOCK_N)
                up = gate
        else:
            rows = tl.minimum(columns, width - 1)
            w_gate = w13_ptr + expert.to(tl.int64) * (NUM_PARTS * width * size) + rows.to(tl.int64)[:, None] * size
            w_up = w_gate + (NUM_PARTS - 1) * width.to(tl.int64) * size
            gate_scales = scales_of(scales_ptr, blocks_ptr, rows, FORMAT)
            up_scales = scales_of(scales_ptr, blocks_ptr, rows + (NUM_PARTS - 1) * width, FORMAT)
            if EXACT:
                # Copies of the row would all be read from one address in the L2 cache, by every program.
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
                    g = plain_tile(g, gate_scales, expert.to(tl.int64), step * BLOCK_K, k, x.dtype, FORMAT)
                    u = plain_tile(u, up_scales, expert.to(tl.int64), step * BLOCK_K, k, x.dtype, FORMAT)
                    if HAS_GATE:
                        gate = tl.dot(x, g.T, gate, input_precision="ieee")
                    up = tl.dot(x, u.T, up, input_precision="ieee")
                else:
                    if HAS_GATE:
                        gate += g.to(tl.float32) * x.to(tl.float32)
                    up += u.to(tl.float32) * x.to(tl.float32)
        let_next_start(DEPENDENT)
        stored = columns < width
        if FP8 is None and MXFP4 is None and not EXACT:
            gate, up = tl.sum(gate, 1), tl.sum(up, 1)
        if SCALES_INPUT:
            gate *= factor
        hidden = activated(gate, up, b13_ptr, expert.to(tl.int64), columns, width, HAS_GATE, LIMIT, ALPHA)
        if EXACT:
            columns = tl.broadcast_to(columns[None, :], [_ROWS, BLOCK_N])
            stored = stored[None, :] & is_row
        tl.store(hidden_ptr + pair * width + columns, hidden.to(hidden_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["first_slot", "part_stride", "low", "high"])
def _pair_down_kernel(
    out_ptr, hidden_ptr, w2_ptr, scales_ptr, blocks_ptr, b2_ptr, experts_ptr, weights_ptr, shared_ptr, logits_ptr,
    slots_ptr, first_slot, num_experts, logits_stride, part_stride, low, high, num_blocks, expert_scales, width, size,
    FORMAT: tl.constexpr, FP8: tl.constexpr, MXFP4: tl.constexpr, ONE_BLOCK: tl.constexpr, SIDE: tl.constexpr,
    PARTS: tl.constexpr, GATED: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token] = sum over its pairs of weight * (w2[expert] @ hidden[pair]), plus the shared expert, perhaps gated.

    With a LEAF, out[part, token] = the subtree of this part, BLOCK_N columns of it; 0 for padding. A bias is part of
    the product, or of the first leaf's. With FP8, uses `sum_side_by_side` over the pairs; with MXFP4,
    `sum_blocks_side_by_side`.
    """
    token, part = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    follow(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    rows = tl.minimum(columns, size - 1)
    w_scales = scales_of(scales_ptr, blocks_ptr, rows, FORMAT)
    if MXFP4 is not None:
        choices = tl.arange(0, SIDE)[:, None]
        chosen, pairs = live & (choices < TOP_K), token * TOP_K + choices
        of_pairs = sum_blocks_side_by_side(
            hidden_ptr + pairs[:, :, None] * width, tl.where(live, TOP_K, 0), w2_ptr, scales_ptr,
            tl.load(experts_ptr + pairs, mask=chosen, other=0).to(tl.int64), rows[None, :], size, width, SIDE, False,
            MXFP4, STAGES,
        )  # fmt: skip
        total = tl.sum(of_pairs * tl.load(weights_ptr + pairs, mask=chosen, other=0.0), 0)
    elif FP8 is not None:
        choices, of_scales = tl.arange(0, SIDE)[:, None], tl.program_id(1) * BLOCK_N if ONE_BLOCK else rows[None, :]
        chosen, pairs = live & (choices < TOP_K), token * TOP_K + choices
        experts = tl.load(experts_ptr + pairs, mask=chosen, other=0).to(tl.int64)
        scales = first_scales(scales_ptr, blocks_ptr, of_scales, num_blocks) + experts * expert_scales
        w_rows = w2_ptr + experts[:, :, None] * width * size + rows.to(tl.int64)[None, :, None] * width
        num_groups = tl.where(live, tl.cdiv(FP8[0] + width, FP8[1]), 0)
        acc = sum_side_by_side(
            hidden_ptr + pairs[:, :, None] * width, None, chosen, w_rows, scales, None, None, chosen[:, :, None],
            num_groups, width, 0, FP8, SIDE, False, BLOCK_K, EVEN_K, STAGES,
        )  # fmt: skip
        acc *= tl.load(weights_ptr + pairs, mask=chosen, other=0.0)[:, :, None]
        total = tl.sum(acc, 0).reshape(BLOCK_N)
    else:
        if LEAF is None:
            steps = tl.cdiv(width, BLOCK_K)  # for one pair
            num_steps = TOP_K * steps
            acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        else:
            first, stop = border(low, high, part), border(low, high, part + 1)
            steps: tl.constexpr = (LEAF + BLOCK_K - 1) // BLOCK_K  # type: ignore[no-redef]  # of a leaf
            num_steps = (stop - first) * TOP_K * steps
            # The first row of an MMA is the pair's, and the other rows are zeros.
            mma_rows = tl.arange(0, _ROWS)[:, None]
            is_row = mma_rows == 0
            hidden_ptr += mma_rows * 0
            product = tl.zeros([_ROWS, BLOCK_N], tl.float32)
            acc = product
            waiting = (acc,) * DEPTH
        for step in tl.range(0, tl.where(live, num_steps, 0), num_stages=STAGES):
            if LEAF is None:
                pair = token * TOP_K + step // steps
                first_k = (step % steps) * BLOCK_K
                stop_k = width
            else:
                leaf = first + step // (TOP_K * steps)
                pair = token * TOP_K + step // steps % TOP_K
                first_k = leaf * LEAF + step % steps * BLOCK_K
                stop_k = (leaf + 1) * LEAF
            k = first_k + tl.arange(0, BLOCK_K)[None, :]
            present = k < stop_k
            expert = tl.load(experts_ptr + pair).to(tl.int64)
            w_rows = w2_ptr + expert * width * size + rows.to(tl.int64)[:, None] * width
            h_row = hidden_ptr + pair * width
            if LEAF is not None:
                h = tl.load(h_row + k, mask=is_row if EVEN_K else present & is_row, other=0.0)
            elif EVEN_K:
                h = tl.load(h_row + k)
            else:
                h = tl.load(h_row + k, mask=present, other=0.0)
            if EVEN_K:
                w = tl.load(w_rows + k, eviction_policy="evict_first")
            else:
                w = tl.load(w_rows + k, mask=present, other=0.0, eviction_policy="evict_first")
            if LEAF is None:
                acc += w.to(tl.float32) * (h.to(tl.float32) * tl.load(weights_ptr + pair))
            else:
                w = plain_tile(w, w_scales, expert, first_k, k, h.dtype, FORMAT)
                product = tl.dot(h, w.T, product, input_precision="ieee")
                if step % steps == steps - 1:
                    if b2_ptr is not None:
                        bias = tl.load(b2_ptr + expert * size + rows).to(tl.float32)
                        product += tl.where(leaf == 0, bias, 0.0)[None, :]
                    acc = tl.fma(tl.load(weights_ptr + pair), product, acc)
                    product = tl.zeros_like(product)
                    if step % (TOP_K * steps) == TOP_K * steps - 1:
                        waiting, acc = add_leaf(waiting, acc, leaf - first, stop - first, DEPTH)
    inside = columns < size
    let_next_start(DEPENDENT)
    if LEAF is None:
        if FP8 is None and MXFP4 is None:
            total = tl.sum(acc, 1)
        if b2_ptr is not None:
            for choice in tl.static_range(TOP_K):
                expert = tl.load(experts_ptr + token * TOP_K + choice, mask=live, other=0).to(tl.int64)
                weight = tl.load(weights_ptr + token * TOP_K + choice, mask=live, other=0.0)
                total += weight * tl.load(b2_ptr + expert * size + rows).to(tl.float32)
        if shared_ptr is not None:
            gate_ptr = logits_ptr + token * logits_stride + num_experts
            total += shared_of(shared_ptr + token * size, gate_ptr, columns, live, inside, part_stride, PARTS, GATED)
        tl.store(out_ptr + token * size + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        out_row = out_ptr + (part * tl.num_programs(0) + token).to(tl.int64) * size
        tl.store(out_row + mma_rows * size + columns[None, :], acc, mask=is_row & inside[None, :])


def sum_pairs(
    tokens: Tokens,
    w13: ExpertWeight,
    w2: ExpertWeight,
    leaf: int | None,
    nodes: tuple[Span, ...],
    tiles: Tiles,
    parts: tuple[Span, ...] | None,
    out: torch.Tensor,
) -> None:
    """Writes `out` as in `moe.mixture`, with `leaf` and `nodes`. `parts` are subtrees of the nodes."""
    hidden, experts, weights = pair_gate_up(tokens, w13, tiles.gate_up, exact=leaf is not None)
    num_tokens, size = out.shape[-2:]
    width, dependent, tile = w2.shape[2], has_dependent_launch(out.device), tiles.down
    blocks_n = triton.cdiv(size, tile.block_n)
    if leaf is None:
        parts, block_k = nodes, fitting(tile.block_k, width)
    else:
        parts = parts or cut_nodes(nodes, min(triton.cdiv(_ENOUGH_PROGRAMS, num_tokens * blocks_n), _MAX_CUTS))
        block_k = fitting_leaf(tile.block_k, leaf)
    pieces, how = pieces_for(w2, tile, block_k, leaf)
    sums = out if parts == nodes else torch.empty((len(parts), num_tokens, size), device=out.device)
    low, high, depth = pack_parts(parts) if parts else (0, 0, 0)
    _pair_down_kernel[(num_tokens, blocks_n, len(parts) or 1)](
        sums,
        hidden,
        *pieces,
        None if tokens.biases is None else tokens.biases.down,
        experts,
        weights,
        tokens.shared,
        *tokens.places,
        low,
        high,
        width=width,
        size=size,
        SIDE=triton.next_power_of_2(tokens.top_k),
        PARTS=len(tokens.logits),
        GATED=tokens.has_shared_gate,
        LEAF=leaf,
        DEPTH=depth,
        TOP_K=tokens.top_k,
        BLOCK_N=tile.block_n,
        **how,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    if sums is not out:
        sum_subtrees(sums, *additions_of(parts, nodes), out=out)


def pair_gate_up(
    tokens: Tokens, w13: ExpertWeight, tile: Tile, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes for every pair the input of its expert's down product [num_pairs, width], the expert [num_pairs] int32,
    and its weight [num_pairs] fp32. All are undefined for padding tokens."""
    num_pairs, width = len(tokens.x) * tokens.top_k, w13.shape[1] // (1 + tokens.has_gate)
    size, device, dependent = w13.shape[2], w13.device, has_dependent_launch(w13.device)
    pieces, how = pieces_for(w13, tile, tile.block_k, 0 if exact else None)
    bias, activation = tokens.activation
    hidden = torch.empty((num_pairs, width), dtype=tokens.x.dtype, device=device)
    experts = torch.empty(num_pairs, dtype=torch.int32, device=device)
    weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    _pair_gate_up_kernel[(num_pairs, triton.cdiv(width, tile.block_n))](
        hidden,
        experts,
        weights,
        tokens.x,
        *pieces,
        bias,
        tokens.scoring.bias,
        *tokens.places,
        tokens.x.stride(0),
        width=width,
        size=size,
        SIDE=tile.block_k // GROUP_COLUMNS,
        PARTS=len(tokens.logits),
        TOP_K=tokens.top_k,
        NORMALISE=tokens.normalise,
        WEIGHT_SCALE=tokens.weight_scale,
        ROUND_TO=TRITON_DTYPES[tokens.round_to],
        BLOCK_E=triton.next_power_of_2(tokens.num_experts),
        BLOCK_N=tile.block_n,
        **how,
        EXACT=exact,
        **tokens.scoring.constants,
        SCALES_INPUT=tokens.scoring.scales_input,
        **activation,
        DEPENDENT=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=dependent,
    )
    return hidden, experts, weights
