"""The input of one forward pass: the rows of a step, as the attention backend and the decoder need them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class ForwardMode(Enum):
    """The work that the rows of a batch do."""

    DECODE = auto()
    """Every row has one input token."""
    EXTEND = auto()
    """Every row has more than one: prompts, or chunks of them, with or without a cached prefix."""
    MIXED = auto()
    """Some of each."""

    @classmethod
    def of(cls, extend_lens: Int64Array) -> ForwardMode:
        """The mode of rows with so many input tokens each."""
        singles = int((extend_lens == 1).sum())
        if singles == len(extend_lens):
            return cls.DECODE
        return cls.MIXED if singles else cls.EXTEND


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedMetadata:
    """Tensors that paged attention kernels read; all on the device, and static while a CUDA graph is captured."""

    cache_seqlens: torch.Tensor
    """[batch_size] int32: tokens in the KV cache once this step's are written; 1 for padding rows."""
    cu_seqlens_q: torch.Tensor
    """[batch_size + 1] int32."""
    page_table: torch.Tensor
    """[batch_size, max_pages] int32: pages of each row of the batch. What follows a row's last page is undefined."""
    max_seqlen_q: int
    """Most input tokens of a row."""

    def check(self) -> None:
        """Asserts what kernels take for granted, who read other widths and rows that are not there: cheap, once a
        step."""
        lens, starts, table = self.cache_seqlens, self.cu_seqlens_q, self.page_table
        assert lens.dtype == starts.dtype == table.dtype == torch.int32, "paged metadata is int32"
        assert len(lens) == len(table) == len(starts) - 1, f"{len(lens)} lengths, {len(table)} rows of pages"
        assert table.stride(1) == lens.stride(0) == starts.stride(0) == 1, "paged metadata is contiguous"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokenMask:
    """The new tokens of its own row that each new token sees, in place of those before it and itself.

    One row's part is [extend_len, extend_len], a query's keys one after the other: a tree of drafts to be verified, or
    all ones where the new tokens see one another in both directions. Of a step's tokens each sees itself.
    """

    visible: torch.Tensor
    """[sum of extend_len ** 2 of the rows that have a part] uint8 or bool, contiguous, on the device: not zero where
    the key is seen."""
    starts: torch.Tensor
    """[batch_size] int32 or int64, on the device: where each row's part begins; -1: it has none, and is causal."""
    positions: torch.Tensor
    """[num_tokens] int64, on the device: `ForwardBatch.positions`, by which window and chunk hide tokens of the prefix.
    They hide none of the new tokens of rows that have a part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBatch:
    """One step on one rank. Tokens of row i are `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, rows in frame order.

    Host arrays (numpy) describe the step before any tensor is read, so building metadata never waits for a device. Made
    whole by worker/step/step_inputs.py, on whose static tensors they lie; no stage fills a field later.
    """

    mode: ForwardMode
    prefix_lens: Int64Array
    """[batch_size] int64, host: tokens already in the KV cache, which is the position of the row's first input."""
    extend_lens: Int64Array
    """[batch_size] int64, host: input tokens of each row."""
    seq_lens: Int64Array
    """[batch_size] int64, host: prefix_lens + extend_lens."""
    cu_seqlens_q: Int64Array
    """[batch_size + 1] int64, host: prefix sums of extend_lens."""
    input_ids: torch.Tensor
    """[num_tokens] int64, device."""
    positions: torch.Tensor
    """[num_tokens] int64, device: position of each input token in its sequence; one after the other from the row's
    `prefix_lens`, but in rows with a part of `mask`, where none is before that."""
    out_cache_loc: torch.Tensor
    """[num_tokens] int64, device: KV slot (page * page_size + offset) each input token's K and V are written to."""
    sample_indices: torch.Tensor
    """[num_sampled] int64 or int32, device: tokens whose logits are wanted, in row order."""
    paged: PagedMetadata
    mask: NewTokenMask | None = None
    """None: every row is causal."""
    in_window_pool: ForwardBatch | None = None
    """This step with slots and pages of the window pool; None: there is no such pool."""

    def seen_by(self, window: int | None) -> ForwardBatch:
        """The step with slots and pages of the pool of layers with that window."""
        return self if window is None or self.in_window_pool is None else self.in_window_pool

    @property
    def batch_size(self) -> int:
        """Rows."""
        return len(self.extend_lens)

    @property
    def num_tokens(self) -> int:
        """Input tokens of all rows."""
        return int(self.cu_seqlens_q[-1])
