"""SmolLM2's answers: greedy tokens equal those of transformers in fp32. tests/whole/test_exact.py has a small model's.

Ranks are threads of this process and the scheduler is called directly: the same code as behind Ray, without Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.messages.engine import SamplingParams
from tests.conftest import Logits
from tests.helpers.local_group import Limits, LocalGroup

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


Answer = tuple[list[int], list[int]]


def assert_greedy(logits: Logits, answers: list[Answer], num_tokens: int = NUM_NEW_TOKENS) -> None:
    """Checks that answers to prompts are transformers' greedy ones in fp32, `num_tokens` each.

    One pass over prompt and answer says what transformers would choose after each prefix of the answer: with every
    token its first choice, the answer is the one it would generate.
    """
    for prompt, answer in answers:
        assert len(answer) == num_tokens
        expected = logits(prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()
        assert answer == expected, f"the answer to {len(prompt)} tokens"


def _check_every_way(group: LocalGroup, logits: Logits, lengths: list[int], few_pages: int) -> None:
    """Checks answers in chunks, from the prefix cache, and after preemption."""
    prompts = make_prompts(lengths, group.model.vocab_size)
    answers, _ = generate(group, prompts, Limits(chunk=16), at_once=True)
    assert_greedy(logits, [*zip(prompts, answers, strict=True)])
    whole, _ = generate(group, prompts, Limits(chunk=512), at_once=True)
    assert whole == answers
    # Half of them alone; the second time its prompt is in the prefix cache, the first time nothing like it is.
    twice = [*prompts[1::2], *prompts[1::2]]
    alone, stats = generate(group, twice, Limits(prefix_caching=True), at_once=False)
    assert stats.total_prefix_hit_tokens > 0
    assert alone == [*answers[1::2], *answers[1::2]]
    preempted, stats = generate(group, prompts, Limits(num_pages=few_pages), at_once=True)
    assert stats.total_preemptions > 0
    assert preempted == answers


@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        pytest.param(2, SHORT_LENGTHS[:4], marks=pytest.mark.slow, id="tp2"),
        *(
            pytest.param(size, LENGTHS, marks=pytest.mark.exhaustive, id=f"tp{size}-many")
            for size in (1, 2, 3, 4, 5, 9)
        ),
    ],
)
@pytest.mark.timeout(5400)
def test_smollm2_answers_as_transformers_do(
    size: int, lengths: list[int], smollm2_path: Path, smollm2_logits: Logits
) -> None:
    group = LocalGroup(smollm2_path, size, Limits().num_pages)
    try:
        if lengths is LENGTHS:
            _check_every_way(group, smollm2_logits, lengths, 120)
            return
        prompts = make_prompts(lengths, group.model.vocab_size)
        answers, _ = generate(group, prompts, Limits(chunk=32), at_once=True)
        assert_greedy(smollm2_logits, [*zip(prompts, answers, strict=True)])
    finally:
        group.close()
