"""Replicas that Ray Serve stops, with requests in them: they end normally, or are told; and the sign to look for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.http.active import ActiveRequests
from cluster.serve import draining
from cluster.serve.draining import StopWatch
from tests.cluster.test_cli import read_until, read_until_ready, served

LOG = logging.getLogger(__name__)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


class Follower:
    """A streamed completion, read in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, **fields: Any) -> None:
        self.begun = threading.Event()
        self.payloads: list[Any] = []
        self.done: Future[None] = pool.submit(self._follow, url, {"prompt": "Once", "stream": True, **fields})

    def _follow(self, url: str, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    payload = line.removeprefix("data: ")
                    self.payloads.append(payload if payload == "[DONE]" else json.loads(payload))
                    self.begun.set()


def declare(app: str, prefix: str, args: dict[str, Any], num_replicas: int) -> None:
    """Deploys as `serve deploy` does, without a dashboard: a changed number of replicas restarts none."""
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": app,
        "route_prefix": prefix,
        "import_path": "cluster.app:build_app",
        "args": args,
        "deployments": [{"name": "Engine", "num_replicas": num_replicas}],
    }
    client = serve.context._get_global_client()
    client.deploy_apps(ServeDeploySchema(applications=[application]))
    wait_for(app, {"RUNNING": num_replicas})


def wait_for(app: str, states: dict[str, int], timeout_s: float = 400.0) -> None:
    from ray import serve

    deadline = time.monotonic() + timeout_s
    while True:
        status = serve.status().applications.get(app)
        found = {} if status is None or not status.deployments else dict(status.deployments["Engine"].replica_states)
        if found == states:
            return
        assert time.monotonic() < deadline, f"{app} is not {states} after {timeout_s:g} s: {status}"
        time.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.timeout(1200)
def test_streams_outlive_a_scale_down_and_are_told_when_the_app_is_deleted(
    endpoint: Any, smollm2_path: Path, pool: ThreadPoolExecutor
) -> None:
    from ray import serve

    args = {
        "model": str(smollm2_path),
        "served_model_name": endpoint.model,
        "tensor_parallel_size": 1,
        # Two replicas share two cores: of each other's threads they know nothing here.
        "parallel": {"threads_per_rank": 1},
        "max_model_len": 4096,
        "kv_cache": {"num_tokens": 16384},
        "server": {"shutdown_timeout_s": 25.0},
    }
    url = f"{endpoint.url}/stopping"
    fields = {"model": endpoint.model, "ignore_eos": True, "temperature": 0}
    try:
        declare("stopping", "/stopping", args, 2)
        followers = [Follower(pool, url, max_tokens=40, **fields) for _ in range(6)]
        assert all(follower.begun.wait(120) for follower in followers)
        declare("stopping", "/stopping", args, 1)
        for follower in followers:
            follower.done.result(120)
            assert follower.payloads[-1] == "[DONE]"
            assert [chunk["choices"][0]["finish_reason"] for chunk in follower.payloads[:-1]][-1] == "length"

        # Now one that lasts longer than the stop may.
        last = Follower(pool, url, max_tokens=4000, **fields)
        assert last.begun.wait(120)
        serve.delete("stopping", _blocking=False)
        # No longer routed there, but to the shared app at /.
        deadline = time.monotonic() + 10
        while httpx.get(f"{url}/v1/models", timeout=30).status_code != 404:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        last.done.result(90)
        assert last.payloads[-1]["error"]["code"] == "engine_overloaded"
        assert "try again" in last.payloads[-1]["error"]["message"]
    finally:
        serve.delete("stopping")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_terminated_server_lets_its_streams_end(smollm2_path: Path, free_port: int, pool: ThreadPoolExecutor) -> None:
    """SIGTERM to the command alone, as a process manager sends it."""
    url = f"http://127.0.0.1:{free_port}"
    fields = {"model": "smollm2-135m-instruct", "ignore_eos": True, "temperature": 0}
    with served(free_port, "--set", "server.shutdown_timeout_s=120") as server:
        read_until_ready(server)
        followers = [Follower(pool, url, max_tokens=150, **fields) for _ in range(4)]
        assert all(follower.begun.wait(120) for follower in followers)
        server.send_signal(signal.SIGTERM)
        read_until(server, "stopping")
        statuses = set()
        while not any(follower.done.done() for follower in followers):
            with contextlib.suppress(httpx.TransportError):
                late = httpx.post(f"{url}/v1/completions", json={**fields, "prompt": "a", "max_tokens": 1}, timeout=60)
                statuses.add(late.status_code)
            time.sleep(0.1)
        for follower in followers:
            follower.done.result(300)
            assert follower.payloads[-1] == "[DONE]"
        # The replica refuses it while HAProxy sends it there, HAProxy by its own words from then on.
        assert statuses <= {200, 404, 500, 503}, statuses
        LOG.info("requests that came late: %s", statuses)
        server.communicate(timeout=120)
        assert server.returncode == 0


# --- The sign ---------------------------------------------------------------------------------------------------------


class Watched:
    """A watch by a clock that only the test advances. Serve is to ask every 40 ms, and says `is_stopping` if asked."""

    def __init__(self, is_stopping: bool) -> None:
        self.now_s = 0.0
        self.num_questions = 0
        self.requests = ActiveRequests()
        self._is_stopping = is_stopping
        self.watch = StopWatch(self.requests, self._answer, period_s=0.04, shutdown_timeout_s=0.3)

    def _answer(self) -> bool:
        self.num_questions += 1
        return self._is_stopping

    async def asked_for(self, seconds: float) -> None:
        """Serve asks for so long."""
        for _ in range(round(seconds / 0.02)):
            self.now_s += 0.02
            self.watch.asked()
            await asyncio.sleep(0.02)  # the watch looks every 10 ms

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 -- the watch has no event for it
                await asyncio.sleep(0.005)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """watch(scenario, is_stopping): runs the scenario beside a watch."""

    async def both(scenario: Any, is_stopping: bool) -> None:
        watched = Watched(is_stopping)
        monkeypatch.setattr(draining, "time", SimpleNamespace(monotonic=lambda: watched.now_s))
        running = asyncio.create_task(watched.watch.run())
        await asyncio.sleep(0)
        await scenario(watched)
        running.cancel()

    return lambda *arguments: asyncio.run(both(*arguments))


def test_a_replica_that_serve_asks_after_goes_on(watch: Callable[..., None]) -> None:
    async def scenario(watched: Watched) -> None:
        await watched.asked_for(0.4)
        assert not watched.requests.stopping
        assert watched.num_questions == 0

    watch(scenario, True)


def test_silence_alone_is_no_stop(watch: Callable[..., None]) -> None:
    async def scenario(watched: Watched) -> None:
        watched.now_s += 0.4
        await watched.until(lambda: watched.num_questions > 2)
        assert not watched.requests.stopping

    watch(scenario, False)


def test_silence_and_a_stopping_app_drain_the_replica_until_serve_asks_again(watch: Callable[..., None]) -> None:
    async def scenario(watched: Watched) -> None:
        watched.now_s += 0.3
        await watched.until(lambda: watched.requests.stopping)
        watched.watch.asked()
        assert not watched.requests.stopping
        await watched.asked_for(0.3)
        assert not watched.requests.stopping

    watch(scenario, True)
