"""The window pool as the scheduler keeps it: every window is resident when it is read, and nothing is lost."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from cluster.messages.engine import Miss
from configs.errors import ConfigError
from configs.schema import NO_SPECULATION, SpeculationConfig
from tests.cluster.test_scheduler import HEAD, run_random_load
from tests.helpers.fake_engine import LIMITS, Engine, prompt_of

W = 8
WINDOWS = replace(LIMITS, num_pages=200, max_model_len=200, window=W, num_window_pages=16)


def num_resident(engine: Engine) -> int:
    return int(np.count_nonzero(engine.scheduler._pages._window._window_page_of))  # type: ignore[union-attr]


def cached_tokens(engine: Engine, prompt: list[int]) -> int | None:
    """Tokens that a request finds in the cache, with nothing beside it."""
    request_id = engine.add(prompt, max_tokens=1)
    engine.run()
    return engine.answers[request_id].cached


random_load = functools.cache(functools.partial(run_random_load, windows=True))


@pytest.mark.parametrize(
    ("seed", "steps_in_flight", "speculation"),
    [*((seed, 2, NO_SPECULATION) for seed in range(6)), (6, 1, NO_SPECULATION), (7, 1, HEAD), (8, 2, HEAD)],
)
def test_every_answer_equals_the_reference_under_random_load(
    seed: int, steps_in_flight: int, speculation: SpeculationConfig
) -> None:
    random_load(seed, steps_in_flight, speculation=speculation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*range(1000, 1025), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1025, 1200))]
)
def test_every_answer_equals_the_reference_under_more_random_load(seed: int) -> None:
    run_random_load(seed, 1 + seed % 3, speculation=HEAD if seed % 2 else NO_SPECULATION, windows=True)


def test_random_load_reaches_preemption_and_hits() -> None:
    stats = [random_load(seed, 2, speculation=NO_SPECULATION).scheduler.stats() for seed in range(6)]
    assert sum(stat.total_preemptions for stat in stats) > 10
    assert sum(stat.total_prefix_hit_tokens for stat in stats) > 100


def test_a_row_keeps_its_window_and_no_more() -> None:
    engine = Engine(replace(WINDOWS, enable_prefix_caching=False))
    engine.add(prompt_of(100), max_tokens=90)
    most = 0
    while engine.step():
        most = max(most, num_resident(engine))
        if any(answer.tokens for answer in engine.answers.values()):
            assert num_resident(engine) <= 3  # pages of 4, a window of 8
    engine.check_idle()
    assert most <= WINDOWS.max_window_pages_per_row
    assert num_resident(engine) == 0


def test_window_pages_alone_make_requests_wait_and_give_way() -> None:
    engine = Engine(replace(WINDOWS, num_window_pages=8))
    for seed in range(4):  # 64 pages in all, of 200; three window pages each, of 8
        engine.add(prompt_of(4, seed), max_tokens=58)
    engine.run()
    assert engine.scheduler.stats().total_preemptions > 0


def test_a_long_prompt_waits_for_window_pages_and_is_computed_in_chunks() -> None:
    engine = Engine(replace(WINDOWS, num_window_pages=WINDOWS.max_window_pages_per_row))
    for seed in range(4):
        engine.add(prompt_of(150, seed), max_tokens=20)
    engine.run()


def test_a_prefix_is_found_as_far_as_its_window_is_resident() -> None:
    engine = Engine(WINDOWS)
    prompt = prompt_of(64)
    assert cached_tokens(engine, prompt) == 0
    assert cached_tokens(engine, prompt) == 60
    assert num_resident(engine) == 16 - 1  # the last page was the second request's own
    # Six pages take the places of those that left their window first.
    assert cached_tokens(engine, prompt_of(24, 1)) == 0
    assert cached_tokens(engine, prompt) == 60
    branch = prompt[:20] + prompt_of(3, 2)
    assert not engine.scheduler.stats().total_missed
    assert cached_tokens(engine, branch) == 0
    assert engine.scheduler.stats().total_missed == {Miss.NO_WINDOW: 20}
    assert cached_tokens(engine, branch) == 20
    # The end of the prompt gives its places up, and the branch, used later, does not.
    assert cached_tokens(engine, prompt_of(44, 3)) == 0
    assert cached_tokens(engine, prompt) == 20
    assert cached_tokens(engine, prompt) == 60


def test_what_is_computed_again_is_cached_once() -> None:
    engine = Engine(WINDOWS)
    prompt = prompt_of(64)
    cached_tokens(engine, prompt)
    for seed in (1, 2):
        cached_tokens(engine, prompt_of(64, seed))
    num_cached = engine.scheduler.stats().num_cached_pages
    assert cached_tokens(engine, prompt) == 0
    assert cached_tokens(engine, prompt) == 60
    assert engine.scheduler.stats().num_cached_pages == num_cached


def test_a_prefix_that_another_row_uses_all_the_time_is_found_again() -> None:
    engine = Engine(WINDOWS)
    prompt = prompt_of(64)
    engine.add(prompt, max_tokens=120)
    for _ in range(40):  # its answer is past the prompt's window
        engine.step()
    for seed in (1, 2):
        engine.add(prompt_of(48, seed), max_tokens=1)
        for _ in range(20):
            engine.step()
    again = [engine.add(prompt, max_tokens=4)]
    for _ in range(20):
        engine.step()
    again.append(engine.add(prompt, max_tokens=4))
    for _ in range(5):
        engine.step()
    assert engine.answers[1].finished is None
    assert [engine.answers[i].cached for i in again] == [0, 60]
    engine.run()


@pytest.mark.parametrize("num_steps", range(1, 40, 3))
def test_an_abort_at_any_step_and_a_flush_leave_nothing_behind(num_steps: int) -> None:
    engine = Engine(WINDOWS)
    ids = [engine.add(prompt_of(length, length), max_tokens=30) for length in (40, 41, 7)]
    for _ in range(num_steps):
        engine.launch()
        if len(engine.frames) == 2:
            engine.retire()
    engine.abort(*ids)
    engine.scheduler.flush_cache()
    engine.scheduler.check_integrity()
    engine.run()
    engine.scheduler.flush_cache()
    engine.scheduler.check_integrity()
    assert num_resident(engine) == 0


def test_a_failed_engine_starts_again_with_an_empty_window_pool() -> None:
    engine = Engine(WINDOWS)
    engine.add(prompt_of(40), max_tokens=30)
    engine.launch()
    engine.scheduler.fail_all("lost")
    engine.scheduler.check_integrity()
    assert num_resident(engine) == 0


def test_refuses_a_window_pool_that_one_row_does_not_fit_in() -> None:
    assert WINDOWS.max_window_pages_per_row == 5  # 7 tokens before a chunk of 8, from the middle of a page on
    with pytest.raises(ConfigError, match=r"num_window_pages=4 are too few.*choose at least 5"):
        replace(WINDOWS, num_window_pages=4)
