"""Answers of a model most of whose layers have a window, with and without a pool for them: transformers' in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention import registry
from cluster.messages.engine import SamplingParams
from configs.errors import EngineError
from configs.schema import AttentionConfig, SpeculationConfig
from tests.helpers import eagle3
from tests.helpers.families import save
from tests.helpers.local_group import Answers, Limits, LocalGroup
from tests.helpers.rerun_graphs import PagedBackend, RerunGraphs
from worker.protocol import RowFlag, StepFrame

WINDOW = 40
NUM_NEW_TOKENS = 24
NUM_PAGES = 400
NUM_WINDOW_PAGES = 60
LENGTHS = [1, 17, 39, 40, 41, 90, 150, 300]  # and windows of 40


@dataclass
class Model:
    hf: Any
    path: Path

    def check(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Every token of every answer is transformers' first choice after what is before it."""
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer) == NUM_NEW_TOKENS
            with torch.inference_mode():
                logits = self.hf(torch.tensor([prompt + answer[:-1]])).logits[0]
            assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist(), f"the answer to {len(prompt)} tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=1024,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention" if i % 3 else "full_attention" for i in range(6)],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("windows")
    hf = transformers.Qwen2ForCausalLM(config)
    save(hf, path)
    return Model(hf, path)


@pytest.fixture
def group(request: pytest.FixtureRequest, model: Model) -> Iterator[LocalGroup]:
    group = LocalGroup(model.path, request.param, NUM_PAGES, num_window_pages=NUM_WINDOW_PAGES)
    assert [layer.mixer.window for layer in group.model.layers] == [None, WINDOW, WINDOW] * 2
    yield group
    group.close()


def limits(**changes: Any) -> Limits:
    return Limits(**{"num_pages": NUM_PAGES, "num_window_pages": NUM_WINDOW_PAGES, "window": WINDOW, **changes})


def generate(group: LocalGroup, prompts: list[list[int]], within: Limits, *, at_once: bool = True) -> Answers:
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    return group.generate([(prompt, sampling) for prompt in prompts], within, at_once=at_once)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 320, length).tolist() for length in lengths]


def test_answers_without_a_pool_of_their_own_equal_transformers(model: Model) -> None:
    group = LocalGroup(model.path, 1, NUM_PAGES)
    prompts = prompts_of(LENGTHS)
    model.check(prompts, generate(group, prompts, Limits(num_pages=NUM_PAGES)).tokens)
    group.close()


@pytest.mark.parametrize(("group", "chunk"), [(1, 16), (1, 512), (2, 56)], indirect=["group"])
def test_batched_answers_equal_transformers_in_any_chunks(group: LocalGroup, model: Model, chunk: int) -> None:
    prompts = prompts_of(LENGTHS)
    answers = generate(group, prompts, limits(chunk=chunk))
    model.check(prompts, answers.tokens)


def test_captured_steps_equal_transformers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)
    by_name = AttentionConfig(backend="torch_native")
    group = LocalGroup(
        model.path, 1, NUM_PAGES, max_model_len=256, num_window_pages=NUM_WINDOW_PAGES, attention=by_name
    )
    prompts = prompts_of([1, 17, 60, 130])
    answers = generate(group, [*prompts, *prompts], limits(chunk=56, prefix_caching=True, num_window_pages=20))
    model.check([*prompts, *prompts], answers.tokens)
    group.close()


def test_a_head_that_drafts_beside_windows_changes_no_answer(model: Model, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    vocabularies = {"vocab_size": 320, "draft_vocab_size": 200}
    eagle3.write(eagle3.Head({**eagle3.HEAD, **sizes, **vocabularies}, torch.empty(0)), tmp_path)
    speculation = SpeculationConfig(method="eagle3", model=str(tmp_path), num_speculative_tokens=5)
    group = LocalGroup(model.path, 2, NUM_PAGES, num_window_pages=NUM_WINDOW_PAGES, speculation=speculation)
    prompts = prompts_of([1, 39, 90, 150])
    drafted = limits(chunk=64, num_window_pages=16, prefix_caching=True, speculation=speculation)
    answers = generate(group, [*prompts, *prompts], drafted)
    model.check([*prompts, *prompts], answers.tokens)
    assert answers.stats.total_drafted > 0
    group.close()


@pytest.mark.parametrize("group", [1], indirect=True)
def test_preemption_for_want_of_window_pages_changes_no_answer(group: LocalGroup, model: Model) -> None:
    prompts = prompts_of([1, 2, 3, 4, 5, 6, 7, 8])
    # Five run at once, and have two window pages each before they end.
    answers = generate(group, prompts, limits(num_window_pages=9, chunk=64))
    assert answers.stats.total_preemptions > 0
    model.check(prompts, answers.tokens)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_prefix_hits_whole_and_in_part_change_no_answer(group: LocalGroup, model: Model) -> None:
    stem, *others = prompts_of([200, 120, 300, 150], seed=1)
    prompts = [stem, stem, stem[:100] + others[0], stem[:100], *others, stem, stem[:100] + others[1], stem]
    answers = generate(group, prompts, limits(num_window_pages=30, chunk=64, prefix_caching=True), at_once=False)
    assert answers.stats.total_prefix_hit_tokens > 500
    model.check(prompts, answers.tokens)
    # Together: some find what others compute, and the pool is too small for all.
    answers = generate(group, prompts, limits(num_window_pages=20, chunk=64, prefix_caching=True))
    assert answers.stats.total_prefix_hit_tokens > 200
    model.check(prompts, answers.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [2])
def test_keys_and_values_in_fp8_give_one_answer_however_they_are_kept(model: Model, tp_size: int) -> None:
    prompts, short = prompts_of(LENGTHS), prompts_of([1, 2, 3, 4, 5, 6, 7, 8])
    plain = LocalGroup(model.path, 1, NUM_PAGES, kv_dtype="fp8_e4m3")
    expected = generate(plain, [*prompts, *short], Limits(num_pages=NUM_PAGES), at_once=False).tokens
    plain.close()
    with pytest.raises(AssertionError, match="the answer to"):
        model.check(prompts, expected[: len(prompts)])  # all in fp32
    group = LocalGroup(model.path, tp_size, NUM_PAGES, num_window_pages=NUM_WINDOW_PAGES, kv_dtype="fp8_e4m3")
    answers = generate(group, [*prompts, *prompts], limits(num_window_pages=20, chunk=56, prefix_caching=True))
    assert answers.stats.total_prefix_hit_tokens > 0
    assert answers.tokens == 2 * expected[: len(prompts)]
    answers = generate(group, short, limits(num_window_pages=9, chunk=64))
    assert answers.stats.total_preemptions > 0
    assert answers.tokens == expected[len(prompts) :]
    group.close()


def test_a_rank_refuses_places_outside_its_pools(model: Model) -> None:
    group = LocalGroup(model.path, 1, NUM_PAGES, num_window_pages=NUM_WINDOW_PAGES)
    frame = StepFrame(
        1,
        1,
        rows=np.array([1], np.int32),
        starts=np.array([0], np.int32),
        lens=np.array([1], np.int32),
        flags=np.array([RowFlag.HAS_TOKENS | RowFlag.SAMPLE], np.int32),
        token_ids=np.array([5], np.int32),
        page_deltas=np.array([[1, 0, 3]], np.int32),
        window_pages=np.array([[3, NUM_WINDOW_PAGES + 1]], np.int32),
    )
    group.send(frame)
    with pytest.raises(EngineError, match="outside 400 pages and 60 of the window pool"):
        group.result()
