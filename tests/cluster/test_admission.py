"""Whom the scheduler lets in, and whom it makes wait: priorities, clients, huge prompts, lack of pages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.messages.engine import Finished, GenerateRequest, SamplingParams
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from configs.schema import SchedulerConfig
from tests.helpers.fake_engine import LIMITS, Engine, prompt_of

ONE_AT_A_TIME = replace(LIMITS, max_num_seqs=1, enable_prefix_caching=False)


def order_of_answers(engine: Engine) -> list[int]:
    """Ids in the order of their ends; runs the engine until nothing is left."""
    ended: list[int] = []
    while engine.step():
        ended += [i for i, answer in engine.answers.items() if answer.finished and i not in ended]
    engine.check_idle()
    return ended + [i for i in engine.answers if i not in ended]


def test_a_lower_priority_is_admitted_first_then_who_came_first() -> None:
    engine = Engine(ONE_AT_A_TIME)
    for priority in (0, 7, 0, -2, 7):
        engine.add(prompt_of(4), max_tokens=2, priority=priority)
    assert order_of_answers(engine) == [4, 1, 3, 2, 5]


def test_clients_take_turns_for_rows() -> None:
    engine = Engine(ONE_AT_A_TIME)
    for client in 12 * ["many"] + 3 * ["few"]:
        engine.add(prompt_of(4), max_tokens=2, client=client)
    clients = ["few" if i > 12 else "many" for i in order_of_answers(engine)]
    assert clients[:6].count("few") == 3


def test_a_client_with_long_answers_gets_fewer_turns() -> None:
    engine = Engine(ONE_AT_A_TIME)
    for _ in range(8):
        engine.add(prompt_of(4), max_tokens=20, client="talker")
        engine.add(prompt_of(4), max_tokens=4, client="listener")
    # 24 tokens against 8.
    first = order_of_answers(engine)[:8]
    assert sum(i % 2 for i in first) == 2


def test_a_flood_of_a_better_level_does_not_starve_a_request() -> None:
    engine = Engine(ONE_AT_A_TIME)
    patient = engine.add(prompt_of(4), max_tokens=2, level=5)
    for step in range(200):
        engine.add(prompt_of(4, step), max_tokens=2, client=str(step))
        engine.step()
        if engine.answers[patient].finished:
            break
    assert len(engine.answers) < 60
    engine.run()


def test_the_lowest_priority_is_preempted_even_if_it_is_the_oldest() -> None:
    engine = Engine(replace(LIMITS, num_pages=14, max_num_batched_tokens=64, enable_prefix_caching=False))
    low = engine.add(prompt_of(8, 0), max_tokens=30, priority=1)
    high = [engine.add(prompt_of(8, seed), max_tokens=30, priority=0) for seed in (1, 2)]
    engine.run()
    preempted = {i: engine.answers[i].finished.num_preemptions for i in (low, *high)}  # type: ignore[union-attr]
    assert preempted[low] > 0
    assert preempted[high[0]] == 0
    assert sum(preempted.values()) == engine.scheduler.stats().total_preemptions


def test_preemption_at_one_priority_takes_the_newest() -> None:
    engine = Engine(replace(LIMITS, num_pages=14, max_num_batched_tokens=64, enable_prefix_caching=False))
    ids = [engine.add(prompt_of(8, seed), max_tokens=30) for seed in range(3)]
    engine.run()
    counts = [engine.answers[i].finished.num_preemptions for i in ids]  # type: ignore[union-attr]
    assert counts[0] == 0
    assert counts[2] > 0


# A head that lacks pages

TIGHT = replace(LIMITS, num_pages=16, max_num_batched_tokens=64, steps_in_flight=1, enable_prefix_caching=False)


@pytest.fixture
def tight() -> Engine:
    """A request runs on 7 to 13 of the 16 pages, and one that needs 13 waits for it."""
    engine = Engine(TIGHT)
    engine.add(prompt_of(24, 0), max_tokens=30)
    engine.step()
    engine.add(prompt_of(50, 1), max_tokens=2)
    engine.step()
    return engine


def test_a_head_that_lacks_pages_does_not_hold_up_who_has_enough(tight: Engine) -> None:
    small = tight.add(prompt_of(4, 2), max_tokens=2)
    tight.step()
    assert tight.answers[small].tokens
    assert not tight.answers[2].tokens
    tight.run()


def test_a_head_that_lacks_pages_is_overtaken_so_often_and_then_waited_for() -> None:
    engine = Engine(replace(TIGHT, max_model_len=64, num_pages=20))
    holder = engine.add(prompt_of(36), max_tokens=25)
    engine.step()
    head = engine.add(prompt_of(60, 1), max_tokens=3)
    overtaking: list[int] = []
    while not engine.answers[head].tokens:
        small = engine.add(prompt_of(2, 2), max_tokens=1)
        engine.step()
        if engine.answers[small].tokens:
            overtaking.append(small)
    assert len(overtaking) == 16
    assert engine.answers[holder].finished, "the head got in before the pages were there"
    engine.run()


def test_a_preempted_request_that_lacks_pages_is_not_overtaken() -> None:
    engine = Engine(replace(LIMITS, num_pages=12, max_num_batched_tokens=64, steps_in_flight=1))
    for seed in range(2):
        engine.add(prompt_of(16, seed), max_tokens=20)
    while not engine.scheduler.stats().total_preemptions:
        engine.step()
    small = engine.add(prompt_of(2, 2), max_tokens=1)
    engine.step()
    assert engine.scheduler.stats().num_evictable_pages > 1, "there is room for the small one"
    while not engine.answers[small].tokens:
        assert engine.scheduler.stats().num_waiting == 2
        engine.step()
    assert engine.scheduler.stats().num_waiting == 0, "the small one got in before the preempted one"
    engine.run()


def test_abort_of_a_head_that_is_waited_for_lets_the_next_ones_in(tight: Engine) -> None:
    for _ in range(5):
        tight.add(prompt_of(50, 3), max_tokens=2)  # more than are looked at
    small = tight.add(prompt_of(4, 2), max_tokens=2)
    tight.step()
    assert not tight.answers[small].tokens
    tight.abort(2, 3)
    tight.step()
    assert tight.answers[small].tokens
    tight.run()


# A huge prompt


def _steps_until_answered(limits: SchedulerLimits, num_short_tokens: int) -> int:
    engine = Engine(limits)
    engine.add(prompt_of(60), max_tokens=2)
    engine.step()
    short = engine.add(prompt_of(num_short_tokens, 1), max_tokens=2)
    steps = 0
    while not engine.answers[short].tokens:
        engine.step()
        steps += 1
    engine.run()
    return steps


def test_a_short_prompt_does_not_wait_for_a_huge_one_in_progress() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=8, prefill_chunk_size=8, steps_in_flight=1)
    assert _steps_until_answered(limits, 4) == 1
    # One that takes more than half of a step waits until the other is done.
    assert _steps_until_answered(limits, 5) >= 7


def test_short_prompts_slow_a_huge_one_down_to_half_at_most() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=8, prefill_chunk_size=8, steps_in_flight=1, max_num_seqs=4)
    engine = Engine(limits)
    huge = engine.add(prompt_of(60), max_tokens=1)
    steps = 0
    while not engine.answers[huge].tokens:
        for seed in range(3):
            engine.add(prompt_of(2, 100 * steps + seed), max_tokens=1)
        engine.step()
        steps += 1
    assert 60 / 8 < steps <= 60 / 4 + 1
    engine.run()


# Submissions of many sequences


def submit(scheduler: Scheduler, count: int, num_tokens: int, first_id: int = 1) -> list[Finished]:
    """Submits `count` sequences of `num_tokens` tokens each; returns the refusals."""
    sampling = SamplingParams(max_tokens=1)
    prompt = bytes(4 * num_tokens)
    return scheduler.add([GenerateRequest(id=first_id + i, prompt=prompt, sampling=sampling) for i in range(count)])


@pytest.fixture
def roomy() -> Scheduler:
    """A scheduler with the queue of a default configuration, whose contexts are long."""
    defaults = SchedulerConfig()
    return Scheduler(
        replace(
            LIMITS,
            num_pages=10_000,
            max_model_len=40_000,
            max_num_queued_requests=defaults.max_num_queued_requests,
            max_num_queued_tokens=defaults.max_num_queued_tokens,
        )
    )


@pytest.mark.parametrize(("count", "num_tokens"), [(1024, 1100), (128, 32_000), (2000, 1), (1, 39_000)])
def test_an_idle_engine_accepts_all_sequences_of_one_request(roomy: Scheduler, count: int, num_tokens: int) -> None:
    assert submit(roomy, count, num_tokens) == []
    assert roomy.stats().num_waiting == count
    roomy.check_integrity()


@pytest.mark.parametrize(
    ("count", "num_tokens", "setting"),
    [(1024, 1, "max_num_queued_requests=1024"), (1000, 1100, "max_num_queued_tokens=1048576")],
)
def test_the_sequences_of_one_request_are_refused_together_where_others_wait(
    roomy: Scheduler, count: int, num_tokens: int, setting: str
) -> None:
    assert submit(roomy, 1, 10) == []
    refusals = submit(roomy, count, num_tokens, first_id=2)
    assert [refusal.id for refusal in refusals] == list(range(2, 2 + count))
    assert {(refusal.error_code, refusal.retry_after_s) for refusal in refusals} == {("engine_overloaded", 1.0)}
    assert setting in str(refusals[0].error)
    stats = roomy.stats()
    assert (stats.num_waiting, stats.total_refused) == (1, count)
    # What was refused is accepted when nothing waits any more: to try again was not in vain.
    roomy.abort([1])
    assert submit(roomy, count, num_tokens, first_id=2) == []
