"""Log probabilities of prompts, from the scheduler down to the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.messages.engine import SamplingParams
from configs.errors import EngineError
from tests.conftest import SMALL, Logits
from tests.helpers.fake_engine import LIMITS, Engine, prompt_of
from tests.helpers.local_group import Limits, LocalGroup, assert_scores_equal
from worker.frame_checks import FrameLimits, check_frame
from worker.protocol import MAX_PROMPT_LOGPROBS, PROMPT_LOGPROBS_DTYPE, RowFlag, StepFrame, StepResult
from worker.sampling.torch_sampling import token_logprobs
from worker.step.scoring import WantedTokens
from worker.step.step import Step

# The scheduler: `Engine` checks every score against the prompt it belongs to, and that each comes once, in order and
# with the first token at the latest.


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("k", [0, 3])
def test_every_prompt_token_but_the_first_is_scored_across_chunks(k: int, steps_in_flight: int) -> None:
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight))
    ids = [engine.add(prompt_of(length), max_tokens=3, prompt_logprobs=k) for length in (1, 2, 8, 9, 37)]
    engine.run()
    assert [len(engine.answers[i].scores) for i in ids] == [0, 1, 7, 8, 36]


def test_a_scored_prompt_reads_no_cache_but_others_read_what_it_computed() -> None:
    engine = Engine(LIMITS)
    prompt = prompt_of(24)
    cached: list[int | None] = []
    for prompt_logprobs in (-1, 1, 1, -1):
        request_id = engine.add(prompt, max_tokens=2, prompt_logprobs=prompt_logprobs)
        engine.run()
        cached.append(engine.answers[request_id].cached)
    assert cached == [0, 0, 0, 20]
    # Beside one another too.
    ids = [engine.add(prompt, max_tokens=2, prompt_logprobs=k) for k in (2, -1, 0)]
    engine.run()
    assert [engine.answers[i].cached for i in ids] == [0, 20, 0]
    engine = Engine(LIMITS)
    engine.add(prompt, max_tokens=2, prompt_logprobs=0)
    engine.run()
    later = engine.add(prompt, max_tokens=2)
    engine.run()
    assert engine.answers[later].cached == 20


def test_a_step_scores_no_more_than_it_may_and_the_other_requests_go_on() -> None:
    limits = replace(LIMITS, max_prompt_logprobs=5, max_num_batched_tokens=16, prefill_chunk_size=16, steps_in_flight=1)
    engine = Engine(limits)
    scored = [engine.add(prompt_of(21, seed), max_tokens=2, prompt_logprobs=1) for seed in range(2)]
    plain = engine.add(prompt_of(9, 7), max_tokens=2)
    engine.step()
    assert engine.answers[plain].tokens, "it waits for prompts that are scored"
    assert 4 <= len(engine.answers[scored[0]].scores) <= 5
    engine.run()


def test_the_last_part_of_a_prompt_takes_what_its_scores_leave_of_the_budget() -> None:
    # The last prompt token has no target: 6 tokens are 5 targets.
    engine = Engine(replace(LIMITS, max_prompt_logprobs=5))
    engine.add(prompt_of(6), max_tokens=1, prompt_logprobs=0)
    engine.run()
    assert engine.scheduler.last_step == 1


def test_a_preempted_request_is_scored_on_from_where_it_was() -> None:
    engine = Engine(replace(LIMITS, num_pages=17, max_prompt_logprobs=3, max_num_batched_tokens=64))
    first = engine.add(prompt_of(8), max_tokens=50)
    scored = engine.add(prompt_of(28, 1), max_tokens=20, prompt_logprobs=1)
    while not engine.scheduler.stats().total_preemptions:
        engine.step()
    engine.run()
    assert len(engine.answers[scored].scores) == 27
    assert engine.answers[first].finished


def test_a_prompt_preempted_in_its_middle_is_scored_once() -> None:
    engine = Engine(replace(LIMITS, num_pages=20, max_prompt_logprobs=2, max_num_batched_tokens=64))
    for seed in range(3):
        engine.add(prompt_of(4, 2 + seed), max_tokens=24)
    engine.step()
    scored = engine.add(prompt_of(40, 1), max_tokens=4, prompt_logprobs=1)
    while not engine.scheduler.stats().total_preemptions:
        engine.step()
    assert 2 < len(engine.answers[scored].scores) < 37
    engine.run()
    finished = engine.answers[scored].finished
    assert finished is not None
    assert finished.num_preemptions > 0
    assert len(engine.answers[scored].scores) == 39


def test_a_scored_request_that_was_aborted_sends_no_more() -> None:
    engine = Engine(replace(LIMITS, max_prompt_logprobs=4))
    scored = engine.add(prompt_of(30), max_tokens=4, prompt_logprobs=0)
    engine.launch()
    engine.launch()
    engine.retire()
    engine.abort(scored)
    engine.run()
    assert len(engine.answers[scored].scores) == 4


# The messages


def _frame(scores: list[tuple[int, int, int, int]], targets: list[int], **changes: Any) -> StepFrame:
    """Rows 3, 1 and 2 with tokens at positions 4 to 7, 0 to 2 and 9 each; the last one decodes."""
    fields: dict[str, Any] = {
        "rows": [3, 1, 2],
        "starts": [4, 0, 9],
        "lens": [4, 3, 1],
        "flags": [RowFlag.HAS_TOKENS, RowFlag.HAS_TOKENS, RowFlag.SAMPLE],
        "token_ids": [0] * 7,
        "prompt_targets": targets,
        **changes,
    }
    arrays = {name: np.array(values, np.int32) for name, values in fields.items()}
    return StepFrame(1, 1, prompt_runs=np.array(scores, PROMPT_LOGPROBS_DTYPE), **arrays)


def test_scores_travel_in_frames_and_results() -> None:
    frame = StepFrame.decode(_frame([(3, 5, 2, 4), (1, 0, 3, 0)], [7, 8, 9, 10, 11]).encode())
    assert frame.prompt_runs.tolist() == [(3, 5, 2, 4), (1, 0, 3, 0)]
    assert frame.prompt_targets.tolist() == [7, 8, 9, 10, 11]
    check_frame(frame, FrameLimits(num_rows=4, vocab_size=12, max_model_len=64))
    for num_tokens, k in ((0, 2), (3, 0)):
        ids, logprobs = np.arange(5 * k, dtype=np.int32).reshape(5, k), np.ones((5, k), np.float32)
        tokens, own = np.arange(num_tokens, dtype=np.int32), -np.arange(5, dtype=np.float32)
        sent = StepResult(1, 1, tokens, prompt_logprobs=own, prompt_top_ids=ids, prompt_top_logprobs=logprobs)
        result = StepResult.decode(sent.encode())
        assert len(sent.encode()) <= StepResult.max_bytes(3, k)
        assert result.tokens.tolist() == tokens.tolist()
        assert result.prompt_logprobs.tolist() == own.tolist()
        assert result.prompt_top_ids.tolist() == ids.tolist()
        assert result.prompt_top_logprobs.shape == (5, k)


@pytest.mark.parametrize(
    ("scores", "targets", "wrong"),
    [
        ([(3, 4, 2, 0)], [1], "1 prompt targets for"),
        ([], [1], "1 prompt targets for"),
        ([(3, 4, 0, 0)], [], "0 prompt targets for"),
        ([(3, 4, MAX_PROMPT_LOGPROBS + 1, 0)], [1] * (MAX_PROMPT_LOGPROBS + 1), f"at most {MAX_PROMPT_LOGPROBS}"),
        ([(3, 4, 1, 0)], [12], "outside a vocabulary"),
        ([(3, 4, 1, -1)], [1], "outside a vocabulary"),
        ([(2, 9, 1, 0)], [1], "row without tokens"),
        ([(1, 0, 1, 0), (3, 4, 1, 0)], [1, 1], "out of order"),
        ([(3, 4, 1, 0), (3, 5, 1, 0)], [1, 1], "out of order"),
        ([(3, 3, 2, 0)], [1, 1], "not inputs"),
        ([(3, 6, 3, 0)], [1, 1, 1], "not inputs"),
    ],
)
def test_scores_that_do_not_fit_a_frame_are_refused(
    scores: list[tuple[int, int, int, int]], targets: list[int], wrong: str
) -> None:
    with pytest.raises(EngineError, match=wrong):
        check_frame(_frame(scores, targets), FrameLimits(num_rows=4, vocab_size=12, max_model_len=64))


def test_a_result_without_the_scores_it_owes_is_an_error() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(6), prompt_logprobs=0)
    assert engine.launch() is not None
    with pytest.raises(EngineError, match="targets"):
        engine.scheduler.retire(StepResult(1, 1, np.zeros(1, np.int32)))


# The ranks: SmolLM2 is in test_answers.py.


def test_the_wanted_inputs_are_those_before_targets_and_the_sampled_ones() -> None:
    wanted = WantedTokens.of(Step.of(_frame([(3, 5, 2, 4), (1, 0, 2, 0)], [7, 8, 9, 10])), np.empty(0, np.int64))
    # Inputs 0 to 3 are row 3's positions 4 to 7, 4 to 6 are row 1's, 7 is the row that is sampled.
    assert wanted.tokens.tolist() == [1, 2, 4, 5, 7]
    assert wanted.tokens[wanted.scored].tolist() == [1, 2, 4, 5]
    assert wanted.tokens[wanted.sampled].tolist() == [7]


def test_equal_log_probabilities_stand_in_the_order_of_their_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    scores = token_logprobs(logits, torch.tensor([4]), 4, torch.empty(1, 0, dtype=torch.int64))
    assert scores.top_ids.tolist() == [[1, 3, 2, 4]]
    assert scores.logprobs.item() == scores.top_logprobs[0, 3].item() == logits.log_softmax(-1)[0, 4].item()


VOCAB = SMALL["vocab_size"]


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, small_path: Path) -> Iterator[LocalGroup]:
    group = LocalGroup(small_path, request.param, Limits().num_pages)
    yield group
    group.close()


def _request(length: int, k: int, max_tokens: int) -> tuple[list[int], SamplingParams]:
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    return prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=k)


# Of each request the prompt's length, which says its tokens, the number of likeliest tokens, and the answer's length.
# The longest prompt has more targets than one step takes.
MANY = [(300, -1, 60), (1, 3, 4), (2, 0, 4), (600, 2, 4), (40, VOCAB, 4), (300, 1, 60), (600, 5, 4)]
CROWDED = [(10, -1, 120), (11, -1, 120), (12, -1, 120), (600, 2, 4), (40, 7, 4)]


@pytest.mark.parametrize(
    ("group", "shapes", "limits", "at_once", "preempts"),
    [
        pytest.param(1, MANY, Limits(chunk=2048), True, False, id="whole"),
        pytest.param(2, MANY, Limits(chunk=33, prefix_caching=True), True, False, id="chunked"),
        pytest.param(1, MANY, Limits(chunk=48, prefix_caching=True), False, False, id="warm"),
        pytest.param(3, CROWDED, Limits(chunk=8, max_num_seqs=5, num_pages=45), True, True, id="preempted"),
    ],
    indirect=["group"],
)
def test_scores_equal_transformers_beside_other_requests(
    group: LocalGroup,
    small_logits: Logits,
    shapes: list[tuple[int, int, int]],
    limits: Limits,
    at_once: bool,
    preempts: bool,
) -> None:
    requests = [_request(*shape) for shape in shapes]
    answers = group.generate(requests, limits, at_once=at_once)
    assert (answers.stats.total_preemptions > 0) == preempts
    for (prompt, sampling), scores, tokens in zip(requests, answers.scores, answers.tokens, strict=True):
        assert len(tokens) == sampling.max_tokens
        if sampling.prompt_logprobs < 0:
            assert len(scores.logprobs) == 0
            continue
        assert_scores_equal(scores, prompt, small_logits(prompt)[:-1].log_softmax(-1))
