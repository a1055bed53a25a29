"""Speculation: answers with drafts are those without, bit for bit, and drafts are made where they pay."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.engine.messages import SamplingParams
from cluster.scheduling.drafter import Drafter
from cluster.scheduling.ngrams import NgramHistory
from cluster.scheduling.request import Request
from configs.schema import SpeculationConfig
from tests.fake_engine import LIMITS, VOCAB, reference
from tests.local_group import Answers, Limits, LocalGroup
from tests.test_scheduler import run_random_load
from worker.protocol import Int32Array

SEVEN = SpeculationConfig(method="ngram", num_speculative_tokens=7)


class Oracle:
    """Drafts that know the answers, and are wrong in one place of five."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, whole_of: Callable[[Request], Sequence[int]], vocab_size: int
    ) -> None:
        """`whole_of`: prompt and answer of a request, or more."""
        self._whole_of, self._vocab_size = whole_of, vocab_size
        self._requests: dict[NgramHistory, Request] = {}
        self.lens: set[int] = set()
        """How many drafts rows had in a step."""
        self.num_guided = 0
        """Rows with drafts and a guide."""
        take, tokens = Drafter.take, Drafter.tokens

        def taken(drafter: Drafter, rows: Int32Array) -> None:
            take(drafter, rows)
            for request in map(drafter._rows.request, rows.tolist()):
                assert request.history is not None
                self._requests[request.history] = request
            drafter._rows.predicted[rows] = True

        def brought(drafter: Drafter, rows: Int32Array, draws: Int32Array) -> Int32Array:
            self.lens |= set((draws - 1).tolist())
            self.num_guided += int(drafter._rows.guided[rows].sum())
            return tokens(drafter, rows, draws)

        monkeypatch.setattr(NgramHistory, "chances", (0.95, 0.95))
        monkeypatch.setattr(NgramHistory, "drafts", lambda history, count: self._drafts(history, count))
        monkeypatch.setattr(Drafter, "take", taken)
        monkeypatch.setattr(Drafter, "tokens", brought)

    def _drafts(self, history: NgramHistory, count: int) -> list[int]:
        request, num_known = self._requests[history], len(history)
        whole = self._whole_of(request)
        assert history._tokens.tolist() == list(whole[:num_known]), "the answer is another"
        drafts = [*whole[num_known : num_known + count], *[0] * count][:count]
        places = range(num_known, num_known + count)
        wrong = [random.Random(f"{request.id}/{place}").random() < 0.2 for place in places]
        return [
            (token + is_wrong) % self._vocab_size for token, is_wrong in zip(drafts, wrong, strict=True)
        ]


def same(got: Answers, expected: Answers) -> None:
    """Checks that no token, log probability or end differs."""
    assert got.tokens == expected.tokens
    assert got.logprobs == expected.logprobs
    assert [(end.reason, end.stop_token_id) for end in got.ends] == [
        (end.reason, end.stop_token_id) for end in expected.ends
    ]


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda size: f"tp{size}")
def group(request: pytest.FixtureRequest, small_path: Path) -> Iterator[LocalGroup]:
    group = LocalGroup(small_path, request.param, Limits().num_pages, speculation=SEVEN)
    yield group
    group.close()


def prompts(group: LocalGroup, lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(11)
    return [generator.integers(0, group.model.vocab_size, length).tolist() for length in lengths]


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "num_logprobs": 2},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.7, "presence_penalty": 0.4, "num_logprobs": 0},
    {"temperature": 1.0, "seed": 4, "logit_bias": ((3, 4.0), (7, -2.0)), "min_tokens": 6, "ignore_eos": False},
    {"temperature": 1.5, "seed": 8, "num_logprobs": 3, "logprob_token_ids": (1, 2), "max_tokens": 9},
    {"temperature": 1.0, "seed": 1, "allowed_token_ids": tuple(range(0, 60, 2)), "max_tokens": 17},
]


@pytest.mark.parametrize(("num_drafts", "num_pages"), [(1, 2048), (2, 2048), (3, 16), (5, 2048), (7, 2048), (7, 16)])
def test_answers_with_drafts_equal_those_without(
    group: LocalGroup, num_drafts: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        (prompt, SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **way}))
        for prompt, way in zip(prompts(group, [3, 17, 40, 16, 33, 8, 60, 5]), WAYS, strict=True)
    ]
    plain = group.generate(requests, Limits(), at_once=True)
    # A token that comes in the middle of an answer, as a stop.
    stops = [plain.tokens[index][len(plain.tokens[index]) // 2] for index in (0, 1)]
    requests += [
        (requests[index][0], SamplingParams(**{"max_tokens": 40, **WAYS[index], "stop_token_ids": (stop,)}))
        for index, stop in enumerate(stops)
    ]
    plain = group.generate(requests, Limits(), at_once=True)
    assert len(plain.tokens[-1]) < 40
    whole = {
        index + 1: [*prompt, *tokens]
        for index, ((prompt, _), tokens) in enumerate(zip(requests, plain.tokens, strict=True))
    }
    oracle = Oracle(monkeypatch, lambda request: whole[request.id], group.model.vocab_size)
    speculation = SEVEN.model_copy(update={"num_speculative_tokens": num_drafts})
    drafted = group.generate(requests, Limits(num_pages=num_pages, speculation=speculation), at_once=True)
    same(drafted, plain)
    assert max(oracle.lens) == num_drafts
    assert (drafted.stats.total_preemptions > 0) == (num_pages < 2048)
    assert 0.3 < drafted.stats.total_accepted / drafted.stats.total_drafted < 0.95


# ---- the scheduler, against a fake model that verifies drafts


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_answers_under_random_load_equal_the_reference_with_drafts_that_are_often_right(
    num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guided requests, stops, preemptions, faults and windows among them."""

    @functools.cache
    def answer(prompt: tuple[int, ...], seed: int, sampling: SamplingParams, max_model_len: int) -> list[int]:
        return reference(list(prompt), sampling, replace(LIMITS, max_model_len=max_model_len))[0]

    def whole_of(request: Request) -> list[int]:
        prompt = request.tokens[: request.num_prompt_tokens].tolist()
        # The reference ends where the longest model would.
        return [*prompt, *answer(tuple(prompt), request.sampling.seed, request.sampling, request.max_total_tokens)]

    oracle = Oracle(monkeypatch, whole_of, VOCAB)
    engines = [
        run_random_load(
            seed, 2, speculation=SEVEN.model_copy(update={"num_speculative_tokens": num_drafts}), **fault
        )
        for seed, fault in enumerate([{}, {}, {"faults": 0.1}, {"windows": True}, {"windows": True, "faults": 0.1}])
    ]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(stat.total_accepted for stat in stats) > 100
    assert sum(stat.total_drafted for stat in stats) > sum(stat.total_accepted for stat in stats)
    assert sum(stat.total_preemptions for stat in stats) > 3
    assert oracle.num_guided > 10
    for engine, stat in zip(engines, stats, strict=True):
        ends = [answer.finished for answer in engine.answers.values() if answer.finished]
        assert sum(end.num_drafted for end in ends) == stat.total_drafted
        assert sum(end.num_accepted for end in ends) == stat.total_accepted
