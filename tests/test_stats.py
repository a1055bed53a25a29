"""The engine's figures: measured in the coordinator, kept by second and by step in the replica."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.messages import EngineStats
from cluster.observability.board import StatsBoard
from cluster.observability.steps import STEP_DTYPE, StepMeter
from cluster.scheduling.limits import SchedulerStats
from worker.protocol import RowFlag, StepFrame


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def frame(num_rows: int, num_prefill_tokens: int = 0) -> StepFrame:
    """With prompt tokens, the last row is the one they belong to."""
    flags = np.full(num_rows, RowFlag.SAMPLE, np.int32)
    if num_prefill_tokens:
        flags[-1] |= RowFlag.HAS_TOKENS
    rows = np.arange(1, num_rows + 1, dtype=np.int32)
    return StepFrame(1, 1, rows=rows, flags=flags, token_ids=np.zeros(num_prefill_tokens, np.int32))


def scheduler_stats(**figures: int) -> SchedulerStats:
    names = SchedulerStats.__dataclass_fields__
    return SchedulerStats(**{name: figures.get(name, 0) for name in names})


def report(meter: StepMeter, **figures: int) -> EngineStats:
    return meter.report(scheduler_stats(**figures), [0.1, 0.2])


def steps_of(stats: EngineStats) -> list[tuple[float, ...]]:
    return [tuple(round(value, 6) for value in step) for step in np.frombuffer(stats.steps, STEP_DTYPE).tolist()]


def test_a_step_lasts_from_the_end_of_the_one_before_it_when_two_are_in_flight() -> None:
    meter = StepMeter(clock := Clock())
    meter.launched(frame(3, 100))
    clock.now += 0.001
    meter.launched(frame(3))
    clock.now += 0.009
    meter.retired(3)
    clock.now += 0.005
    meter.retired(3)
    assert steps_of(report(meter)) == [(1000.0, 0.01, 0.0, 3, 2, 100, 3), (1000.001, 0.005, 0.0, 3, 3, 0, 3)]
    assert report(meter).steps == b""
    assert report(meter).num_steps == 2


def test_time_between_steps_is_a_gap_unless_there_was_nothing_to_do() -> None:
    meter = StepMeter(clock := Clock())
    for _ in range(2):
        meter.launched(frame(1))
        clock.now += 0.01
        meter.retired(1)
        clock.now += 0.002
    meter.rest()
    clock.now += 50
    meter.launched(frame(1))
    clock.now += 0.01
    meter.retired(1)
    assert [step[1:3] for step in steps_of(report(meter))] == [(0.01, 0.0), (0.01, 0.002), (0.01, 0.0)]


def test_a_report_is_due_every_tenth_of_a_second_and_tells_the_age_of_the_step_in_flight() -> None:
    meter = StepMeter(clock := Clock())
    assert meter.is_due()
    assert report(meter).step_age_s == 0
    assert not meter.is_due()
    meter.launched(frame(1))
    clock.now += 0.125
    assert meter.is_due()
    assert report(meter).step_age_s == 0.125


def test_records_that_nobody_reads_are_bounded() -> None:
    meter = StepMeter(Clock())
    for _ in range(10_000):
        meter.launched(frame(1))
        meter.retired(1)
    assert len(report(meter).steps) <= 4096 * STEP_DTYPE.itemsize


def test_the_board_counts_by_second_and_keeps_the_last_steps() -> None:
    board = StatsBoard(clock := Clock())
    meter = StepMeter(clock)
    assert board.latest is None
    assert board.kv_usage == 0
    for _ in range(3):
        for _ in range(90):
            meter.launched(frame(2, 5))
            clock.now += 0.01
            meter.retired(2)
        board.update(
            report(
                meter, num_running=2, num_free_pages=60, num_cached_pages=30, num_evictable_pages=20, num_owned_pages=10
            )
        )
        board.first_token(0.25)
        clock.now += 0.1
    assert [second.time_s for second in board.history()] == [1000, 1001, 1002]
    last = board.history()[-1]
    assert (last.num_steps, last.num_generated_tokens, last.num_prefill_tokens) == (90, 180, 450)
    assert last.step_s == pytest.approx(0.9, abs=1e-4)
    assert last.gap_s == pytest.approx(0.1, abs=1e-4)
    assert (last.num_running, last.kv_usage) == (2, 0.2)
    assert (last.num_first_tokens, last.ttft_s) == (1, 0.25)
    assert board.totals.num_generated_tokens == 540
    last_steps = board.steps(200)
    assert len(last_steps) == 200
    assert last_steps["launched_s"][-1] == pytest.approx(1002.89, abs=0.02)
    assert len(board.steps()) == 270
    assert board.age_s == pytest.approx(0.1)


def test_the_board_keeps_as_many_steps_as_it_has_room_for_in_order() -> None:
    board = StatsBoard(clock := Clock())
    meter = StepMeter(clock)
    launched = []
    for _ in range(9):
        for _ in range(2000):
            launched.append(clock.now)
            meter.launched(frame(1, 1))
            clock.now += 0.01
            meter.retired(1)
        board.update(report(meter))
    np.testing.assert_array_equal(board.steps()["launched_s"], launched[-(1 << 14) :])
    np.testing.assert_array_equal(board.steps(5)["launched_s"], launched[-5:])


def test_the_board_forgets_what_is_older_than_five_minutes() -> None:
    board = StatsBoard(clock := Clock())
    for _ in range(400):
        board.first_token(0.1)
        clock.now += 1
    assert len(board.history()) == 300
    assert board.history()[-1].time_s == 1399
