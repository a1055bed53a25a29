"""A step's inputs on the device: one pinned buffer, one copy, and the tensors every CUDA step reads.

Layout of the buffer, int32, with B = `max_rows`:

    rows B | starts B | sampled B | sample_tokens B | cu_seqlens_q B + 1 | token_ids | page deltas

The first five lie where every step's lie, so that captured graphs find them; `token_ids` does too, and the deltas
follow it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import ForwardBatch, ForwardMode, PagedMetadata
from attention.kernels.step_metadata import StepTensors, apply_page_deltas, fill_step_metadata
from attention.kv_pool import ReqToTokenPool
from worker.protocol import RowFlag, StepFrame

# More than the steps in flight, so that no step waits for another's copy.
_NUM_STAGES = 4
LAST_TOKEN = -1
"""In place of a token id: the row's own last sampled token."""


class StepInputs:
    """Static device tensors of the steps of one rank, filled from frames.

    Steps share them: a step's copy is queued on the same stream behind the kernels of the step before.

    Args:
        max_rows: most rows of a step, padding included.
        max_tokens: most input tokens of a step.
        page_size: of the KV pool.
    """

    def __init__(
        self, pool: ReqToTokenPool, *, max_rows: int, max_tokens: int, page_size: int, device: torch.device
    ) -> None:
        assert pool.device_page_table is not None, "step inputs need the page table on the device"
        self._page_table = pool.device_page_table
        self._page_size = page_size
        self._max_rows = max_rows
        num_rows, max_pages = self._page_table.shape
        self._tail = 5 * max_rows + 1
        self._capacity = self._tail + max(max_tokens, max_rows) + 3 * (max_rows + max_tokens)
        self._stages = [_Stage(self._capacity) for _ in range(_NUM_STAGES)]
        self._next_stage = 0
        self._buffer = torch.zeros(self._capacity, dtype=torch.int32, device=device)
        self._arange = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """[num_rows + 1] int64: what each row sampled last."""
        max_tokens = max(max_tokens, max_rows)
        self._tensors = StepTensors(
            input_ids=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            cache_seqlens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            page_table=torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device),
        )

    def upload(self, frame: StepFrame, padded_rows: int) -> None:
        """Queues the copy of `frame` and the page table's update; rows up to `padded_rows` become padding."""
        stage = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % _NUM_STAGES
        stage.wait()
        host, rows, num_rows = stage.array, self._max_rows, len(frame.rows)
        host[: 2 * rows].reshape(2, rows)[:, num_rows:padded_rows] = 0
        host[:num_rows] = frame.rows
        host[rows : rows + num_rows] = frame.starts
        sampled = np.flatnonzero(frame.flags & RowFlag.SAMPLE)
        cu_seqlens_q = host[4 * rows : 4 * rows + num_rows + 1]
        cu_seqlens_q[0] = 0
        np.cumsum(frame.lens, out=cu_seqlens_q[1:])
        host[2 * rows : 2 * rows + len(sampled)] = sampled
        host[3 * rows : 3 * rows + len(sampled)] = cu_seqlens_q[1:][sampled] - 1
        num_tokens = max(int(cu_seqlens_q[-1]), padded_rows)
        self._put_token_ids(host[self._tail : self._tail + num_tokens], frame)
        deltas = frame.page_deltas
        end = self._tail + num_tokens + deltas.size
        if end <= self._capacity:
            host[end - deltas.size : end] = deltas.reshape(-1)
            stage.copy_to(self._buffer, end)
            on_device = self._buffer[end - deltas.size : end].view(-1, 3)
        else:
            # Prefix hits of many long prompts in one step: rare enough to wait for a copy of their own.
            stage.copy_to(self._buffer, end - deltas.size)
            on_device = torch.from_numpy(deltas).to(self._buffer.device)
        if len(deltas):
            apply_page_deltas(self._page_table, on_device)

    def decode_batch(self, num_rows: int) -> ForwardBatch:
        """The batch of `num_rows` decodes, padding included: its tensors are the same for every step.

        Queues the kernel that fills them from the last upload. Host arrays are those of no particular step.
        """
        ones = np.ones(num_rows, np.int64)
        return self._batch(
            ones,
            ones,
            cu_seqlens_q=self._arange[: num_rows + 1],
            host_cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int64),
            sample_indices=self._arange[:num_rows],
        )

    def batch(self, frame: StepFrame) -> ForwardBatch:
        """The batch of any frame. Queues the kernel that fills it from the last upload, which was this frame's."""
        rows, num_rows = self._max_rows, len(frame.rows)
        num_sampled = int(np.count_nonzero(frame.flags & RowFlag.SAMPLE))
        host_cu_seqlens_q = np.zeros(num_rows + 1, np.int64)
        np.cumsum(frame.lens, out=host_cu_seqlens_q[1:])
        return self._batch(
            frame.lens.astype(np.int64),
            frame.starts.astype(np.int64),
            cu_seqlens_q=self._buffer[4 * rows : 4 * rows + num_rows + 1],
            host_cu_seqlens_q=host_cu_seqlens_q,
            sample_indices=self._buffer[3 * rows : 3 * rows + num_sampled],
            req_pool_indices=frame.rows.astype(np.int64),
        )

    def rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int32: the page-table row of each row of the batch."""
        return self._buffer[:num_rows]

    def seq_lens(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int32: tokens of each row once this step's are counted."""
        return self._tensors.cache_seqlens[:num_rows]

    def sampled(self, num_sampled: int) -> torch.Tensor:
        """[num_sampled] int32: which rows of the batch are sampled."""
        return self._buffer[2 * self._max_rows : 2 * self._max_rows + num_sampled]

    def _batch(
        self,
        extend_lens: npt.NDArray[np.int64],
        prefix_lens: npt.NDArray[np.int64],
        *,
        cu_seqlens_q: torch.Tensor,
        host_cu_seqlens_q: npt.NDArray[np.int64],
        sample_indices: torch.Tensor,
        req_pool_indices: npt.NDArray[np.int64] | None = None,
    ) -> ForwardBatch:
        num_rows, num_tokens = len(extend_lens), int(host_cu_seqlens_q[-1])
        full = self._tensors
        tensors = StepTensors(
            input_ids=full.input_ids[:num_tokens],
            positions=full.positions[:num_tokens],
            out_cache_loc=full.out_cache_loc[:num_tokens],
            cache_seqlens=full.cache_seqlens[:num_rows],
            page_table=full.page_table[:num_rows],
        )
        max_seqlen_q = int(extend_lens.max())
        fill_step_metadata(
            rows=self._buffer[:num_rows],
            starts=self._buffer[self._max_rows : self._max_rows + num_rows],
            cu_seqlens_q=cu_seqlens_q,
            token_ids=self._buffer[self._tail : self._tail + num_tokens],
            page_table=self._page_table,
            last_tokens=self.last_tokens,
            page_size=self._page_size,
            max_seqlen_q=max_seqlen_q,
            out=tensors,
        )
        return ForwardBatch(
            mode=ForwardMode.of(extend_lens),
            req_pool_indices=np.zeros(num_rows, np.int64) if req_pool_indices is None else req_pool_indices,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            seq_lens=prefix_lens + extend_lens,
            cu_seqlens_q=host_cu_seqlens_q,
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            out_cache_loc=tensors.out_cache_loc,
            sample_indices=sample_indices,
            paged=PagedMetadata(
                cache_seqlens=tensors.cache_seqlens,
                cu_seqlens_q=cu_seqlens_q,
                page_table=tensors.page_table,
                max_seqlen_q=max_seqlen_q,
            ),
        )

    @staticmethod
    def _put_token_ids(out: npt.NDArray[np.int32], frame: StepFrame) -> None:
        has_tokens = (frame.flags & RowFlag.HAS_TOKENS) != 0
        if not has_tokens.any():
            out[:] = LAST_TOKEN
        elif has_tokens.all():
            out[: len(frame.token_ids)] = frame.token_ids
            out[len(frame.token_ids) :] = LAST_TOKEN
        else:
            out[:] = LAST_TOKEN
            given = np.repeat(has_tokens, frame.lens)
            out[: len(given)][given] = frame.token_ids


class _Stage:
    """One pinned host buffer and the event after which it may be written again."""

    def __init__(self, capacity: int) -> None:
        self._pinned = torch.empty(capacity, dtype=torch.int32, pin_memory=True)
        self.array: npt.NDArray[np.int32] = self._pinned.numpy()
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it

    def wait(self) -> None:
        """Returns once the last copy has read the buffer; that was several steps ago."""
        self._copied.synchronize()

    def copy_to(self, out: torch.Tensor, count: int) -> None:
        """Queues the copy of the first `count` elements."""
        out[:count].copy_(self._pinned[:count], non_blocking=True)
        self._copied.record()
