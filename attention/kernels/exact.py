"""Attention over the paged KV cache whose answers have the same bits however a token comes: as a decode, in a prompt of
any chunks, behind a cached prefix or not, alone or in any batch, with any number of heads on the rank.

The contract. Keys are cut into spans of `SPAN` positions of the sequence, and spans into tiles of `tile_of` positions.
Of each span a query has a sum of its own, in fp32, that begins empty: the largest score, the weights' sum and the
weighted values' sum. Tiles are taken in ascending order: scores by one product over the whole head, weights rounded
to the dtype of the values, both sums by a product of those same weights with ones and with values. (A reduction of the
weights would add in the order of the registers that hold them, which a tile's shape decides.) Spans are merged in
ascending order, the sink after them; then comes one division and one rounding. What a query does not see weighs an
exact zero: tiles and spans without a key of its own change no bit, so it matters not which queries share a program.

Everything else is free: pairs of a program, its warps and stages, pages, and which program walks which spans. So one
kernel does it all. Where programs are few, each walks some spans of one row and leaves their sums in memory, and a
second kernel merges them, in the same order by the same function.

Measured on an H200, of these products: the same bits with 16 to 128 pairs of a program and 2 to 8 warps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.forward_batch import PagedMetadata
from attention.kernels.decode import block_of, first_key, for_cache, has_dependent_launch
from attention.kernels.extend import first_tile, masked_load, row_of_tile
from attention.layer import AttentionLayer

SPAN = 512
"""Positions of a span: a power of two. With 256 or 128 a decode step of Qwen3-8B took 0.99 to 1.01 times as long on an
H200, and its prompts 0.997 to 1.001 times (exact_wide_leaves_h200_2026-11-23.txt). Long rows, on which half of it lets
twice the programs work, were not measured."""
_ROWS_AT_ONCE = 128
"""As in attention/kernels/extend.py."""
_MERGED_AT_ONCE = 8
"""Spans whose sums are on their way from memory to the program that merges them."""
_LOWEST = tl.constexpr(-1e30)
"""What no score is below, and finite: the difference of two of them is zero and not NaN."""
_TOTAL_COLUMNS = tl.constexpr(16)
"""Of the product that adds up weights, as few as a product has; all have the sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How the work is laid out. No bit of an answer depends on it."""

    block_m: int
    """Pairs of a token and a query head of a program: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Tiles of keys and values on their way from memory at a time, and one."""
    num_runs: int = 1
    """Runs that the spans of a row are cut into, at most, in steps with one token a row; others take 1."""


def tile_of(head_dim: int, dtype: torch.dtype) -> int:
    """Positions of a tile, by the width of a head and the dtype of queries: what both kinds of steps can take.

    Prompts want large tiles: 64 is what their registers hold beside the sums of heads of 128, 32 of 256. Decodes want
    bytes on their way from memory, of which these have as many for either width. fp32 is multiplied without tensor
    cores, where threads hold whole rows of the operands.
    """
    if dtype.itemsize > 2:
        return 16
    return 64 if head_dim <= 128 else 32


def choose(head_dim: int, dtype: torch.dtype, group: int, num_rows: int | None = None) -> Schedule:
    """A layout for H200s. Not measured.

    Args:
        group: query heads of a KV head.
        num_rows: of a step with one token a row, padding included, times this rank's KV heads; None: of other steps.
    """
    is_wide = head_dim > 128
    most = 16 if dtype.itemsize > 2 else 64 if is_wide else 128
    num_stages = 2 if dtype.itemsize > 2 else 3
    if num_rows is None:
        return Schedule(block_m=most, num_warps=4 if most == 16 else 8, num_stages=num_stages)
    block_m = min(block_of(group), most)
    num_runs = 1 if num_rows > 192 else (256 if num_rows <= 64 else 512) // num_rows
    num_warps = 8 if block_m > (32 if is_wide else 64) else 4
    return Schedule(block_m=block_m, num_warps=num_warps, num_stages=num_stages, num_runs=num_runs)


@triton.jit
def _merge(m, total, acc, span_m, span_total, span_acc):
    """The sums of all spans so far and of the next. An empty one changes no bit of the other."""
    new_m = tl.maximum(m, span_m)
    kept = tl.exp2(m - new_m)
    added = tl.exp2(span_m - new_m)
    # Fused by hand: the compiler might fuse either product of a sum of two.
    return new_m, tl.fma(span_total, added, total * kept), tl.fma(span_acc, added[:, None], acc * kept[:, None])


@triton.jit
def _answer(m, total, acc, sink, v_scale):
    """What the sums of all spans come to. `sink`: in units of the scores times log2(e), or None."""
    if sink is not None:
        new_m = tl.maximum(m, sink)
        kept = tl.exp2(m - new_m)
        total = tl.fma(total, kept, tl.exp2(sink - new_m))
        acc *= kept[:, None]
    # Whether a sum of zeros is negative depends on what was added to it that weighs nothing.
    return tl.fma(tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape)), v_scale, 0.0)


@triton.jit
def _cap(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP), with a division whose steps the compiler does not fuse with what follows."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    powers = tl.exp2(scores * (2.0 * LOG2_E / CAP)) + 1.0
    return CAP - tl.div_rn(tl.full(powers.shape, 2.0 * CAP, tl.float32), powers)


@triton.jit
def _scores(q, k, visible, scale, CAP: tl.constexpr):
    """Of a tile of keys, capped or before `scale`. `visible`: which of them each query sees, or None: all."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP > 0:
        scores = _cap(scores * scale, CAP)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _add_tile(scores, v, m, new_m, total, acc, factor):
    """Takes a tile of keys into the sums of a span, whose largest score is now `new_m`."""
    decay = tl.exp2(m - new_m)[:, None]
    p = tl.exp2(tl.fma(scores, factor, -new_m[:, None])).to(v.dtype)
    ones = tl.full([v.shape[0], _TOTAL_COLUMNS], 1.0, v.dtype)
    # In fp32, where a product with one is an addition, the compiler would fuse that and a plain multiplication.
    decayed = tl.fma(total, tl.broadcast_to(decay, total.shape), 0.0)
    total = tl.dot(p, ones, decayed, input_precision="ieee")
    acc = tl.dot(p, v, acc * decay, input_precision="ieee")
    return new_m, total, acc


@triton.jit
def _empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    m = tl.full([BLOCK_M], _LOWEST, tl.float32)
    return m, tl.zeros([BLOCK_M, _TOTAL_COLUMNS], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def _leave(m, total, acc, parts, is_pair, sums_ptr, parts_ptr, HEAD_DIM: tl.constexpr):
    """Writes the sums of a span to memory, as part number `parts` of each pair."""
    dims = tl.arange(0, acc.shape[1])
    tl.store(sums_ptr + 2 * parts, m, mask=is_pair)
    tl.store(sums_ptr + 2 * parts + 1, tl.max(total, 1), mask=is_pair)
    is_stored = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(parts_ptr + parts[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_stored)


@triton.jit
def _walk(
    q,
    m,
    total,
    acc,
    all_m,
    all_total,
    all_acc,
    k_ptr,
    v_ptr,
    table_row,
    begin,
    end,
    low,
    stop,
    positions,
    first_keys,
    kv_head,
    num_kv_heads,
    scale,
    parts,
    is_pair,
    sums_ptr,
    parts_ptr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes tiles [begin, end) into the sums of a span, and those into all spans' where the next begins.

    Not MASKED: every query sees every key of them. MASKED: keys from `low` to before `stop` are there, and each query
    sees those from its own first key to its own position. `parts`: leave spans in memory, as `_leave` does; or None.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_D: tl.constexpr = acc.shape[1]
    keys = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_D)
    slot_stride = num_kv_heads * HEAD_DIM
    in_page = (keys % PAGE_SIZE)[:, None] * slot_stride + (kv_head * HEAD_DIM + dims)[None, :]
    if PAGE_SIZE >= TILE:
        page_of_key = tl.zeros([TILE], tl.int32)  # one page holds a tile
        page = tl.load(table_row + begin * TILE // PAGE_SIZE, mask=begin < end, other=0)
    else:
        page_of_key = keys // PAGE_SIZE
        first = begin * (TILE // PAGE_SIZE) + page_of_key
        page = tl.load(table_row + first, mask=first * PAGE_SIZE < stop, other=0)[:, None]
    for tile in tl.range(begin, end):
        slot = page.to(tl.int64) * PAGE_SIZE
        if PAGE_SIZE > TILE:
            slot += tile * TILE % PAGE_SIZE
        # The page ids of the next tile come while this one is worked on.
        if PAGE_SIZE >= TILE:
            page = tl.load(table_row + (tile + 1) * TILE // PAGE_SIZE, mask=tile + 1 < end, other=0)
        else:
            following = (tile + 1) * (TILE // PAGE_SIZE) + page_of_key
            page = tl.load(table_row + following, mask=following * PAGE_SIZE < stop, other=0)[:, None]

        is_there = (dims < HEAD_DIM)[None, :]
        visible = None
        if MASKED:
            # Keys that are not there are not read: a NaN among the values would come through its weight of zero.
            position = tile * TILE + keys
            is_key = (position >= low) & (position < stop)
            is_there = is_there & is_key[:, None]
            visible = (position[None, :] >= first_keys[:, None]) & (position[None, :] <= positions[:, None])
            visible = visible & is_key[None, :]
        is_whole: tl.constexpr = not MASKED and HEAD_DIM == BLOCK_D
        k = masked_load(k_ptr + slot * slot_stride + in_page, is_there, is_whole).to(q.dtype)
        v = masked_load(v_ptr + slot * slot_stride + in_page, is_there, is_whole).to(q.dtype)
        scores = _scores(q, k, visible, scale, CAP)
        factor = LOG2_E if CAP > 0 else scale * LOG2_E
        top = tl.max(scores, 1)
        # The branch depends on scores, so that it comes once the products before it are done. Where it does not, Triton
        # 3.6 waits for each product of the loop; at the loop's end it would read sums that wgmma is still adding to.
        if tile % (SPAN // TILE) == 0:
            if parts is None:
                all_m, all_total, all_acc = _merge(all_m, all_total, all_acc, m, tl.max(total, 1), acc)
            elif tile > begin:
                _leave(m, total, acc, parts + tile // (SPAN // TILE) - 1, is_pair, sums_ptr, parts_ptr, HEAD_DIM)
            m, total, acc = _empty(BLOCK_M, BLOCK_D)
            new_m = tl.maximum(m, top * factor)
        else:
            new_m = tl.maximum(m, top * factor)
        m, total, acc = _add_tile(scores, v, m, new_m, total, acc, factor)
    return m, total, acc, all_m, all_total, all_acc


@triton.jit(
    do_not_specialize=["page_table_stride", "group", "num_rows", "num_parts"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "cu_seqlens_q", "sinks"],
)
def _exact_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    sinks,
    out_ptr,
    sums_ptr,
    q_stride,
    page_table_stride,
    num_rows,
    group,
    num_parts,
    scale,
    v_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    EARLY_MERGE: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    if EARLY_MERGE:
        # The merge starts once every program here has said so or ended: none of these waits for its place.
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    if ONE_TOKEN:
        row = tl.program_id(2)
        start, num_tokens, first_pair = row, 1, 0
    else:
        # From the end: the last of a prompt have the most keys, and are not to be left when all else is done.
        index = tl.num_programs(2) - 1 - tl.program_id(2)
        row = row_of_tile(cu_seqlens_q, num_rows, group, index, BLOCK_M, ROWS_AT_ONCE)
        start = tl.load(cu_seqlens_q + row)
        num_tokens = tl.load(cu_seqlens_q + row + 1) - start
        first_pair = (index - first_tile(start, row, group, BLOCK_M)) * BLOCK_M
        if first_pair >= num_tokens * group:
            return
    prefix_len = tl.load(cache_seqlens + row) - num_tokens
    pairs = first_pair + tl.arange(0, BLOCK_M)
    is_pair = pairs < num_tokens * group
    tokens = tl.minimum(pairs // group, num_tokens - 1)
    q_heads = kv_head * group + pairs % group
    positions = prefix_len + tokens
    first_keys = first_key(positions, WINDOW, CHUNK)
    first_position = prefix_len + first_pair // group
    stop = prefix_len + tl.minimum((first_pair + BLOCK_M - 1) // group, num_tokens - 1) + 1
    low = first_key(first_position, WINDOW, CHUNK)
    begin, end = low // TILE, tl.cdiv(stop, TILE)
    out_rows = (start + tokens).to(tl.int64) * (num_kv_heads * group) + q_heads
    parts = None
    if sums_ptr is not None:
        # A run of spans, each of which becomes a part.
        first_span = low // SPAN
        num_spans = tl.cdiv(stop, SPAN) - first_span
        run = tl.cdiv(num_spans, tl.num_programs(1))
        begin = tl.maximum(begin, (first_span + tl.program_id(1) * run) * (SPAN // TILE))
        end = tl.minimum(end, (first_span + (tl.program_id(1) + 1) * run) * (SPAN // TILE))
        if begin >= end:
            return
        parts = out_rows * num_parts - first_span

    dims = tl.arange(0, BLOCK_D)
    is_there = is_pair[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (start + tokens).to(tl.int64) * q_stride + q_heads * HEAD_DIM
    q = for_cache(tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=is_there, other=0.0), k_ptr.dtype.element_ty)
    m, total, acc = _empty(BLOCK_M, BLOCK_D)
    all_m, _, all_acc = _empty(BLOCK_M, BLOCK_D)
    all_total = tl.zeros([BLOCK_M], tl.float32)
    table_row = page_table + row.to(tl.int64) * page_table_stride
    if not ONE_TOKEN and WINDOW == 0 and CHUNK == 0:
        # Tiles that all queries see whole need no masks. A window or a chunk has few of them, as has what one program
        # walks of a decode.
        whole = (first_position + 1) // TILE
        m, total, acc, all_m, all_total, all_acc = _walk(
            q, m, total, acc, all_m, all_total, all_acc, k_ptr, v_ptr, table_row, begin, whole, low, stop, positions,
            first_keys, kv_head, num_kv_heads, scale, parts, is_pair, sums_ptr, out_ptr, HEAD_DIM, PAGE_SIZE, SPAN,
            TILE, CAP, MASKED=False,
        )  # fmt: skip
        begin = whole
    m, total, acc, all_m, all_total, all_acc = _walk(
        q, m, total, acc, all_m, all_total, all_acc, k_ptr, v_ptr, table_row, begin, end, low, stop, positions,
        first_keys, kv_head, num_kv_heads, scale, parts, is_pair, sums_ptr, out_ptr, HEAD_DIM, PAGE_SIZE, SPAN, TILE,
        CAP, MASKED=True,
    )  # fmt: skip
    if parts is None:
        all_m, all_total, all_acc = _merge(all_m, all_total, all_acc, m, tl.max(total, 1), acc)
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + q_heads, mask=is_pair, other=0.0) * LOG2_E
        answer = _answer(all_m, all_total, all_acc, sink, v_scale)
        out_ptrs = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptrs, answer.to(out_ptr.dtype.element_ty), mask=is_there)
    else:
        _leave(m, total, acc, parts + (end - 1) // (SPAN // TILE), is_pair, sums_ptr, out_ptr, HEAD_DIM)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["cache_seqlens", "sinks"])
def _merge_kernel(
    parts_ptr,
    sums_ptr,
    cache_seqlens,
    sinks,
    out_ptr,
    num_parts,
    v_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    EARLY_MERGE: tl.constexpr,
):
    head = tl.program_id(0) + tl.arange(0, 1)
    row = tl.program_id(1).to(tl.int64)
    # Written before the kernel that leaves parts, which is not started early itself, and so before any program here.
    seq_len = tl.load(cache_seqlens + row)
    num_spans = tl.cdiv(seq_len, SPAN) - first_key(seq_len - 1, WINDOW, CHUNK) // SPAN
    if EARLY_MERGE:
        # Until all parts are there and can be seen. Every program waits, so this kernel ends after the one before it,
        # and the next in the stream, started as usual, finds both done: it may take the parts' memory.
        tl.extra.cuda.gdc_wait()
    out_row = row * tl.num_programs(0) + head
    dims = tl.arange(0, BLOCK_D)[None, :]
    m, _, acc = _empty(1, BLOCK_D)
    total = tl.zeros([1], tl.float32)
    for span in tl.range(0, num_spans, num_stages=AT_ONCE):
        part = out_row * num_parts + span
        span_m, span_total = tl.load(sums_ptr + 2 * part), tl.load(sums_ptr + 2 * part + 1)
        span_acc = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        m, total, acc = _merge(m, total, acc, span_m, span_total, span_acc)
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head) * 1.4426950408889634
    answer = _answer(m, total, acc, sink, v_scale)
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + dims
    tl.store(out_ptrs, answer.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_exact(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    paged: PagedMetadata,
    layer: AttentionLayer,
    *,
    out: torch.Tensor,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of each row over the row's keys, their own included, under the contract above.

    One kernel, or two where the spans of a row are cut into runs; no host sync, so it can be captured in a CUDA graph:
    its grid follows from the shapes of `q` and of `paged`, which holds rows as long as the table is wide. Page-table
    entries past a row's last page, unused pages and slots past a row's last token are never read.

    Args:
        q: [num_tokens, tp_q_head_num, head_dim], bf16, fp16 or fp32; heads of a token are contiguous, tokens may lie
            further apart. All of them belong to rows: `cu_seqlens_q` ends with num_tokens, or before it. fp32 is
            multiplied as such, without tensor cores.
        k_pages: [num_pages, page_size, tp_k_head_num, head_dim], contiguous, of q's dtype or FP8 e4m3; page_size is a
            power of two.
        v_pages: likewise.
        paged: rows may have no new tokens. Where `max_seqlen_q` is 1, every row has one and `cu_seqlens_q` is not read.
        layer: its scales, window, chunk, softcap and sinks are applied.
        out: [num_tokens, tp_q_head_num, head_dim], contiguous, of q's dtype, written.
        schedule: None: `choose` of this step. Runs take head_dim + 2 columns of 4 bytes for each query head, row and
            span of the longest row that the table holds, as long as this computes.

    Returns:
        `out`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pages.shape
    num_rows, group = len(paged.cache_seqlens), num_q_heads // num_kv_heads
    window, chunk = layer.window or 0, layer.chunk or 0
    is_decode = paged.max_seqlen_q == 1
    if schedule is None:
        schedule = choose(head_dim, q.dtype, group, num_rows * num_kv_heads if is_decode else None)
    one_token = is_decode and group <= schedule.block_m
    tile, block_d = tile_of(head_dim, q.dtype), block_of(head_dim)
    most_seen = min(it for it in (paged.page_table.shape[1] * page_size, window, chunk) if it)
    # Where the keys that a query sees begin within a span is not known.
    num_parts = -(-(most_seen - 1) // SPAN) + 1
    num_runs = min(schedule.num_runs, num_parts) if one_token else 1
    parts, sums = out, None
    if num_runs > 1:
        count = num_tokens * num_q_heads * num_parts
        parts = torch.empty(count * (head_dim + 2), dtype=torch.float32, device=q.device)
        sums = parts[count * head_dim :]
    early_merge = num_runs > 1 and has_dependent_launch(q.device)
    # As many as `first_tile` tells apart: the tiles of all tokens were they one row's, and one for each row.
    num_tiles = num_rows if one_token else num_tokens * group // schedule.block_m + num_rows
    _exact_kernel[(num_kv_heads, num_runs, num_tiles)](
        q,
        k_pages,
        v_pages,
        paged.page_table,
        paged.cache_seqlens,
        paged.cu_seqlens_q,
        layer.sinks,
        parts,
        sums,
        q.stride(0),
        paged.page_table.stride(0),
        num_rows,
        group,
        num_parts,
        layer.scale * layer.k_scale,
        layer.v_scale,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        PAGE_SIZE=page_size,
        BLOCK_M=schedule.block_m,
        SPAN=SPAN,
        TILE=tile,
        WINDOW=window,
        CHUNK=chunk,
        CAP=layer.softcap or 0.0,
        ONE_TOKEN=one_token,
        EARLY_MERGE=early_merge,
        ROWS_AT_ONCE=_ROWS_AT_ONCE,
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )
    if sums is not None:
        _merge_kernel[(num_q_heads, num_rows)](
            parts,
            sums,
            paged.cache_seqlens,
            layer.sinks,
            out,
            num_parts,
            layer.v_scale,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            SPAN=SPAN,
            WINDOW=window,
            CHUNK=chunk,
            AT_ONCE=_MERGED_AT_ONCE,
            EARLY_MERGE=early_merge,
            launch_pdl=early_merge,
        )
    return out
