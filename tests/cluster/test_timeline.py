"""One request's life as a trace: its phases, the engine's steps meanwhile, and who may see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from cluster.http.context import RequestContext, Role
from cluster.http.keys import KeyRing, new_key
from cluster.messages.engine import Miss, Prefilled, SamplingParams
from cluster.messages.steps import STEP_DTYPE
from cluster.observability.timeline import NUM_REQUESTS, RecentRequests, Timeline, timeline
from cluster.serve.ingress import create_app
from tests.helpers.records import record
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of


def steps_of(*steps: tuple[float, float, int]) -> np.ndarray[Any, Any]:
    """Records of (launched at, duration, prompt tokens)."""
    return np.array([(launched, took, 0.0, 3, 2, prompt, 3, 0.0, 0.0) for launched, took, prompt in steps], STEP_DTYPE)


def spans(made: Timeline, track: int) -> dict[str, tuple[float, float]]:
    """(begin, end) in milliseconds by name; of several of one name the last."""
    events = [event for event in made.trace_events if event.ph == "X" and event.tid == track]
    return {event.name: (round(event.ts / 1e3, 2), round((event.ts + event.dur) / 1e3, 2)) for event in events}


def test_the_phases_follow_each_other_from_arrival_to_end() -> None:
    made = timeline(record(prefilled=Prefilled(1, 16, 0.05, 0.2, {Miss.NO_STATE: 24})), steps_of())
    assert spans(made, 1) == {
        "request": (0, 1250),
        "prepare": (0, 0),
        "queue": (0, 50),
        "prefill": (50, 250),
        "decode": (250, 1250),
    }
    [request] = [event for event in made.trace_events if event.name == "request"]
    assert request.args == {
        "x-request-id": "req-1",
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "missed_no_state_tokens": 24,
        "output_tokens": 11,
        "sequences": 1,
        "finish_reasons": "stop",
        "error": None,
    }


def test_a_request_that_got_no_token_has_no_phases() -> None:
    made = timeline(record(first_token_s=None, prefilled=None, error="DeadlineError"), steps_of())
    assert list(spans(made, 1)) == ["request"]
    assert made.trace_events[2].args["error"] == "DeadlineError"


def test_the_steps_of_its_life_are_there_and_no_other() -> None:
    # Launched ahead, a step begins when the one before it ends: the second at 100.02, the third at 100.03.
    made = timeline(
        record(),
        steps_of((99.0, 0.5, 9), (99.99, 0.03, 7), (100.0, 0.01, 0), (100.01, 0.02, 5), (101.5, 0.01, 3)),
    )
    events = [event for event in made.trace_events if event.ph == "X" and event.tid == 2]
    assert [(event.name, round(event.ts / 1e3, 2), round(event.dur / 1e3, 2)) for event in events] == [
        ("prefill", -10, 30),
        ("decode", 20, 10),
        ("prefill", 30, 20),
    ]
    assert events[0].args == {"rows": 3, "decodes": 2, "prompt_tokens": 7, "gap_before_us": 0}
    assert made.steps_left_out == 0
    assert msgspec.json.decode(msgspec.json.encode(made), type=Timeline) == made


def test_a_pause_is_among_the_steps() -> None:
    made = timeline(record(), steps_of((100.0, 0.01, 0)), [(100.5, 101.0)])
    assert spans(made, 2)["pause"] == (500, 1000)


def test_a_long_life_has_its_first_steps() -> None:
    many = steps_of(*[(100 + 0.0002 * i, 0.0002, 0) for i in range(5000)])
    made = timeline(record(), many)
    events = [event for event in made.trace_events if event.tid == 2 and event.ph == "X"]
    assert (len(events), made.steps_left_out) == (4096, 904)
    assert events[0].ts == pytest.approx(0, abs=0.2)


def test_the_last_requests_are_found_by_either_id_and_by_whom_they_are() -> None:
    recent = RecentRequests()
    for index in range(NUM_REQUESTS + 1):
        context = RequestContext(request_id=f"req-{index // 2}", client="alice")
        sampling = SamplingParams(max_tokens=16, logit_bias=((7, 1.0),))
        recent.keep(record(id=f"cmpl-{index}", context=context, sampling=sampling))
    assert recent.find("cmpl-0", None) is None
    kept = recent.find("cmpl-1", None)
    assert kept is not None
    assert kept.sampling.logit_bias == ()  # it may be as large as the vocabulary
    again = recent.find("req-7", "alice")
    assert again is not None
    assert again.id == "cmpl-15"  # the later one
    assert recent.find("req-7", "bob") is None
    assert recent.find("req-7", "") is None


def test_the_route_answers_for_an_answers_id_and_a_requests_id(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a secret"}]}
        reply = await stack.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "find-me"})
        found = [(await stack.http.get(f"/v1/timelines/{name}")) for name in (reply.json()["id"], "find-me")]
        assert found[0].json() == found[1].json()
        names = [event["name"] for event in found[0].json()["traceEvents"]]
        assert names[:3] == ["thread_name", "thread_name", "request"]
        assert "decode" in names
        assert "secret" not in found[0].text
        missing = await stack.http.get("/v1/timelines/another")
        error_of(missing, 404, "request_not_found")

    run(scenario)


def test_keys_see_their_own_requests_and_an_admins_every_one(run: Run, tmp_path: Path) -> None:
    roles = {"alice": Role.USER, "bob": Role.USER, "root": Role.ADMIN}
    keys = {name: new_key(name, role) for name, role in roles.items()}
    (tmp_path / "keys").write_text("".join(f"{line}\n" for _, line in keys.values()))

    async def scenario(stack: Stack) -> None:
        transport = httpx.ASGITransport(create_app(stack.model, keys=KeyRing(tmp_path / "keys")))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def status(name: str) -> int:
                headers = {"authorization": f"Bearer {keys[name][0]}"}
                return (await http.get("/v1/timelines/hers", headers=headers)).status_code

            await http.post(
                "/v1/completions",
                json={"model": MODEL, "prompt": "hi"},
                headers={"authorization": f"Bearer {keys['alice'][0]}", "x-request-id": "hers"},
            )
            assert [await status(name) for name in keys] == [200, 404, 200]

    run(scenario)
