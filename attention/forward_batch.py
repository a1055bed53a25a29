"""The input of one forward pass: a step's rows, as attention backend and decoder need them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

from attention.state_pool import RowStates

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class ForwardMode(Enum):
    """The kinds of rows in a batch."""

    DECODE = auto()
    """Every row has one input token."""
    EXTEND = auto()
    """Every row has several input tokens: prompts or chunks, with or without a cached prefix."""
    MIXED = auto()
    """Both kinds of rows."""

    @classmethod
    def of(cls, extend_lens: Int64Array) -> ForwardMode:
        """The mode of rows with these numbers of input tokens."""
        singles = int((extend_lens == 1).sum())
        if singles == len(extend_lens):
            return cls.DECODE
        return cls.MIXED if singles else cls.EXTEND


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedMetadata:
    """Device tensors that paged attention kernels read. They are static while a CUDA graph is captured."""

    cache_seqlens: torch.Tensor
    """[batch_size] int32: tokens in the KV cache after this step's tokens are written; 1 for padding rows."""
    cu_seqlens_q: torch.Tensor
    """[batch_size + 1] int32: start of each row's input tokens in the batch, and the end of the last row's."""
    page_table: torch.Tensor
    """[batch_size, max_pages] int32: pages of each row. Entries after a row's last page are undefined."""
    max_seqlen_q: int
    """Largest number of input tokens of a row."""

    @classmethod
    def of_single_tokens(cls, cache_seqlens: torch.Tensor, page_table: torch.Tensor) -> PagedMetadata:
        """The metadata of rows with one input token each. Queues a kernel, and does not wait for the device."""
        starts = torch.arange(len(cache_seqlens) + 1, dtype=torch.int32, device=cache_seqlens.device)
        return cls(cache_seqlens=cache_seqlens, cu_seqlens_q=starts, page_table=page_table, max_seqlen_q=1)

    def check(self) -> None:
        """Asserts the shapes that kernels assume; with others they would read out of bounds. This is cheap and runs
        once a step."""
        lens, starts, table = self.cache_seqlens, self.cu_seqlens_q, self.page_table
        assert lens.dtype == starts.dtype == table.dtype == torch.int32, "paged metadata is int32"
        assert len(lens) == len(table) == len(starts) - 1, f"{len(lens)} lengths, {len(table)} rows of pages"
        assert table.stride(1) == lens.stride(0) == starts.stride(0) == 1, "paged metadata is contiguous"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokenMask:
    """Which new tokens of its row each new token sees. Without a mask, it sees itself and the new tokens before it.

    The part of one row is [extend_len, extend_len], stored query by query: for example a tree of drafts, or all ones
    for bidirectional attention. Every real token must see itself.
    """

    visible: torch.Tensor
    """[sum of extend_len ** 2 over rows with a part] uint8 or bool, contiguous, device: nonzero if the key is
    visible."""
    starts: torch.Tensor
    """[batch_size] int32 or int64, device: start of each row's part in `visible`. -1 for a causal row without a
    part."""
    positions: torch.Tensor
    """[num_tokens] int64, device: `ForwardBatch.positions`. Window and chunk hide tokens of the prefix by these
    positions, but no new tokens of rows with a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step on one rank. Tokens of row i are `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, in the order of the frame's
    rows.

    The host arrays (numpy) describe the step, so building metadata never waits for the device.
    worker/step/step_inputs.py creates the whole object over its static tensors; no later stage fills a field.
    """

    mode: ForwardMode
    prefix_lens: Int64Array
    """[batch_size] int64, host: number of each row's tokens in the KV cache, and so the position of its first input."""
    extend_lens: Int64Array
    """[batch_size] int64, host: number of input tokens of each row."""
    seq_lens: Int64Array
    """[batch_size] int64, host: number of each row's tokens, cached or input: prefix_lens + extend_lens."""
    cu_seqlens_q: Int64Array
    """[batch_size + 1] int64, host: start of each row's input tokens in the batch, and the end of the last row's."""
    input_ids: torch.Tensor
    """[num_tokens] int64, device: the input tokens."""
    positions: torch.Tensor
    """[num_tokens] int64, device: position of each input token. Positions of a row are consecutive from `prefix_lens`
    on. In rows with a part of `mask` they may be in any order, but none is below `prefix_lens`."""
    out_cache_loc: torch.Tensor
    """[num_tokens] int64, device: KV slot (page * page_size + offset) of each input token's K and V."""
    sample_indices: torch.Tensor
    """[num_sampled] int64 or int32, device: indices of the tokens that need logits, in row order."""
    paged: PagedMetadata
    mask: NewTokenMask | None = None
    """If None, every row is causal."""
    in_window_pool: ForwardBatch | None = None
    """This step with slots and pages of the window pool. None if there is no window pool."""
    states: RowStates | None = None
    """States of recurrent layers that the step reads and writes. None if the model has no recurrent layer."""

    def seen_by(self, window: int | None) -> ForwardBatch:
        """The step with the slots and pages of the pool that layers with this window use."""
        return self if window is None or self.in_window_pool is None else self.in_window_pool

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.extend_lens)

    @property
    def num_tokens(self) -> int:
        """Number of input tokens of all rows."""
        return int(self.cu_seqlens_q[-1])
