"""A kernel that lists the pages of all rows in one array, as FlashInfer reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.forward_batch import PagedMetadata

_BLOCK = 512  # pages of a row that one program copies: 16 bytes for each of its 128 threads
_ROWS = 256  # number of row lengths that a program reads at a time


@triton.jit
def _pages_of(cache_seqlens, cu_seqlens_q, rows, is_row, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """The first listed page of each row, and the number of listed pages."""
    lens = tl.load(cache_seqlens + rows, mask=is_row, other=0)
    first = lens * 0  # zeros of the shape of `lens`
    if CHUNK > 0:
        starts = tl.load(cu_seqlens_q + rows, mask=is_row, other=0)
        num_tokens = tl.load(cu_seqlens_q + rows + 1, mask=is_row, other=0) - starts
        first = (lens - num_tokens) // CHUNK * (CHUNK // PAGE_SIZE)
    return first, (lens + PAGE_SIZE - 1) // PAGE_SIZE - first


@triton.jit(do_not_specialize=["stride"])
def _flatten_pages(
    cache_seqlens, cu_seqlens_q, page_table, flat, stride, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    before = tl.zeros((ROWS,), tl.int32)
    for start in range(0, row, ROWS):
        rows = start + tl.arange(0, ROWS)
        before += _pages_of(cache_seqlens, cu_seqlens_q, rows, rows < row, PAGE_SIZE, CHUNK)[1]
    first, count = _pages_of(cache_seqlens, cu_seqlens_q, row, True, PAGE_SIZE, CHUNK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_page = columns < count
    pages = tl.load(page_table + row.to(tl.int64) * stride + first + columns, mask=is_page, other=0)
    tl.store(flat + tl.sum(before, axis=0) + columns, pages, mask=is_page)


def flatten_pages(paged: PagedMetadata, page_size: int, out: torch.Tensor, chunk: int | None = None) -> None:
    """Writes the pages of all rows, in order and without gaps, to the start of `out`. One kernel without a host sync,
    so a CUDA graph can capture it. Entries after a row's last page are not read.

    Args:
        chunk: a multiple of page_size. A row's pages are listed from the chunk of its first new token on. If None, all
            pages are listed.
        out: int32, contiguous, with at least as many elements as the rows have pages.
    """
    num_rows, max_pages = paged.page_table.shape
    _flatten_pages[(num_rows, triton.cdiv(max_pages, _BLOCK))](
        paged.cache_seqlens,
        paged.cu_seqlens_q,
        paged.page_table,
        out,
        paged.page_table.stride(0),
        PAGE_SIZE=page_size,
        CHUNK=chunk or 0,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
    )
