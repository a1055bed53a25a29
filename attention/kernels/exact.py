"""Attention over the paged KV cache with the same bits for a token in every step.

The bits do not depend on whether the token is a decode or part of a prompt, on chunks, on a cached prefix, on the
batch, or on the number of heads on the rank.

The contract. Keys are cut into spans of `SPAN` positions, and spans into tiles of `tile_of` positions. For each span, a
query has a separate sum in fp32 that starts empty: the largest score, the sum of the weights, and the weighted sum of
the values. Tiles are taken in ascending order. Scores come from one product over the whole head. Weights are rounded to
the dtype of the values. Both sums are products of these weights, with ones and with the values. (A reduction of the
weights would add in the order of registers, which depends on the tile's shape.) Spans are merged in ascending order,
then the sink, then one division and one rounding. A key that a query does not see gets a weight of exactly zero. So
tiles and spans without a visible key change no bit, and it does not matter which queries share a program.

Latent layers have one form, the absorbed one: the value is the first part of the key, and a score adds the product over
this part first, then that over the rotated part.

The rest is free: pairs per program, warps, stages, pages, and which program walks which spans. So one kernel serves all
steps. If there are few programs, each walks some spans of one row and writes their sums to memory, and a second kernel
merges them in the same order with the same function. Measured on an H200: the same bits with 16 to 128 pairs per
program and 2 to 8 warps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.forward_batch import PagedMetadata
from attention.kernels.extend import ExtendTuning, Spans, paged_extend
from attention.kernels.pages import block_of, first_key
from attention.kernels.sums import empty_span, exact_answer, merge_span, scaled_sink
from attention.layer import AttentionLayer
from parallel.kernels.dependent_launch import follow, has_dependent_launch, let_next_start
from parallel.kernels.shared_memory import has_little

SPAN = 512
"""Positions per span: a power of two. With 256 or 128, a decode step of Qwen3-8B took 0.99 to 1.01 times as long on an
H200, and its prompts 0.997 to 1.001 times (exact_wide_leaves_h200_2026-11-23.txt). Long rows, for which half the span
would give twice the programs, were not measured."""
_MOST_RUNS = 256
"""Number of programs that walk keys at once, if keys are cut into runs."""
_MOST_PART_BYTES = 32 << 20
"""Memory for the span sums of steps with few tokens: 24 tokens with 32 heads of 128 and 40,960 positions."""
_MOST_LATENT_BYTES = 256 << 20
"""Memory for the span sums of decodes of latent layers, which are four times as wide as others: 64 rows with 16 heads
of 512 and 65,536 positions. Not measured."""
_MERGED_AT_ONCE = 8
"""Number of spans that the merging program loads ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The layout of the work. No bit of an output depends on it."""

    block_m: int
    """(token, query head) pairs per program: a power of two, at least 16."""
    num_warps: int
    num_stages: int
    """Number of key and value tiles that are being loaded, plus one."""
    num_runs: int = 1
    """Largest number of runs of a row's spans: in steps with one token per row, and in steps with few tokens if their
    queries see all keys before them. Other steps use 1."""


def tile_of(head_dim: int, dtype: torch.dtype) -> int:
    """Positions per tile, by head size and query dtype, such that prompts and decodes can both use it. Prompts want
    large tiles; 64 is the most that fits in registers beside the sums of heads of 128, and 32 for 256. Decodes want
    many bytes in flight, which is the same number for both sizes. fp32 is multiplied without tensor cores, and its
    threads hold whole rows of the operands. Latents have the tile of heads of 256."""
    if dtype.itemsize > 2:
        return 16
    return 64 if head_dim <= 128 else 32


def choose(
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    num_rows: int | None = None,
    tokens: int = 1 << 10,
    *,
    is_small: bool = False,
) -> Schedule:
    """The layout for H200s. Not measured.

    Args:
        group: query heads per KV head.
        num_rows: for steps with one token per row: rows, padding included, times this rank's KV heads. Else None.
        tokens: for other steps: mean tokens per row. A tile with few pairs takes as long as a full one.
        is_small: whether the GPU has too little shared memory for three stages of heads wider than 128.
    """
    is_wide = head_dim > 128
    is_latent = head_dim > 256
    # The sums of a span and of all spans are in registers, 4 KiB for each pair of a latent layer.
    most = 32 if is_latent else 64 if is_wide else 128
    if dtype.itemsize > 2 or (is_latent and is_small):
        most = 16
    few = 16 if is_latent else 32
    num_stages = 2 if dtype.itemsize > 2 or (is_wide and is_small) else 3
    if num_rows is None:
        block_m = min(block_of(group * tokens), most)
        num_warps = 4 if block_m <= few else 8
        return Schedule(block_m=block_m, num_warps=num_warps, num_stages=num_stages, num_runs=_MOST_RUNS)
    block_m = min(block_of(group), most)
    num_rows *= -(-group // block_m)
    num_runs = 1 if num_rows > 192 else (256 if num_rows <= 64 else 512) // num_rows
    num_warps = 8 if block_m > (few if is_wide else 64) else 4
    return Schedule(block_m=block_m, num_warps=num_warps, num_stages=num_stages, num_runs=num_runs)


@triton.jit(
    do_not_specialize=["num_parts", "num_rows"],
    do_not_specialize_on_alignment=["cache_seqlens", "cu_seqlens_q", "sinks"],
)
def _merge_kernel(
    parts_ptr, sums_ptr, cache_seqlens, cu_seqlens_q, sinks, out_ptr, num_parts, num_rows, v_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr, EARLY_MERGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program per query head and token. With ROWS (a power of two, at least the number of rows), rows have several
    tokens."""
    head = tl.program_id(0) + tl.arange(0, 1)
    token = tl.program_id(1)
    # The kernel of the parts let this one start only after its own wait, so all tensors written before it can be read.
    if ROWS > 0:
        rows = tl.arange(0, ROWS)
        ends = tl.load(cu_seqlens_q + 1 + rows, mask=rows < num_rows, other=token)
        row = tl.sum((ends <= token).to(tl.int32), 0) - (ROWS - num_rows)
        if row >= num_rows:
            return
        seq_len = tl.load(cache_seqlens + row) - (tl.load(cu_seqlens_q + row + 1) - 1 - token)
    else:
        seq_len = tl.load(cache_seqlens + token)
    num_spans = tl.cdiv(seq_len, SPAN) - first_key(seq_len - 1, WINDOW, CHUNK) // SPAN
    follow(EARLY_MERGE)  # until all parts are written and visible
    let_next_start(EARLY_MERGE)
    out_row = token.to(tl.int64) * tl.num_programs(0) + head
    dims = tl.arange(0, BLOCK_D)[None, :]
    m, _, acc = empty_span(1, BLOCK_D)
    total = tl.zeros([1], tl.float32)
    for span in tl.range(0, num_spans, num_stages=AT_ONCE):
        part = out_row * num_parts + span
        span_m, span_total = tl.load(sums_ptr + 2 * part), tl.load(sums_ptr + 2 * part + 1)
        span_acc = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        m, total, acc = merge_span(m, total, acc, span_m, span_total, span_acc)
    sink = None
    if sinks is not None:
        sink = scaled_sink(tl.load(sinks + head))
    answer = exact_answer(m, total, acc, sink, v_scale)
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + dims
    tl.store(out_ptrs, answer.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_exact(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    paged: PagedMetadata,
    layer: AttentionLayer,
    *,
    out: torch.Tensor,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of each row over all keys of the row, under the contract above.

    One kernel, or two if a row's spans are cut into runs. No host sync, so a CUDA graph can capture it: the grid
    depends only on the shapes of `q` and `paged`, and a row may be as long as the page table is wide. Page-table
    entries after a row's last page, unused pages and slots after a row's last token are never read.

    Args:
        q: [num_tokens, tp_q_head_num, head_dim] bf16, fp16 or fp32. Heads of a token are contiguous; the token stride
            may be larger. Every token belongs to a row: `cu_seqlens_q` ends with num_tokens or earlier. fp32 is
            multiplied in fp32, without tensor cores.
        k_pages: [num_pages, page_size, tp_k_head_num, head_dim], contiguous, in q's dtype or e4m3. page_size is a power
            of two.
        v_pages: like `k_pages`. If None, the value is the first columns of the key.
        paged: rows may have no new tokens. If `max_seqlen_q` is 1, every row has one, and `cu_seqlens_q` is not read.
        layer: its scales, window, chunk, softcap and sinks are applied.
        out: [num_tokens, tp_q_head_num, columns of a value], contiguous, in q's dtype, written.
        schedule: if None, `choose` for this step. Runs temporarily take 4 * (v_dim + 2) bytes for each query head,
            token and span of the longest row that the table can hold.

    Returns:
        `out`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    v_dim = out.shape[-1]
    _, page_size, num_kv_heads, _ = k_pages.shape
    num_rows, group = len(paged.cache_seqlens), num_q_heads // num_kv_heads
    window, chunk = layer.window or 0, layer.chunk or 0
    is_decode = paged.max_seqlen_q == 1
    if schedule is None:
        tokens = -(-num_tokens // max(num_rows, 1))
        programs = num_rows * num_kv_heads if is_decode else None
        schedule = choose(head_dim, q.dtype, group, programs, tokens, is_small=has_little(q.device))
    most_seen = min(it for it in (paged.page_table.shape[1] * page_size, window, chunk) if it)
    # The first visible key may be anywhere in a span.
    num_parts = -(-(most_seen - 1) // SPAN) + 1
    count = num_tokens * num_q_heads * num_parts
    num_bytes, most_bytes = 4 * count * (v_dim + 2), _MOST_LATENT_BYTES if is_decode else _MOST_PART_BYTES
    num_runs = 1
    if is_decode:
        num_runs = min(schedule.num_runs, num_parts) if v_pages is not None or num_bytes <= most_bytes else 1
    elif not window and not chunk and num_bytes <= most_bytes:
        num_tiles = num_kv_heads * max(num_tokens * group // schedule.block_m, 1)
        num_runs = min(schedule.num_runs, num_parts, max(_MOST_RUNS // num_tiles, 1))
    parts, sums = out, None
    if num_runs > 1:
        workspace = torch.empty(count * (v_dim + 2), dtype=torch.float32, device=q.device)
        parts, sums = workspace[: count * v_dim].view(count, v_dim), workspace[count * v_dim :]
    early_merge = num_runs > 1 and has_dependent_launch(q.device)
    tuning = ExtendTuning(
        block_m=schedule.block_m,
        block_n=tile_of(head_dim, q.dtype),
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
    )
    spans = Spans(span=SPAN, num_parts=num_parts, num_runs=num_runs, one_token=is_decode, is_early=early_merge)
    paged_extend(q, k_pages, v_pages, paged, layer, out=parts, lse=sums, tuning=tuning, spans=spans)
    if sums is not None:
        _merge_kernel[(num_q_heads, num_tokens)](
            parts,
            sums,
            paged.cache_seqlens,
            paged.cu_seqlens_q,
            layer.sinks,
            out,
            num_parts,
            num_rows,
            layer.v_scale,
            HEAD_DIM=v_dim,
            BLOCK_D=block_of(v_dim),
            SPAN=SPAN,
            WINDOW=window,
            CHUNK=chunk,
            AT_ONCE=_MERGED_AT_ONCE,
            EARLY_MERGE=early_merge,
            ROWS=0 if is_decode else block_of(num_rows),
            launch_pdl=early_merge,
        )
    return out
