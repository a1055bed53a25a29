"""EAGLE-3: what the ranks draft is what a head in plain torch does, and answers with its drafts are those without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.engine.messages import GenerateRequest, SamplingParams
from cluster.scheduling.drafter import StepTimes
from configs.schema import SpeculationConfig
from tests import eagle3
from tests.local_group import Answers, Limits, LocalGroup
from tests.test_scheduler import run_random_load
from tests.test_speculation import WAYS, TurnsGuide, prompts, same
from worker.protocol import StepResult

Requests = list[tuple[list[int], SamplingParams]]


@dataclass(frozen=True)
class Trained:
    """A head that has seen the answers to some requests, and these without drafts at one rank."""

    path: Path
    head: eagle3.Head
    requests: Requests
    plain: Answers
    vocab_size: int

    def make_guide(self, request: GenerateRequest) -> TurnsGuide | None:
        return TurnsGuide(self.vocab_size) if request.sampling.grammar else None

    def speculation(self, num_drafts: int) -> SpeculationConfig:
        return SpeculationConfig(method="eagle3", model=str(self.path), num_speculative_tokens=num_drafts)


def asked_for(prompt: list[int], **way: Any) -> tuple[list[int], SamplingParams]:
    return prompt, SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **way})


@pytest.fixture(scope="module")
def trained(small_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    group = LocalGroup(small_path, 1, Limits().num_pages)
    vocab_size = group.model.vocab_size
    requests = [
        asked_for(prompt, **way)
        for prompt, way in zip(prompts(group, [3, 17, 40, 16, 33, 8, 60, 5, 9, 12, 31, 31]), WAYS, strict=True)
    ]
    requests[-1] = requests[-2][0], requests[-1][1]  # another choice of one prompt

    def make_guide(request: GenerateRequest) -> TurnsGuide | None:
        return TurnsGuide(vocab_size) if request.sampling.grammar else None

    firsts = group.generate(requests[:2], Limits(), at_once=True)
    requests += [
        asked_for(requests[index][0], **WAYS[index], stop_token_ids=(tokens[len(tokens) // 2],))
        for index, tokens in enumerate(firsts.tokens)
    ]
    plain = group.generate(requests, Limits(), at_once=True, make_guide=make_guide)
    assert len(plain.tokens[-1]) < 40
    group.close()
    texts = [[*prompt, *tokens] for (prompt, _), tokens in zip(requests, plain.tokens, strict=True)]
    head, path = eagle3.train(small_path, texts[:12], 14), tmp_path_factory.mktemp("head")
    eagle3.write(head, path)
    return Trained(path, head, requests, plain, vocab_size)


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, small_path: Path, trained: Trained) -> Iterator[LocalGroup]:
    group = LocalGroup(small_path, request.param, Limits().num_pages, speculation=trained.speculation(7))
    yield group
    group.close()


@pytest.fixture(autouse=True)
def cheap_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take on a busy machine would choose for itself."""
    monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))


@pytest.mark.parametrize("group", [1, 3], indirect=True)
def test_ranks_draft_what_a_head_in_plain_torch_does(
    group: LocalGroup, trained: Trained, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[StepResult] = []
    result = group.result
    monkeypatch.setattr(group, "result", lambda: results.append(result()) or results[-1])
    num_drafts = 0
    for prompt, sampling in trained.requests[2], trained.requests[4]:
        results.clear()
        answers = group.generate([(prompt, sampling)], Limits(speculation=trained.speculation(4)), at_once=True)
        whole = [*prompt, *answers.tokens[0]]
        states, num_known = eagle3.states_of(small_path, whole, (0, 1, 2)), len(prompt)
        for step in results:
            num_known += len(step.tokens)
            drafts = step.drafts[step.drafts >= 0].tolist()
            assert drafts == trained.head.drafts(states[: num_known - 1], whole[:num_known], len(drafts))
            num_drafts += len(drafts)
    assert num_drafts > 60


@pytest.mark.parametrize(
    ("group", "num_drafts", "num_pages"),
    [(1, 1, 2048), (1, 3, 18), (2, 7, 18), (3, 4, 18), (3, 7, 2048)],
    indirect=["group"],
)
def test_answers_with_drafts_equal_those_without(
    group: LocalGroup, trained: Trained, num_drafts: int, num_pages: int
) -> None:
    limits = Limits(num_pages=num_pages, speculation=trained.speculation(num_drafts))
    drafted = group.generate(trained.requests, limits, at_once=True, make_guide=trained.make_guide)
    same(drafted, trained.plain)
    assert (drafted.stats.total_preemptions > 0) == (num_pages < 2048)
    assert 0.3 < drafted.stats.total_accepted / drafted.stats.total_drafted < 0.95


# ---- the scheduler, against a fake model whose ranks draft


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_answers_under_random_load_equal_the_reference_with_drafts_of_the_ranks(num_drafts: int) -> None:
    """Guided requests, stops, preemptions, faults and windows among them."""
    speculation = SpeculationConfig(method="eagle3", model="head", num_speculative_tokens=num_drafts)
    faults: list[dict[str, Any]] = [{}, {}, {"faults": 0.1}, {"windows": True}, {"windows": True, "faults": 0.1}]
    engines = [run_random_load(seed, 2, speculation=speculation, **fault) for seed, fault in enumerate(faults)]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(stat.total_accepted for stat in stats) > 100
    assert sum(stat.total_drafted for stat in stats) > sum(stat.total_accepted for stat in stats)
    assert sum(stat.total_preemptions for stat in stats) > 3
