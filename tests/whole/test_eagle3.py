"""EAGLE-3: what the ranks draft is what a head in plain torch does, and answers with its drafts are those without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from attention import registry
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.scheduling import drafter as drafter_module
from cluster.scheduling.decodes import Decodes
from cluster.scheduling.draft_history import DraftHistory
from cluster.scheduling.drafter import DraftCounts, Drafter, StepTimes
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.launcher import Launcher
from cluster.scheduling.request import Request
from cluster.scheduling.row_table import RowTable
from cluster.scheduling.step_results import Launched
from configs.errors import CheckpointError, ConfigError
from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.schema import AttentionConfig, EngineConfig, SpeculationConfig
from tests.cluster.test_scheduler import run_random_load
from tests.helpers import eagle3
from tests.helpers.fake_engine import LIMITS, Engine
from tests.helpers.local_group import Answers, Limits, LocalGroup
from tests.helpers.rerun_graphs import PagedBackend, RerunGraphs
from tests.whole.test_speculation import WAYS, TurnsGuide, prompts, same
from worker.models.draft_head import DraftModel, Eagle3Model
from worker.protocol import FrameKind, Int32Array, RowFlag, StepFrame, StepResult
from worker.weights.checkpoint import Checkpoint

Requests = list[tuple[list[int], SamplingParams]]


class Head(Protocol):
    """A head in plain torch."""

    def states_of(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), columns]: states of the model that it reads."""

    def drafts(self, states: torch.Tensor, ids: list[int], count: int) -> list[int]:
        """What it predicts after `ids` [n], of whose first n - 1 it has the `states`."""


@dataclass(frozen=True)
class Known:
    """Some requests, and the answers to them without drafts at one rank."""

    requests: Requests
    plain: Answers
    make_guide: Callable[[GenerateRequest], TurnsGuide | None]

    @classmethod
    def of(cls, path: Path) -> Known:
        """Of the model at `path`."""
        group = LocalGroup(path, 1, Limits().num_pages)
        vocab_size = group.model.vocab_size

        def make_guide(request: GenerateRequest) -> TurnsGuide | None:
            return TurnsGuide(vocab_size) if request.sampling.grammar else None

        requests = [
            asked_for(prompt, **way)
            for prompt, way in zip(prompts(group, [3, 17, 40, 16, 33, 8, 60, 5, 9, 12, 31, 31]), WAYS, strict=True)
        ]
        requests[-1] = requests[-2][0], requests[-1][1]  # another choice of one prompt
        firsts = group.generate(requests[:2], Limits(), at_once=True)
        requests += [
            asked_for(requests[index][0], **WAYS[index], stop_token_ids=(tokens[len(tokens) // 2],))
            for index, tokens in enumerate(firsts.tokens)
        ]
        plain = group.generate(requests, Limits(), at_once=True, make_guide=make_guide)
        assert len(plain.tokens[-1]) < 40
        group.close()
        return cls(requests, plain, make_guide)

    @property
    def texts(self) -> list[list[int]]:
        """Prompts with their answers, each once."""
        pairs = zip(self.requests, self.plain.tokens, strict=True)
        return [[*prompt, *tokens] for (prompt, _), tokens in pairs][:12]


@dataclass(frozen=True)
class Trained:
    """A head that has seen the answers to some requests."""

    head: Head
    known: Known
    seven: SpeculationConfig
    """With as many drafts."""

    def speculation(self, num_drafts: int) -> SpeculationConfig:
        return self.seven.model_copy(update={"num_speculative_tokens": num_drafts})


def asked_for(prompt: list[int], **way: Any) -> tuple[list[int], SamplingParams]:
    return prompt, SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **way})


@pytest.fixture(scope="module")
def trained(small_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    known, path = Known.of(small_path), tmp_path_factory.mktemp("head")
    head = eagle3.train(small_path, known.texts, 14)
    eagle3.write(head, path)
    return Trained(head, known, SpeculationConfig(method="eagle3", model=str(path)))


@pytest.fixture(scope="module")
def group(request: pytest.FixtureRequest, small_path: Path, trained: Trained) -> Iterator[LocalGroup]:
    group = LocalGroup(small_path, request.param, Limits().num_pages, speculation=trained.speculation(7))
    yield group
    group.close()


@pytest.fixture(autouse=True)
def cheap_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps take on a busy machine would choose for itself."""
    monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))


def check_drafts(group: LocalGroup, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks every draft that the ranks make, of texts that the head knows and of others, with plain torch."""
    results: list[StepResult] = []
    result = group.result
    monkeypatch.setattr(group, "result", lambda: results.append(result()) or results[-1])
    num_drafts = 0
    unknown = [asked_for(prompt, temperature=1.0, seed=3) for prompt in prompts(group, [21, 50])]
    for prompt, sampling in [trained.known.requests[2], *unknown]:
        results.clear()
        answers = group.generate([(prompt, sampling)], Limits(speculation=trained.speculation(4)), at_once=True)
        whole = [*prompt, *answers.tokens[0]]
        states, num_known = trained.head.states_of(whole), len(prompt)
        for step in results:
            num_known += len(step.tokens)
            drafts = step.drafts[step.drafts >= 0].tolist()
            assert drafts == trained.head.drafts(states[: num_known - 1], whole[:num_known], len(drafts))
            num_drafts += len(drafts)
    assert num_drafts > 60


def check_answers(group: LocalGroup, trained: Trained, num_drafts: int, num_pages: int) -> None:
    """Checks answers with drafts of the ranks, some right and some wrong, against those without."""
    known, limits = trained.known, Limits(num_pages=num_pages, speculation=trained.speculation(num_drafts))
    drafted = group.generate(known.requests, limits, at_once=True, make_guide=known.make_guide)
    same(drafted, known.plain)
    assert (drafted.stats.total_preemptions > 0) == (num_pages < 2048)
    assert 0.3 < drafted.stats.total_accepted / drafted.stats.total_drafted < 0.95


@pytest.mark.parametrize("group", [1, 3], indirect=True)
def test_ranks_draft_what_a_head_in_plain_torch_does(
    group: LocalGroup, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_drafts(group, trained, monkeypatch)


def test_drafts_behind_captured_steps_are_the_same(
    trained: Trained, small_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)
    by_name, speculation = AttentionConfig(backend="torch_native"), trained.speculation(7)
    group = LocalGroup(small_path, 1, 64, max_model_len=128, attention=by_name, speculation=speculation)
    check_drafts(group, trained, monkeypatch)
    group.close()


@pytest.mark.parametrize(
    ("group", "num_drafts", "num_pages"),
    [(1, 1, 2048), (1, 3, 18), (2, 7, 18), (3, 4, 18), (3, 7, 2048)],
    indirect=["group"],
)
def test_answers_with_drafts_equal_those_without(
    group: LocalGroup, trained: Trained, num_drafts: int, num_pages: int
) -> None:
    check_answers(group, trained, num_drafts, num_pages)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_answers_with_drafts_of_a_head_that_rests_now_and_then_equal_those_without(
    group: LocalGroup, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of twenty steps, ten are taken to be none that drafts are worth it in."""
    kinds, launch, choose = list[FrameKind](), Launcher.launch, Drafter._num_samples

    def chosen(drafter: Drafter, rows: Int32Array, budget: int) -> Int32Array | None:
        return np.ones(len(rows), np.int32) if len(kinds) % 20 < 10 else choose(drafter, rows, budget)

    def launched(launcher: Launcher, *plan: Any) -> tuple[StepFrame, Launched]:
        frame, snapshot = launch(launcher, *plan)
        kinds.append(frame.kind)
        return frame, snapshot

    monkeypatch.setattr(Launcher, "launch", launched)
    monkeypatch.setattr(Drafter, "_num_samples", chosen)
    monkeypatch.setattr(drafter_module, "_MOST_VAIN", 2)
    monkeypatch.setattr(drafter_module, "_FIRST_REST", 3)
    monkeypatch.setattr(drafter_module, "_ASK_EVERY", 1)
    check_answers(group, trained, 3, 2048)
    assert 5 < kinds.count(FrameKind.STEP_WITHOUT_DRAFT_HEAD) < len(kinds) / 2


@pytest.mark.parametrize("group", [2], indirect=True)
def test_pages_and_chunks_change_no_answer(group: LocalGroup, trained: Trained) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, num_logprobs=1)
    firsts = [(prompt, sampling) for prompt, _ in trained.known.requests[1:4]]
    plain = group.generate(firsts, Limits(), at_once=True)
    turns = [([*prompt, *tokens, 7], sampling) for (prompt, _), tokens in zip(firsts, plain.tokens, strict=True)]
    plain = group.generate([*firsts, *turns], Limits(), at_once=True)
    limits = Limits(speculation=trained.speculation(3), prefix_caching=True, chunk=32)
    drafted = group.generate([*firsts, *turns], limits, at_once=False)
    same(drafted, plain)
    # Each answer leaves all its whole pages, but for the last token.
    assert drafted.stats.total_prefix_hit_tokens == sum((len(prompt) + 39) // 16 * 16 for prompt, _ in firsts)
    assert drafted.stats.total_drafted > 0
    # The head finds in the pages what it left there.
    known = asked_for(trained.known.requests[0][0] + trained.known.plain.tokens[0][:20], max_tokens=20)
    whole = group.generate([known] * 3, limits, at_once=False)
    assert whole.stats.total_prefix_hit_tokens > 0
    assert whole.stats.total_accepted > 0.5 * whole.stats.total_drafted


def test_states_of_a_layer_that_a_head_reads_twice_are_there_twice(
    small_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**eagle3.HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]}}
    eagle3.write(eagle3.Head(config, torch.empty(0)), tmp_path)
    seen, empty_head_inputs, reduced = list[torch.Tensor](), DraftModel.empty_head_inputs, Eagle3Model.reduced

    def kept(head: Eagle3Model, states: torch.Tensor) -> torch.Tensor:
        seen.append(states.clone())
        return reduced(head, states)

    monkeypatch.setattr(DraftModel, "empty_head_inputs", lambda *args: empty_head_inputs(*args).fill_(torch.nan))
    monkeypatch.setattr(Eagle3Model, "reduced", kept)
    speculation = SpeculationConfig(method="eagle3", model=str(tmp_path))
    group = LocalGroup(small_path, 1, 64, speculation=speculation)
    group.generate([asked_for([5, 6, 7], max_tokens=3)], Limits(num_pages=64, speculation=speculation), at_once=True)
    group.close()
    assert seen
    for states in seen:
        assert states.isfinite().all()
        assert torch.equal(states[:, 0], states[:, 2])
        assert not torch.equal(states[:, 0], states[:, 1])


# ---- checkpoints


def refused(head: dict[str, Any], path: Path, small_path: Path, reason: str) -> None:
    (path / "config.json").write_text(json.dumps(head))
    config = EngineConfig(
        model="m", load_format="dummy", speculation=SpeculationConfig(method="eagle3", model=str(path))
    )
    with pytest.raises(ConfigError, match=reason):
        with_draft_head(read_model_config(small_path), config)


def test_a_head_that_does_not_fit_is_refused_with_the_reason(tmp_path: Path, small_path: Path) -> None:
    for changed, reason in [
        ({"hidden_size": 128}, "hidden_size=128 does not fit the model, for which it must be 144"),
        ({"vocab_size": 1001}, "vocab_size=1001 does not fit"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 does not fit"),
        ({"draft_vocab_size": 1001}, "draft_vocab_size=1001 is more than 1000"),
        ({"architectures": ["LlamaForCausalLM"]}, "is not an EAGLE-3 head"),
        ({"num_key_value_heads": 2}, "not a multiple"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, r"enter layers \[2, 3, 4\], and .* has 3"),
        ({"model_type": "mistral", "sliding_window": 8}, "plain attention and a dense MLP"),
    ]:
        refused({**eagle3.HEAD, **changed}, tmp_path, small_path, reason)


@pytest.mark.parametrize(
    ("said", "layers"), [(None, (2, 1, 0)), ([1, 0, 1], (2, 1, 2)), ([2, 0, 1], (2, 0, 1)), ([0, 2], (0, 2))]
)
def test_states_are_those_that_enter_the_named_layers(
    said: list[int] | None, layers: tuple[int, ...], tmp_path: Path, small_path: Path
) -> None:
    named = {} if said is None else {"eagle_aux_hidden_state_layer_ids": said}
    (tmp_path / "config.json").write_text(json.dumps({**eagle3.HEAD, "eagle_config": named}))
    speculation = SpeculationConfig(method="eagle3", model=str(tmp_path))
    config = EngineConfig(model="m", load_format="dummy", speculation=speculation)
    head = with_draft_head(read_model_config(small_path), config).draft_head
    assert head is not None
    assert head.state_layers == layers
    assert head.projection.shape == (144, len(layers) * 144)


def test_both_names_of_the_layer_are_read_and_what_is_not_known_is_refused(
    trained: Trained, small_path: Path, tmp_path: Path
) -> None:
    config, head_path = EngineConfig(model="m", speculation=trained.seven), Path(str(trained.seven.model))
    model = with_draft_head(read_model_config(small_path), config)
    tensors = load_file(head_path / "model.safetensors")
    other = {name.replace("midlayer.", "model.layers.0."): tensor for name, tensor in tensors.items()}
    save_file({**other, "embed_tokens.weight": torch.zeros(1000, 144)}, tmp_path / "model.safetensors")
    with (
        Checkpoint.open(small_path, model, head_path) as one,
        Checkpoint.open(small_path, model, tmp_path) as two,
    ):
        for name in "draft.midlayer.self_attn.q_proj.weight", "draft.midlayer.hidden_norm.weight", "draft.fc.weight":
            found = [torch.empty(model.stored_tensors()[name].shape) for _ in range(2)]
            one.read(name, found[0])
            two.read(name, found[1])
            assert torch.equal(*found)
            assert torch.equal(found[0], tensors[name.removeprefix("draft.")])
    save_file({**tensors, "fc_norm.weight": torch.zeros(432)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not use: draft\.fc_norm\.weight"):
        Checkpoint.open(small_path, model, tmp_path)


# ---- the scheduler, against a fake model whose ranks draft


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_answers_under_random_load_equal_the_reference_with_drafts_of_the_ranks(num_drafts: int) -> None:
    """Guided requests, stops, preemptions, faults and windows among them."""
    seeds = range(10) if num_drafts == 3 else range(5)
    speculation = SpeculationConfig(method="eagle3", model="head", num_speculative_tokens=num_drafts)
    faults: list[dict[str, Any]] = [{}, {}, {"faults": 0.1}, {"windows": True}, {"windows": True, "faults": 0.1}]
    engines = [run_random_load(seed, 2, speculation=speculation, **faults[seed % len(faults)]) for seed in seeds]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(stat.total_accepted for stat in stats) > 10 * len(seeds)
    assert sum(stat.total_drafted for stat in stats) > sum(stat.total_accepted for stat in stats)
    assert sum(stat.total_preemptions for stat in stats) > 0.3 * len(seeds)
    assert sum(engine.worker.num_ahead for engine in engines) > 5 * len(seeds)


# ---- how many drafts the ranks make


def test_rates_are_learned_from_every_draft_that_a_token_came_for() -> None:
    history = DraftHistory(10)
    assert history.chances is None
    history.bring([5, 6, 7, 8])
    first, then = history.chances or (0, 0)
    history.take(np.array([5, 6], np.int32), is_whole=True)
    assert history.drafts(9) == [7, 8]
    assert history.num_drafts == 2
    going = history.chances or (0, 0)
    assert going[0] == going[1] > then
    history.take(np.array([9], np.int32), is_whole=True)  # what is behind it says nothing
    assert (len(history), history.chances) == (13, None)
    history.bring([1])
    again = history.chances or (0, 0)
    assert again[0] > first
    assert again[1] < going[1]
    history.take(np.array([2], np.int32), is_whole=True)
    history.bring([1])
    assert (history.chances or (0, 0))[0] < again[0]


def test_ranks_draft_as_many_as_are_taken_and_one_more_and_now_and_then_all() -> None:
    limits = replace(
        LIMITS,
        speculation=SpeculationConfig(method="eagle3", model="head", num_speculative_tokens=5),
    )
    table = RowTable(limits)
    drafter = Drafter(limits, table, GuidedRows(limits, table), DraftCounts())
    request = GenerateRequest(id=1, prompt=bytes(40), sampling=SamplingParams(max_tokens=40))
    row = table.take(Request.create(request, limits))
    rows = np.array([row], np.int32)

    def chosen() -> list[int] | None:
        decodes = drafter.choose(rows, 16)
        return None if decodes is None else decodes.num_samples.tolist()

    assert drafter._num_wanted() == 5
    drafter.take(rows)
    assert chosen() == [1]

    def bring(rates: tuple[float, float]) -> None:
        drafter.bring(rows, np.array([[3, 4, 5, 6, -1]], np.int32))
        history = table.request(row).history
        assert isinstance(history, DraftHistory)
        history._rates = list(rates)

    bring((0.9, 0.001))
    for is_known, num_drafts, draws in (True, 0, [2]), (False, 0, None), (False, 3, [2]):
        table.in_flight[row], table.num_drafts[row] = not is_known, num_drafts
        assert chosen() == draws
        assert drafter._num_wanted() == 2
    table.in_flight[row] = 0
    bring((0.9, 0.9))
    assert chosen() == [5], "there are no more"
    assert drafter._num_wanted() == 5
    bring((0.01, 0.01))
    assert chosen() == [1]
    asked = []
    for _ in range(40):
        drafter.take(rows[:0])
        asked.append(drafter._num_wanted())
    assert asked == [0] * 31 + [5] * 9
    bring((0.01, 0.01))
    assert drafter._num_wanted() == 0


def test_the_head_rests_where_no_drafts_were_worth_it_for_long_and_prompts_go_through_it_nevertheless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of one row that draws 800 tokens, of which no draft is right, with another request now and then."""
    speculation = SpeculationConfig(method="eagle3", model="head", num_speculative_tokens=3)
    limits = replace(LIMITS, num_pages=256, max_model_len=900, speculation=speculation)
    monkeypatch.setattr(Drafter, "_num_samples", lambda _self, rows, _budget: np.ones(len(rows), np.int32))
    engine = Engine(limits)
    engine.add([1, 2, 3], max_tokens=850, ignore_eos=True)
    frames = []
    while engine.scheduler.has_work:
        if len(frames) in (300, 500):
            engine.add([4, 5, 6, 7], max_tokens=5)
        while (frame := engine.launch()) is not None:
            frames.append(frame)
        engine.retire()
    resting = [frame.kind is FrameKind.STEP_WITHOUT_DRAFT_HEAD for frame in frames]
    prompts = [bool((frame.flags & RowFlag.HAS_TOKENS).any()) for frame in frames]
    assert sum(prompts) == 3
    assert not any(np.logical_and(resting, prompts))
    assert not any(len(frame.num_wanted) for frame, rests in zip(frames, resting, strict=True) if rests)
    decodes = [rests for rests, is_prompt in zip(resting, prompts, strict=True) if not is_prompt]
    assert decodes == [*[False] * 64, *[True] * 512, *[False] * 64, *[True] * (len(decodes) - 640)]
    assert len(decodes) > 800


@pytest.mark.parametrize(("every", "num_rows", "rests"), [(4, 8, False), (32, 8, True), (32, 4, False)])
def test_the_head_rests_where_drafts_are_seldom_worth_it_until_there_are_half_as_many_rows(
    every: int, num_rows: int, rests: bool
) -> None:
    """Eight rows, of which each so-manieth step verifies drafts; one of `num_rows` follows."""
    limits = replace(LIMITS, speculation=SpeculationConfig(method="eagle3", model="head"))
    table = RowTable(limits)
    drafter = Drafter(limits, table, GuidedRows(limits, table), DraftCounts())
    rows = np.arange(1, 9, dtype=np.int32)
    for step in range(1, 200):
        drafter.launch(Decodes(rows, np.full(8, 2 if step % every == 0 else 1, np.int32)))
    drafter.launch(Decodes.plain(rows[:num_rows]))
    assert drafter.rests == rests
