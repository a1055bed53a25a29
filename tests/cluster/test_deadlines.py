"""The scheduler's clock: deadlines, when to come back, and how long each request took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.messages.engine import FinishReason
from cluster.scheduling.recent_rate import RecentRate
from tests.helpers.fake_engine import LIMITS, Engine, prompt_of


def test_a_waiting_request_past_its_deadline_ends_without_a_step() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=1))
    running = engine.add(prompt_of(4), max_tokens=40)
    engine.step()
    late = engine.add(prompt_of(4, 1), deadline_s=0.1)
    patient = engine.add(prompt_of(4, 2), deadline_s=60)
    while engine.answers[late].finished is None:
        engine.step()
    assert 0.1 <= engine.now <= 0.15
    finished = engine.answers[late].finished
    assert (finished.reason, finished.error_code) == (FinishReason.ERROR, "deadline_exceeded")
    assert finished.error == "The request's deadline of 0.1 seconds passed while it was waiting."
    assert not engine.answers[running].finished
    engine.run()
    assert engine.answers[late].cached is None
    assert len(engine.answers[patient].tokens) == 5
    assert engine.scheduler.stats().total_expired == 1


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_running_request_past_its_deadline_ends_and_frees_its_pages(steps_in_flight: int) -> None:
    engine = Engine(replace(LIMITS, steps_in_flight=steps_in_flight, enable_prefix_caching=False))
    late = engine.add(prompt_of(4), max_tokens=50, deadline_s=0.2)
    other = engine.add(prompt_of(4, 1), max_tokens=50)
    while engine.answers[late].finished is None:
        engine.step()
    num_tokens = len(engine.answers[late].tokens)
    assert 10 < num_tokens < 25
    assert engine.answers[late].finished.error_code == "deadline_exceeded"
    engine.run()
    assert len(engine.answers[late].tokens) == num_tokens
    assert len(engine.answers[other].tokens) == 50


def test_a_deadline_in_the_middle_of_a_prompt_ends_it() -> None:
    engine = Engine(replace(LIMITS, max_num_batched_tokens=4, prefill_chunk_size=4))
    late = engine.add(prompt_of(60), deadline_s=0.05)
    engine.run()
    assert engine.answers[late].finished is not None
    assert engine.answers[late].finished.error_code == "deadline_exceeded"
    assert engine.worker.num_computed < 60


def test_a_request_that_ends_in_time_has_one_finish() -> None:
    engine = Engine(LIMITS)
    engine.add(prompt_of(4), max_tokens=2, deadline_s=0.5)
    engine.run()
    engine.now += 1
    assert engine.launch() is None
    assert engine.scheduler.drain_finished() is None


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = Engine(LIMITS)
    late = [engine.add(prompt_of(4, seed), deadline_s=10.0 + seed % 3) for seed in range(3)]
    for _ in range(1000):
        engine.scheduler.abort([engine.add(prompt_of(4), deadline_s=1000.0)])
        assert len(engine.scheduler._life._deadlines) <= 73
    engine.now += 20
    assert engine.launch() is None
    assert {engine.answers[id_].finished.error_code for id_ in late} == {"deadline_exceeded"}


# When to come back


def test_a_refusal_says_when_the_queue_will_be_empty() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=1, max_num_queued_requests=30, enable_prefix_caching=False))

    def retry_after_s() -> float | None:
        """Seconds that the first request that is refused is told to wait."""
        while True:
            finished = engine.answers[engine.add(prompt_of(10), max_tokens=1)].finished
            if finished is not None:
                assert finished.error_code == "engine_overloaded"
                return finished.retry_after_s

    assert retry_after_s() == 1.0, "nothing was admitted so far"
    for _ in range(30):
        engine.step()
        engine.now += 0.49
    stats = engine.scheduler.stats()
    # A prompt of ten tokens takes two steps of half a second.
    assert stats.admitted_tokens_per_s == pytest.approx(10, rel=0.1)
    assert retry_after_s() == pytest.approx(300 / stats.admitted_tokens_per_s)
    for _ in range(30):
        engine.step()
        engine.now += 10
    assert retry_after_s() == 60, "never more than a minute"
    assert engine.scheduler.stats().total_refused == 3
    engine.run()


def test_a_rate_is_of_the_last_windows_only() -> None:
    rate = RecentRate()
    assert rate.per_second(0.0) is None
    for second in range(100):
        rate.add(5 if second < 50 else 20, float(second))
    assert rate.per_second(99.5) == pytest.approx(20, rel=0.05)
    # After a pause nothing is known; then only what came after it counts.
    rate.add(7, 1000.0)
    assert rate.per_second(1000.1) is None
    assert rate.per_second(1002.0) == pytest.approx(3.5)


# How long each request took


def test_the_first_token_tells_how_long_the_request_waited_and_was_prefilled() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=1, steps_in_flight=1))
    engine.now = 100.0
    first = engine.add(prompt_of(20), max_tokens=4)
    second = engine.add(prompt_of(4, 1), max_tokens=4)
    engine.now = 101.0
    engine.run()
    one, two = engine.answers[first].prefilled, engine.answers[second].prefilled
    assert one is not None
    assert two is not None
    assert one.queue_s == pytest.approx(1)
    assert one.prefill_s == pytest.approx(0.03), "three chunks"
    assert two.queue_s == pytest.approx(1.06)
    assert two.prefill_s == pytest.approx(0.01)


def test_a_preempted_requests_wait_counts_once_and_its_preemptions_are_told() -> None:
    engine = Engine(replace(LIMITS, num_pages=14, max_num_batched_tokens=64, enable_prefix_caching=False))
    ids = [engine.add(prompt_of(8, seed), max_tokens=30) for seed in range(3)]
    engine.run()
    told = {i: engine.answers[i].finished.num_preemptions for i in ids}
    assert sum(told.values()) == engine.scheduler.stats().total_preemptions > 0
    assert all(answer.prefilled.queue_s < 0.05 for answer in engine.answers.values())


def test_the_stats_count_answers_and_the_longest_wait() -> None:
    engine = Engine(replace(LIMITS, max_num_seqs=1))
    engine.add(prompt_of(4), max_tokens=10)
    engine.add(prompt_of(4, 1), max_tokens=10)
    engine.step()
    engine.now += 2.0
    engine.add(prompt_of(4, 2), max_tokens=10, priority=-1)
    assert engine.scheduler.stats().longest_wait_s == pytest.approx(engine.now)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.total_answer_tokens, stats.longest_wait_s) == (30, 0)
