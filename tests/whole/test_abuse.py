"""An hour in which one key does all the harm it can, and what another one notices of it.

ABUSE_S, an environment variable, is how many seconds it lasts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.http.context import Role
from tests.cluster.test_auth import Keys
from tests.conftest import ROOT, Endpoint, unused_port
from tests.whole.test_failure import processes

ABUSE_S = float(os.environ.get("ABUSE_S", "3600"))
IDLE_S = min(ABUSE_S / 2, 60.0)
MB = 1 << 20

pytestmark = [pytest.mark.exhaustive, pytest.mark.ray, pytest.mark.timeout(2 * ABUSE_S + 900)]


@dataclass
class Notes:
    """Seconds that an honest client waited."""

    first: list[float] = field(default_factory=list)
    """For the first token of each request."""
    gaps: list[float] = field(default_factory=list)
    """Between two tokens."""
    refusals: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        first = ", ".join(f"p{q} {1e3 * np.percentile(self.first, q):.0f}" for q in (50, 90, 99))
        return f"{len(self.first)} requests, first token {first} ms, longest gap {1e3 * max(self.gaps):.0f} ms"


async def use(endpoint: Endpoint, key: dict[str, str], seconds: float, seed: int) -> Notes:
    """An honest client: one short request after the other."""
    notes, rng, deadline = Notes(), random.Random(seed), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=endpoint.url, headers=key, timeout=120) as http:
        while time.monotonic() < deadline:
            prompt = " ".join(rng.choices(("rivers", "are", "long", "and", "wide"), k=20))
            body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True}
            times = [time.monotonic()]
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    notes.refusals.append(reply.status_code)
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        assert "error" not in json.loads(line[6:]), line
                        times.append(time.monotonic())
            if len(times) > 1:
                notes.first.append(times[1] - times[0])
                notes.gaps += [after - before for before, after in itertools.pairwise(times[1:])]
            await asyncio.sleep(rng.random() / 2)
    return notes


def memory() -> dict[str, int]:
    """Resident bytes of each process of the endpoint, by its name and id."""
    found = processes("ray::Serve", "ray::Coord", "ray::Rank", "haproxy")
    return {f"{it.name()}:{pid}": it.memory_info().rss for pid, it in found.items() if it.status() != "zombie"}


@pytest.fixture
def keyed(ray_cluster: None, smollm2_path: Path, tmp_path: Path) -> Iterator[tuple[Endpoint, Keys]]:
    """A served model that asks for keys."""
    from ray import serve

    from cluster.serve.app import build_app
    from configs.load import load_app_config

    keys = Keys(tmp_path, ("mallory", Role.USER, ""), ("bob", Role.USER, ""))
    # A step with 512 tokens of prompts, as is the default, takes 0.7 s on two cores, and two are in flight.
    changes = [f"server.api_keys={keys.path}", "tensor_parallel_size=1", "scheduler.max_num_batched_tokens=64"]
    app = load_app_config(ROOT / "configs" / "smollm2-135m.yaml", changes)
    port = unused_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_app(app.engine.model_dump()), name="abuse", route_prefix="/")
    yield Endpoint(f"http://127.0.0.1:{port}", "abuse", "smollm2-135m-instruct"), keys
    serve.delete("abuse")


def test_an_hour_of_abuse_by_one_key_is_hardly_noticed_by_another(keyed: tuple[Endpoint, Keys]) -> None:
    endpoint, keys = keyed
    bob = keys.bearer("bob")

    async def main() -> tuple[Notes, Notes, dict[str, int], dict[str, Any]]:
        await use(endpoint, bob, 3, 0)
        idle = await use(endpoint, bob, IDLE_S, 1)
        arguments = (endpoint.url, endpoint.model, keys.secrets["mallory"], str(ABUSE_S), "2")
        abuser = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.helpers.abuser", *arguments, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        try:
            early = await use(endpoint, bob, ABUSE_S / 4, 3)  # caches fill up
            before = memory()
            busy = await use(endpoint, bob, ABUSE_S * 3 / 4, 4)
            out, _ = await asyncio.wait_for(abuser.communicate(), 120)
        finally:
            if abuser.returncode is None:
                abuser.kill()
        busy.first += early.first
        busy.gaps += early.gaps
        busy.refusals += early.refusals
        return idle, busy, before, json.loads(out)

    began = set(processes("ray::Serve", "ray::Coord", "ray::Rank"))
    idle, busy, before, did = asyncio.run(main())
    print(f"idle: {idle}\nabused: {busy}, refusals {busy.refusals}\n{did}")  # noqa: T201 -- figures to report
    endpoint.wait_idle(120)
    assert set(processes("ray::Serve", "ray::Coord", "ray::Rank")) == began, "a process was replaced"
    assert not busy.refusals
    deadline = time.monotonic() + 60
    while grown := {name: rss for name, rss in memory().items() if rss > 1.1 * before.get(name, rss) + 64 * MB}:
        assert time.monotonic() < deadline, f"memory grew: {grown}, before: {before}"
        time.sleep(1)
    # Two cores run server, clients and abuser here: a step with 31 other rows takes 0.2 s, and two are in flight.
    assert np.percentile(busy.first, 99) <= 2
    assert max(busy.gaps) <= max(idle.gaps) + 1
