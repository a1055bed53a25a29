"""Attention of any new tokens over the paged KV cache: prompts, chunks behind a cached prefix, decodes, all mixed.

A program walks the keys that one tile of queries sees. A tile has tokens of one row of the batch and, for each of them,
the query heads of one KV head, so that keys are read once for all of these. Blocks of keys start at multiples of their
size in the sequence and are walked upwards from the first that the tile sees, with sums in fp32 and one division at
the end; a block in which a query sees nothing changes no bit of its sums. What a query's answer is, to the last bit,
follows from its own keys and from `ExtendTuning`: never from the other rows, nor from how a prompt was cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.forward_batch import NewTokenMask, PagedMetadata
from attention.kernels.decode import block_of, cap, first_key, for_cache
from attention.layer import AttentionLayer

_ROWS_AT_ONCE = 128
"""Rows of the batch among which a program looks for its own at a time."""
_ONE_PAGE = tl.constexpr(1 << 30)
"""Tokens of a page where a row's keys follow one another: they are one page, which begins at any slot."""
_LOWEST = tl.constexpr(-1e30)
"""What no score is below, and finite: the difference of two of them is zero and not NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtendTuning:
    """How the work is laid out. The last bits of a query's answer depend on all of it but `num_stages`."""

    block_m: int
    """Pairs of a token and a query head of a tile: a power of two, at least 16."""
    block_n: int
    """Keys of a block: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Blocks of keys and values on their way from memory at a time, and one."""


def choose(v_dim: int, dtype: torch.dtype) -> ExtendTuning:
    """A layout for H200s, as large as registers hold without spilling, or hardly: 420 to 463 TFLOP/s, 73 to 97 % of
    FA3's, for prompts of 8,192 tokens with heads of 128 (benchmarks/results/attention_h200_2026-11-23.txt). No other
    was measured.

    The same for every batch, so that a row's answer does not depend on what else runs: where rows are few or short, the
    keys' way from memory takes longer than products with a tile that is not full.
    """
    if dtype.itemsize > 2:
        # Without tensor cores, whose fp32 is TF32: threads hold whole rows of a product's operands.
        return ExtendTuning(block_m=16, block_n=16, num_warps=4, num_stages=2)
    if v_dim > 256:
        return ExtendTuning(block_m=64, block_n=32, num_warps=8, num_stages=3)
    return ExtendTuning(block_m=128, block_n=64 if v_dim <= 128 else 32, num_warps=8, num_stages=3)


@triton.jit
def row_of_tile(cu_seqlens_q, num_rows, group, tile, BLOCK_M: tl.constexpr, ROWS_AT_ONCE: tl.constexpr):
    """The row of the batch that a tile belongs to: the last whose `first_tile` is not behind it."""
    row = -1
    for first in tl.range(0, num_rows, ROWS_AT_ONCE):
        rows = first + tl.arange(0, ROWS_AT_ONCE)
        starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
        begins = (rows < num_rows) & (first_tile(starts, rows, group, BLOCK_M) <= tile)
        row += tl.sum(begins.to(tl.int32), 0)
    return row


@triton.jit
def first_tile(start, row, group, BLOCK_M: tl.constexpr):
    """The first tile of a row whose tokens begin at `start`: found without the other rows, for one idle tile a row."""
    return start * group // BLOCK_M + row


@triton.jit
def masked_load(pointers, is_there, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=is_there, other=0.0)


@triton.jit
def _walk(
    q,
    q_rest,
    m,
    total,
    acc,
    k_ptr,
    v_ptr,
    table_row,
    begin,
    end,
    low,
    stop,
    positions,
    first_keys,
    masked_from,
    mask_ptr,
    mask_rows,
    kv_head,
    num_kv_heads,
    scale,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes the key blocks [begin, end) into the tile's sums.

    Not MASKED: every query sees every key of them. MASKED: keys from `low` to before `stop` are there, and each query
    sees those from its own first key to its own position, but from `masked_from` on what its row of the mask says.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    BLOCK_D: tl.constexpr = acc.shape[1]
    KEY_DIM: tl.constexpr = HEAD_DIM if HEAD_DIM < V_DIM else V_DIM
    PAGE_STRIDE: tl.constexpr = 1 if PAGE_SIZE == _ONE_PAGE else PAGE_SIZE
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    slots = (keys % PAGE_SIZE)[:, None]
    k_stride, v_stride = num_kv_heads * HEAD_DIM, num_kv_heads * V_DIM
    k_tile = slots * k_stride + (kv_head * HEAD_DIM + dims)[None, :]
    v_tile = slots * v_stride + (kv_head * V_DIM + dims)[None, :]
    factor = LOG2_E if CAP > 0 else scale * LOG2_E

    if PAGE_SIZE >= BLOCK_N:
        page_of_key = tl.zeros([BLOCK_N], tl.int32)  # one page holds a block
        page = tl.load(table_row + begin * BLOCK_N // PAGE_SIZE, mask=begin < end, other=0)
    else:
        page_of_key = keys // PAGE_SIZE
        first = begin * (BLOCK_N // PAGE_SIZE) + page_of_key
        page = tl.load(table_row + first, mask=first * PAGE_SIZE < stop, other=0)[:, None]
    for block in tl.range(begin, end):
        slot = page.to(tl.int64) * PAGE_STRIDE
        if PAGE_SIZE > BLOCK_N:
            slot += block * BLOCK_N % PAGE_SIZE
        # The page ids of the next block come while this one is worked on.
        if PAGE_SIZE >= BLOCK_N:
            page = tl.load(table_row + (block + 1) * BLOCK_N // PAGE_SIZE, mask=block + 1 < end, other=0)
        else:
            following = (block + 1) * (BLOCK_N // PAGE_SIZE) + page_of_key
            page = tl.load(table_row + following, mask=following * PAGE_SIZE < stop, other=0)[:, None]

        position = block * BLOCK_N + keys
        is_there = (dims < KEY_DIM)[None, :]
        is_value = (dims < V_DIM)[None, :]
        if MASKED:
            # Keys that are not there are not read: a NaN among the values would come through its weight of zero.
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
            k_tile_rest = slots * k_stride + (kv_head * HEAD_DIM + rest)[None, :]
            whole_rest: tl.constexpr = not MASKED and q_rest.shape[1] == HEAD_DIM - KEY_DIM
            k_rest = masked_load(k_ptr + slot * k_stride + k_tile_rest, is_there, whole_rest)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if CAP > 0:
            scores = cap(scores * scale, CAP)
        if MASKED:
            visible = (position[None, :] >= first_keys[:, None]) & (position[None, :] <= positions[:, None])
            if mask_ptr is not None:
                is_masked = position >= masked_from
                seen = tl.load(
                    mask_ptr + (mask_rows[:, None] + position[None, :]), mask=(is_masked & is_key)[None, :], other=0
                )
                visible = tl.where(is_masked[None, :], seen != 0, visible)
            scores = tl.where(visible & is_key[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1) * factor)
        decay = tl.exp2(m - new_m)
        # Fused by hand, so that it is one instruction in either walk, and no query's bits depend on which it is in.
        p = tl.exp2(tl.fma(scores, factor, -new_m[:, None]))
        m = new_m
        total = tl.fma(total, decay, tl.sum(p, 1))
        v = k
        if v_ptr is not None:
            v = masked_load(v_ptr + slot * v_stride + v_tile, is_value, not MASKED and V_DIM == BLOCK_D).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return m, total, acc


@triton.jit(
    do_not_specialize=["page_table_stride", "group", "num_rows"],
    do_not_specialize_on_alignment=[
        "page_table",
        "cache_seqlens",
        "cu_seqlens_q",
        "sinks",
        "mask_ptr",
        "mask_starts",
        "mask_positions",
    ],
)
def _extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    sinks,
    mask_ptr,
    mask_starts,
    mask_positions,
    out_ptr,
    lse_ptr,
    q_stride,
    page_table_stride,
    num_rows,
    group,
    scale,
    v_scale,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    PREFIX_ONLY: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    KEY_DIM: tl.constexpr = HEAD_DIM if HEAD_DIM < V_DIM else V_DIM
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    # From the end: the last tiles of a prompt have the most keys, and are not to be left when all else is done (not
    # measured).
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_of_tile(cu_seqlens_q, num_rows, group, tile, BLOCK_M, ROWS_AT_ONCE)
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

    m = tl.full([BLOCK_M], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + q_heads, mask=is_pair, other=0.0) * LOG2_E
        m = tl.maximum(m, sink)
        total = tl.exp2(sink - m)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin = low // BLOCK_N
    if WINDOW == 0 and CHUNK == 0:
        # Blocks that all queries see whole need no masks. A window or a chunk has few of them (not measured).
        m, total, acc = _walk(
            q, q_rest, m, total, acc, k_ptr, v_ptr, page_table + row.to(tl.int64) * page_table_stride, begin, whole,
            low, stop, positions, first_keys, masked_from, mask_ptr, mask_rows, kv_head, num_kv_heads, scale,
            HEAD_DIM, V_DIM, PAGE_SIZE, BLOCK_N, CAP, MASKED=False,
        )  # fmt: skip
        begin = whole
    m, total, acc = _walk(
        q, q_rest, m, total, acc, k_ptr, v_ptr, page_table + row.to(tl.int64) * page_table_stride, begin,
        tl.cdiv(stop, BLOCK_N), low, stop, positions, first_keys, masked_from, mask_ptr, mask_rows, kv_head,
        num_kv_heads, scale, HEAD_DIM, V_DIM, PAGE_SIZE, BLOCK_N, CAP, MASKED=True,
    )  # fmt: skip

    # A query that a mask lets see nothing gets zeros.
    divisor = tl.where(total > 0, total, 1.0)
    out_rows = (start + tokens).to(tl.int64) * (num_kv_heads * group) + q_heads
    if lse_ptr is not None:
        lse = tl.where(total > 0, (m + tl.log2(divisor)) / LOG2_E, float("-inf"))
        tl.store(lse_ptr + out_rows, lse, mask=is_pair)
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
) -> torch.Tensor:
    """Attention of the new tokens of each row over the row's keys, their own included.

    One kernel; no host sync, so it can be captured in a CUDA graph: its grid follows from the shapes of `q` and of
    `paged`. The last new token of a row is at position `cache_seqlens - 1` and sees all before it that window and chunk
    leave. Page-table entries past a row's last page, unused pages and slots past a row's last token are never read.
    Scores, weights and sums are fp32; the weights are rounded to q's dtype for their product with the values, with FP8
    to fp16 in place of bf16, the answer once at the end.

    Args:
        q: [num_tokens, tp_q_head_num, head_dim], bf16, fp16 or fp32; heads of a token are contiguous, tokens may lie
            further apart. All of them belong to rows: `cu_seqlens_q` ends with num_tokens, or before it. fp32 is
            multiplied as such, without tensor cores.
        k_pages: [num_pages, page_size, tp_k_head_num, head_dim], contiguous, of q's dtype or FP8 e4m3; page_size is a
            power of two. Or [num_keys, tp_k_head_num, head_dim] of rows whose keys follow one another: `page_table` is
            then [batch_size, 1], the first key of each.
        v_pages: likewise, of any width. None: the first columns of a key, as many as an answer has, are its value.
        paged: rows may have no new tokens. `max_seqlen_q` is not read.
        layer: its scales, window, chunk, softcap and sinks are applied.
        out: [num_tokens, tp_q_head_num, columns of a value], contiguous, written; of q's dtype, or fp32 for a part that
            is to be merged.
        lse: [num_tokens, tp_q_head_num] fp32, contiguous, written: the natural logarithm of the sum of exponentials
            that each answer was divided by, the sink's included; -inf where a query sees nothing, which answers zeros.
        mask: for the new tokens of the rows that have a part of it.
        prefix_only: see only the tokens before the new ones, of which the cache then need hold none.
        tuning: None: `choose` for this layer.

    Returns:
        `out`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    *pages, num_kv_heads, _ = k_pages.shape
    v_dim = out.shape[-1]
    num_rows = len(paged.cache_seqlens)
    group = num_q_heads // num_kv_heads
    if tuning is None:
        tuning = choose(v_dim, q.dtype)
    # As many as `first_tile` tells apart: the tiles of all tokens were they one row's, and one for each row.
    num_tiles = num_tokens * group // tuning.block_m + num_rows
    _extend_kernel[(num_kv_heads, num_tiles)](
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
        layer.scale * layer.k_scale,
        layer.v_scale,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        BLOCK_D=block_of(v_dim),
        BLOCK_REST=block_of(head_dim - v_dim) if head_dim > v_dim else 0,
        PAGE_SIZE=pages[1] if len(pages) == 2 else _ONE_PAGE.value,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        WINDOW=layer.window or 0,
        CHUNK=layer.chunk or 0,
        CAP=layer.softcap or 0.0,
        PREFIX_ONLY=prefix_only,
        ROWS_AT_ONCE=_ROWS_AT_ONCE,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out
