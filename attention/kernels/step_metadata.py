"""Two kernels that turn a step's frame into the tensors that layers read: inputs, KV slots and page tables.

attention/step_metadata.py has the same functions for CPUs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.step_metadata import StepTensors

# Pages, or tokens, of a row that one program handles: 512 int32 are 16 bytes for each of its 128 threads.
_BLOCK = 512
_DELTA_BLOCK = 128


# Inputs are slices of one buffer. Without the decorator's arguments, Triton would compile a kernel for each combination
# of their alignments when it first appears, while serving.
@triton.jit(do_not_specialize_on_alignment=["rows", "starts", "cu_seqlens_q", "token_ids"])
def _fill_step_metadata(
    rows, starts, cu_seqlens_q, token_ids, page_table, last_tokens, input_ids, positions, out_cache_loc, cache_seqlens,
    row_pages, window_page_of, window_out_cache_loc, window_row_pages, next_starts, page_table_stride, row_pages_stride,
    WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    row = tl.load(rows + index).to(tl.int64)
    start = tl.load(starts + index)
    if next_starts is not None:
        start = tl.where(start < 0, tl.load(next_starts + row), start)
    first = tl.load(cu_seqlens_q + index)
    num_tokens = tl.load(cu_seqlens_q + index + 1) - first
    seq_len = start + num_tokens
    table_row = page_table + row * page_table_stride
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

    is_page = offsets < (seq_len + PAGE_SIZE - 1) // PAGE_SIZE
    pages = tl.load(table_row + offsets, mask=is_page, other=0)
    row_page = index.to(tl.int64) * row_pages_stride + offsets
    tl.store(row_pages + row_page, pages, mask=is_page)
    if HAS_WINDOW:
        tl.store(window_row_pages + row_page, tl.load(window_page_of + pages, mask=is_page, other=0), mask=is_page)

    is_token = offsets < num_tokens
    token = tl.load(token_ids + first + offsets, mask=is_token, other=0).to(tl.int64)
    own = tl.load(last_tokens + row * WIDTH + tl.maximum(-1 - token, 0), mask=token < 0, other=0)
    token = tl.where(token < 0, tl.maximum(own, 0), token)
    position = start + offsets
    page = tl.load(table_row + position // PAGE_SIZE, mask=is_token, other=0).to(tl.int64)
    tl.store(input_ids + first + offsets, token, mask=is_token)
    tl.store(positions + first + offsets, position.to(tl.int64), mask=is_token)
    tl.store(out_cache_loc + first + offsets, page * PAGE_SIZE + position % PAGE_SIZE, mask=is_token)
    if HAS_WINDOW:
        place = tl.load(window_page_of + page, mask=is_token, other=0).to(tl.int64)
        tl.store(window_out_cache_loc + first + offsets, place * PAGE_SIZE + position % PAGE_SIZE, mask=is_token)

    tl.store(cache_seqlens + index, seq_len, mask=tl.program_id(1) == 0)


def fill_step_metadata(
    *,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    token_ids: torch.Tensor,
    page_table: torch.Tensor,
    last_tokens: torch.Tensor,
    page_size: int,
    max_seqlen_q: int,
    out: StepTensors,
    window_page_of: torch.Tensor | None = None,
    next_starts: torch.Tensor | None = None,
) -> None:
    """Writes `out` in one kernel. No host sync, so a CUDA graph can capture it.

    Nothing after a row's last page or last token is read or written. Padding rows are row 0 at start 0 with one token;
    they get page 0, slot 0 and length 1.

    Args:
        rows: [B] int32: page-table row of each row of the batch.
        starts: [B] int32: position of each row's first token. A negative one stands for the row's entry in
            `next_starts`.
        cu_seqlens_q: [B + 1] int32: start of each row's tokens.
        token_ids: [T] int32. -1 - j means element j of the row's `last_tokens`.
        page_table: [num_rows + 1, max_pages] int32, up to date.
        last_tokens: [num_rows + 1, width] int64: the row's last token, then drafts of the next ones. A -1, of a row
            that got no token, counts as 0.
        page_size: a power of two.
        max_seqlen_q: largest number of tokens of a row. Further tokens of a row are lost, so a graph is captured with
            its own value.
        window_page_of: [num_pages + 1] int32: window page of each page. None without a window pool.
        next_starts: [num_rows + 1] int32: position of the token after each row's last one. If None, all `starts` are
            given.
    """
    num_blocks = triton.cdiv(max(page_table.shape[1], max_seqlen_q), _BLOCK)
    _fill_step_metadata[(rows.shape[0], num_blocks)](
        rows,
        starts,
        cu_seqlens_q,
        token_ids,
        page_table,
        last_tokens,
        out.input_ids,
        out.positions,
        out.out_cache_loc,
        out.cache_seqlens,
        out.page_table,
        window_page_of,
        out.window_out_cache_loc,
        out.window_page_table,  # strides are those of `page_table`
        next_starts,
        page_table.stride(0),
        out.page_table.stride(0),
        WIDTH=last_tokens.shape[1],
        PAGE_SIZE=page_size,
        HAS_WINDOW=window_page_of is not None,
        BLOCK=_BLOCK,
    )


# The stride is excluded from specialisation too, because `window_page_of` is passed as a table of one row.
@triton.jit(do_not_specialize=["num_deltas", "page_table_stride"], do_not_specialize_on_alignment=["deltas"])
def _apply_page_deltas(page_table, deltas, num_deltas, page_table_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_delta = index < num_deltas
    row = tl.load(deltas + 3 * index, mask=is_delta, other=0).to(tl.int64)
    column = tl.load(deltas + 3 * index + 1, mask=is_delta, other=0)
    page = tl.load(deltas + 3 * index + 2, mask=is_delta, other=0)
    tl.store(page_table + row * page_table_stride + column, page, mask=is_delta)


def apply_page_deltas(page_table: torch.Tensor, deltas: torch.Tensor) -> None:
    """Writes pages to the table, in one kernel.

    Args:
        page_table: [num_rows + 1, max_pages] int32.
        deltas: [num_deltas, 3] int32, contiguous: (row, index, page id), all within the table. The host has checked
            them before the upload. No (row, index) occurs twice, because the order of writes is undefined.
    """
    num_deltas = deltas.shape[0]
    if num_deltas == 0:
        return
    _apply_page_deltas[(triton.cdiv(num_deltas, _DELTA_BLOCK),)](
        page_table, deltas, num_deltas, page_table.stride(0), BLOCK=_DELTA_BLOCK
    )
