"""Turns a step's frame into the tensors that layers read, for CPUs, with numpy.

attention/kernels/step_metadata.py has the Triton kernels of the same names and signatures. numpy is used because its
calls on small arrays are faster than torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTensors:
    """Tensors that `fill_step_metadata` writes, for B rows and T tokens; contiguous, on the device."""

    input_ids: torch.Tensor
    """[T] int64: the input tokens."""
    positions: torch.Tensor
    """[T] int64: position of each token in its sequence."""
    out_cache_loc: torch.Tensor
    """[T] int64: KV slot (page * page_size + offset) of each token."""
    cache_seqlens: torch.Tensor
    """[B] int32: tokens of each row in the cache after this step's tokens are written."""
    page_table: torch.Tensor
    """[B, max_pages] int32: pages of each row. Entries after a row's last page are not written."""
    window_out_cache_loc: torch.Tensor | None = None
    """[T] int64: slot of each token in the window pool. None without a window pool."""
    window_page_table: torch.Tensor | None = None
    """[B, max_pages] int32: window pages of each row; otherwise like `page_table`. None without a window pool."""

    def first(self, num_rows: int, num_tokens: int) -> StepTensors:
        """Views of the first rows and tokens."""

        def cut(tensor: torch.Tensor | None, length: int) -> torch.Tensor | None:
            return None if tensor is None else tensor[:length]

        return StepTensors(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            out_cache_loc=self.out_cache_loc[:num_tokens],
            cache_seqlens=self.cache_seqlens[:num_rows],
            page_table=self.page_table[:num_rows],
            window_out_cache_loc=cut(self.window_out_cache_loc, num_tokens),
            window_page_table=cut(self.window_page_table, num_rows),
        )


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
    """The CPU version of the kernel of the same name."""
    table, row_of, bounds, positions = page_table.numpy(), rows.numpy(), cu_seqlens_q.numpy(), starts.numpy()
    if next_starts is not None:
        positions = np.where(positions < 0, next_starts.numpy()[row_of], positions)
    lens = bounds[1:] - bounds[:-1]
    num_rows, num_tokens = len(lens), int(bounds[-1])
    seq_lens = positions + lens
    row_of_token = row_of
    if max_seqlen_q > 1:
        # A token's position is its row's start plus its offset in the row.
        positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(positions - bounds[:-1], lens)
        row_of_token = np.repeat(row_of, lens)
    pages, offsets = np.divmod(positions, page_size)
    ids = token_ids.numpy()[:num_tokens]
    own = last_tokens.numpy()[row_of_token, np.maximum(-1 - ids, 0)].clip(0)
    out.input_ids.numpy()[:num_tokens] = np.where(ids < 0, own, ids)
    out.positions.numpy()[:num_tokens] = positions
    pages = table[row_of_token, pages]
    out.out_cache_loc.numpy()[:num_tokens] = pages * np.int64(page_size) + offsets
    out.cache_seqlens.numpy()[:num_rows] = seq_lens
    num_pages = -(-seq_lens // page_size)
    width = int(num_pages.max())
    is_page = np.arange(width) < num_pages[:, None]
    row_pages = table[row_of, :width]
    np.copyto(out.page_table.numpy()[:num_rows, :width], row_pages, where=is_page)
    if window_page_of is not None:
        assert out.window_out_cache_loc is not None, "places without a window pool"
        assert out.window_page_table is not None, "places without a window pool"
        place = window_page_of.numpy()
        out.window_out_cache_loc.numpy()[:num_tokens] = place[pages] * np.int64(page_size) + offsets
        windowed = place[np.where(is_page, row_pages, 0)]
        np.copyto(out.window_page_table.numpy()[:num_rows, :width], windowed, where=is_page)


def apply_page_deltas(page_table: torch.Tensor, deltas: torch.Tensor) -> None:
    """The CPU version of the kernel of the same name."""
    row, index, page = deltas.numpy().T
    page_table.numpy()[row, index] = page
