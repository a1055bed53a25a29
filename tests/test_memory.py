"""The steps of the profile run, and what is made of its figures."""

from __future__ import annotations

import numpy as np
import pytest

from worker.frame_check import FrameLimits, check_frame
from worker.memory import DeviceMemory, _largest_frames
from worker.protocol import RowFlag, StepFrame


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "max_model_len"), [(256, 8192, 8192), (256, 8192, 2048), (8, 256, 100), (2, 300, 100)]
)
def test_the_profile_runs_the_largest_steps_that_a_scheduler_may_send(
    max_rows: int, max_tokens: int, max_model_len: int
) -> None:
    limits = FrameLimits(num_rows=max_rows + 1, vocab_size=100, max_model_len=max_model_len)
    prefill, decode = _largest_frames(max_rows, max_tokens, max_model_len, page_size=16)
    for frame in (prefill, decode):
        check_frame(StepFrame.decode(frame.encode()), limits)
        assert ((frame.flags & RowFlag.SAMPLE) != 0).all()
        rows, indices, pages = frame.page_deltas.T
        assert len(np.unique(pages)) == len(pages), "a page of two rows"
        assert pages.max() <= -(-max_tokens // 16) + max_rows, "more pages than the profile's pool has"
        for row, length in zip(frame.rows, frame.lens, strict=True):
            assert sorted(indices[rows == row]) == list(range(-(-int(length) // 16)))
    assert prefill.lens.sum() == min(max_tokens, max_rows * max_model_len)
    assert len(decode.rows) == max_rows
    assert len(decode.params) == max_rows


def test_what_a_step_needs_is_taken_off_and_said() -> None:
    gib = 1 << 30
    memory = DeviceMemory(100 * gib, 3 * gib, 2 * gib, gib)
    assert memory.usable_bytes == 94 * gib
    assert str(memory).endswith("less 3.00 for the largest step, 2.00 for CUDA graphs and 1.00 for sampling: 94.00 GiB")
    assert DeviceMemory(gib, gib, gib).usable_bytes == 0
