"""Speculation: answers with drafts are those without, bit for bit, and drafts are made where they pay."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from attention import registry
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.scheduling.drafter import DraftCounts, Drafter, StepTimes
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.ngrams import NgramHistory
from cluster.scheduling.request import Request, mask_of
from cluster.scheduling.row_table import RowTable
from configs.schema import NO_SPECULATION, AttentionConfig, SpeculationConfig
from tests.cluster.test_scheduler import run_random_load
from tests.helpers.fake_engine import LIMITS, VOCAB, Engine, prompt_of, reference
from tests.helpers.families import random_case
from tests.helpers.local_group import Answers, Limits, LocalGroup
from tests.helpers.rerun_graphs import PagedBackend, RerunGraphs
from worker.protocol import Int32Array, UInt32Array

PEAKED: dict[str, Any] = {
    "vocab_size": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
"""A Llama of few tokens; the likeliest has a probability of about 0.4 where matrices are large."""
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
        take, tokens = Drafter.take, Drafter._tokens

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
        # What steps take on a busy machine would choose for itself.
        monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))
        monkeypatch.setattr(NgramHistory, "drafts", lambda history, count: self._drafts(history, count))
        monkeypatch.setattr(Drafter, "take", taken)
        monkeypatch.setattr(Drafter, "_tokens", brought)

    def _drafts(self, history: NgramHistory, count: int) -> list[int]:
        request, num_known = self._requests[history], len(history)
        whole = self._whole_of(request)
        assert history._tokens.tolist() == list(whole[:num_known]), "the answer is another"
        drafts = [*whole[num_known : num_known + count], *[0] * count][:count]
        places = range(num_known, num_known + count)
        wrong = [random.Random(f"{request.id}/{place}").random() < 0.2 for place in places]
        return [(token + is_wrong) % self._vocab_size for token, is_wrong in zip(drafts, wrong, strict=True)]


def same(got: Answers, expected: Answers) -> None:
    """Checks that no token, log probability or end differs."""
    assert got.tokens == expected.tokens
    assert got.logprobs == expected.logprobs
    assert [(end.reason, end.stop_token_id) for end in got.ends] == [
        (end.reason, end.stop_token_id) for end in expected.ends
    ]


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, small_path: Path) -> Iterator[LocalGroup]:
    group = LocalGroup(small_path, request.param, Limits().num_pages, speculation=SEVEN)
    yield group
    group.close()


def prompts(group: LocalGroup, lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(11)
    return [generator.integers(0, group.model.vocab_size, length).tolist() for length in lengths]


class TurnsGuide:
    """Has even and odd tokens take turns, and ends an answer of 23 tokens."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_tokens = 0
        self._drafts: Sequence[int] = ()
        self.is_finished = False

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._num_tokens += len(tokens)
        self._drafts = drafts
        self.is_finished = self._num_tokens >= 23

    def poll(self) -> UInt32Array:
        return self._mask(self._num_tokens)

    @property
    def ahead(self) -> list[UInt32Array]:
        masks: list[UInt32Array] = []
        for place, token in enumerate(self._drafts, start=self._num_tokens):
            if token % 2 != place % 2 or place + 1 == 23:
                break
            masks.append(self._mask(place + 1))
        return masks

    def _mask(self, num_tokens: int) -> UInt32Array:
        return mask_of(range(num_tokens % 2, self._vocab_size, 2), self._vocab_size)

    def close(self) -> None:
        pass


WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3, "num_logprobs": 2},
    {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.7, "presence_penalty": 0.4, "num_logprobs": 0},
    {"temperature": 1.0, "seed": 4, "logit_bias": ((3, 4.0), (7, -2.0)), "min_tokens": 6, "ignore_eos": False},
    {"temperature": 1.5, "seed": 8, "num_logprobs": 3, "logprob_token_ids": (1, 2), "max_tokens": 9},
    {"temperature": 1.0, "seed": 1, "allowed_token_ids": tuple(range(0, 60, 2)), "max_tokens": 17},
    {"grammar": "turns", "num_logprobs": 1},
    {"grammar": "turns", "temperature": 1.0, "seed": 2, "presence_penalty": 1.0, "allowed_token_ids": tuple(range(99))},
    {"temperature": 1.0, "seed": 7, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 8, "prompt_logprobs": -1},
]


def test_captured_steps_with_room_for_drafts_sample_what_others_do(
    small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more rows than shapes for few have, of which one input each is sampled."""
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)
    by_name = AttentionConfig(backend="torch_native")
    answers = []
    for speculation in (NO_SPECULATION, SEVEN):
        group = LocalGroup(small_path, 1, 64, max_model_len=128, attention=by_name, speculation=speculation)
        asked = [(prompt, SamplingParams(max_tokens=3)) for prompt in prompts(group, [*range(3, 15)])]
        answers.append(group.generate(asked, Limits(num_pages=64), at_once=True).tokens)
        group.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("group", "num_drafts", "num_pages"),
    [(1, 1, 2048), (1, 3, 16), (2, 7, 16), (3, 4, 16), (3, 7, 2048)],
    indirect=["group"],
)
def test_answers_with_drafts_equal_those_without(
    group: LocalGroup, num_drafts: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        (prompt, SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **way}))
        for prompt, way in zip(prompts(group, [3, 17, 40, 16, 33, 8, 60, 5, 9, 12, 31, 31]), WAYS, strict=True)
    ]
    requests[-1] = requests[-2][0], requests[-1][1]  # another choice of one prompt

    def make_guide(request: GenerateRequest) -> TurnsGuide | None:
        return TurnsGuide(group.model.vocab_size) if request.sampling.grammar else None

    plain = group.generate(requests, Limits(), at_once=True, make_guide=make_guide)
    # A token that comes in the middle of an answer, as a stop.
    stops = [plain.tokens[index][len(plain.tokens[index]) // 2] for index in (0, 1)]
    requests += [
        (requests[index][0], SamplingParams(**{"max_tokens": 40, **WAYS[index], "stop_token_ids": (stop,)}))
        for index, stop in enumerate(stops)
    ]
    plain = group.generate(requests, Limits(), at_once=True, make_guide=make_guide)
    assert len(plain.tokens[-1]) < 40
    assert [len(tokens) for tokens in plain.tokens[8:10]] == [23, 23]
    whole = {
        index + 1: [*prompt, *tokens]
        for index, ((prompt, _), tokens) in enumerate(zip(requests, plain.tokens, strict=True))
    }
    oracle = Oracle(monkeypatch, lambda request: whole[request.id], group.model.vocab_size)
    speculation = SEVEN.model_copy(update={"num_speculative_tokens": num_drafts})
    limits = Limits(num_pages=num_pages, speculation=speculation)
    drafted = group.generate(requests, limits, at_once=True, make_guide=make_guide)
    same(drafted, plain)
    assert oracle.num_guided > 0 or num_pages < 2048
    assert max(oracle.lens) == num_drafts
    assert (drafted.stats.total_preemptions > 0) == (num_pages < 2048)
    assert 0.3 < drafted.stats.total_accepted / drafted.stats.total_drafted < 0.95


@pytest.mark.parametrize("group", [1, 3], indirect=True)
def test_pages_of_answers_with_drafts_are_found_again_with_the_right_tokens(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, num_logprobs=1)
    firsts = [(prompt, sampling) for prompt in prompts(group, [5, 20, 33])]
    answers = group.generate(firsts, Limits(), at_once=True)
    turns = [([*prompt, *tokens, 7], sampling) for (prompt, _), tokens in zip(firsts, answers.tokens, strict=True)]
    plain = group.generate([*firsts, *turns], Limits(), at_once=True)
    whole = {
        index + 1: [*prompt, *tokens]
        for index, ((prompt, _), tokens) in enumerate(zip([*firsts, *turns], plain.tokens, strict=True))
    }
    Oracle(monkeypatch, lambda request: whole[request.id], group.model.vocab_size)
    limits = Limits(speculation=SEVEN, prefix_caching=True)
    drafted = group.generate([*firsts, *turns], limits, at_once=False)
    same(drafted, plain)
    # Of each answer all whole pages but for the last token, of which nothing was computed.
    num_found = sum(len(prompt) + 39 for prompt, _ in firsts) // 16 * 16
    assert drafted.stats.total_prefix_hit_tokens > num_found - 3 * 16


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
        run_random_load(seed, 2, speculation=SEVEN.model_copy(update={"num_speculative_tokens": num_drafts}), **fault)
        for seed, fault in enumerate([{}, {}, {"faults": 0.1}, {"windows": True}, {"windows": True, "faults": 0.1}])
    ]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(stat.total_accepted for stat in stats) > 100
    assert sum(stat.total_drafted for stat in stats) > sum(stat.total_accepted for stat in stats)
    assert sum(stat.total_preemptions for stat in stats) > 3
    assert oracle.num_guided > 10


# ---- fast numerics: not the same bits, but the same distribution


class SameDrafts(Oracle):
    """The same drafts whatever the answers are."""

    def _drafts(self, history: NgramHistory, count: int) -> list[int]:
        return list(self._whole_of(self._requests[history])[len(history) :][:count])


def improbability(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """How far `counts` are from what `probabilities` of the same cells make likely: chi-square, less its mean, in its
    standard deviations. Cells that fewer than eight are expected in count as one."""
    expected = probabilities * counts.sum()
    is_rare = expected < 8
    found, expected = (np.append(of[~is_rare], of[is_rare].sum()) for of in (counts, expected))
    found, expected = found[expected > 0], expected[expected > 0]
    freedom = len(found) - 1
    return float((((found - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_fast_numerics_with_drafts_draw_what_the_model_alone_makes_likely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two tokens of an answer come without drafts, since steps overlap, and the next two with them.

    Planted once: one draft of twenty, or of ten, that counts as right whatever was sampled, is 6 and 27 deviations; a
    step that draws all tokens of a row with one noise 167.
    """
    case = random_case("llama", PEAKED, tmp_path, factor=6.0)
    size, num_answers, prompt = PEAKED["vocab_size"], 3000, [3, 1, 4, 1, 5, 2, 0, 5, 3]
    answers = torch.cartesian_prod(*[torch.arange(size)] * 4)
    with torch.inference_mode():
        logits = case.hf(torch.cat((torch.tensor([prompt]).expand(len(answers), -1), answers), dim=1)).logits
    of_tokens = logits[:, len(prompt) - 1 : -1].log_softmax(dim=-1).gather(2, answers.unsqueeze(2))
    likely = of_tokens.sum((1, 2)).double().exp().view([size] * 4).numpy()
    # The likeliest tokens of all four places are the drafts, whatever is before them.
    drafts = [int(np.moveaxis(likely, place, 0).reshape(size, -1).sum(axis=1).argmax()) for place in range(4)]
    SameDrafts(monkeypatch, lambda _request: [*prompt, *drafts, *drafts], size)
    speculation = SEVEN.model_copy(update={"num_speculative_tokens": 2})
    group = LocalGroup(case.path, 1, Limits().num_pages, numerics="fast", speculation=speculation)
    requests = [
        (prompt, SamplingParams(max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True))
        for seed in range(num_answers)
    ]
    limits = Limits(speculation=speculation)
    # Of more requests than there are rows, some would begin in steps of others, which have no drafts then.
    waves = [requests[first : first + limits.max_num_seqs] for first in range(0, num_answers, limits.max_num_seqs)]
    got = [group.generate(wave, limits, at_once=True) for wave in waves]
    group.close()
    num_drafted = sum(wave.stats.total_drafted for wave in got)
    assert num_drafted >= 2 * num_answers
    assert 0.2 < sum(wave.stats.total_accepted for wave in got) / num_drafted < 0.6
    counts = np.zeros_like(likely, np.int64)
    np.add.at(counts, tuple(np.array([tokens for wave in got for tokens in wave.tokens])[:, :4].T), 1)
    # The two that are verified alone, and with what was before them.
    assert improbability(counts.sum((0, 1)).ravel(), likely.sum((0, 1)).ravel()) < 4
    assert improbability(counts.ravel(), likely.ravel()) < 4


# ---- n-grams


def history_of(tokens: list[int]) -> NgramHistory:
    history = NgramHistory(2, 4)
    history.take(np.array(tokens, np.int32), is_whole=True)
    return history


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1, 2, 3, 4]),
        ([1, 2, 3, 9, 7, 2, 3, 8, 6, 1, 2, 3], [9, 7, 2, 3, 8, 6, 1]),  # three in common before two, though later
        ([2, 3, 8, 6, 2, 3, 9, 7, 2, 3], [9, 7, 2, 3, 9, 7, 2]),  # the last of two that have two
        ([5, 6, 5, 6, 5], [6, 5, 6, 5, 6, 5, 6]),
        ([4, 4, 4], [4] * 7),
        ([1, 2, 3, 4, 5, 6, 2], None),
        ([1, 2], None),
        ([1], None),
        ([], None),
    ],
)
def test_drafts_are_what_followed_the_last_tokens_before(tokens: list[int], drafts: list[int] | None) -> None:
    history = history_of(tokens)
    assert (history.chances is None) == (drafts is None)
    assert drafts is None or history.drafts(7) == drafts
    one_by_one = NgramHistory(2, 4)
    for token in tokens:
        one_by_one.take(np.array([token], np.int32), is_whole=True)
    # A match that has begun goes on where it was found first.
    assert (one_by_one.chances is None) == (drafts is None)
    assert len(one_by_one) == len(tokens)


def test_chances_follow_what_came_of_predictions() -> None:
    history = history_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2])
    found = history.chances
    assert found is not None
    history.take(np.array([3, 4, 5, 6], np.int32), is_whole=True)
    going = history.chances
    assert going is not None
    assert going[0] == going[1] > found[1]
    history.take(np.array([1, 2], np.int32), is_whole=True)  # the first of them was not predicted
    again = history.chances
    assert again is not None
    assert again[1] < going[1]
    assert found[0] < again[0] < 1  # the match before was right
    history.take(np.array([9], np.int32), is_whole=True)
    assert history.chances is None


# ---- how many drafts


def test_the_time_of_a_step_is_learned_from_steps() -> None:
    times, random_ = StepTimes(), random.Random(5)
    assert times.of(100, has_drafts=False) == 2 * times.of(0, has_drafts=False)
    for _ in range(300):
        num_tokens, has_drafts = random_.choice([(1, False), (4, False), (8, True), (12, True)])
        noise = random_.uniform(0.98, 1.02)
        slow = 50.0 if random_.random() < 0.01 else 1.0
        times.took(num_tokens, (10 + num_tokens + 3 * has_drafts) * noise * slow, has_drafts=has_drafts)
    assert times.of([1, 4], has_drafts=False) == pytest.approx([11, 14], rel=0.15)
    assert times.of([8, 12], has_drafts=True) == pytest.approx([21, 25], rel=0.15)
    # What a token takes is not forgotten where all steps are of one size.
    steady = copy.copy(times)
    for _ in range(300):
        steady.took(12, 25, has_drafts=True)
    assert steady.of(12, has_drafts=False) - steady.of(2, has_drafts=False) == pytest.approx(10, rel=0.35)
    # Where drafts cost a lot they are not made; after a while they are tried again.
    before = float(times.of(4, has_drafts=True) - times.of(4, has_drafts=False))
    for _ in range(2000):
        times.took(4, 14, has_drafts=False)
    assert times.of(4, has_drafts=True) - times.of(4, has_drafts=False) < 0.2 * before


class Chooser:
    """A drafter of rows 1 to n, whose predictions and step times a test gives."""

    def __init__(self, chances: list[tuple[float, float] | None], token_s: float, extra_s: float = 0.0) -> None:
        limits = replace(LIMITS, speculation=SEVEN, max_num_batched_tokens=64, max_model_len=48)
        self.table = RowTable(limits)
        self.drafter = Drafter(limits, self.table, GuidedRows(limits, self.table), DraftCounts())
        self.rows = np.arange(1, len(chances) + 1, dtype=np.int32)
        for index, of_row in enumerate(chances):
            request = GenerateRequest(id=index, prompt=bytes(8), sampling=SamplingParams(max_tokens=40))
            row = self.table.take(Request.create(request, limits))
            assert row == index + 1
            self.table.predicted[row] = of_row is not None
            self.table.request(row).history = cast("NgramHistory", SimpleNamespace(chances=of_row, num_drafts=99))
        for num_tokens in (1, 2, 4, 8) * 50:
            self.drafter.times.took(num_tokens, 10 + token_s * num_tokens, has_drafts=False)
        self.drafter.times._extra = extra_s

    def choose(self, *, budget: int = 64) -> list[int] | None:
        draws = self.drafter._num_samples(self.rows, budget)
        return None if draws is None else draws.tolist()


@pytest.mark.parametrize(
    ("chances", "token_s", "extra_s", "draws"),
    [
        ([(0.9, 0.9)], 0.1, 0.0, [8]),
        ([(0.9, 0.9)], 1.0, 0.0, [8]),
        ([(0.5, 0.5)], 1.0, 0.0, [3]),
        ([(0.5, 0.5)], 20.0, 0.0, [1]),  # each token costs more than it brings
        ([(0.9, 0.9)], 0.1, 70.0, [1]),  # so does a step with drafts
        ([None, None], 0.1, 0.0, [1, 1]),
        ([(0.9, 0.9), None, (0.6, 0.6)], 1.0, 0.0, [5, 1, 3]),
        ([(0.9, 0.9), *[None] * 7], 2.0, 0.0, [1] * 8),  # seven would wait for what one gains
    ],
)
def test_a_step_has_the_drafts_that_make_rows_fastest(
    chances: list[tuple[float, float] | None], token_s: float, extra_s: float, draws: list[int]
) -> None:
    chooser = Chooser(chances, token_s, extra_s)
    assert chooser.choose() == draws
    chooser.table.in_flight[chooser.rows] = 1
    # They are waited for where they are worth it, and else the next step is launched as ever.
    assert chooser.choose() == (None if max(draws) > 1 else draws)


def test_drafts_keep_to_the_steps_tokens_and_to_a_rows_length() -> None:
    chooser = Chooser([(0.9, 0.9), (0.9, 0.9)], 0.1)
    assert chooser.choose(budget=7) == [4, 3]
    chooser.table.num_computed[1], chooser.table.max_total[1] = 10, 14
    assert chooser.choose() == [3, 8]
    chooser.table.max_total[1] = 12
    assert chooser.choose() == [1, 8]


def test_steps_without_a_match_are_those_without_speculation() -> None:
    frames: list[list[bytes]] = []
    for speculation in (SEVEN.model_copy(update={"prompt_lookup_min": 4}), NO_SPECULATION):
        engine = Engine(replace(LIMITS, speculation=speculation))
        for seed in range(4):
            engine.add(prompt_of(9 + seed, seed), max_tokens=15, seed=seed)
        frames.append([])
        while engine.scheduler.has_work:
            while (frame := engine.launch()) is not None:
                frames[-1].append(frame.encode())
            engine.retire()
        engine.check_idle()
    assert frames[0] == frames[1]
    assert len(frames[0]) > 15
