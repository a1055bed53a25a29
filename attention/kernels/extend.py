"""Attention of any new tokens over the paged KV cache: prompts, chunks after a cached prefix, decodes, and mixtures.

A program walks the keys that one tile of queries sees. A tile has tokens of one row and, for each token, the query
heads of one KV head, so that keys are read once for all of them. Key blocks are walked upwards from the first visible
one, with fp32 sums and one division at the end. A block without visible keys for a query changes no bit of its sums. So
the bits of an output depend on its own keys and on `ExtendTuning`, but not on other rows or on a prompt's chunks.

With SPAN, the same kernel follows the contract of exact.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.forward_batch import NewTokenMask, PagedMetadata
from attention.kernels.pages import (
    ONE_PAGE,
    ROWS_AT_ONCE,
    block_of,
    first_key,
    first_tile,
    for_cache,
    masked_load,
    pages_of,
    row_of_tile,
    slots_in_page,
    slots_of,
)
from attention.kernels.sums import (
    add_block,
    add_tile,
    cap,
    empty_span,
    exact_answer,
    exact_cap,
    first_sums,
    leave_span,
    merge_span,
    scaled_sink,
)
from attention.layer import AttentionLayer
from parallel.kernels.dependent_launch import follow, let_next_start
from parallel.kernels.shared_memory import has_little, is_b200


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtendTuning:
    """The layout of the work. The last bits of an output depend on every field except `num_stages`."""

    block_m: int
    """(token, query head) pairs per tile: a power of two, at least 16."""
    block_n: int
    """Keys per block: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Number of key and value blocks that are being loaded, plus one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """How the kernel adds up a tile's keys in spans."""

    span: int
    """Keys per span: a power of two and a multiple of the tuning's `block_n`."""
    num_parts: int
    """Largest number of spans with visible keys for one query."""
    num_runs: int
    """Number of programs that walk the spans of a tile. If there are several, each writes its spans' sums to memory."""
    one_token: bool
    """Whether every row has one token. A tile then has heads of one row."""
    is_early: bool
    """Whether the merging kernel may start while spans are still walked."""


def choose(v_dim: int, dtype: torch.dtype, device: torch.device) -> ExtendTuning:
    """The layout for H200s: the largest tiles that hardly spill registers. 420 to 463 TFLOP/s, 73 to 97 % of FA3's, for
    prompts of 8,192 tokens with heads of 128 (benchmarks/results/attention_h200_2026-11-23.txt). No other was measured.

    It is the same for every batch, so that an output does not depend on other requests. With few or short rows, loading
    the keys takes longer than the products of a partly filled tile. With less shared memory than an H200 or A100 has,
    tiles are half as large, which was not measured.
    """
    if dtype.itemsize > 2:
        # Tensor cores are not used, because their fp32 is TF32. Threads hold whole rows of a product's operands.
        return ExtendTuning(block_m=16, block_n=16, num_warps=4, num_stages=2)
    if has_little(device):
        rows, keys = 32 if v_dim > 256 else 64, 64 if v_dim <= 128 else 32
        return ExtendTuning(block_m=rows, block_n=keys, num_warps=4, num_stages=2)
    if v_dim > 256:
        return ExtendTuning(block_m=64, block_n=32, num_warps=8, num_stages=2 if is_b200(device) else 3)
    return ExtendTuning(block_m=128, block_n=64 if v_dim <= 128 else 32, num_warps=8, num_stages=3)


@triton.jit
def _walk(
    q, q_rest, sums, k_ptr, v_ptr, table_row, first, begin, end, low, stop, positions, first_keys, masked_from,
    mask_ptr, mask_rows, kv_head, num_kv_heads, scale, parts, is_pair, sums_ptr, parts_ptr, HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the key blocks [begin, end) to the tile's sums.

    Not MASKED: every query sees every key. MASKED: keys from `low` to before `stop` exist, and each query sees those
    from its own first key to its own position; from `masked_from` on, its row of the mask decides instead. SPAN: the
    sums are those of the current span and of all spans. At the start of the next span, the span's sums are added to the
    total, or written to memory if the program began before it, at block `first`.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    if SPAN == 0:
        m, total, acc = sums
    else:
        m, total, acc, all_m, all_total, all_acc = sums
    BLOCK_D: tl.constexpr = acc.shape[1]
    KEY_DIM: tl.constexpr = HEAD_DIM if HEAD_DIM < V_DIM else V_DIM
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    in_page = slots_in_page(PAGE_SIZE, BLOCK_N)
    k_stride, v_stride = num_kv_heads * HEAD_DIM, num_kv_heads * V_DIM
    k_tile = in_page * k_stride + (kv_head * HEAD_DIM + dims)[None, :]
    v_tile = in_page * v_stride + (kv_head * V_DIM + dims)[None, :]
    factor = LOG2_E if CAP > 0 else scale * LOG2_E
    page = pages_of(table_row, begin, end, stop, PAGE_SIZE, BLOCK_N)
    for block in tl.range(begin, end):
        slot = slots_of(page, block, PAGE_SIZE, BLOCK_N)
        page = pages_of(table_row, block + 1, end, stop, PAGE_SIZE, BLOCK_N)
        position = block * BLOCK_N + keys
        is_there = (dims < KEY_DIM)[None, :]
        is_value = (dims < V_DIM)[None, :]
        if MASKED:
            # Missing keys are not loaded: a NaN among the values would pass through its weight of zero.
            is_key = (position >= low) & (position < stop)
            is_there = is_there & is_key[:, None]
            is_value = is_value & is_key[:, None]
        k = masked_load(k_ptr + slot * k_stride + k_tile, is_there, not MASKED and KEY_DIM == BLOCK_D).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if q_rest is not None:
            rest = KEY_DIM + tl.arange(0, q_rest.shape[1])
            is_there = (rest < HEAD_DIM)[None, :]
            if MASKED:
                is_there = is_there & is_key[:, None]
            k_tile_rest = in_page * k_stride + (kv_head * HEAD_DIM + rest)[None, :]
            whole_rest: tl.constexpr = not MASKED and q_rest.shape[1] == HEAD_DIM - KEY_DIM
            k_rest = masked_load(k_ptr + slot * k_stride + k_tile_rest, is_there, whole_rest)
            scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision="ieee")
        if CAP > 0:
            scores = exact_cap(scores * scale, CAP) if SPAN > 0 else cap(scores * scale, CAP)
        if MASKED:
            visible = (position[None, :] >= first_keys[:, None]) & (position[None, :] <= positions[:, None])
            if mask_ptr is not None:
                is_masked = position >= masked_from
                seen = tl.load(
                    mask_ptr + (mask_rows[:, None] + position[None, :]), mask=(is_masked & is_key)[None, :], other=0
                )
                visible = tl.where(is_masked[None, :], seen != 0, visible)
            scores = tl.where(visible & is_key[None, :], scores, float("-inf"))
        v = k
        if v_ptr is not None:
            v = masked_load(v_ptr + slot * v_stride + v_tile, is_value, not MASKED and V_DIM == BLOCK_D).to(q.dtype)
        if SPAN == 0:
            m, total, acc = add_block(scores, v, m, total, acc, factor)
        else:
            top = tl.max(scores, 1)
            # The branch depends on scores, so that it runs after the products before it. Otherwise Triton 3.6 waits for
            # each product of the loop, and at the loop's end reads sums to which wgmma is still adding.
            if block % (SPAN // BLOCK_N) == 0:
                if parts is None:
                    all_m, all_total, all_acc = merge_span(all_m, all_total, all_acc, m, tl.max(total, 1), acc)
                elif block > first:
                    part = parts + block // (SPAN // BLOCK_N) - 1
                    leave_span(m, total, acc, part, is_pair, sums_ptr, parts_ptr, V_DIM)
                m, total, acc = empty_span(acc.shape[0], BLOCK_D)
                new_m = tl.maximum(m, top * factor)
            else:
                new_m = tl.maximum(m, top * factor)
            m, total, acc = add_tile(scores, v, m, new_m, total, acc, factor)
    if SPAN == 0:
        return m, total, acc
    else:
        return m, total, acc, all_m, all_total, all_acc


@triton.jit(
    do_not_specialize=["page_table_stride", "group", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=[
        *("page_table", "cache_seqlens", "cu_seqlens_q", "sinks", "mask_ptr", "mask_starts", "mask_positions")
    ],
)
def _extend_kernel(
    q_ptr, k_ptr, v_ptr, page_table, cache_seqlens, cu_seqlens_q, sinks, mask_ptr, mask_starts, mask_positions,
    out_ptr, sums_ptr, q_stride, page_table_stride, num_rows, group, num_parts, scale, v_scale,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_REST: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAP: tl.constexpr, PREFIX_ONLY: tl.constexpr, SPAN: tl.constexpr, ONE_TOKEN: tl.constexpr, LEAVES: tl.constexpr,
    EARLY: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per KV head, run of spans, and tile. `sums_ptr`: logarithms of sums, or with LEAVES spans' sums.
    ONE_TOKEN: number of tiles of each row, if every row has one token, else 0."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    KEY_DIM: tl.constexpr = HEAD_DIM if HEAD_DIM < V_DIM else V_DIM
    follow(EARLY)
    # The merging kernel may start once every program has signalled or ended. No program waits for a free SM after that.
    let_next_start(EARLY)
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    if ONE_TOKEN:
        row = tl.program_id(2) // ONE_TOKEN
        start, num_tokens, first_pair = row, 1, tl.program_id(2) % ONE_TOKEN * BLOCK_M
    else:
        # Tiles are taken from the end: the last tiles of a prompt have the most keys and should not start last (not
        # measured).
        tile = tl.num_programs(2) - 1 - tl.program_id(2)
        row = row_of_tile(cu_seqlens_q, num_rows, group, tile, BLOCK_M, AT_ONCE)
        start = tl.load(cu_seqlens_q + row)
        num_tokens = tl.load(cu_seqlens_q + row + 1) - start
        first_pair = (tile - first_tile(start, row, group, BLOCK_M)) * BLOCK_M
        if first_pair >= num_tokens * group:
            return
    seq_len = tl.load(cache_seqlens + row)
    prefix_len = seq_len - num_tokens

    pairs = first_pair + tl.arange(0, BLOCK_M)
    is_pair = pairs < num_tokens * group
    tokens = tl.minimum(pairs // group, num_tokens - 1)
    q_heads = kv_head * group + pairs % group
    positions = prefix_len + tokens
    first_position = prefix_len + first_pair // group
    stop = prefix_len + tl.minimum((first_pair + BLOCK_M - 1) // group, num_tokens - 1) + 1
    whole = (first_position + 1) // BLOCK_N
    masked_from = seq_len
    mask_rows = None
    if mask_ptr is not None:
        mask_start = tl.load(mask_starts + row).to(tl.int64)
        mask_rows = mask_start + tokens.to(tl.int64) * num_tokens - prefix_len
        if mask_start >= 0:
            positions = tl.load(mask_positions + start + tokens).to(tl.int32)
            stop = seq_len
            whole = prefix_len // BLOCK_N
            masked_from = prefix_len
    if PREFIX_ONLY:
        stop = prefix_len
        whole = prefix_len // BLOCK_N
    first_keys = first_key(positions, WINDOW, CHUNK)
    if mask_ptr is None:
        low = first_key(first_position, WINDOW, CHUNK)
    else:
        low = tl.minimum(tl.min(first_keys, 0), masked_from)
    begin, end = low // BLOCK_N, tl.cdiv(stop, BLOCK_N)
    out_rows = (start + tokens).to(tl.int64) * (num_kv_heads * group) + q_heads
    parts = None
    if LEAVES:
        # a run of spans; each span becomes one part
        first_span = low // SPAN
        run = tl.cdiv(tl.cdiv(stop, SPAN) - first_span, tl.num_programs(1))
        begin = tl.maximum(begin, (first_span + tl.program_id(1) * run) * (SPAN // BLOCK_N))
        end = tl.minimum(end, (first_span + (tl.program_id(1) + 1) * run) * (SPAN // BLOCK_N))
        if begin >= end:
            return
        whole = tl.minimum(tl.maximum(whole, begin), end)
        parts = out_rows * num_parts - first_span

    dims = tl.arange(0, BLOCK_D)
    q_rows = (start + tokens).to(tl.int64) * q_stride + q_heads * HEAD_DIM
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=is_pair[:, None] & (dims < KEY_DIM)[None, :], other=0.0)
    q = for_cache(q, k_ptr.dtype.element_ty)
    q_rest = None
    if BLOCK_REST > 0:
        rest = KEY_DIM + tl.arange(0, BLOCK_REST)
        q_rest = tl.load(
            q_ptr + q_rows[:, None] + rest[None, :], mask=is_pair[:, None] & (rest < HEAD_DIM)[None, :], other=0.0
        )
        q_rest = for_cache(q_rest, k_ptr.dtype.element_ty)
    sink = None
    if sinks is not None and not LEAVES:
        sink = scaled_sink(tl.load(sinks + q_heads, mask=is_pair, other=0.0))
    sums = first_sums(sink, BLOCK_M, BLOCK_D, SPAN)
    table_row = page_table + row.to(tl.int64) * page_table_stride
    first = begin
    if ONE_TOKEN == 0 and WINDOW == 0 and CHUNK == 0:
        # Blocks that all queries see whole need no masks. With a window or a chunk, and for one program of a decode,
        # there are few such blocks (not measured).
        sums = _walk(
            q, q_rest, sums, k_ptr, v_ptr, table_row, first, begin, whole, low, stop, positions, first_keys,
            masked_from, mask_ptr, mask_rows, kv_head, num_kv_heads, scale, parts, is_pair, sums_ptr, out_ptr,
            HEAD_DIM, V_DIM, PAGE_SIZE, BLOCK_N, SPAN, CAP, MASKED=False,
        )  # fmt: skip
        begin = whole
    sums = _walk(
        q, q_rest, sums, k_ptr, v_ptr, table_row, first, begin, end, low, stop, positions, first_keys, masked_from,
        mask_ptr, mask_rows, kv_head, num_kv_heads, scale, parts, is_pair, sums_ptr, out_ptr, HEAD_DIM, V_DIM,
        PAGE_SIZE, BLOCK_N, SPAN, CAP, MASKED=True,
    )  # fmt: skip
    if SPAN > 0:
        m, total, acc, all_m, all_total, all_acc = sums
        if LEAVES:
            leave_span(m, total, acc, parts + (end - 1) // (SPAN // BLOCK_N), is_pair, sums_ptr, out_ptr, V_DIM)
            return
        all_m, all_total, all_acc = merge_span(all_m, all_total, all_acc, m, tl.max(total, 1), acc)
        attended = exact_answer(all_m, all_total, all_acc, sink, v_scale)
    else:
        m, total, acc = sums
        # A query that sees nothing, because of its mask, gets zeros.
        divisor = tl.where(total > 0, total, 1.0)
        if sums_ptr is not None:
            lse = tl.where(total > 0, (m + tl.log2(divisor)) / LOG2_E, float("-inf"))
            tl.store(sums_ptr + out_rows, lse, mask=is_pair)
        attended = acc / divisor[:, None] * v_scale
    stored = is_pair[:, None] & (dims < V_DIM)[None, :]
    tl.store(out_ptr + out_rows[:, None] * V_DIM + dims[None, :], attended.to(out_ptr.dtype.element_ty), mask=stored)


def paged_extend(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    paged: PagedMetadata,
    layer: AttentionLayer,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    mask: NewTokenMask | None = None,
    prefix_only: bool = False,
    tuning: ExtendTuning | None = None,
    spans: Spans | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of each row over all keys of the row, their own included.

    One kernel. No host sync, so a CUDA graph can capture it: the grid depends only on the shapes of `q` and `paged`.
    The last new token of a row is at position `cache_seqlens - 1` and sees all tokens before it, within window and
    chunk. Page-table entries after a row's last page, unused pages and slots after a row's last token are never read.

    Scores, weights and sums are fp32. For the product with the values, weights are rounded to q's dtype, or to fp16 if
    q is bf16 and the cache FP8. The output is rounded once.

    Args:
        q: [num_tokens, tp_q_head_num, head_dim] bf16, fp16 or fp32. Heads of a token are contiguous; the token stride
            may be larger. Every token belongs to a row: `cu_seqlens_q` ends with num_tokens or earlier. fp32 is
            multiplied in fp32, without tensor cores.
        k_pages: [num_pages, page_size, tp_k_head_num, head_dim], contiguous, in q's dtype or FP8 e4m3. page_size is a
            power of two. Or [num_keys, tp_k_head_num, head_dim] if the keys of a row follow each other: `page_table`
            [batch_size, 1] then has the first key of each row.
        v_pages: like `k_pages`, but of any width. If None, the value is the first columns of the key.
        paged: rows may have no new tokens. `max_seqlen_q` is not read.
        layer: its scales, window, chunk, softcap and sinks are applied.
        out: [num_tokens, tp_q_head_num, columns of a value], contiguous, written. Its dtype is q's, or fp32 for a part
            that is merged later.
        lse: [num_tokens, tp_q_head_num] fp32, contiguous, written: the natural logarithm of the sum of exponentials
            (with the sink's) by which each output was divided. -inf for a query that sees nothing; its output is zeros.
        mask: for the new tokens of rows that have a part of it.
        prefix_only: whether to see only tokens before the new ones. The cache need not hold the new ones then.
        tuning: if None, `choose` for this layer.
        spans: if set, adds up in the order of `paged_exact`, and `mask` must be None. With several runs, `out` gets the
            values of each part, and `lse` its largest score and its weight.

    Returns:
        `out`.
    """
    v_dim = out.shape[-1]
    tuning = tuning or choose(v_dim, q.dtype, q.device)
    num_tokens, num_q_heads, head_dim = q.shape
    *pages, num_kv_heads, _ = k_pages.shape
    num_rows, group = len(paged.cache_seqlens), num_q_heads // num_kv_heads
    one_token = -(-group // tuning.block_m) if spans is not None and spans.one_token else 0
    num_runs = 1 if spans is None else spans.num_runs
    # The number of tiles that `first_tile` distinguishes: the tiles of all tokens as one row, plus one per row.
    num_tiles = num_rows * one_token if one_token else num_tokens * group // tuning.block_m + num_rows
    _extend_kernel[(num_kv_heads, num_runs, num_tiles)](
        q,
        k_pages,
        v_pages,
        paged.page_table,
        paged.cache_seqlens,
        paged.cu_seqlens_q,
        layer.sinks,
        None if mask is None else mask.visible.view(torch.uint8),
        None if mask is None else mask.starts,
        None if mask is None else mask.positions,
        out,
        lse,
        q.stride(0),
        paged.page_table.stride(0),
        num_rows,
        group,
        0 if spans is None else spans.num_parts,
        layer.scale * layer.k_scale,
        layer.v_scale,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        BLOCK_D=block_of(v_dim),
        BLOCK_REST=block_of(head_dim - v_dim) if head_dim > v_dim else 0,
        PAGE_SIZE=pages[1] if len(pages) == 2 else ONE_PAGE.value,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        WINDOW=layer.window or 0,
        CHUNK=layer.chunk or 0,
        CAP=layer.softcap or 0.0,
        PREFIX_ONLY=prefix_only,
        SPAN=0 if spans is None else spans.span,
        ONE_TOKEN=one_token,
        LEAVES=num_runs > 1,
        EARLY=spans is not None and spans.is_early,
        AT_ONCE=ROWS_AT_ONCE,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=spans is not None and spans.is_early,
    )
    return out
