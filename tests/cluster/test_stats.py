"""The engine's figures: measured in the coordinator, kept by second and by step in the replica."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from cluster.messages.engine import EngineStats, SchedulerStats
from cluster.messages.steps import STEP_DTYPE, StepMeter
from cluster.observability.board import StatsBoard
from cluster.ranks.liveness import LOOK_S, Liveness, RankClock
from parallel.step_cost import AttentionCost, StepCost
from worker.protocol import RowFlag, StepFrame

COST = StepCost(1000, 100, 10, (AttentionCost(None, 2, 3),))


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
    lens = np.ones(num_rows, np.int32)
    if num_prefill_tokens:
        lens[-1] = num_prefill_tokens
    tokens = np.zeros(num_prefill_tokens, np.int32)
    return StepFrame(1, 1, rows=rows, starts=np.zeros_like(rows), lens=lens, flags=flags, token_ids=tokens)


def scheduler_stats(**figures: int) -> SchedulerStats:
    names = SchedulerStats.__dataclass_fields__
    return SchedulerStats(**{name: figures.get(name, 0) for name in names if name != "total_missed" or name in figures})


def report(meter: StepMeter, **figures: int) -> EngineStats:
    return meter.report(scheduler_stats(**figures), [0.1, 0.2])


def steps_of(stats: EngineStats) -> list[tuple[float, ...]]:
    return [tuple(round(value, 6) for value in step) for step in np.frombuffer(stats.steps, STEP_DTYPE).tolist()]


def test_a_step_lasts_from_the_end_of_the_one_before_it_when_two_are_in_flight() -> None:
    meter = StepMeter(COST, clock := Clock())
    meter.launched(frame(3, 100))
    clock.now += 0.001
    meter.launched(frame(3))
    clock.now += 0.009
    meter.retired(3)
    clock.now += 0.005
    meter.retired(3)
    assert [step[:7] for step in steps_of(report(meter))] == [
        (1000.0, 0.01, 0.0, 3, 2, 100, 3),
        (1000.001, 0.005, 0.0, 3, 3, 0, 3),
    ]
    assert report(meter).steps == b""
    assert report(meter).num_steps == 2


def test_a_step_costs_what_its_rows_and_their_contexts_make_it() -> None:
    meter = StepMeter(COST, Clock())
    decodes = frame(3)
    decodes.starts[:] = 10, 20, 30
    scored = frame(1, 4)
    scored.flags[:] = RowFlag.HAS_TOKENS
    scored.prompt_targets = np.zeros(3, np.int32)
    for launched in (decodes, scored):
        meter.launched(launched)
        meter.retired(0)
    assert [step[7:] for step in steps_of(report(meter))] == [
        (3 * 100 + 3 * 10 + 2 * (11 + 21 + 31), 1000 + 3 * (11 + 21 + 31)),
        (4 * 100 + 3 * 10 + 2 * (1 + 2 + 3 + 4), 1000 + 3 * 4),
    ]


def test_drafts_are_no_prompt_tokens() -> None:
    meter = StepMeter(COST, Clock())
    verified = frame(3, 4)
    verified.num_samples = np.array([1, 1, 4], np.int32)
    meter.launched(verified)
    assert not meter.oldest[0]
    meter.retired(5)
    assert [step[3:7] for step in steps_of(report(meter))] == [(3, 3, 0, 5)]


def test_utilisation_is_what_steps_needed_of_what_was_measured_while_they_ran() -> None:
    board = StatsBoard(clock := Clock())
    meter = StepMeter(COST, clock)
    for _ in range(3):
        meter.launched(frame(2))
        clock.now += 0.5
        meter.retired(2)
        clock.now += 0.5
    board.update(report(meter))
    assert board.utilisation(board.totals) is None, "nobody has said what the devices can do"
    board.peak_flops, board.peak_bandwidth = 1000.0, 10_000.0
    assert board.utilisation(board.totals) == pytest.approx((224 / 0.5 / 1000, 1006 / 0.5 / 10_000))
    before = replace(board.totals)
    assert board.utilisation(board.totals.since(before)) is None
    meter.launched(frame(2))
    clock.now += 0.1
    meter.retired(2)
    board.update(report(meter))
    assert board.totals.since(before).num_steps == 1
    assert board.utilisation(board.totals.since(before)) == pytest.approx((2.24, 1.006), rel=1e-6)


def test_time_between_steps_is_a_gap_unless_there_was_nothing_to_do() -> None:
    meter = StepMeter(COST, clock := Clock())
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
    meter = StepMeter(COST, clock := Clock())
    assert meter.is_due()
    assert report(meter).step_age_s == 0
    assert not meter.is_due()
    meter.launched(frame(1))
    clock.now += 0.125
    assert meter.is_due()
    assert report(meter).step_age_s == 0.125


def test_records_that_nobody_reads_are_bounded() -> None:
    meter = StepMeter(COST, Clock())
    for _ in range(10_000):
        meter.launched(frame(1))
        meter.retired(1)
    assert len(report(meter).steps) <= 4096 * STEP_DTYPE.itemsize


def test_the_board_counts_by_second_and_keeps_the_last_steps() -> None:
    board = StatsBoard(clock := Clock())
    meter = StepMeter(COST, clock)
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
    assert board.steps(90)["gap_s"].sum() == pytest.approx(0.1, abs=1e-4)
    assert board.latest is not None
    assert (board.latest.scheduler.num_running, board.kv_usage) == (2, 0.2)
    assert (last.num_first_tokens, last.ttft_s) == (1, 0.25)
    assert board.totals.num_generated_tokens == 540
    last_steps = board.steps(200)
    assert len(last_steps) == 200
    assert last_steps["launched_s"][-1] == pytest.approx(1002.89, abs=0.02)
    assert len(board.steps()) == 270
    assert board.age_s == pytest.approx(0.1)


def test_the_board_keeps_as_many_steps_as_it_has_room_for_in_order() -> None:
    board = StatsBoard(clock := Clock())
    meter = StepMeter(COST, clock)
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


class SetRankClock(RankClock):
    """A clock that shows what tests set."""

    shown_s = 0.0

    def look(self, pids: Iterable[int]) -> float:
        return self.shown_s


def test_a_step_is_expected_to_take_what_the_slowest_of_its_kind_took_lately_for_what_it_costs() -> None:
    meter, rank_clock = StepMeter(COST, clock := Clock()), SetRankClock()
    liveness = Liveness((math.inf, 1e5), 1.0, rank_clock)

    least_s = [0.0]

    def step(seconds: float, num_prefill_tokens: int = 0) -> float:
        meter.launched(frame(3, num_prefill_tokens))
        liveness.began(*meter.oldest)
        least_s[:] = [0.001 + meter.oldest[1][1] / 1e5]
        expected_s = liveness.expected_s
        clock.now += seconds
        assert liveness.hang([]) is None
        liveness.ended(meter.retired(3))
        return expected_s

    assert step(0.02) == pytest.approx(10 * least_s[0]), "ten times what the peaks allow"
    for _ in range(400):
        step(0.02)
    assert step(0.02) == pytest.approx(0.02)
    assert step(5.0) == pytest.approx(0.02)
    assert step(0.02) == pytest.approx(2 * LOOK_S), "the rest of the five seconds was other programs'"
    for _ in range(400):
        step(0.02)
    assert step(0.02) == pytest.approx(0.02)
    assert step(0.3, 10) == pytest.approx(10 * least_s[0]), "of steps with prompts nothing is known yet"
    assert step(0.02) == pytest.approx(0.02)
    assert step(0.3, 10) == pytest.approx(0.3)
    meter.launched(frame(3))
    liveness.began(*meter.oldest)
    rank_clock.shown_s = 1.05
    assert liveness.hang([]) is None
    rank_clock.shown_s = 1.07
    assert "recovery.hang_timeout_s=1" in str(liveness.hang([]))


def test_half_as_many_ranks_may_take_twice_as_long_and_are_learned_anew() -> None:
    liveness = Liveness((math.inf, 10.0), 1.0, SetRankClock())
    liveness.began(False, (0.0, 5.0))
    whole_s = liveness.expected_s
    liveness.ended(100.0)
    liveness.begin(0.5)
    liveness.began(False, (0.0, 5.0))
    assert liveness.expected_s == pytest.approx(2 * whole_s, rel=0.01)
