"""ForwardBatches as a step makes them, for tests that drive a decoder or a backend themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attention.forward_batch import ForwardBatch
from attention.kv_pool import ReqToTokenPool
from worker.protocol import RowFlag, StepFrame
from worker.step.step import Step
from worker.step.step_inputs import StepInputs


def batch_of(
    table: ReqToTokenPool, rows: Sequence[tuple[int, int, int]], page_size: int, token_ids: Sequence[int] | None = None
) -> ForwardBatch:
    """The batch of (page-table row, start, tokens) each, every row sampled, on tensors of its own.

    Args:
        token_ids: of all rows, one after the other; None: zeros.
    """
    of_row, starts, lens = np.array(rows, np.int32).T
    num_tokens = int(lens.sum())
    frame = StepFrame(
        generation=1,
        step=1,
        rows=of_row,
        starts=starts,
        lens=lens,
        flags=np.full(len(rows), RowFlag.HAS_TOKENS | RowFlag.SAMPLE, np.int32),
        token_ids=np.zeros(num_tokens, np.int32) if token_ids is None else np.array(token_ids, np.int32),
    )
    inputs = StepInputs(table, max_rows=len(rows), max_tokens=num_tokens, page_size=page_size)
    shape = Step.of(frame).shape
    inputs.upload(Step.of(frame), shape)
    return inputs.batch(Step.of(frame))
