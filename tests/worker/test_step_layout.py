"""Shapes that steps are padded to, and what a padded step tells the kernels: the same as the exact one, and padding."""

from __future__ import annotations

import numpy as np
import pytest

from attention.fa3 import unsplit_shapes
from attention.step_shape import ANY_LEN, StepShape
from worker.protocol import RowFlag, StepFrame
from worker.step.step import Step
from worker.step.step_layout import (
    LAST_TOKEN,
    StepLayout,
    decode_shapes,
    launch_bound_tokens,
    prompt_shapes,
    smallest,
)

MAX_ROWS, MAX_TOKENS = 40, 640
LONGEST = 40_000
STALE = 1 << 29


def captured(max_rows: int, max_tokens: int, max_model_len: int) -> list[StepShape]:
    """The shapes of steps with prompts that are captured for FlashAttention."""
    ladder = prompt_shapes(max_rows, max_tokens, max_model_len, max_rows)
    return [shape for each in ladder for shape in unsplit_shapes(each, max_model_len)]


def frame_of(generator: np.random.Generator, num_rows: int, *, decodes: bool = False) -> StepFrame:
    """Rows in random order, decodes and prompts among them, the last of a prompt's chunks or not."""
    lens = np.ones(num_rows, np.int32)
    flags = np.full(num_rows, RowFlag.SAMPLE, np.int32)
    if not decodes:
        is_prompt = generator.random(num_rows) < 0.4
        is_prompt[generator.integers(num_rows)] = True
        lens[is_prompt] = generator.integers(2, 12, int(is_prompt.sum()))
        flags[is_prompt] = RowFlag.HAS_TOKENS | RowFlag.SAMPLE
        flags[is_prompt & (generator.random(num_rows) < 0.3)] = RowFlag.HAS_TOKENS
    has_tokens = (flags & RowFlag.HAS_TOKENS) != 0
    return StepFrame(
        generation=1,
        step=1,
        rows=generator.permutation(np.arange(1, MAX_ROWS + 1, dtype=np.int32))[:num_rows],
        starts=generator.integers(0, 900, num_rows).astype(np.int32),
        lens=lens,
        flags=flags,
        token_ids=generator.integers(0, 1000, int(lens[has_tokens].sum())).astype(np.int32),
    )


@pytest.mark.parametrize(("num_rows", "num_drafts"), [(1, 3), (1, 7), (2, 3), (16, 3), (64, 1), (48, 3)])
def test_steps_with_drafts_are_padded_to_the_next_size_alone(num_rows: int, num_drafts: int) -> None:
    num_tokens = num_rows * (1 + num_drafts)
    ladder = prompt_shapes(256, 8192, LONGEST, 256 + 128)
    shape = smallest(ladder, StepShape(num_tokens, num_rows, num_tokens))
    assert shape is not None
    assert shape.num_tokens == num_tokens


@pytest.mark.parametrize("max_rows", [1, 3, 8, 11])
def test_steps_with_as_many_drafts_as_rows_may_have_are_captured_for_few_rows_too(max_rows: int) -> None:
    ladder = prompt_shapes(max_rows, 512, LONGEST, 8 * max_rows)
    for num_rows in range(1, max_rows + 1):
        shape = smallest(ladder, StepShape(8 * num_rows, num_rows, 8 * num_rows))
        assert shape is not None
        assert shape.num_tokens < 8 * num_rows + 32
    assert not any(shape.is_decode for shape in ladder)


@pytest.mark.parametrize("max_sampled", [4, 8])
@pytest.mark.parametrize("max_tokens", [4, 8, 13, 16])
def test_the_largest_step_is_captured_however_small_it_is(max_tokens: int, max_sampled: int) -> None:
    shape = smallest(prompt_shapes(4, max_tokens, LONGEST, max_sampled), StepShape(max_tokens, 1, 1))
    assert shape is not None
    assert shape.num_tokens == max_tokens


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_padded_step_says_of_its_own_rows_what_the_exact_one_says(seed: int, decodes: bool) -> None:
    generator = np.random.default_rng(seed)
    layout = StepLayout(MAX_ROWS + 1, MAX_TOKENS)
    frame = frame_of(generator, int(generator.integers(1, MAX_ROWS + 1)), decodes=decodes)
    step = Step.of(frame).shape
    assert step.is_decode == decodes
    shape = smallest(decode_shapes(MAX_ROWS) if decodes else captured(MAX_ROWS, MAX_TOKENS, LONGEST), step)
    assert shape is not None
    exact, padded = (np.full(layout.capacity, STALE, np.int32) for _ in range(2))
    assert layout.pack(exact, Step.of(frame), step) == layout.token_ids(step.num_tokens).stop
    assert layout.pack(padded, Step.of(frame), shape) == layout.token_ids(shape.num_tokens).stop
    np.testing.assert_array_equal(exact[layout.rows(step.num_rows)], frame.rows)
    np.testing.assert_array_equal(exact[layout.starts(step.num_rows)], frame.starts)
    np.testing.assert_array_equal(np.diff(exact[layout.cu_seqlens_q(step.num_rows)]), frame.lens)
    for part, count in (
        (layout.rows, step.num_rows),
        (layout.starts, step.num_rows),
        (layout.cu_seqlens_q, step.num_rows),
        (layout.sampled, step.num_sampled),
        (layout.sample_tokens, step.num_sampled),
        (layout.token_ids, step.num_tokens),
    ):
        np.testing.assert_array_equal(padded[part(count)], exact[part(count)])
    # What is left is the padding row's, and no element is another step's.
    rest = slice(step.num_rows, shape.num_rows)
    assert not padded[layout.rows(shape.num_rows)][rest].any()
    assert not padded[layout.starts(shape.num_rows)][rest].any()
    lens = np.diff(padded[layout.cu_seqlens_q(shape.num_rows)])
    assert lens.sum() == shape.num_tokens
    assert (padded[layout.token_ids(shape.num_tokens)][step.num_tokens :] == LAST_TOKEN).all()
    if decodes:
        assert (lens == 1).all()
    else:
        assert not lens[step.num_rows : -1].any()
        assert (padded[layout.sampled(shape.num_sampled)][step.num_sampled :] == shape.num_rows - 1).all()
        assert padded[layout.rows(shape.num_rows)][-1] == 0
    samples = padded[layout.sample_tokens(shape.num_sampled)]
    assert ((samples >= 0) & (samples < shape.num_tokens)).all()


@pytest.mark.parametrize("shape", [*decode_shapes(MAX_ROWS), *captured(MAX_ROWS, MAX_TOKENS, LONGEST)], ids=str)
def test_a_shape_is_valid_without_any_rows(shape: StepShape) -> None:
    """What graphs are captured with: kernels that got less than no tokens of a row have written anywhere."""
    layout = StepLayout(MAX_ROWS + 1, MAX_TOKENS)
    out = np.full(layout.capacity, STALE, np.int32)
    layout.pack(out, Step.of(StepFrame(generation=0, step=0)), shape)
    lens = np.diff(out[layout.cu_seqlens_q(shape.num_rows)])
    assert out[layout.cu_seqlens_q(shape.num_rows)][0] == 0
    assert lens.tolist() == (
        [1] * shape.num_rows if shape.is_decode else [0] * (shape.num_rows - 1) + [shape.num_tokens]
    )
    assert not out[layout.rows(shape.num_rows)].any()
    assert not out[layout.starts(shape.num_rows)].any()
    assert (out[layout.sampled(shape.num_sampled)] == shape.num_rows - 1).all()
    assert (out[layout.sample_tokens(shape.num_sampled)] == shape.num_tokens - 1).all()
    assert (out[layout.token_ids(shape.num_tokens)] == LAST_TOKEN).all()


def test_a_step_samples_the_last_token_of_its_sampled_rows() -> None:
    frame = StepFrame(
        generation=1,
        step=1,
        rows=np.array([4, 2, 7], np.int32),
        starts=np.array([0, 10, 5], np.int32),
        lens=np.array([3, 1, 2], np.int32),
        flags=np.array([RowFlag.HAS_TOKENS, RowFlag.SAMPLE, RowFlag.HAS_TOKENS | RowFlag.SAMPLE], np.int32),
        token_ids=np.array([11, 12, 13, 21, 22], np.int32),
    )
    layout, shape = StepLayout(9, 16), StepShape(num_tokens=16, num_rows=9, num_sampled=8)
    out = np.full(layout.capacity, STALE, np.int32)
    layout.pack(out, Step.of(frame), shape)
    assert out[layout.cu_seqlens_q(9)].tolist() == [0, 3, 4, 6, 6, 6, 6, 6, 6, 16]
    assert out[layout.sampled(8)].tolist() == [1, 2] + [8] * 6
    assert out[layout.sample_tokens(8)].tolist() == [3, 5] + [15] * 6
    assert out[layout.token_ids(16)].tolist() == [11, 12, 13, LAST_TOKEN, 21, 22] + [LAST_TOKEN] * 10


def test_a_step_gets_the_smallest_shape_of_its_kind_that_holds_it() -> None:
    decodes, prompts = decode_shapes(20), captured(20, 96, 1000)
    for step, expected in (
        (StepShape(1, 1, 1, 9), StepShape(1, 1, 1)),
        (StepShape(17, 17, 17, 999), StepShape(20, 20, 20)),
        (StepShape(21, 21, 21), None),
    ):
        assert smallest(decodes, step) == expected
    for step, expected in (
        (StepShape(3, 1, 1, 3), StepShape(16, 9, 8)),
        (StepShape(3, 3, 0, 999), StepShape(16, 9, 8)),
        (StepShape(16, 9, 9, 128), StepShape(16, 16, 15, 128)),
        (StepShape(16, 9, 9, 129), StepShape(16, 16, 15)),
        (StepShape(17, 1, 0, 17), StepShape(32, 9, 8)),
        (StepShape(17, 16, 16, 256), StepShape(32, 21, 20, 256)),
        (StepShape(96, 20, 20, 999), StepShape(96, 21, 20)),
        (StepShape(97, 1, 1), None),
    ):
        assert smallest(sorted(prompts), step) == expected


@pytest.mark.parametrize("max_rows", [1, 3, 7, 8, 16, 250, 256, 257, 300, 4096])
def test_the_ladder_of_decodes_pads_little_and_reaches_the_largest_step(max_rows: int) -> None:
    ladder = decode_shapes(max_rows)
    assert ladder == sorted(set(ladder))
    assert all(shape.is_decode for shape in ladder)
    assert ladder[-1].num_rows == max_rows
    for num_rows in range(1, max_rows + 1):
        shape = smallest(ladder, StepShape(num_rows, num_rows, num_rows))
        assert shape is not None
        padding = shape.num_rows - num_rows
        assert padding <= (7 if num_rows <= 256 else 31), num_rows


@pytest.mark.parametrize("max_tokens", [2048, 3240, 8192])
@pytest.mark.parametrize("max_rows", [1, 3, 16, 256])
def test_the_ladder_of_prompts_pads_little_and_always_has_a_row_for_padding(max_rows: int, max_tokens: int) -> None:
    ladder = captured(max_rows, max_tokens, LONGEST)
    assert ladder == sorted(set(ladder))
    assert ladder[-1].num_tokens == max_tokens
    for num_tokens in range(2, max_tokens + 1):
        for num_rows in {1, min(max_rows, num_tokens - 1)}:
            shape = smallest(ladder, StepShape(num_tokens, num_rows, num_rows, LONGEST))
            assert not shape.is_decode
            assert shape.num_rows > num_rows
            assert shape.num_sampled >= num_rows
            if num_tokens <= 2048:
                assert (shape.num_sampled <= 8) == (num_rows <= 8)
            limits = {128: 31, 512: 63, 4096: 127, 8192: 511}
            assert shape.num_tokens - num_tokens <= next(limits[end] for end in limits if num_tokens <= end)


@pytest.mark.parametrize(("longest", "splits"), [(100, False), (768, False), (769, True), (40_000, True)])
def test_keys_of_short_rows_stay_whole_where_rows_are_many(longest: int, splits: bool) -> None:
    ladder = captured(256, 4096, LONGEST)
    frame = StepFrame(
        generation=1,
        step=1,
        rows=np.arange(1, 10, dtype=np.int32),
        starts=np.array([longest - 1, *[60] * 8], np.int32),
        lens=np.array([*[1] * 8, 80], np.int32),
        flags=np.array([*[RowFlag.SAMPLE] * 8, RowFlag.HAS_TOKENS], np.int32),
        token_ids=np.zeros(80, np.int32),
    )
    step = Step.of(frame).shape
    assert step.max_seq_len == max(longest, 140)
    shape = smallest(ladder, step)
    assert (shape.num_tokens, shape.num_rows, shape.max_seq_len == ANY_LEN) == (96, 96, splits)
    alone = smallest(ladder, StepShape(80, 8, 8, step.max_seq_len))
    assert (alone.num_rows, alone.max_seq_len == ANY_LEN) == (9, True)
    assert all(shape.max_seq_len == ANY_LEN for shape in decode_shapes(256))


def test_the_largest_step_is_a_shape_and_none_is_larger() -> None:
    assert captured(8, 1, LONGEST) == []
    assert captured(8, 2, LONGEST) == [StepShape(2, 2, 1)]
    assert [shape.num_tokens for shape in captured(8, 100, LONGEST)] == [16, 32, 64, 96, 100]
    assert [shape.num_tokens for shape in captured(8, 100, 33)] == [16, 32, 33]  # a padding row is no longer
    assert len(captured(9, 100, LONGEST)) == 15
    assert captured(256, 100_000, LONGEST)[-1].num_tokens == 8192


def test_keys_are_split_only_where_a_row_may_be_longer_than_what_stays_whole() -> None:
    ladder = captured(256, 8192, 8 * 4096)
    assert {shape.num_tokens for shape in ladder if shape.num_rows > 9 and shape.max_seq_len == ANY_LEN} == {
        shape.num_tokens for shape in ladder if shape.num_tokens < 4096
    }
    for num_tokens in (4095, 4096, 8000):
        assert smallest(ladder, StepShape(num_tokens, 256, 256, 8 * 4096)).num_tokens >= num_tokens


@pytest.mark.parametrize(
    ("flops_per_token", "num_tokens"),
    [
        pytest.param(2 * 4096 * (80 * 128 + 3 * 12288), 2073, id="Qwen3-8B"),
        pytest.param(2 * 4096 * (80 * 128 + 3 * 12288) / 4, 8292, id="Qwen3-8B over 4 ranks"),
        pytest.param(2 * 8192 * (144 * 128 + 3 * 28672), 2048, id="Llama-3.1-70B"),
    ],
)
def test_graphs_end_where_a_rank_computes_longer_than_it_launches(flops_per_token: float, num_tokens: int) -> None:
    assert launch_bound_tokens(flops_per_token) == num_tokens


def test_a_step_that_verifies_drafts_is_no_decode() -> None:
    frame = StepFrame(
        generation=1,
        step=1,
        rows=np.array([1, 2], np.int32),
        starts=np.array([3, 9], np.int32),
        lens=np.array([4, 2], np.int32),
        flags=np.full(2, RowFlag.SAMPLE, np.int32),
        num_samples=np.array([4, 2], np.int32),
    )
    step = Step.of(frame).shape
    assert (step.num_tokens, step.num_rows, step.num_sampled) == (6, 2, 6)
    assert not step.is_decode
    assert smallest(decode_shapes(20), step) is None
    shape = smallest(captured(256, 4096, LONGEST), step)
    assert shape is not None
    assert shape.num_sampled >= 6
    assert StepShape(16, 9, 8).holds(StepShape(12, 2, 8))
    assert not StepShape(16, 9, 8).holds(StepShape(12, 2, 9))


def test_a_step_samples_behind_each_draft() -> None:
    frame = StepFrame(
        generation=1,
        step=1,
        rows=np.array([1, 2, 3, 4], np.int32),
        starts=np.array([3, 9, 0, 5], np.int32),
        lens=np.array([4, 1, 5, 2], np.int32),
        flags=np.array([3, RowFlag.SAMPLE, RowFlag.HAS_TOKENS, 3], np.int32),
        num_samples=np.array([4, 1, 2], np.int32),
        token_ids=np.arange(11, dtype=np.int32),
    )
    step = Step.of(frame).shape
    layout, shape = StepLayout(9, 16, max_sampled=12), StepShape(num_tokens=16, num_rows=9, num_sampled=8)
    out = np.full(layout.capacity, -7, np.int32)
    layout.pack(out, Step.of(frame), shape)
    assert step.num_sampled == 7
    assert out[layout.sampled(8)].tolist() == [0, 0, 0, 0, 1, 3, 3, 8]
    assert out[layout.sample_tokens(8)].tolist() == [0, 1, 2, 3, 4, 10, 11, 15]
    assert out[layout.cu_seqlens_q(9)].tolist() == [0, 4, 5, 10, 12, *[12] * 4, 16]
    assert out[layout.token_ids(16)].tolist() == [0, 1, 2, 3, -1, *range(4, 11), *[-1] * 4]


def test_a_step_with_prompts_takes_no_shape_of_decodes() -> None:
    for step in (StepShape(4, 3, 2), StepShape(4, 4, 3), StepShape(1, 1, 0)):
        assert not StepShape(8, 8, 8).holds(step)
        assert StepShape(16, 16, 15).holds(step)
