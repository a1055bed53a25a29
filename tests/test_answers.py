"""The answers: greedy tokens of SmolLM2 equal those of transformers in fp32, however they are computed.

Ranks are threads of this process and the scheduler is called directly: the same code as behind Ray, without Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.messages import SamplingParams
from tests.conftest import Logits
from tests.local_group import Limits, LocalGroup, assert_scores_equal

NUM_NEW_TOKENS = 24


def generate(
    group: LocalGroup, prompts: list[list[int]], limits: Limits, *, at_once: bool
) -> tuple[list[list[int]], Any]:
    """Greedy tokens of every prompt, and the scheduler's figures."""
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers = group.generate([(prompt, sampling) for prompt in prompts], limits, at_once=at_once)
    return answers.tokens, answers.stats


def make_prompts(lengths: list[int], vocab_size: int) -> list[list[int]]:
    """Random tokens of the given lengths, none of them special; the same at every run."""
    generator = np.random.default_rng(7)
    return [generator.integers(100, vocab_size, length).tolist() for length in lengths]


SHORT_LENGTHS = [1, 2, 17, 40, 130, 300]
LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 20, 24, 31, 32, 33, 40, 47, 48, 55, 64, 65, 80]
LENGTHS += [96, 100, 127, 128, 129, 150, 200, 255, 300, 400, 513, 600]


AssertGreedy = Callable[[list[list[int]], list[list[int]]], None]


@pytest.fixture(scope="module")
def assert_greedy(smollm2_logits: Logits) -> AssertGreedy:
    """Checks that answers are transformers' greedy ones in fp32, one prompt at a time.

    One pass over prompt and answer says what transformers would choose after each prefix of the answer: with every
    token its first choice, the answer is the one it would generate.
    """
    known: dict[tuple[int, ...], list[int]] = {}

    def check(prompts: list[list[int]], answers: list[list[int]]) -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == NUM_NEW_TOKENS
            if known.get(tuple(prompt)) != answer:
                logits = smollm2_logits(prompt + answer[:-1])
                assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist(), f"the answer to {len(prompt)} tokens"
                known[tuple(prompt)] = answer

    return check


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LocalGroup]:
    group = LocalGroup(smollm2_path, request.param, Limits().num_pages)
    yield group
    group.close()


@pytest.mark.parametrize(
    "group", [1, 2, pytest.param(3, marks=pytest.mark.slow)], indirect=True, ids=lambda size: f"tp{size}"
)
def test_batched_answers_equal_transformers(group: LocalGroup, assert_greedy: AssertGreedy) -> None:
    prompts = make_prompts(SHORT_LENGTHS, group.model.vocab_size)
    tokens, _ = generate(group, prompts, Limits(chunk=64), at_once=True)
    assert_greedy(prompts, tokens)


@pytest.mark.parametrize(
    "group", [1, 2, pytest.param(3, marks=pytest.mark.slow)], indirect=True, ids=lambda size: f"tp{size}"
)
def test_prompt_logprobs_equal_transformers_in_chunks_and_with_a_warm_prefix_cache(
    group: LocalGroup, smollm2_logits: Logits
) -> None:
    prompts = make_prompts([1, 2, 17, 100], group.model.vocab_size)
    plain, scored = ([(prompt, SamplingParams(max_tokens=1, prompt_logprobs=k)) for prompt in prompts] for k in (-1, 5))
    together = group.generate(scored, Limits(), at_once=True)
    again = group.generate([*plain, *scored], Limits(chunk=48, prefix_caching=True), at_once=False)
    for index, prompt in enumerate(prompts):
        expected = smollm2_logits(prompt)[:-1].log_softmax(-1)
        for scores in (together.scores[index], again.scores[len(prompts) + index]):
            assert_scores_equal(scores, prompt, expected)


@pytest.mark.slow
@pytest.mark.parametrize("group", [5, 9], indirect=True, ids=lambda size: f"tp{size}")
def test_more_ranks_than_kv_heads_give_the_same_answers(group: LocalGroup, assert_greedy: AssertGreedy) -> None:
    prompts = make_prompts(SHORT_LENGTHS, group.model.vocab_size)[:3]
    tokens, _ = generate(group, prompts, Limits(), at_once=True)
    assert_greedy(prompts, tokens)


@pytest.mark.parametrize("group", [2], indirect=True, ids=lambda size: f"tp{size}")
def test_preemption_and_prefix_hits_change_no_answer(group: LocalGroup, assert_greedy: AssertGreedy) -> None:
    prompts = make_prompts(SHORT_LENGTHS, group.model.vocab_size)
    # Six requests end at 634 tokens in 42 pages: 40 pages force one of them out on the way.
    tokens, stats = generate(group, prompts, Limits(num_pages=40), at_once=True)
    assert stats.total_preemptions > 0
    assert_greedy(prompts, tokens)
    again = [*prompts[3:5], *prompts[3:5]]
    tokens, stats = generate(group, again, Limits(prefix_caching=True), at_once=False)
    assert stats.total_prefix_hit_tokens > 0
    assert_greedy(again, tokens)


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "group",
    [2, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (1, 3, 4, 5, 9))],
    indirect=True,
    ids=lambda size: f"tp{size}",
)
def test_thirty_two_answers_equal_transformers_whatever_the_way(group: LocalGroup, assert_greedy: AssertGreedy) -> None:
    prompts = make_prompts(LENGTHS, group.model.vocab_size)
    for chunk in (16, 512):
        tokens, _ = generate(group, prompts, Limits(chunk=chunk), at_once=True)
        assert_greedy(prompts, tokens)
    # Half of them alone; the second time its prompt is in the prefix cache, the first time nothing like it is.
    twice = [*prompts[::2], *prompts[::2]]
    tokens, stats = generate(group, twice, Limits(prefix_caching=True), at_once=False)
    assert stats.total_prefix_hit_tokens > 0
    assert_greedy(twice, tokens)
    tokens, stats = generate(group, prompts, Limits(num_pages=120), at_once=True)
    assert stats.total_preemptions > 0
    assert_greedy(prompts, tokens)
