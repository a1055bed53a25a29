"""Attention of one new token per row over the paged KV cache. Keys are read once, at the speed of the memory.

A program walks a run of key blocks for the query heads of one KV head of one row. Values may be the first columns of
the keys (latent attention); a block is then read once for both. If the batch has too few rows to fill the device, the
keys of a row are cut into runs. Each program then writes its part of the output in fp32; a second kernel joins them.

The bits of a row's output depend on its own keys, the number of runs and `DecodeTuning`, but not on the other rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.forward_batch import PagedMetadata
from attention.kernels.pages import (
    block_of,
    first_key,
    for_cache,
    pages_of,
    slots_in_page,
    slots_of,
    unpaired,
)
from attention.kernels.sums import cap
from attention.layer import AttentionLayer
from parallel.kernels.dependent_launch import follow, is_dependent, let_next_start
from parallel.kernels.shared_memory import is_b200, shared_bytes

_SPLITS_AT_ONCE = 16
_MAX_SPLITS = 128
_SPARED_BYTES = 7 * 1024
"""Bytes of a program's shared memory that are not planned for."""
_WIDE = 256  # Values wider than this many columns limit a program's query heads, because their sums fill its registers.
_WIDE_BLOCK_M = 64
_WIDE_SHARED_BYTES = 150 * 1024
"""Shared memory that `_WIDE_BLOCK_M` heads take with three stages. With less, half as many heads and two stages do."""
_MULTIPROCESSORS = 132  # number of SMs of an H200; one program with wide values fills an SM


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTuning:
    """The layout of the work. The last bits of an output depend on every field except `early_join`."""

    block_n: int
    """Keys per block: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Number of key and value blocks that are being loaded, plus one."""
    num_splits: int
    """Largest number of runs into which a row's keys are cut."""
    min_blocks: int = 1
    """Smallest number of blocks per run. Rows that are too short have fewer runs."""
    early_join: bool = False
    """Whether the join kernel starts while the runs are still computed. It then waits on the device, which saves about
    1 us (H200). Without effect if there is one run, or on GPUs without dependent launches."""


def choose(batch_size: int, num_kv_heads: int, itemsize: int = 2) -> DecodeTuning:
    """The fastest tuning for this batch size (padding included) on an H200, for rows of equal and of mixed lengths.

    Measured with head_dim 128 (benchmarks/results/decode_attention_h200_2026-11-21.txt). Blocks of 64 keys load more
    bytes at a time. With blocks of 32, six programs share an SM instead of three; they win only where this lets all
    programs (or most) run at once on the 132 SMs. Keys are split only until the device is full, because each further
    run must be started and joined.

    For FP8, the shared memory holds the same number of bytes as for 16-bit values; otherwise the layout is the same.
    That was not measured: `python -m benchmarks.decode_attention --kv-dtype fp8_e4m3` tries others.

    Args:
        batch_size: at least 1.
        num_kv_heads: of this rank.
        itemsize: bytes per element of the cache.
    """
    num_rows = batch_size * num_kv_heads  # programs that read keys
    num_splits, is_large = 1, True
    if num_rows <= 64:
        num_splits = min(256 // num_rows, _MAX_SPLITS)
    elif num_rows <= 192:
        num_splits, is_large = 512 // num_rows, False
    elif 256 < num_rows <= 1536:
        is_large = False
    return DecodeTuning(
        block_n=64 if is_large else 32,
        num_warps=4 if is_large else 2,
        num_stages=3 if itemsize > 1 else 5,
        num_splits=num_splits,
        early_join=num_splits > 1,
    )


def _fit(
    tuning: DecodeTuning,
    block_m: int,
    block_d: int,
    itemsize: int,
    kv_itemsize: int,
    num_programs: int,
    device: torch.device,
) -> DecodeTuning:
    """Adapts `tuning` to registers and shared memory. On an H200, unchanged for 16-bit values and up to 32 query heads
    per KV head.

    More query heads need more warps. fp32 needs short blocks, because its threads hold whole rows of the operands. For
    wide values, blocks of 32 let two programs with up to 32 heads each share an SM; at 16 and 64 rows of 4k tokens,
    nothing else was over 7 % faster. With more heads, one program fills an SM's registers, so there are only as many
    runs as SMs. Runs of less than 128 tokens do not pay for joining their wide parts
    (benchmarks/results/latent_decode_h200_2026-11-26.txt).

    Args:
        num_programs: number of programs per run, over all rows.
    """
    shared = shared_bytes(device)
    if block_d > _WIDE and (shared < _WIDE_SHARED_BYTES or is_b200(device)):
        tuning = dataclasses.replace(tuning, num_stages=2)
    if block_d > _WIDE and itemsize <= 2:
        wide = dataclasses.replace(tuning, block_n=32, min_blocks=4, num_warps=4 if block_m <= 32 else 8)
        if block_m <= 32:
            return wide
        num_splits = min(max(_MULTIPROCESSORS // num_programs, 1), _MAX_SPLITS)
        return dataclasses.replace(wide, num_splits=num_splits, early_join=num_splits > 1)
    block_n = tuning.block_n if itemsize <= 2 else 16
    stage_bytes = 2 * tuning.num_stages * block_d * kv_itemsize
    while block_n > 16 and block_m * block_d * itemsize + block_n * stage_bytes > shared - _SPARED_BYTES:
        block_n //= 2
    num_warps = max(tuning.num_warps, 4 if itemsize > 2 else 1, block_m // 16 if block_m > 32 else 1)
    return dataclasses.replace(tuning, block_n=block_n, num_warps=num_warps)


@triton.jit
def _blocks_of_run(num_blocks, num_splits, MIN_BLOCKS: tl.constexpr):
    """Number of blocks in each run except the last, if `num_blocks` are cut into `num_splits` runs."""
    return tl.maximum(tl.cdiv(num_blocks, num_splits), MIN_BLOCKS)


@triton.jit
def _blocks_of_split(
    seq_len, split, num_splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The key blocks [begin, end) of one run of a row. Empty if earlier runs hold all keys."""
    begin = first_key(seq_len - 1, WINDOW, CHUNK) // BLOCK_N
    end = tl.cdiv(seq_len, BLOCK_N)
    run = _blocks_of_run(end - begin, num_splits, MIN_BLOCKS)
    begin += split * run
    return begin, tl.minimum(end, begin + run)


@triton.jit(
    do_not_specialize=["page_table_stride", "group", "num_splits"],
    do_not_specialize_on_alignment=["page_table", "cache_seqlens", "sinks"],
)
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, page_table, cache_seqlens, sinks, out_ptr, lse_ptr, q_stride, page_table_stride, group,
    scale, v_scale, num_splits, HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_BLOCKS: tl.constexpr, CAP: tl.constexpr,
    SPLIT: tl.constexpr, DEPENDENT: tl.constexpr, EARLY_JOIN: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    # FP8 values are loaded in pairs. Single bytes would move from shared memory to registers one by one, because a
    # product over keys needs the values transposed, and the hardware transposes only 16-bit words. Latents are already
    # fp16 here, as keys.
    PAIRED: tl.constexpr = k_ptr.dtype.element_ty.is_fp8() and v_ptr is not None
    PER_WORD: tl.constexpr = 2 if PAIRED else 1
    # Consecutive programs read neighbouring or the same memory: the KV heads of one row.
    kv_head = tl.program_id(0) // HEAD_TILES
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(0) // HEAD_TILES
    follow(DEPENDENT)
    # The join kernel may start once every program has signalled or ended. No program waits for a free SM after that.
    let_next_start(EARLY_JOIN)
    slot_stride = num_kv_heads * HEAD_DIM

    seq_len = tl.load(cache_seqlens + row)
    if SPLIT:
        begin, end = _blocks_of_split(seq_len, split, num_splits, BLOCK_N, WINDOW, CHUNK, MIN_BLOCKS)
        if begin >= end:
            return
    else:
        begin, end = _blocks_of_split(seq_len, 0, 1, BLOCK_N, WINDOW, CHUNK, 1)

    heads = tl.program_id(0) % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < V_DIM
    is_head = heads < group
    q_heads = kv_head * group + heads
    q_rows = q_ptr + row * q_stride + q_heads[:, None] * HEAD_DIM
    q = tl.load(q_rows + dims[None, :], mask=is_head[:, None] & inside[None, :], other=0.0)
    q = for_cache(q, k_ptr.dtype.element_ty)
    if BLOCK_REST > 0:
        rest = V_DIM + tl.arange(0, BLOCK_REST)
        q_rest = tl.load(q_rows + rest[None, :], mask=is_head[:, None] & (rest < HEAD_DIM)[None, :], other=0.0)
        q_rest = for_cache(q_rest, k_ptr.dtype.element_ty)

    table_row = page_table + row * page_table_stride
    page = pages_of(table_row, begin, end, seq_len, PAGE_SIZE, BLOCK_N)
    head_in_page = slots_in_page(PAGE_SIZE, BLOCK_N) * slot_stride + kv_head * HEAD_DIM
    tile = head_in_page + dims[None, :]
    words = tl.arange(0, BLOCK_D // PER_WORD)
    word_inside = words < V_DIM // PER_WORD
    word_tile = head_in_page // PER_WORD + words[None, :]
    if BLOCK_REST > 0:
        tile_rest = head_in_page + rest[None, :]

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Weights are summed over keys only at the end; inside the loop this would need a round trip through shared memory.
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D // PER_WORD], tl.float32)
    seconds = acc  # the second half of each word, if words hold two values
    for block in tl.range(begin, end):
        position = block * BLOCK_N + keys
        visible = position < seq_len
        if WINDOW > 0 or CHUNK > 0:
            visible = visible & (position >= first_key(seq_len - 1, WINDOW, CHUNK))
        offset = slots_of(page, block, PAGE_SIZE, BLOCK_N) * slot_stride
        page = pages_of(table_row, block + 1, end, seq_len, PAGE_SIZE, BLOCK_N)
        # Missing keys are not loaded: a NaN among the values would pass through its weight of zero.
        k = tl.load(k_ptr + offset + tile, mask=visible[:, None] & inside[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_REST > 0:
            k_rest = tl.load(k_ptr + offset + tile_rest, mask=visible[:, None] & (rest < HEAD_DIM)[None, :], other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest.to(q.dtype)), scores, input_precision="ieee")
        scores *= scale
        if CAP > 0:
            scores = cap(scores, CAP)
        scores = tl.where(visible[None, :], scores * LOG2_E, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        decay = tl.exp2(m - new_m)
        p = tl.exp2(scores - new_m[:, None])
        m = new_m
        weights = weights * decay[:, None] + p
        v = k
        if v_ptr is not None:
            v = tl.load(v_ptr + offset // PER_WORD + word_tile, mask=visible[:, None] & word_inside[None, :], other=0)
        p = p.to(q.dtype)
        if PAIRED:
            v, second = unpaired(v, COMPILED)
            seconds = tl.dot(p, second.to(q.dtype), seconds * decay[:, None], input_precision="ieee")
        acc = tl.dot(p, v.to(q.dtype), acc * decay[:, None], input_precision="ieee")

    total = tl.sum(weights, 1)
    if sinks is not None:
        sink = tl.load(sinks + q_heads, mask=is_head, other=0.0) * LOG2_E
        new_m = tl.maximum(m, sink)
        decay = tl.exp2(m - new_m)
        total = total * decay + tl.exp2(sink - new_m)
        acc *= decay[:, None]
        seconds *= decay[:, None]
    out_row = row * (num_kv_heads * group) + q_heads
    stored = is_head[:, None] & word_inside[None, :]
    if SPLIT:
        out_row = out_row * num_splits + split
        tl.store(lse_ptr + out_row, m + tl.log2(total), mask=is_head)
    out_ptrs = out_ptr + out_row[:, None] * V_DIM + words[None, :] * PER_WORD
    attended = acc / total[:, None] * v_scale
    if not EARLY_JOIN:
        let_next_start(DEPENDENT)
    tl.store(out_ptrs, attended.to(out_ptr.dtype.element_ty), mask=stored)
    if PAIRED:
        attended = seconds / total[:, None] * v_scale
        tl.store(out_ptrs + 1, attended.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["cache_seqlens", "sinks"])
def _join_kernel(
    parts_ptr, lse_ptr, cache_seqlens, sinks, out_ptr, num_splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, EARLY_JOIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    out_row = row * tl.num_programs(0) + tl.program_id(0)
    # The kernel of the runs let this one start only after its own wait, so all tensors written before it can be read.
    seq_len = tl.load(cache_seqlens + row)
    begin, end = _blocks_of_split(seq_len, 0, 1, BLOCK_N, WINDOW, CHUNK, 1)
    num_blocks = end - begin
    num_parts = tl.cdiv(num_blocks, _blocks_of_run(num_blocks, num_splits, MIN_BLOCKS))
    follow(EARLY_JOIN)  # until all runs are done and their writes are visible
    let_next_start(EARLY_JOIN)

    splits = tl.arange(0, MAX_SPLITS)
    lse = tl.load(lse_ptr + out_row * num_splits + splits, mask=splits < num_parts, other=float("-inf"))
    largest = tl.max(lse, 0)
    if sinks is not None:
        sink = tl.load(sinks + tl.program_id(0)) * 1.4426950408889634
        largest = tl.maximum(largest, sink)
    total = tl.sum(tl.exp2(lse - largest), 0)
    if sinks is not None:
        total += tl.exp2(sink - largest)
    dims = tl.arange(0, BLOCK_D)
    inside = dims < HEAD_DIM
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_parts, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        is_part = part < num_parts
        part_row = out_row * num_splits + part
        weight = tl.exp2(tl.load(lse_ptr + part_row, mask=is_part, other=float("-inf")) - largest)
        values = tl.load(
            parts_ptr + part_row[:, None] * HEAD_DIM + dims[None, :], mask=is_part[:, None] & inside[None, :], other=0.0
        )
        acc += tl.sum(values * weight[:, None], 0)
    tl.store(out_ptr + out_row * HEAD_DIM + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=inside)


def paged_decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    paged: PagedMetadata,
    layer: AttentionLayer,
    *,
    out: torch.Tensor,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """Attention of the newest token of each row over all keys of the row, its own included.

    One kernel, or two if keys are split. No host sync, so a CUDA graph can capture it. Page-table entries after a row's
    last page, unused pages and unused slots of the last page are never read.

    Scores, weights and sums are fp32. For the product with the values, weights are rounded to q's dtype, or to fp16 if
    q is bf16 and the cache FP8. The output is rounded once.

    Args:
        q: [batch_size, tp_q_head_num, head_dim] bf16, fp16 or fp32. Heads of a row are contiguous; the row stride may
            be larger. fp32 is multiplied in fp32, without tensor cores.
        k_pages: [num_pages, page_size, tp_k_head_num, head_dim], contiguous, in q's dtype or e4m3. page_size is a power
            of two.
        v_pages: like `k_pages`. If None, the value is the first columns of the key.
        paged: of a step with one token per row. `cache_seqlens` is at least 1 in every row; `cu_seqlens_q` is not read.
        layer: its scales, window, chunk, softcap and sinks are applied.
        out: [batch_size, tp_q_head_num, columns of a value], contiguous, written.
        tuning: if None, `choose` for this batch. Split keys temporarily take 4 bytes for each column of a value and one
            more, per query head and run; with `choose`, there are at most 512 * group of these.

    Returns:
        `out`.
    """
    batch_size, num_q_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_pages.shape
    v_dim = out.shape[-1]
    assert v_pages is None or v_dim == head_dim, "values of a width of their own are columns of the keys"
    group = num_q_heads // num_kv_heads
    itemsize, kv_itemsize = q.element_size(), k_pages.element_size()
    block_m, block_d = block_of(group), block_of(v_dim)
    if block_d > _WIDE:
        most = _WIDE_BLOCK_M if shared_bytes(q.device) >= _WIDE_SHARED_BYTES else _WIDE_BLOCK_M // 2
        block_m = min(block_m, most if kv_itemsize <= 2 else 16)
    head_tiles = triton.cdiv(group, block_m)
    if tuning is None:
        tuning, num_programs = choose(batch_size, num_kv_heads, kv_itemsize), batch_size * num_kv_heads * head_tiles
        tuning = _fit(tuning, block_m, block_d, itemsize, kv_itemsize, num_programs, q.device)
    num_splits = tuning.num_splits
    is_split = num_splits > 1
    dependent = is_dependent(q.device, batch_size)
    early_join = is_split and tuning.early_join and dependent
    parts, lse = out, None
    if is_split:
        num_parts = batch_size * num_q_heads * num_splits
        workspace = torch.empty(num_parts * (v_dim + 1), dtype=torch.float32, device=q.device)
        parts, lse = workspace, workspace[num_parts * v_dim :]
    window, chunk = layer.window or 0, layer.chunk or 0
    _decode_kernel[(num_kv_heads * head_tiles, num_splits, batch_size)](
        q,
        k_pages,
        v_pages.view(torch.int16) if v_pages is not None and kv_itemsize == 1 else v_pages,
        paged.page_table,
        paged.cache_seqlens,
        None if is_split else layer.sinks,  # else the join adds the sinks
        parts,
        lse,
        q.stride(0),
        paged.page_table.stride(0),
        group,
        layer.scale * layer.k_scale,
        layer.v_scale,
        num_splits,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        BLOCK_D=block_d,
        BLOCK_REST=block_of(head_dim - v_dim) if head_dim > v_dim else 0,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        HEAD_TILES=head_tiles,
        BLOCK_N=tuning.block_n,
        WINDOW=window,
        CHUNK=chunk,
        MIN_BLOCKS=tuning.min_blocks,
        CAP=layer.softcap or 0.0,
        SPLIT=is_split,
        DEPENDENT=dependent,
        EARLY_JOIN=early_join,
        COMPILED=not triton.knobs.runtime.interpret,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=dependent,
    )
    if is_split:
        _join_kernel[(num_q_heads, batch_size)](
            parts,
            lse,
            paged.cache_seqlens,
            layer.sinks,
            out,
            num_splits,
            HEAD_DIM=v_dim,
            BLOCK_D=block_d,
            BLOCK_N=tuning.block_n,
            WINDOW=window,
            CHUNK=chunk,
            MIN_BLOCKS=tuning.min_blocks,
            MAX_SPLITS=1 << (num_splits - 1).bit_length(),
            BLOCK_S=_SPLITS_AT_ONCE,
            EARLY_JOIN=early_join,
            launch_pdl=early_join,
        )
    return out
