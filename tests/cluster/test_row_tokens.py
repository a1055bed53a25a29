"""Rows that bring several tokens a step, as verified drafts will: every answer, stop, log probability and cached page
is that of a run with one token a step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.messages.engine import FinishReason, GenerateRequest, SamplingParams
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.request import Request
from cluster.scheduling.row_table import RowTable
from configs.errors import EngineError
from configs.schema import NO_SPECULATION, SpeculationConfig
from tests.cluster.test_guided_rows import HandGuide
from tests.helpers.fake_engine import EOS, LIMITS, Engine, prompt_of, prompt_stopping_at
from worker.frame_checks import FrameLimits, check_frame
from worker.protocol import RowFlag, StepFrame, StepResult

HEAD = SpeculationConfig(method="eagle3", model="head", num_speculative_tokens=3)
FOUR = replace(LIMITS, speculation=HEAD, steps_in_flight=1)


@pytest.mark.parametrize(
    ("page_size", "sampling"),
    [
        (1, {"max_tokens": 1}),
        (4, {"max_tokens": 13}),
        (1, {"max_tokens": 100}),
        (4, {"max_tokens": 30, "ignore_eos": False}),
        (1, {"max_tokens": 30, "ignore_eos": False, "min_tokens": 9}),
        (4, {"max_tokens": 30, "stop_token_ids": (3, 11, 20)}),
        (4, {"max_tokens": 30, "stop_token_ids": (3, 11, 20), "min_tokens": 6}),
    ],
    ids=str,
)
def test_a_run_leaves_what_a_run_with_one_token_a_step_leaves(page_size: int, sampling: dict[str, Any]) -> None:
    limits = replace(FOUR, page_size=page_size, num_pages=256 // page_size)
    four, one = Engine(limits), Engine(replace(limits, speculation=NO_SPECULATION))
    for seed in range(6):
        for engine in (four, one):
            engine.add(prompt_of(9, seed), seed=seed, num_logprobs=1, **sampling)
            engine.run()
            # A second turn finds what the first one left in the cache.
            first = engine.answers[len(engine.answers)]
            engine.add([*first.prompt, *first.tokens, 1][: limits.max_model_len - 1], max_tokens=2)
            engine.run()
        for request_id, answer in one.answers.items():
            other = four.answers[request_id]
            assert (other.tokens, other.finished, other.logprobs) == (answer.tokens, answer.finished, answer.logprobs)
            assert other.cached == answer.cached
        assert figures(four) == figures(one)
    assert sampling["max_tokens"] == 1 or four.scheduler.last_step < one.scheduler.last_step


def figures(engine: Engine) -> tuple[int, ...]:
    stats = engine.scheduler.stats()
    return (
        stats.num_free_pages,
        stats.num_cached_pages,
        stats.num_evictable_pages,
        stats.total_prefix_hit_tokens,
        stats.total_answer_tokens,
    )


@pytest.mark.parametrize("index", range(7))
def test_what_a_row_brings_behind_a_stop_is_dropped(index: int) -> None:
    prompt, seed = prompt_stopping_at(index)
    engine = Engine(FOUR)
    for kind in ({"ignore_eos": False}, {"stop_token_ids": (EOS,)}, {"max_tokens": index + 1}):
        engine.add(prompt, **{"max_tokens": 40, "seed": seed, "num_logprobs": 0, **kind})
    engine.run()
    ends = [answer.finished for answer in engine.answers.values() if answer.finished]
    assert [end.reason for end in ends] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [end.stop_token_id for end in ends] == [EOS, EOS, None]
    for answer in engine.answers.values():
        assert len(answer.tokens) == len(answer.logprobs) == index + 1


def test_a_row_with_a_guide_brings_one_token_and_its_guide_takes_them_one_by_one() -> None:
    engine = Engine(FOUR)
    engine.add(prompt_of(5), max_tokens=20, grammar="rule")
    engine.add(prompt_of(6), max_tokens=20)
    num_samples: set[tuple[int, ...]] = set()
    for _ in range(50):
        frame = engine.launch()
        if frame is not None:
            num_samples.add(tuple(frame.samples_per_row[frame.rows == 2].tolist()))  # it had to wait for its first mask
            engine.retire()
    assert num_samples == {(1,), ()}
    engine.run()

    table = RowTable(LIMITS)
    guided = GuidedRows(LIMITS, table)
    guides = [HandGuide(), HandGuide()]
    for request_id, guide in enumerate(guides, start=1):
        request = GenerateRequest(id=request_id, prompt=bytes(4), sampling=SamplingParams(max_tokens=9))
        entry = Request.create(request, LIMITS)
        entry.guide = guide
        table.take(entry)
    rows, stopped = np.array([2, 2, 1, 1], np.int32), np.array([False, False, False, True])
    guided.take_tokens(rows, np.array([5, 6, 8, EOS], np.int32), stopped)
    assert [guide.accepted for guide in guides] == [[8], [5, 6]]
    assert guided.num_awaiting == 2


def test_results_with_too_many_tokens_of_a_row_or_none_are_refused() -> None:
    for counts in ([5], [0], [2, 2], []):
        engine = Engine(FOUR)
        engine.add(prompt_of(5), max_tokens=20)
        for _ in range(2):
            engine.launch()
            if engine.scheduler.last_step == 1:
                engine.retire()
        tokens = np.zeros(sum(counts) if counts else 3, np.int32)
        with pytest.raises(EngineError, match="result"):
            engine.scheduler.retire(StepResult(1, 2, tokens, num_tokens=np.array(counts, np.int32)))
    one = Engine(LIMITS)
    one.add(prompt_of(5))
    one.launch()
    with pytest.raises(EngineError, match="too many"):
        one.scheduler.retire(StepResult(1, 1, np.zeros(2, np.int32), num_tokens=np.array([2], np.int32)))


def verify_frame(**changes: Any) -> StepFrame:
    """Row 2 has four inputs, its last token and three drafts; row 1 one; row 3 ends a prompt of two."""
    sections = {
        "rows": [2, 1, 3],
        "starts": [7, 9, 0],
        "lens": [4, 1, 2],
        "flags": [RowFlag.SAMPLE, RowFlag.SAMPLE, RowFlag.SAMPLE | RowFlag.HAS_TOKENS],
        "num_samples": [4, 1, 1],
        "token_ids": [5, 6],
        **changes,
    }
    frame = StepFrame(1, 1, **{name: np.array(values, np.int32) for name, values in sections.items()})
    frame.masks = np.ones((len(frame.mask_rows), 1), np.uint32)
    return frame


@pytest.mark.parametrize(
    ("changes", "max_samples", "wrong"),
    [
        ({}, 4, None),
        ({"mask_rows": [1, 2, 2, 2, 2]}, 4, None),
        ({"flags": [2, 2, 1], "num_samples": [4, 1]}, 4, None),
        ({}, 1, "samples 4 inputs of a row; at least 1 and at most 1"),
        ({"num_samples": [0, 1, 1]}, 4, "impossible length|samples"),
        ({"num_samples": [4, 1]}, 4, "num_samples for other rows"),
        ({"num_samples": [4, 1, 3]}, 4, "above a row's inputs"),
        ({"num_samples": [3, 1, 1]}, 4, "impossible length"),
        ({"num_samples": []}, 4, "impossible length"),
        ({"num_wanted": [3, 0, 1]}, 4, None),
        ({"num_wanted": [3, 0]}, 4, "drafts of other rows"),
        ({"num_wanted": [4, 0, 0]}, 4, "more than 3 of one"),
        ({"num_wanted": [0, 3, 0], "starts": [7, 13, 0]}, 4, None),
        ({"num_wanted": [0, 3, 0], "starts": [7, 14, 0]}, 4, "after the last position"),
        ({"mask_rows": [1, 1]}, 4, "more masks of a row"),
        ({"mask_rows": [2, 2, 2, 2, 2]}, 4, "more masks of a row"),
    ],
)
def test_a_frame_samples_no_more_inputs_than_its_rows_have(
    changes: dict[str, Any], max_samples: int, wrong: str | None
) -> None:
    frame = StepFrame.decode(verify_frame(**changes).encode())
    limits = FrameLimits(num_rows=4, vocab_size=32, max_model_len=16, max_samples=max_samples)
    if wrong is None:
        check_frame(frame, limits)
    else:
        with pytest.raises(EngineError, match=wrong):
            check_frame(frame, limits)
