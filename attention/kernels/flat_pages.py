"""One kernel that lists the pages of all rows one after the other, as FlashInfer reads them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.forward_batch import PagedMetadata

_BLOCK = 512  # pages of a row that one program copies: 16 bytes for each of its 128 threads
_ROWS = 256  # whose lengths a program reads at a time


@triton.jit(do_not_specialize=["stride"])
def _flatten_pages(
    cache_seqlens, page_table, flat, stride, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    before = tl.zeros((ROWS,), tl.int32)
    for start in range(0, row, ROWS):
        rows = start + tl.arange(0, ROWS)
        lens = tl.load(cache_seqlens + rows, mask=rows < row, other=0)
        before += (lens + PAGE_SIZE - 1) // PAGE_SIZE
    first = tl.sum(before, axis=0)
    count = (tl.load(cache_seqlens + row) + PAGE_SIZE - 1) // PAGE_SIZE
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_page = columns < count
    pages = tl.load(page_table + row.to(tl.int64) * stride + columns, mask=is_page, other=0)
    tl.store(flat + first + columns, pages, mask=is_page)


def flatten_pages(paged: PagedMetadata, page_size: int, out: torch.Tensor) -> None:
    """Writes the pages of the rows, in order and without gaps, to the start of `out`.

    One kernel, no host sync: it can be captured in a CUDA graph. Entries past a row's last page are not read.

    Args:
        out: int32, contiguous, of at least as many elements as the rows have pages.
    """
    num_rows, max_pages = paged.page_table.shape
    _flatten_pages[(num_rows, triton.cdiv(max_pages, _BLOCK))](
        paged.cache_seqlens,
        paged.page_table,
        out,
        paged.page_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
    )
