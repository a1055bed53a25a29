"""Routes each token to its experts: router logits, their top k, and the (token, expert) pairs of every expert.

A *pair* is token * top_k + choice. On any rank and in any batch, a token's logits are summed in one order, its weights
in integers, and ties go to the first expert, so all ranks route alike, bit for bit. The order of one expert's pairs is
not fixed, because a grouped product computes each row alike in any position. Tokens of a graph's padding, which write
their keys and values below the pool's first slot, go to no expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start

LOGIT_PARTS = 4
"""Number of parts of a router's product over the inputs. The logits are the sum of the parts, in order."""

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

_LOGITS_BLOCK_K = 128
_ROUTE_BLOCK_T = 4
"""Tokens of one program, with one warp for each."""

_NONE = tl.constexpr(-(1 << 63))


@triton.jit
def is_live(slots_ptr, tokens, mask, first_slot):
    """Whether tokens are not padding. If there are no slots, all tokens in `mask` count."""
    live = mask
    if slots_ptr is not None:
        live = mask & (tl.load(slots_ptr + tokens, mask=mask, other=0) >= first_slot)
    return live


@triton.jit
def load_logits(pointers, mask, part_stride, PARTS: tl.constexpr):
    """The sums of a router's PARTS parts, in order."""
    logits = tl.load(pointers, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(pointers + part * part_stride, mask=mask, other=0.0)
    return logits


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def shared_of(row_ptr, gate_ptr, columns, live, inside, part_stride, PARTS: tl.constexpr, GATED: tl.constexpr):
    """The shared expert's part of a token, perhaps gated; 0 for padding."""
    shared = tl.load(row_ptr + columns, mask=live & inside, other=0.0).to(tl.float32)
    if GATED:
        shared *= sigmoid(load_logits(gate_ptr, live, part_stride, PARTS))
    return shared


@triton.jit
def of_best_groups(
    choice, experts, inside, num_experts, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """`choice` [tokens, experts] for experts in a token's TOP_GROUPS best groups, -inf for all other experts. A group
    ranks by its best expert, or with PAIRS by the sum of its two best. Ties go to the first group."""
    choice = tl.where(inside & (choice == choice), choice, float("-inf"))
    group_of = experts // (num_experts // GROUPS)
    groups = tl.arange(0, BLOCK_G)[None, :]
    scores = tl.full([choice.shape[0], BLOCK_G], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(group_of == group, choice, float("-inf"))
        score = tl.max(own, 1)[:, None]
        if PAIRS:
            first = tl.min(tl.where(own == score, experts, num_experts), 1)[:, None]
            score += tl.max(tl.where(experts == first, float("-inf"), own), 1)[:, None]
        scores = tl.where(groups == group, score, scores)
    is_open = inside & (group_of < 0)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(scores, 1)[:, None]
        chosen = tl.min(tl.where(scores == best, groups, GROUPS), 1)[:, None]
        scores = tl.where(groups == chosen, float("-inf"), scores)
        is_open |= group_of == chosen
    return tl.where(is_open, choice, float("-inf"))


@triton.jit
def compare_logits(
    logits_ptr, bias_ptr, num_experts, part_stride, PARTS: tl.constexpr, BLOCK_E: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A token's logits, and the number of experts before each in the ranking. NaN and padding rank last."""
    ids = tl.arange(0, BLOCK_E)
    inside = ids < num_experts
    logits = load_logits(logits_ptr + ids, inside, part_stride, PARTS)
    choice = logits
    if bias_ptr is not None:
        choice = sigmoid(logits) + tl.load(bias_ptr + ids, mask=inside, other=0.0)
    ordered = tl.where(inside & (choice == choice), choice, float("-inf"))
    if TOP_GROUPS < GROUPS:
        ordered = of_best_groups(
            ordered[None, :], ids[None, :], inside[None, :], num_experts, GROUPS, TOP_GROUPS, BLOCK_G,
            bias_ptr is not None,
        )  # fmt: skip
        ordered = tl.reshape(ordered, [BLOCK_E])
    # Summed over rows, which each thread holds itself. Sums over columns would need all threads for every row.
    return logits, tl.sum((ordered[:, None] > ordered[None, :]).to(tl.int32), 0)


@triton.jit
def nth_expert(num_above, choice, BLOCK_E: tl.constexpr):
    """The expert with rank `choice`. Ties go to the first expert, as in `_route_kernel`."""
    above = tl.max(tl.where(num_above <= choice, num_above, 0), 0)
    is_equal = num_above == above
    nth = tl.cumsum(is_equal.to(tl.int32), 0) - 1
    return tl.sum(tl.where(is_equal & (nth == choice - above), tl.arange(0, BLOCK_E), 0), 0)


@triton.jit
def in_units(shares):
    """Shares of at most 1 as integers in units of 2 ** -40. Their sums have the same bits in any order and kernel."""
    return (shares * 1099511627776.0).to(tl.int64)


@triton.jit
def from_units(total):
    return total.to(tl.float32) * (1.0 / 1099511627776.0)


@triton.jit
def normalised(shares, top_shares):
    """`shares` over the sum of `top_shares`, both [tokens, experts], plus 1e-20. Equal bits in any order."""
    largest = tl.maximum(tl.max(top_shares, 1), 1e-30)[:, None]
    total = from_units(tl.sum(in_units(top_shares / largest), 1))[:, None]
    return shares / tl.fma(total, largest, 1e-20)


@triton.jit
def weight_of(
    expert, logits, num_above, num_experts, TOP_K: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """The weight of one of a token's experts."""
    ids = tl.arange(0, BLOCK_E)
    inside = ids < num_experts
    if SIGMOID:
        scores = tl.where(inside, sigmoid(logits), 0.0)
        if NORMALISE:
            last = tl.max(tl.where(num_above < TOP_K, num_above, 0), 0)
            nth = tl.cumsum((num_above == last).to(tl.int32), 0) - 1
            is_top = (num_above < last) | ((num_above == last) & (nth < TOP_K - last))
            scores = tl.reshape(normalised(scores[None, :], tl.where(is_top, scores, 0.0)[None, :]), [BLOCK_E])
        return tl.sum(tl.where(ids == expert, scores, 0.0), 0)
    largest = tl.max(tl.where(inside, logits, float("-inf")), 0)
    shares = tl.where(inside, tl.exp(logits - largest), 0.0)
    if NORMALISE:
        # Experts outside the top k may equal the last of the top k.
        last = tl.max(tl.where(num_above < TOP_K, num_above, 0), 0)
        last_share = tl.max(tl.where(num_above == last, shares, 0.0), 0)
        above = tl.sum(in_units(tl.where(num_above < last, shares, 0.0)), 0)
        total = above + (TOP_K - last) * in_units(last_share)
    else:
        total = tl.sum(in_units(shares), 0)
    return tl.sum(tl.where(ids == expert, shares, 0.0), 0) / from_units(total)


@triton.jit
def find_block(counts_ptr, block, num_experts, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """A block's expert, the index of its first pair in that expert, and the expert's number of pairs. 0 after the last.

    Every expert's pairs fill separate blocks, the last one perhaps partly.
    """
    ids = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + ids, mask=ids < num_experts, other=0)
    num_blocks = tl.cdiv(counts, BLOCK_M)
    in_front = tl.cumsum(num_blocks, 0) - num_blocks
    is_expert = (block >= in_front) & (block < in_front + num_blocks)
    expert = tl.sum(tl.where(is_expert, ids, 0), 0)
    first = tl.sum(tl.where(is_expert, (block - in_front) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(is_expert, counts, 0), 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    logits_ptr, counts_ptr, x_ptr, weight_ptr, bias_ptr, num_tokens, num_experts, N, K, x_stride, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
    let_next_start(DEPENDENT)
    if counts_ptr is not None:
        # The next kernel counts every expert's pairs here.
        experts = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(counts_ptr + experts, tl.zeros([BLOCK_N], tl.int32), mask=experts < num_experts)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    present = (rows < num_tokens)[:, None]
    x_rows = x_ptr + tl.minimum(rows, num_tokens - 1).to(tl.int64)[:, None] * x_stride
    w_rows = weight_ptr + tl.minimum(columns, N - 1)[:, None] * K
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), PARTS)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        k = (part * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            x, w = tl.load(x_rows + k), tl.load(w_rows + k)
        else:
            x, w = tl.load(x_rows + k, mask=k < K, other=0.0), tl.load(w_rows + k, mask=k < K, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        acc += tl.where(part == 0, bias, 0.0)[None, :]
    out = logits_ptr + (part * num_tokens + rows).to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out, acc, mask=present & (columns < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "first_slot", "part_stride"])
def _route_kernel(
    weights_ptr, pairs_ptr, counts_ptr, logits_ptr, slots_ptr, bias_ptr, num_tokens, first_slot, num_experts,
    logits_stride, part_stride, PARTS: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr, ROUND_TO: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_TOP: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    follow(DEPENDENT)
    let_next_start(DEPENDENT)
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)[None, :]
    present = tokens < num_tokens
    live = is_live(slots_ptr, tokens, present, first_slot)
    inside = tl.broadcast_to(experts < num_experts, [BLOCK_T, BLOCK_E])
    pointers = logits_ptr + tokens.to(tl.int64)[:, None] * logits_stride + experts
    logits = load_logits(pointers, live[:, None] & inside, part_stride, PARTS)
    choice = logits
    if SIGMOID:
        shares = tl.where(inside, sigmoid(logits), 0.0)
        if bias_ptr is not None:
            choice = shares + tl.load(bias_ptr + experts, mask=experts < num_experts, other=0.0)
    else:
        largest = tl.max(tl.where(inside, logits, float("-inf")), 1)
        shares = tl.where(inside, tl.exp(logits - largest[:, None]), 0.0)
    if TOP_GROUPS < GROUPS:
        choice = of_best_groups(choice, experts, inside, num_experts, GROUPS, TOP_GROUPS, BLOCK_G, bias_ptr is not None)
    # Keys in the order of choice, with the first of equal experts on top. NaN is below all, and padding even lower.
    bits = choice.to(tl.int32, bitcast=True)
    ordered = tl.where(choice == choice, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - experts).to(tl.int64)
    keys = tl.where(inside, keys, _NONE)
    choices = tl.arange(0, BLOCK_TOP)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_TOP], tl.int32)
    chosen_shares = tl.zeros([BLOCK_T, BLOCK_TOP], tl.float32)
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 1)[:, None]
        is_best = keys == best
        share = tl.sum(tl.where(is_best, shares, 0.0), 1)[:, None]
        keys = tl.where(is_best, _NONE, keys)
        chosen = tl.where(choices == choice, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
        chosen_shares = tl.where(choices == choice, share, chosen_shares)
    if SIGMOID:
        weights = normalised(chosen_shares, chosen_shares) if NORMALISE else chosen_shares
    else:
        total = from_units(tl.sum(in_units(chosen_shares if NORMALISE else shares), 1))
        weights = chosen_shares / total[:, None]
    weights = (weights * WEIGHT_SCALE).to(ROUND_TO).to(tl.float32)
    stored = live[:, None] & (choices < TOP_K)
    pairs = tokens[:, None] * TOP_K + choices
    tl.store(weights_ptr + pairs, weights, mask=stored)
    place = tl.atomic_add(counts_ptr + chosen, 1, mask=stored, sem="relaxed")
    tl.store(pairs_ptr + chosen.to(tl.int64) * num_tokens + place, pairs, mask=stored)


@dataclass(frozen=True)
class Scoring:
    """How logits determine the choice of experts and their weights. The default is a softmax over all experts."""

    sigmoid: bool = False
    """Weights are sigmoids of logits."""
    bias: torch.Tensor | None = None
    """[num_experts] fp32, added to sigmoids only for the choice."""
    num_groups: int = 1
    """Number of equal groups of neighbouring experts."""
    top_groups: int = 1
    """Number of groups to choose experts from. Groups rank by their best expert, or with a bias by their two best."""
    scales_input: bool = False
    """Whether a weight multiplies the expert's input instead of its output."""

    @cached_property
    def constants(self) -> dict[str, bool | int]:
        """The kernels' arguments."""
        groups = {"GROUPS": self.num_groups, "TOP_GROUPS": self.top_groups}
        return {"SIGMOID": self.sigmoid, **groups, "BLOCK_G": triton.next_power_of_2(self.num_groups)}


SOFTMAX = Scoring()


@dataclass(frozen=True, slots=True)
class Routes:
    """The pairs of every expert."""

    weights: torch.Tensor
    """[num_tokens, top_k] fp32, the likeliest expert's first; undefined for padding tokens."""
    pairs: torch.Tensor
    """[num_experts, num_tokens] int32: each expert's pairs, in any order; undefined past the expert's count."""
    counts: torch.Tensor
    """[num_experts] int32: number of each expert's pairs."""


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Parts of x @ weight.T + bias in fp32. Their bits do not depend on the other rows of x.

    Args:
        x: [num_tokens, hidden], at least one token, contiguous within a row.
        weight: [num_logits, hidden] of x's dtype, contiguous.
        counts: [num_experts] int32 or None, at most num_logits elements. Set to 0, for `route`.
        bias: [num_logits] fp32, or None for no bias.

    Returns:
        [LOGIT_PARTS, num_tokens, num_logits] fp32. The sum over the first dimension gives the logits.
    """
    (num_tokens, hidden), num_logits = x.shape, len(weight)
    assert counts is None or len(counts) <= num_logits, "there are more counts than logits"
    logits = torch.empty((LOGIT_PARTS, num_tokens, num_logits), dtype=torch.float32, device=x.device)
    # Tiles of up to 32 rows use one instruction, so with equal steps the sums have one order for any number of tokens.
    block_m, block_n, num_warps, num_stages = (16, 16, 2, 4) if num_tokens <= 256 else (32, 64, 4, 3)
    dependent = has_dependent_launch(x.device)
    _logits_kernel[(triton.cdiv(num_tokens, block_m), triton.cdiv(num_logits, block_n), LOGIT_PARTS)](
        logits,
        counts,
        x,
        weight,
        bias,
        num_tokens,
        0 if counts is None else len(counts),
        num_logits,
        hidden,
        x.stride(0),
        PARTS=LOGIT_PARTS,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=_LOGITS_BLOCK_K,
        EVEN_K=hidden % (_LOGITS_BLOCK_K * LOGIT_PARTS) == 0,
        STAGES=num_stages,
        DEPENDENT=dependent,
        num_warps=num_warps,
        num_stages=num_stages,
        launch_pdl=dependent,
    )
    return logits


def route(
    logits: torch.Tensor,
    counts: torch.Tensor,
    *,
    top_k: int,
    normalise: bool,
    round_to: torch.dtype,
    weight_scale: float = 1.0,
    scoring: Scoring = SOFTMAX,
    slots: torch.Tensor | None = None,
    first_slot: int = 0,
) -> Routes:
    """The top k of every token's experts, and the pairs of each expert.

    Args:
        logits: as from `router_logits`, of num_experts experts. Further logits are ignored.
        counts: [num_experts] int32 zeros. Becomes the routes' counts.
        normalise: divide a token's weights by their sum.
        round_to: dtype to which the weights are rounded last. fp32 does not change them.
        weight_scale: factor of the weights, before they are rounded.
        scoring: how weights follow from logits.
        slots: [num_tokens] int64, or None. Tokens with a slot below `first_slot` are padding and go to no expert.
    """
    parts, num_tokens, num_logits = logits.shape
    num_experts = len(counts)
    assert top_k <= num_experts <= num_logits, f"top {top_k} of {num_experts} experts with {num_logits} logits"
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    pairs = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=logits.device)
    dependent = has_dependent_launch(logits.device)
    _route_kernel[(triton.cdiv(num_tokens, _ROUTE_BLOCK_T),)](
        weights,
        pairs,
        counts,
        logits,
        slots,
        scoring.bias,
        num_tokens,
        first_slot,
        num_experts,
        num_logits,
        num_tokens * num_logits,
        PARTS=parts,
        TOP_K=top_k,
        NORMALISE=normalise,
        WEIGHT_SCALE=weight_scale,
        ROUND_TO=TRITON_DTYPES[round_to],
        BLOCK_T=_ROUTE_BLOCK_T,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_TOP=triton.next_power_of_2(top_k),
        **scoring.constants,
        DEPENDENT=dependent,
        num_warps=_ROUTE_BLOCK_T,
        launch_pdl=dependent,
    )
    return Routes(weights, pairs, counts)


def max_blocks(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> int:
    """Maximum number of blocks that pairs can fill, for any choice of experts."""
    num_pairs = num_tokens * top_k
    return min(num_pairs, num_pairs // block_m + num_experts)
