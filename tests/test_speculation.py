"""Speculation: answers with drafts are those without, bit for bit, and drafts are made where they pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.engine.messages import SamplingParams
from cluster.scheduling.drafter import Drafter
from cluster.scheduling.ngrams import NgramHistory
from configs.schema import SpeculationConfig
from tests.local_group import Answers, Limits, LocalGroup
from worker.protocol import Int32Array

SEVEN = SpeculationConfig(method="ngram", num_speculative_tokens=7)


class Oracle:
    """Drafts that know the answers, and are wrong now and then: `share` of them are right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, whole: dict[int, list[int]], share: float = 0.8) -> None:
        """`whole`: prompt and answer of each request, by id."""
        self._random = random.Random(3)
        self._whole, self._share = whole, share
        self.lens: set[int] = set()
        """How many drafts rows had in a step."""
        monkeypatch.setattr(NgramHistory, "chances", (0.95, 0.95))
        monkeypatch.setattr(Drafter, "tokens", self._tokens_of)

    @property
    def _tokens_of(self) -> Callable[..., Int32Array]:
        return lambda drafter, rows, draws: self._tokens(drafter, rows, draws)

    def _tokens(self, drafter: Drafter, rows: Int32Array, draws: Int32Array) -> Int32Array:
        ids: list[int] = []
        for row, count in zip(rows.tolist(), draws.tolist(), strict=True):
            known = int(drafter._rows.num_known[row])
            whole = self._whole[drafter._rows.request(row).id]
            assert drafter._rows.tokens[row, known - 1] == whole[known - 1], "the answer is another"
            self.lens.add(count - 1)
            drafts = whole[known : known + count - 1]
            assert len(drafts) == count - 1, "a row has drafts past its length"
            ids += (
                whole[known - 1],
                *(token if self._random.random() < self._share else (token + 1) % 64 for token in drafts),
            )
        return np.array(ids, np.int32)


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
        index + 1: [*prompt, *tokens] + [0] * 40
        for index, ((prompt, _), tokens) in enumerate(zip(requests, plain.tokens, strict=True))
    }
    oracle = Oracle(monkeypatch, whole)
    speculation = SEVEN.model_copy(update={"num_speculative_tokens": num_drafts})
    drafted = group.generate(requests, Limits(num_pages=num_pages, speculation=speculation), at_once=True)
    same(drafted, plain)
    assert max(oracle.lens) == num_drafts
    assert (drafted.stats.total_preemptions > 0) == (num_pages < 2048)
    assert 0.3 < drafted.stats.total_accepted / drafted.stats.total_drafted < 0.95
