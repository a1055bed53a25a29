"""A step's inputs on the device: one staged buffer, one copy, and the tensors that every step reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import ForwardBatch, ForwardMode, Int64Array, PagedMetadata
from attention.kv_pool import ReqToTokenPool
from attention.state_pool import StatePool
from attention.step_metadata import StepTensors
from attention.step_shape import StepShape
from configs.errors import EngineError
from worker.protocol import StepFrame
from worker.step.step import Step
from worker.step.step_layout import StepLayout
from worker.upload import upload

# More than the steps in flight, so that no step waits for the copy of another.
_NUM_STAGES = 4


class StepInputs:
    """The device tensors from which every step of a rank reads its inputs. Each frame overwrites them.

    A frame's copy is queued on the same stream as the kernels of the step before, and so runs after them.

    Args:
        max_rows: maximum number of rows of a step, padding included.
        max_tokens: maximum number of input tokens of a step, padding included.
        page_size: the KV pool's page size, in tokens.
        max_sampled: maximum number of sampled inputs of a step. A number below `max_rows` counts as `max_rows`.
        num_drafts: maximum number of drafts that the ranks make for a row. If it is above 0, these tensors track each
            row's position, which the scheduler may not know yet.
        state_pool: states of the model's recurrent layers. None if it has none.
    """

    def __init__(
        self,
        pool: ReqToTokenPool,
        *,
        max_rows: int,
        max_tokens: int,
        page_size: int,
        max_sampled: int = 0,
        num_drafts: int = 0,
        state_pool: StatePool | None = None,
    ) -> None:
        self._page_table, self._window_page_of = pool.page_table, pool.window_page_of
        self._page_size = page_size
        self._state_pool = state_pool
        num_rows, max_pages = self._page_table.shape
        device = self._page_table.device
        if device.type == "cuda":
            from attention.kernels.step_metadata import (
                apply_page_deltas,
                fill_step_metadata,
            )
        else:
            from attention.step_metadata import apply_page_deltas, fill_step_metadata
        self._apply_page_deltas, self._fill_step_metadata = apply_page_deltas, fill_step_metadata
        self._max_rows, self._max_tokens = max_rows, max(max_tokens, max_rows)
        self._layout = StepLayout(max_rows, self._max_tokens, max_sampled)
        self._stages = [_Stage(self._layout.capacity, device) for _ in range(_NUM_STAGES)]
        self._next_stage = 0
        self._buffer = torch.zeros(self._layout.capacity, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(num_rows, 1 + num_drafts, dtype=torch.int64, device=device)
        self._next_starts = torch.zeros(num_rows, dtype=torch.int32, device=device) if num_drafts else None
        self._tensors = StepTensors(
            input_ids=torch.zeros(self._max_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(self._max_tokens, dtype=torch.int64, device=device),
            out_cache_loc=torch.zeros(self._max_tokens, dtype=torch.int64, device=device),
            cache_seqlens=torch.zeros(max_rows, dtype=torch.int32, device=device),
            page_table=torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device),
        )
        if self._window_page_of is not None:
            self._tensors = replace(
                self._tensors,
                window_out_cache_loc=torch.zeros_like(self._tensors.out_cache_loc),
                window_page_table=torch.zeros_like(self._tensors.page_table),
            )

    def take(self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Stores `tokens` [n] int64 as the last ones of `rows` [n] int64. Their positions in the sequences are
        `positions` [n] int32. A token of -1 belongs to a row with a NaN in its logits. A graph may capture this."""
        self._last_tokens[:, 0].index_copy_(0, rows, tokens)
        if self._next_starts is not None:
            self._next_starts.index_copy_(0, rows, positions)

    def take_drafts(self, rows: torch.Tensor, drafts: torch.Tensor) -> None:
        """Stores `drafts` [n, most] of the tokens after the last ones of `rows` [n], all int64."""
        self._last_tokens[:, 1 : 1 + drafts.shape[1]].index_copy_(0, rows, drafts)

    def with_device_starts(self, step: Step) -> Step:
        """Returns the step with the positions that the device tracks as starts of rows without HAS_TOKENS. This waits
        for the device. If the ranks make no drafts, the frame's starts are true, and the same step is returned."""
        frame = step.frame
        if self._next_starts is None or (given := frame.has_tokens).all():
            return step
        starts = np.where(given, frame.starts, self._next_starts.cpu().numpy()[frame.rows])
        return Step.of(StepFrame(frame.generation, frame.step, frame.kind, **(frame.arrays | {"starts": starts})))

    def next_starts(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int32, device: for each row of the last uploaded frame, the position of its next input. 0 for
        padding."""
        assert self._next_starts is not None, "positions are not tracked, as the ranks make no drafts"
        rows = self._buffer[self._layout.rows(num_rows)]
        return self._next_starts.index_select(0, rows).where(rows > 0, 0)

    def restore_starts(self, shape: StepShape) -> None:
        """Writes the start positions of the last step's rows back into the buffer, because sampling has advanced the
        tracked positions. `shape` is the step's, or the captured shape that it was padded to. Draft passes then read
        the same inputs again. A graph may capture this."""
        bounds = self._buffer[self._layout.cu_seqlens_q(shape.num_rows)]
        seq_lens = self._tensors.cache_seqlens[: shape.num_rows]
        self.starts(shape.num_rows).copy_(seq_lens - bounds.diff())

    def upload(self, step: Step, shape: StepShape, *, use_frame_starts: bool = False) -> None:
        """Queues the copy of the step's frame, padded to `shape`, and the page table's update.

        Args:
            use_frame_starts: use the frame's starts of rows without HAS_TOKENS. Otherwise, if positions are tracked, -1
                is uploaded for such rows, and the kernel replaces it by the tracked position.

        Raises EngineError, before anything is written, if the step is larger than these tensors.
        """
        frame = step.frame
        if shape.num_rows > self._max_rows or shape.num_tokens > self._max_tokens:
            raise EngineError(
                f"step {frame.step} of generation {frame.generation} has {shape.num_rows} rows and {shape.num_tokens} "
                f"tokens; at most {self._max_rows} and {self._max_tokens} fit; please report this bug"
            )
        stage = self._stages[self._next_stage]
        self._next_stage = (self._next_stage + 1) % _NUM_STAGES
        stage.wait()
        begin = self._layout.pack(stage.array, step, shape)
        if self._next_starts is not None and not use_frame_starts:
            stage.array[self._layout.starts(len(frame.rows))][~frame.has_tokens] = -1
        deltas, num_page_deltas = frame.page_deltas, len(frame.page_deltas)
        if len(frame.window_pages):
            # The window table has one row, which maps each page to its window page.
            deltas = np.concatenate((deltas, np.insert(frame.window_pages, 0, 0, axis=1)))
        end = begin + deltas.size
        if end <= self._layout.capacity:
            stage.array[begin:end] = deltas.reshape(-1)
            stage.copy_to(self._buffer, end)
            on_device = self._buffer[begin:end].view(-1, 3)
        else:
            # Prefix hits of many long prompts in one step are rare enough for a separate copy.
            stage.copy_to(self._buffer, begin)
            on_device = upload(deltas, self._buffer.device)
        if num_page_deltas:
            self._apply_page_deltas(self._page_table, on_device[:num_page_deltas])
        if self._window_page_of is not None and num_page_deltas < len(deltas):
            self._apply_page_deltas(self._window_page_of.view(1, -1), on_device[num_page_deltas:])

    def graph_batch(self, shape: StepShape, *, of_draft_head: bool = False) -> ForwardBatch:
        """The batch of any step padded to `shape`. Its tensors are the same for every step.

        Queues the kernel that fills them from the last upload. The host arrays do not describe a particular step.

        Args:
            of_draft_head: whether the batch is for a pass of the draft head, which has no recurrent layers.
        """
        lens = np.ones(shape.num_rows, np.int64)
        if not shape.is_decode:
            lens[:-1], lens[-1] = 0, shape.num_tokens
        return self._batch(shape, np.zeros(shape.num_rows, np.int64), lens, of_draft_head)

    def batch(self, step: Step, *, of_draft_head: bool = False) -> ForwardBatch:
        """The batch of a step, in its own shape.

        Queues the kernel that fills it from the last upload, which must be this step's. `of_draft_head` is that of
        `graph_batch`.
        """
        starts, lens = step.frame.starts.astype(np.int64), step.frame.lens.astype(np.int64)
        return self._batch(step.shape, starts, lens, of_draft_head)

    def starts(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int32, device: the position of each row's first input, as uploaded. Callers may change it."""
        return self._buffer[self._layout.starts(num_rows)]

    def inputs_after_samples(self, shape: StepShape) -> torch.Tensor:
        """[num_sampled] int64, device: the step's input after each sampled one, which may belong to the next row. After
        the step's last input, that input itself."""
        inputs = self._buffer[self._layout.sample_tokens(shape.num_sampled)]
        return self._tensors.input_ids.index_select(0, (inputs + 1).clamp_(max=shape.num_tokens - 1))

    def rows_of_samples(self, shape: StepShape) -> torch.Tensor:
        """[num_sampled] int32, device: the row in the step of each sampled input. For padding, the shape's last row."""
        return self._buffer[self._layout.sampled(shape.num_sampled)]

    def sampled_rows(self, shape: StepShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Row in the page table of each sampled input, and position of the token after it: [num_sampled] int32 each."""
        rows = self._buffer[self._layout.rows(shape.num_rows)]
        if shape.is_decode:
            return rows, self._tensors.cache_seqlens[: shape.num_rows]
        which = self.rows_of_samples(shape)
        inputs = self._buffer[self._layout.sample_tokens(shape.num_sampled)]
        return rows.index_select(0, which), (self._tensors.positions.index_select(0, inputs) + 1).int()

    def _batch(
        self, shape: StepShape, prefix_lens: Int64Array, extend_lens: Int64Array, of_draft_head: bool
    ) -> ForwardBatch:
        layout, tensors = self._layout, self._tensors.first(shape.num_rows, shape.num_tokens)
        cu_seqlens_q = self._buffer[layout.cu_seqlens_q(shape.num_rows)]
        max_seqlen_q = int(extend_lens.max())
        self._fill_step_metadata(
            rows=self._buffer[layout.rows(shape.num_rows)],
            starts=self._buffer[layout.starts(shape.num_rows)],
            cu_seqlens_q=cu_seqlens_q,
            token_ids=self._buffer[layout.token_ids(shape.num_tokens)],
            page_table=self._page_table,
            last_tokens=self._last_tokens,
            page_size=self._page_size,
            max_seqlen_q=max_seqlen_q,
            out=tensors,
            window_page_of=self._window_page_of,
            next_starts=self._next_starts,
        )
        host_cu_seqlens_q = np.zeros(shape.num_rows + 1, np.int64)
        np.cumsum(extend_lens, out=host_cu_seqlens_q[1:])
        batch = ForwardBatch(
            mode=ForwardMode.of(extend_lens),
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            seq_lens=prefix_lens + extend_lens,
            cu_seqlens_q=host_cu_seqlens_q,
            input_ids=tensors.input_ids,
            positions=tensors.positions,
            out_cache_loc=tensors.out_cache_loc,
            sample_indices=self._buffer[layout.sample_tokens(shape.num_sampled)],
            paged=PagedMetadata(
                cache_seqlens=tensors.cache_seqlens,
                cu_seqlens_q=cu_seqlens_q,
                page_table=tensors.page_table,
                max_seqlen_q=max_seqlen_q,
            ),
        )
        if (pool := self._state_pool) is not None and not of_draft_head:
            rows, num_drafts = layout.rows(shape.num_rows), layout.num_drafts(shape.num_rows)
            of_rows = self._buffer[rows], cu_seqlens_q, tensors.cache_seqlens, self._buffer[num_drafts]
            states = pool.begin(shape.num_tokens, *of_rows, is_decode=shape.is_decode)
            batch = replace(batch, states=states)
        slots, pages = tensors.window_out_cache_loc, tensors.window_page_table
        if slots is None or pages is None:
            return batch
        paged = replace(batch.paged, page_table=pages)
        return replace(batch, in_window_pool=replace(batch, out_cache_loc=slots, paged=paged))


class _Stage:
    """One host buffer. For CUDA it is pinned, and an event marks when it may be written again."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._staged = torch.empty(capacity, dtype=torch.int32, pin_memory=on_cuda)
        self.array: npt.NDArray[np.int32] = self._staged.numpy()
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]  # torch's

    def wait(self) -> None:
        """Returns once the last copy, several steps ago, has read the buffer."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, out: torch.Tensor, count: int) -> None:
        """Queues the copy of the first `count` elements. On the CPU the copy is done when this returns."""
        out[:count].copy_(self._staged[:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
