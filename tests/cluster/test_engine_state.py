"""What an engine is at: which state follows which, and that health, readiness, metrics and the page say the same."""

from __future__ import annotations

import itertools
import re

import msgspec
import pytest

from cluster.http.active import ActiveRequests
from cluster.messages.engine import EngineStats, SchedulerStats
from cluster.messages.state import EngineLife, EngineState
from cluster.page.live import LiveStream
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import Run, Stack, error_of, runner

STARTING, RUNNING, REBUILDING, SLEEPING, DRAINING, DEAD = EngineState
SERVING = {RUNNING, REBUILDING, SLEEPING}
WAYS = {
    (STARTING, RUNNING),
    *itertools.permutations(SERVING, 2),
    (DRAINING, RUNNING),  # Ray Serve goes on with a replica after all
    *((state, DRAINING) for state in (STARTING, *SERVING)),
    *((state, DEAD) for state in (STARTING, *SERVING, DRAINING)),
}
TO = {
    STARTING: (),
    RUNNING: (RUNNING,),
    REBUILDING: (RUNNING, REBUILDING),
    SLEEPING: (RUNNING, SLEEPING),
    DRAINING: (DRAINING,),
    DEAD: (DEAD,),
}


def at(state: EngineState) -> EngineLife:
    life = EngineLife()
    for step in TO[state]:
        life.enter(step)
    assert life.state is state
    return life


@pytest.mark.parametrize(("before", "after"), [*itertools.product(EngineState, repeat=2)])
def test_an_engine_enters_what_may_follow_and_nothing_else(before: EngineState, after: EngineState) -> None:
    life = at(before)
    life.enter(after)
    assert life.state is (after if (before, after) in WAYS else before)


@pytest.mark.parametrize(("before", "reported"), [*itertools.product(EngineState, repeat=2)])
def test_reports_decide_only_while_an_engine_serves(before: EngineState, reported: EngineState) -> None:
    life = at(before)
    life.follow(reported)
    assert life.state is (reported if {before, reported} <= SERVING else before)


@pytest.fixture(scope="module")
def run(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(smollm2, tmp_path_factory.mktemp("states"))


NOTHING = SchedulerStats(
    num_running=0,
    num_waiting=0,
    num_waiting_tokens=0,
    num_free_pages=1,
    num_cached_pages=0,
    num_evictable_pages=0,
    num_owned_pages=0,
    total_prefix_hit_tokens=0,
    total_prompt_tokens=0,
    total_preemptions=0,
)
STATS = EngineStats(time_s=0.0, scheduler=NOTHING, num_steps=0, step_age_s=0.0, heartbeat_age_s=[], steps=b"")


async def shown(stack: Stack) -> tuple[str, int, int]:
    """The one state that metrics and page show, and the statuses of /health and /ready."""
    health, ready = [await stack.http.get(path) for path in ("/health", "/ready")]
    metrics = (await stack.http.get("/metrics")).text
    found = dict(re.findall(r'^lockstep_engine_state\{.*state="(\w+)".*\} (\d)', metrics, re.MULTILINE))
    assert set(found) == set(EngineState)
    [state] = [name for name, value in found.items() if value == "1"]
    view = LiveStream(stack.model, stack.engine.board).view()
    assert view is not None
    assert view.state == state
    for response in (health, ready):
        if response.status_code == 200:
            assert response.json()["state"] == state
        else:
            error = error_of(response, 503, "engine_overloaded")
            assert "retry-after" in response.headers or state == "draining", error
    return state, health.status_code, ready.status_code


def test_an_engine_shows_each_state_everywhere(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        telemetry = stack.engine.telemetry
        requests = ActiveRequests(life=telemetry.life)
        stack.http._transport.app = create_app(stack.model, requests)  # type: ignore[attr-defined]
        telemetry.report(STATS)
        assert await shown(stack) == ("starting", 200, 503)
        await stack.model.warm_up(5)
        assert await shown(stack) == ("running", 200, 200)
        telemetry.report(msgspec.structs.replace(STATS, state=REBUILDING))
        assert await shown(stack) == ("rebuilding", 200, 503)
        telemetry.report(STATS)
        assert await shown(stack) == ("running", 200, 200)
        await requests.drain(0.1)
        telemetry.report(msgspec.structs.replace(STATS, state=REBUILDING))
        assert await shown(stack) == ("draining", 200, 503)
        requests.admit_again()
        assert await shown(stack) == ("running", 200, 200)
        await stack.engine.close()
        telemetry.report(STATS)  # too late
        assert await shown(stack) == ("dead", 503, 503)

    run(scenario)
