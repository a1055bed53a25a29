"""A request for which the model answers with a NaN: it ends with an error that says so, and the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.messages.engine import FinishReason, SamplingParams
from configs.schema import NO_SPECULATION, SpeculationConfig
from tests.cluster.test_scheduler import HEAD
from tests.helpers.fake_engine import LIMITS, Engine, prompt_of
from tests.helpers.local_group import PAGE_SIZE, Limits, LocalGroup
from tests.helpers.tiny_engine import write_tiny_checkpoint
from worker.protocol import StepResult

BROKEN = 265
"""A token whose embedding has a NaN."""


@pytest.fixture(scope="module", params=[1, 2])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroup]:
    path = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN, 3] = torch.nan
    save_file(tensors, path / "model.safetensors")
    group = LocalGroup(path, request.param, num_pages=64)
    yield group
    group.close()


def test_a_request_with_a_nan_ends_with_that_error_and_the_others_have_their_answers(group: LocalGroup) -> None:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(4, 260, length).tolist() for length in (3 * PAGE_SIZE, 5, 2 * PAGE_SIZE + 3, 40)]
    plain = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    ways = {
        "greedy": {},
        "drawn": {"temperature": 1.0, "seed": 5},
        "filtered": {"temperature": 1.0, "top_p": 0.8, "seed": 6},
        "adjusted": {"repetition_penalty": 1.2, "allowed_token_ids": (7, 8, 9), "num_logprobs": 2},
        "scored": {"prompt_logprobs": 1},
    }
    others = [(prompt, plain) for prompt in prompts]
    limits = Limits(64, prefix_caching=True)
    expected = group.generate(others, limits, at_once=True).tokens
    for name, changes in ways.items():
        victim = [*prompts[0], BROKEN, *prompts[1]], SamplingParams(**{**_fields(plain), **changes})
        answers = group.generate([*others, victim], limits, at_once=True)
        *ends, end = answers.ends
        assert answers.tokens == [*expected, []], name
        assert {it.reason for it in ends} == {FinishReason.LENGTH}
        assert (end.reason, end.error_code) == (FinishReason.ERROR, "not_a_number")
        assert end.error is not None
        assert "hold a NaN" in end.error
        assert answers.stats.num_owned_pages == 0
        # What the four others have in whole pages, and nothing of what the victim computed after the page it shares.
        assert answers.stats.num_cached_pages == sum((len(prompt) + 8) // PAGE_SIZE for prompt in prompts)


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("speculation", [NO_SPECULATION, HEAD], ids=["plain", "drafts"])
def test_pages_of_a_row_with_a_nan_are_free_once_no_step_names_it(
    speculation: SpeculationConfig, steps_in_flight: int
) -> None:
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight, speculation=speculation))
    prompts = [prompt_of(9, seed) for seed in range(3)]
    ids = [
        engine.add(prompt, max_tokens=12, grammar="rule" if seed == 2 else None) for seed, prompt in enumerate(prompts)
    ]
    for victim in ids:
        _end_by_nan(engine, victim)
        end = engine.answers[victim].finished
        assert end is not None
        assert end.error_code == "not_a_number"
    engine.run()
    assert engine.scheduler.stats().num_cached_pages == 0


def test_a_nan_among_log_probabilities_ends_the_request_that_asked() -> None:
    engine = Engine(LIMITS)
    scored, labels = {"prompt_logprobs": 1}, {"num_logprobs": 0, "logprob_token_ids": (3, 4), "max_tokens": 1}
    ids = [engine.add(prompt_of(7, 1), **scored), engine.add(prompt_of(7, 2), **labels), engine.add(prompt_of(6, 3))]
    engine.launch()
    result = StepResult.decode(engine.results[0])
    for name in ("prompt_logprobs", "logprobs"):
        values = getattr(result, name).copy()
        values[-1] = np.nan
        setattr(result, name, values)
    engine.results[0] = result.encode()
    engine.run()
    codes = [end.error_code for i in ids if (end := engine.answers[i].finished) is not None]
    assert codes == ["not_a_number", "not_a_number", None]


def test_the_cache_forgets_what_only_a_row_with_a_nan_computed() -> None:
    engine = Engine(LIMITS)
    stem = prompt_of(8, 1)
    other = engine.add([*stem, *prompt_of(4, 2)], max_tokens=20)
    engine.step()
    victim = engine.add([*stem, *prompt_of(12, 3)], max_tokens=20)
    _end_by_nan(engine, victim, after=1)
    assert engine.answers[victim].cached == 8
    engine.run()
    assert len(engine.answers[other].tokens) == 20
    again = engine.add([*stem, *prompt_of(12, 3)], max_tokens=1)
    engine.run()
    assert engine.answers[again].cached == 8


def _end_by_nan(engine: Engine, request_id: int, after: int = 0) -> None:
    """Puts a NaN in place of the token that the request gets in a step, once it has `after` tokens."""
    while True:
        while engine.launch() is not None:
            pass
        if not engine.frames:
            continue
        frame, result = engine.frames[0], StepResult.decode(engine.results[0])
        sampled = frame.rows[frame.samples_per_row > 0]
        place = np.flatnonzero(engine.scheduler._rows.ids[sampled] == request_id)
        if len(place) and len(engine.answers[request_id].tokens) >= after:
            break
        engine.retire()
    counts = result.num_tokens if len(result.num_tokens) else np.ones(len(sampled), np.int32)
    result.tokens = result.tokens.copy()
    result.tokens[counts[: place[0]].sum()] = -1
    engine.results[0] = result.encode()
    engine.retire()
