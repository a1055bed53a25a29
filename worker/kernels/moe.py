"""A mixture of experts over one rank's columns, from router logits to the sum over each token's experts.

For few tokens it takes three kernels, in which each (token, expert) pair reads its expert's weights separately. The
choice of experts is part of the first product over them, and the sum over experts is part of the second. For more
tokens it takes five kernels: pairs are gathered by expert (worker/kernels/routing.py), and two grouped products process
blocks of an expert's pairs, so that its weights are read once for all its tokens. The weights of experts that no token
chose are not read. Nothing waits for the device, and grids depend only on shapes, so a CUDA graph can capture it.

In exact numerics the result is nodes of the sum over an expert's columns, which are divided among the ranks. The
columns form leaves of one width. A token's leaf is a chain of fused multiply-adds over its experts, the likeliest
first. Each adds the expert's weight times its down product over the leaf, which is itself one ascending chain of MMAs.
Nodes are halving trees of leaves, as in node_gemm.py. All earlier values are computed whole: logits, weights, and the
first products, which are ascending chains of MMAs. So the bits of a token's node depend only on the token and the
weights. For few tokens leaves are added in registers, and by a third kernel if there would be too few programs. For
more tokens, the grouped products store every pair's leaves separately, and the last kernel adds them. Both process only
as many of the output's columns at a time as fit a memory bound.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start, let_next_start_beside
from parallel.kernels.shared_memory import fitting_stages, has_little
from parallel.numerics.fp8 import Fp8Matrix
from parallel.numerics.kernels.node_gemm import add_leaf, border, pack_parts
from parallel.numerics.mxfp4 import Mxfp4Matrix
from parallel.plan import Span
from worker.kernels.gate_and_up import activated
from worker.kernels.grouped_experts import (
    Biases,
    ExpertWeight,
    Tile,
    Tiles,
    Tokens,
    grouped_down,
    grouped_gate_up,
)
from worker.kernels.pair_experts import sum_pairs
from worker.kernels.routing import (
    SOFTMAX,
    Scoring,
    is_live,
    load_logits,
    router_logits,
    shared_of,
    sigmoid,
)


@triton.jit(do_not_specialize=["first_slot", "part_stride", "num_tokens", "low", "high", "first_column"])
def _combine_kernel(
    out_ptr, y_ptr, weights_ptr, shared_ptr, logits_ptr, slots_ptr, first_slot, num_experts, logits_stride, part_stride,
    num_tokens, low, high, size, first_column, num_columns, PARTS: tl.constexpr, GATED: tl.constexpr,
    DEPTH: tl.constexpr, NUM_SUMMANDS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[token] = the sum of its pairs' y, the likeliest expert's first, plus the shared expert, perhaps gated; 0 for
    padding.

    With a DEPTH, out[node, token] = the node's sum over y [num_leaves, num_pairs, num_columns], with the pairs'
    weights.
    """
    token, node = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    if DEPTH is not None:
        first, stop = border(low, high, node), border(low, high, node + 1)
    follow(DEPENDENT)
    let_next_start_beside(DEPENDENT)
    live = is_live(slots_ptr, token, True, first_slot)
    acc = tl.zeros([BLOCK], tl.float32)
    if DEPTH is None:
        for choice in tl.static_range(NUM_SUMMANDS):
            row = (token * NUM_SUMMANDS + choice) * num_columns
            acc += tl.load(y_ptr + row + columns, mask=live & inside, other=0.0).to(tl.float32)
        if shared_ptr is not None:
            gate_ptr = logits_ptr + token * logits_stride + num_experts
            acc += shared_of(shared_ptr + token * size, gate_ptr, columns, live, inside, part_stride, PARTS, GATED)
    else:
        waiting = (acc,) * DEPTH
        for leaf in tl.range(0, tl.where(live, stop - first, 0)):
            for choice in tl.static_range(NUM_SUMMANDS):
                pair = token * NUM_SUMMANDS + choice
                row = ((first + leaf) * num_tokens * NUM_SUMMANDS + pair) * num_columns
                product = tl.load(y_ptr + row + columns, mask=inside, other=0.0)
                acc = tl.fma(tl.load(weights_ptr + pair), product, acc)
            waiting, acc = add_leaf(waiting, acc, leaf, stop - first, DEPTH)
    let_next_start(DEPENDENT)
    out_row = out_ptr + token * size
    if DEPTH is not None:
        out_row += node.to(tl.int64) * num_tokens * size + first_column
    tl.store(out_row + columns, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_slot", "part_stride"])
def _activate_shared_kernel(
    out_ptr, x_ptr, logits_ptr, slots_ptr, first_slot, gate_column, logits_stride, part_stride, size, x_stride,
    PARTS: tl.constexpr, GATED: tl.constexpr, HAS_GATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = is_live(slots_ptr, token, True, first_slot)
    inside = live & (columns < size)
    gate_ptrs = x_ptr + token * x_stride + columns
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + size, mask=inside, other=0.0).to(tl.float32) if HAS_GATE else gate
    hidden = activated(gate, up, None, 0, columns, size, HAS_GATE, None, None)
    if GATED:
        hidden *= sigmoid(load_logits(logits_ptr + token * logits_stride + gate_column, live, part_stride, PARTS))
    tl.store(out_ptr + token * size + columns, hidden.to(out_ptr.dtype.element_ty), mask=columns < size)


_PAIR_TOKENS: dict[type, int] = {Mxfp4Matrix: 4}
"""Up to this number of tokens, or else 8, every pair reads its expert separately, since few experts are then chosen
twice. Grouped products take 1.2 to 1.7 times as long for one token, and 0.84 times as long for eight with experts in
four bits (benchmarks/results/moe_pairs_h200_2026-11-28.txt)."""
_PAIR_EXPERTS = 128
"""Maximum number of experts for pairs that read separately, because each program then compares all experts."""

# Measured on an H200 for Qwen3-30B-A3B, whole and halved.
_PAIR = Tiles(1, gate_up=Tile(8, 256, 4, 4), down=Tile(4, 128, 1, 8))
# Each entry holds up to this number of pairs for each expert of the model.
_GROUPED = (
    (8.0, Tiles(16, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3))),
    (16.0, Tiles(32, gate_up=Tile(64, 128, 4, 3), down=Tile(256, 64, 8, 3))),
    (128.0, Tiles(64, gate_up=Tile(128, 64, 8, 4), down=Tile(256, 64, 8, 3))),
    (float("inf"), Tiles(128, gate_up=Tile(128, 64, 8, 4), down=Tile(256, 64, 8, 3))),
)
# Weights in FP8 have separate tiles with steps of whole groups of columns. In the pairs' first product, a step has
# several groups side by side. Measured on an H200 for Qwen3-30B-A3B (`--sweep`,
# benchmarks/results/fp8_tiles_h200_2026-11-26.txt).
_FP8_PAIR = Tiles(1, gate_up=Tile(16, 512, 4, 3), down=Tile(16, 128, 8, 3))
_FP8_GROUPED = (
    (8.0, Tiles(16, gate_up=Tile(32, 128, 4, 6), down=Tile(128, 128, 4, 3))),
    (16.0, Tiles(32, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 4))),
    (128.0, Tiles(64, gate_up=Tile(64, 128, 4, 4), down=Tile(128, 128, 4, 4))),
    (float("inf"), Tiles(64, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3))),
)
# Weights in four bits too have separate tiles, in steps of groups of 128 columns. Measured for gpt-oss-20b (same file).
_MXFP4_PAIR = Tiles(1, gate_up=Tile(16, 256, 2, 3), down=Tile(16, 128, 4, 4))
_MXFP4_GROUPED = (
    (8.0, Tiles(16, gate_up=Tile(32, 128, 2, 4), down=Tile(64, 128, 4, 4))),
    (64.0, Tiles(32, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3))),
    (128.0, Tiles(64, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3))),
    (float("inf"), Tiles(128, gate_up=Tile(64, 128, 4, 2), down=Tile(128, 128, 4, 2))),
)
_PLAIN = _PAIR, _GROUPED
_TABLES = {Fp8Matrix: (_FP8_PAIR, _FP8_GROUPED), Mxfp4Matrix: (_MXFP4_PAIR, _MXFP4_GROUPED)}
_COMBINE_BLOCK = 1024
_ACT_BLOCK = 1024

# The fastest with bf16 on an H200 (the same file).
_EXACT_PAIR = Tiles(1, gate_up=Tile(32, 128, 4, 4), down=Tile(32, 64, 1, 10))
# Replace the table's tiles if pairs' leaves are stored on the way, which takes shared memory.
_EXACT_DOWN = {16: Tile(128, 64, 4, 4), 32: Tile(128, 64, 4, 4), 64: Tile(128, 64, 8, 4), 128: Tile(128, 64, 8, 4)}
MOST_BYTES = 24 << 20
"""Maximum bytes of pairs' leaves at a time, so that they are still in the L2 cache. One column block may exceed it."""


def choose_tiles(
    num_tokens: int, top_k: int, num_experts: int, kind: type = torch.Tensor, exact: bool = False
) -> Tiles:
    """The table's tiles for this number of tokens and kind of weights. `block_m` 1 is a program for every pair."""
    if num_tokens <= _PAIR_TOKENS.get(kind, 8) and num_experts <= _PAIR_EXPERTS:
        return _EXACT_PAIR if exact else _TABLES.get(kind, _PLAIN)[0]
    pairs_each = num_tokens * top_k / num_experts
    tiles = next(it for most, it in (_PLAIN if exact else _TABLES.get(kind, _PLAIN))[1] if pairs_each <= most)
    return replace(tiles, down=_EXACT_DOWN[tiles.block_m]) if exact else tiles


def mixture(
    x: torch.Tensor,
    router: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    *,
    top_k: int,
    normalise: bool,
    round_to: torch.dtype,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
    first_slot: int = 0,
    weight_scale: float = 1.0,
    scoring: Scoring = SOFTMAX,
    biases: Biases | None = None,
    shared: torch.Tensor | None = None,
    latents: torch.Tensor | None = None,
    leaf: int | None = None,
    nodes: tuple[Span, ...] = (),
    tiles: Tiles | None = None,
    parts: tuple[Span, ...] | None = None,
    most_bytes: int = MOST_BYTES,
) -> torch.Tensor:
    """Sum over each token's top k experts of weight * w2 @ (silu(gate) * up), and the shared expert, perhaps gated.
    Without gates it is w2 @ relu2(up).

    Weights are a softmax over all experts, or determined by `scoring`. Sums over inputs and over experts are fp32.

    Args:
        x: [num_tokens, size], contiguous within a row, with any row stride.
        router: [num_experts, size] of x's dtype, contiguous. One more row if the shared expert has a gate.
        w13: [num_experts, 2 * width, size] of x's dtype, contiguous, or in FP8: this rank's gate rows of each expert,
            then its up rows. In four bits, gate and up rows alternate. Without gates [num_experts, width, size], the up
            rows. The width may be 0.
        w2: [num_experts, size, width] of x's dtype, contiguous, or in FP8 or four bits like w13.
        normalise: divide a token's weights by their sum.
        round_to: dtype to which the weights are rounded last.
        out: the output, [num_tokens, size] of x's dtype, contiguous. With leaves, [len(nodes), num_tokens, size] fp32.
        slots: [num_tokens] int64, or None. Tokens with a slot below `first_slot` are padding: they become 0.
        weight_scale: factor of the weights, before they are rounded.
        biases: biases of the experts and parameters of their activation, if they have any. Not with a shared expert.
        shared: [num_tokens, size] of x's dtype, contiguous: the shared expert's part. Not with leaves.
        latents: [num_tokens, latent size]: what experts read instead of x. `size` of all others is then this size.
        leaf: columns of a leaf, which divide the width. If None, numerics are not exact.
        nodes: the range of leaves of each node, consecutive, from the rank's first leaf to its last.
        tiles: for measurements, like `parts` and `most_bytes`. Chosen by shape by default.

    Returns:
        The router's logits, as from `router_logits`, for `activate_shared`.
    """
    (num_experts, _, width), num_tokens = w2.shape, len(x)
    num_leaves = nodes[-1].stop - nodes[0].start if nodes else 0
    assert leaf is None or width == leaf * num_leaves, f"{nodes} of {leaf} are not {width} columns"
    assert leaf is None or out.dtype is torch.float32, f"nodes are fp32, not {out.dtype}"
    if num_tokens == 0:
        return torch.empty((1, 0, len(router)), device=x.device)
    tiles = tiles or choose_tiles(num_tokens, top_k, num_experts, type(w13), exact=leaf is not None)
    if has_little(x.device):
        both = tiles.gate_up, tiles.down
        fitting = [replace(it, num_stages=fitting_stages(it.num_stages, tiles.block_m, x.device)) for it in both]
        tiles = Tiles(tiles.block_m, *fitting)
    counts = None
    if width > 0 and tiles.block_m > 1:
        counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    logits = router_logits(x, router, counts, None if biases is None else biases.router)
    tokens = Tokens(
        x if latents is None else latents, logits, slots, first_slot, num_experts, top_k, normalise, weight_scale,
        round_to, shared, scoring, biases, has_gate=w13.shape[1] == 2 * width,
    )  # fmt: skip
    if counts is not None:
        _sum_groups(tokens, counts, w13, w2, leaf, nodes, tiles, most_bytes, out)
    elif width > 0:
        sum_pairs(tokens, w13, w2, leaf, nodes, tiles, parts, out)
    elif leaf is None:
        _combine(None, None, 0, tokens, nodes, 0, out)
    return logits


def _sum_groups(
    tokens: Tokens,
    counts: torch.Tensor,
    w13: ExpertWeight,
    w2: ExpertWeight,
    leaf: int | None,
    nodes: tuple[Span, ...],
    tiles: Tiles,
    most_bytes: int,
    out: torch.Tensor,
) -> None:
    routes, hidden = grouped_gate_up(tokens, counts, w13, tiles, exact=leaf is not None)
    size, block_n, num_leaves, step = out.shape[-1], tiles.down.block_n, 1, out.shape[-1]
    if leaf is not None:
        num_leaves = w2.shape[2] // leaf
        fitting_columns = most_bytes // (4 * num_leaves * len(hidden)) // block_n * block_n
        step = min(max(fitting_columns, block_n), size)
    room = torch.empty(num_leaves * len(hidden) * step, dtype=out.dtype, device=out.device)
    for first_column in range(0, size, step):
        num_columns = min(step, size - first_column)
        y = room[: num_leaves * len(hidden) * num_columns].view(num_leaves, len(hidden), num_columns)
        bias = None if tokens.biases is None else tokens.biases.down
        grouped_down(hidden, w2, routes, tiles, y, bias=bias, first_column=first_column, leaf=leaf)
        _combine(y, None if leaf is None else routes.weights, tokens.top_k, tokens, nodes, first_column, out)


def _combine(
    y: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_summands: int,
    tokens: Tokens,
    nodes: tuple[Span, ...],
    first_column: int,
    out: torch.Tensor,
) -> None:
    num_tokens, size = out.shape[-2:]
    num_columns = size if y is None else y.shape[-1]
    dependent = has_dependent_launch(out.device)
    block = min(triton.next_power_of_2(num_columns), _COMBINE_BLOCK)
    low, high, depth = pack_parts(nodes) if nodes else (0, 0, None)
    _combine_kernel[(num_tokens, triton.cdiv(num_columns, block), len(nodes) or 1)](
        out,
        y,
        weights,
        tokens.shared,
        *tokens.places,
        num_tokens,
        low,
        high,
        size,
        first_column,
        num_columns,
        PARTS=len(tokens.logits),
        GATED=tokens.has_shared_gate,
        DEPTH=depth,
        NUM_SUMMANDS=num_summands,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=4 if weights is None else max(block // 256, 1),
        launch_pdl=dependent,
    )


def activate_shared(
    x: torch.Tensor,
    logits: torch.Tensor,
    num_experts: int,
    slots: torch.Tensor | None,
    first_slot: int,
    *,
    has_gate: bool = True,
) -> torch.Tensor:
    """silu(gate) * up, times the sigmoid of the shared expert's logit if it has one, rounded once; 0 for padding.

    Args:
        x: [num_tokens, 2 * size], gate then up, contiguous within a row, with any row stride.
        has_gate: if False, x is up [num_tokens, size], and the activation is relu2.
        logits: as from `router_logits`. A column after the first `num_experts` is the shared expert's logit.
        slots, first_slot: as in `moe.mixture`.

    Returns:
        [num_tokens, size], contiguous, of x's dtype.
    """
    num_tokens, size = x.shape[0], x.shape[1] // (1 + has_gate)
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    parts, _, num_logits = logits.shape
    _activate_shared_kernel[(num_tokens, triton.cdiv(size, _ACT_BLOCK))](
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
        HAS_GATE=has_gate,
        BLOCK=_ACT_BLOCK,
        num_warps=4,
    )
    return out
