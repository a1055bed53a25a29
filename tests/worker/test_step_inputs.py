"""A step's inputs: what a padded step reads of its own rows is what the exact one reads, and padding harms nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention.forward_batch import ForwardBatch, ForwardMode
from attention.kv_pool import ReqToTokenPool
from attention.step_shape import StepShape
from configs.errors import EngineError
from tests.worker.test_step_layout import frame_of
from worker.protocol import RowFlag, StepFrame
from worker.step.step import Step
from worker.step.step_inputs import StepInputs
from worker.step.step_layout import decode_shapes, prompt_shapes, smallest

MAX_ROWS, MAX_TOKENS, PAGE_SIZE, MAX_LEN = 40, 640, 16, 1024
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _inputs(device: str, max_tokens: int = MAX_TOKENS) -> tuple[StepInputs, ReqToTokenPool]:
    """Inputs over a table in which every page of every row is another one; row 0 is padding."""
    table = ReqToTokenPool(MAX_ROWS, MAX_LEN // PAGE_SIZE, torch.device(device))
    table.page_table[1:] = torch.arange(1, MAX_ROWS * MAX_LEN // PAGE_SIZE + 1).view(MAX_ROWS, -1)
    inputs = StepInputs(table, max_rows=MAX_ROWS + 1, max_tokens=max_tokens, page_size=PAGE_SIZE)
    inputs._last_tokens[:, 0] = torch.arange(MAX_ROWS + 1) + 5000
    return inputs, table


def _of_rows(batch: ForwardBatch, step: StepShape) -> dict[str, list[object]]:
    """What the tensors of `batch` say of the rows of a step that is not padded."""
    paged = batch.paged
    lens = paged.cache_seqlens[: step.num_rows].tolist()
    return {
        "input_ids": batch.input_ids[: step.num_tokens].tolist(),
        "positions": batch.positions[: step.num_tokens].tolist(),
        "out_cache_loc": batch.out_cache_loc[: step.num_tokens].tolist(),
        "sample_indices": batch.sample_indices[: step.num_sampled].tolist(),
        "cache_seqlens": lens,
        "cu_seqlens_q": paged.cu_seqlens_q[: step.num_rows + 1].tolist(),
        "pages": [paged.page_table[i, : -(-length // PAGE_SIZE)].tolist() for i, length in enumerate(lens)],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_a_padded_step_reads_of_its_own_rows_what_the_exact_one_reads(seed: int, decodes: bool, device: str) -> None:
    generator = np.random.default_rng(seed)
    frame = frame_of(generator, int(generator.integers(1, MAX_ROWS + 1)), decodes=decodes)
    step = Step.of(frame).shape
    shape = smallest(
        decode_shapes(MAX_ROWS) if decodes else prompt_shapes(MAX_ROWS, MAX_TOKENS, MAX_LEN, MAX_ROWS), step
    )
    assert shape is not None
    inputs, table = _inputs(device)
    inputs.upload(Step.of(frame), step)
    exact = inputs.batch(Step.of(frame))
    assert exact.mode is ForwardMode.of(frame.lens.astype(np.int64))
    assert exact.num_tokens == len(exact.input_ids) == step.num_tokens
    expected = _of_rows(exact, step)
    sampled = [part[: step.num_sampled].tolist() for part in inputs.sampled_rows(step)]
    # The exact step, from the frame itself.
    rows = np.repeat(frame.rows, frame.lens)
    positions = np.concatenate([np.arange(n) + start for start, n in zip(frame.starts, frame.lens, strict=True)])
    pages = table.page_table.cpu().numpy()[rows, positions // PAGE_SIZE]
    has_tokens = np.repeat((frame.flags & RowFlag.HAS_TOKENS) != 0, frame.lens)
    ids = rows + 5000
    ids[has_tokens] = frame.token_ids
    is_sampled = (frame.flags & RowFlag.SAMPLE) != 0
    assert expected["input_ids"] == ids.tolist()
    assert expected["positions"] == positions.tolist()
    assert expected["out_cache_loc"] == (pages * PAGE_SIZE + positions % PAGE_SIZE).tolist()
    assert expected["sample_indices"] == (frame.lens.cumsum() - 1)[is_sampled].tolist()
    assert sampled == [frame.rows[is_sampled].tolist(), (frame.starts + frame.lens)[is_sampled].tolist()]

    inputs.upload(Step.of(frame), shape)
    padded = inputs.graph_batch(shape)
    assert _of_rows(padded, step) == expected
    assert [part[: step.num_sampled].tolist() for part in inputs.sampled_rows(shape)] == sampled
    # Padding writes to page 0 alone, samples row 0, and is no longer than its table.
    assert all(slot < PAGE_SIZE for slot in padded.out_cache_loc[step.num_tokens :].tolist())
    assert not any(inputs.sampled_rows(shape)[0][step.num_sampled :].tolist())
    assert padded.paged.cache_seqlens[step.num_rows :].sum() == shape.num_tokens - step.num_tokens
    assert len(padded.sample_indices) == shape.num_sampled


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_deltas", [0, 5, MAX_ROWS * MAX_LEN // PAGE_SIZE])
def test_pages_that_a_step_brings_are_there_for_it_however_many(num_deltas: int, device: str) -> None:
    inputs, table = _inputs(device, max_tokens=MAX_ROWS)
    frame = frame_of(np.random.default_rng(0), MAX_ROWS, decodes=True)
    entries = np.arange(num_deltas)
    indices = entries % (MAX_LEN // PAGE_SIZE)
    frame.page_deltas = np.stack([entries // (MAX_LEN // PAGE_SIZE) + 1, indices, 9000 + entries], 1).astype(np.int32)
    frame = StepFrame.decode(frame.encode())  # its arrays can only be read
    before = table.page_table.clone()
    inputs.upload(Step.of(frame), Step.of(frame).shape)
    expected = before.flatten()
    expected[MAX_LEN // PAGE_SIZE :][:num_deltas] = torch.arange(9000, 9000 + num_deltas, dtype=torch.int32)
    assert torch.equal(table.page_table.flatten(), expected)
    batch = inputs.batch(Step.of(frame))
    pages = table.page_table.cpu().numpy()[frame.rows, frame.starts // PAGE_SIZE]
    assert (batch.out_cache_loc // PAGE_SIZE).tolist() == pages.tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_places", [0, 7, 9000])
def test_places_in_the_window_pool_are_there_for_the_step_that_brings_them(num_places: int, device: str) -> None:
    table = ReqToTokenPool(MAX_ROWS, MAX_LEN // PAGE_SIZE, torch.device(device), num_placed_pages=9000)
    table.page_table[1:] = torch.arange(1, MAX_ROWS * MAX_LEN // PAGE_SIZE + 1).view(MAX_ROWS, -1)
    inputs = StepInputs(table, max_rows=MAX_ROWS + 1, max_tokens=MAX_ROWS, page_size=PAGE_SIZE)
    frame = frame_of(np.random.default_rng(0), MAX_ROWS, decodes=True)
    frame.page_deltas = np.array([[3, 1, 7]], np.int32)
    frame.window_pages = np.stack([np.arange(1, num_places + 1), 2 * np.arange(1, num_places + 1)], 1).astype(np.int32)
    frame = StepFrame.decode(frame.encode())
    inputs.upload(Step.of(frame), Step.of(frame).shape)
    batch = inputs.batch(Step.of(frame))
    assert table.page_table[3, 1] == 7
    assert batch.seen_by(None) is batch
    windowed = batch.seen_by(5)
    places = torch.zeros(9001, dtype=torch.int64)
    places[1 : num_places + 1] = 2 * torch.arange(1, num_places + 1)
    slots = batch.out_cache_loc.cpu()
    assert torch.equal(windowed.out_cache_loc.cpu(), places[slots // PAGE_SIZE] * PAGE_SIZE + slots % PAGE_SIZE)
    for i, length in enumerate(batch.seq_lens.tolist()):
        pages = batch.paged.page_table[i, : -(-length // PAGE_SIZE)].long().cpu()
        assert torch.equal(windowed.paged.page_table[i, : len(pages)].long().cpu(), places[pages])


def test_refuses_a_step_larger_than_its_tensors() -> None:
    inputs, table = _inputs("cpu")
    before = table.page_table.clone()
    frame = frame_of(np.random.default_rng(0), 3, decodes=True)
    frame.page_deltas = np.array([[1, 0, 77]], np.int32)
    for shape in (StepShape(MAX_ROWS + 2, MAX_ROWS + 2, 1), StepShape(MAX_TOKENS + 1, 3, 3)):
        with pytest.raises(EngineError, match="at most 41 and 640 fit"):
            inputs.upload(Step.of(frame), shape)
    assert torch.equal(table.page_table, before)
