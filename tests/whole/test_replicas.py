"""Two CPU replicas of the example file: they come and go with the load, and keep each conversation."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray

from cluster.serve.app_replicas import coordinators
from configs.load import load_app_config
from tests.cluster.test_cli import ROOT, Head, bare_head, is_ready, run
from tests.whole.test_failure import processes

__all__ = ["bare_head"]  # a fixture

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "configs" / "smollm2-135m-replicas.yaml"


@contextmanager
def serving(endpoint: Any, **settings: Any) -> Iterator[str]:
    """The example beside the shared app, with some other settings; its URL."""
    from ray import serve

    from cluster.serve.app import build_app

    args = {**load_app_config(EXAMPLE).engine.model_dump(), **settings}
    serve.run(build_app(args), name="replicas", route_prefix="/replicas")
    try:
        yield f"{endpoint.url}/replicas"
    finally:
        serve.delete("replicas")


@pytest.fixture(scope="module")
def two_replicas(endpoint: Any) -> Iterator[str]:
    """The URL of two replicas that both answer."""
    with serving(endpoint, autoscaling_config=None, num_replicas=2) as url:
        wait_for(lambda: num_replicas() == 2, 120, "two replicas")
        wait_for(lambda: len(answering(url)) == 2, 60, "HAProxy's way to both replicas")
        yield url


def answering(url: str) -> set[str]:
    """The replicas that some requests without a session reach."""
    texts = [httpx.get(f"{url}/metrics", timeout=30).text for _ in range(40)]
    return {text.split('replica="')[1].split('"')[0] for text in texts}


def num_replicas() -> int:
    from ray import serve

    states = serve.status().applications["replicas"].deployments["Engine"].replica_states
    return states.get("RUNNING", 0)


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until `condition` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what} did not come within {timeout_s:g} s"
        time.sleep(0.2)
    return time.monotonic() - began


def replace_one_replica() -> None:
    """Kills the newest replica of the app, and returns when another one runs in its place."""
    before = set(coordinators("replicas"))
    os.kill(max(processes("ServeReplica:replicas")), signal.SIGKILL)

    def is_replaced() -> bool:
        names = set(coordinators("replicas"))
        return len(names) == len(before) and names != before and num_replicas() == len(before)

    wait_for(is_replaced, 120, "another replica")


def chat(url: str, messages: list[dict[str, str]], session: str | None = None, max_tokens: int = 16) -> Any:
    headers = {} if session is None else {"x-session-id": session}
    body = {"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.timeout(600)
def test_an_operators_change_reaches_every_replica_and_those_that_start_later(
    endpoint: Any, smollm2_path: Path, tmp_path: Path
) -> None:
    """Weights, sleep and caches; a change that one replica cannot make is made by none."""
    other = tmp_path / "other"
    other.mkdir()
    for file in smollm2_path.iterdir():
        (other / file.name).symlink_to(file)
    (tmp_path / "keys").write_text(f"root:{hashlib.sha256(b'secret').hexdigest()}:admin\n")
    root = {"Authorization": "Bearer secret"}
    server = {**load_app_config(EXAMPLE).engine.server.model_dump(), "api_keys": str(tmp_path / "keys")}

    def of_each(call: str) -> list[Any]:
        return ray.get([getattr(it, call).remote() for it in coordinators("replicas").values()])

    def versions() -> list[str]:
        return [it.source["version"] for it in of_each("state_in_app") if it is not None]

    with serving(endpoint, autoscaling_config=None, num_replicas=2, server=server) as url:
        wait_for(lambda: num_replicas() == 2, 120, "two replicas")

        def post(path: str, body: Any = None) -> httpx.Response:
            return httpx.post(f"{url}{path}", json=body, headers=root, timeout=120)

        def change(model: Path, version: str) -> httpx.Response:
            return post("/v1/admin/weights", {"model": str(model), "version": version})

        wait_for(lambda: change(other, "two").status_code == 200, 120, "HAProxy's way to the replicas")

        def long_answer(_: int) -> httpx.Response:
            body = {"model": "smollm2-135m-instruct", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
            named = {**root, "x-request-id": "one"}
            return httpx.post(f"{url}/v1/completions", json=body, headers=named, timeout=300)

        def num_open() -> list[int]:
            return [it["num_running"] + it["num_waiting"] for it in of_each("status")]

        for abort in ({"rid": "one"}, {"abort_all": True}):
            with ThreadPoolExecutor(10) as clients:
                answers = clients.map(long_answer, range(10))
                wait_for(lambda: sum(num_open()) == 10, 60, "ten requests")
                assert all(num_open()), "one replica has all requests"
                assert post("/abort_request", abort).json() == {"aborted": 10}
                assert [it.json()["error"]["code"] for it in answers] == ["request_aborted"] * 10

        assert versions() == ["two", "two"]
        # One replica cannot change: it is busy with a change of its own.
        [first, _] = coordinators("replicas").values()
        asleep = ray.get(first.sleep.remote())
        assert asleep > 0
        refused = change(smollm2_path, "three")
        assert (refused.status_code, "sleeps" in refused.json()["error"]["message"]) == (400, True)
        assert versions() == ["two", "two"]

        def command(*words: str) -> str:
            done = run(*words, f"{url}/v1", OPENAI_API_KEY="secret")
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert "seconds: " in command("sleep")
        assert [it["state"] for it in of_each("status")] == ["sleeping"] * 2
        # A replica that starts meanwhile sleeps too, so no request gets an answer that others wait for.
        replace_one_replica()
        assert [it["state"] for it in of_each("status")] == ["sleeping"] * 2
        assert "seconds: " in command("wake")
        assert [it["state"] for it in of_each("status")] == ["running"] * 2
        assert "tensor_parallel_size: 2" in command("resize", "2")
        assert [len(it["pids"]) for it in of_each("status")] == [2, 2]
        assert post("/flush_cache").status_code == 200
        replace_one_replica()
        assert versions() == ["two", "two"]
        assert [len(it["pids"]) for it in of_each("status")] == [2, 2]


@pytest.mark.exhaustive
def test_replicas_come_with_a_queue_and_go_with_it(endpoint: Any) -> None:
    """One replica, a queue, two replicas, nothing to do, one replica."""
    # Only the queue may ask for the second: the batch may be full.
    quick = {
        "max_replicas": 2,
        "look_back_period_s": 12,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 3.0,
        "aggregation_function": "max",
        "policy": {"policy_kwargs": {"target_queued_tokens": 64, "target_running": 1.0}},
    }
    with serving(endpoint, autoscaling_config=quick) as url:
        assert num_replicas() == 1
        stop = threading.Event()

        def load(worker: int) -> int:
            answered = 0
            while not stop.is_set():
                chat(url, [{"role": "user", "content": f"Write about the number {worker}. Begin with it."}])
                answered += 1
            return answered

        with ThreadPoolExecutor(12) as workers:
            answers = [workers.submit(load, worker) for worker in range(12)]
            try:
                up_s = wait_for(lambda: num_replicas() == 2, 180, "the second replica")
            finally:
                stop.set()
            # Nothing was lost on the way.
            assert sum(answer.result() for answer in answers) > 0
        down_s = wait_for(lambda: num_replicas() == 1, 180, "the end of the second replica")
        print(f"1 -> 2 after {up_s:.0f} s, 2 -> 1 after {down_s:.0f} s")  # noqa: T201 -- for who runs it
        chat(url, [{"role": "user", "content": "Are you there?"}])


def test_the_turns_of_a_conversation_find_their_prefix(two_replicas: str) -> None:
    url = two_replicas
    system = "You are a patient teacher of arithmetic, geometry and logic who answers in one short sentence. " * 3

    def talk(url: str, session: str) -> list[int]:
        """Cached tokens of the second, third and fourth turn."""
        # The session comes first: conversations share no page.
        messages = [{"role": "system", "content": f"{session}. {system}"}, {"role": "user", "content": "Hello"}]
        cached = []
        for turn in range(4):
            reply = chat(url, messages, session, max_tokens=8)
            if turn:
                cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages += [reply["choices"][0]["message"], {"role": "user", "content": f"And {turn} plus {turn}?"}]
            messages = [{"role": each["role"], "content": each["content"] or ""} for each in messages]
        return cached

    with_header = [talk(url, f"session-{i}") for i in range(6)]
    found = [cached for turns in with_header for cached in turns]
    # HAProxy lets no replica have many more requests than another.
    lost = sum(cached == 0 for cached in found)
    assert lost <= 1, with_header
    assert all(cached == 0 or cached >= 48 for cached in found), with_header
    assert len(answering(url)) == 2, "requests without a session go to both"
    print(f"turns without their prefix: {lost} of 18")  # noqa: T201


def replica_pids() -> dict[str, int]:
    """Process ids of the app's replicas, by name."""
    import ray

    names = [it["name"] for it in ray.util.list_named_actors(all_namespaces=True) if it["namespace"] == "serve"]
    actors = {it: ray.get_actor(it, namespace="serve") for it in names if it.startswith("SERVE_REPLICA::replicas#")}
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors.values()], timeout=60)
    return dict(zip(actors, pids, strict=True))


class Clients:
    """Eight that chat until `stop`, each in a conversation of its own, and pause only after a lost answer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answered = 0
        self.lost: list[str] = []
        self._pool = ThreadPoolExecutor(8)
        self._running = [self._pool.submit(self._chat, index) for index in range(8)]

    def _chat(self, index: int) -> None:
        messages = [{"role": "user", "content": f"Write about the number {index}."}]
        while not self._stop.is_set():
            try:
                chat(self._url, messages, f"client-{index}")
                self.answered += 1
            except (httpx.TransportError, AssertionError) as error:
                self.lost.append(str(error))
                time.sleep(0.5)  # else a faster client, or a process that ends more slowly, loses more

    def wait_for_more(self, count: int) -> None:
        """Returns when `count` more are answered."""
        end = self.answered + count
        wait_for(lambda: self.answered >= end, 120, "more answers")

    def stop(self) -> None:
        self._stop.set()
        for running in self._running:
            running.result(60)
        self._pool.shutdown()


def test_what_one_replica_holds_is_found_through_every_other(two_replicas: str) -> None:
    """Without a session, each of these requests reaches the replicas in turn: four times each, so both of them."""
    url = two_replicas
    new = {"model": "smollm2-135m-instruct", "input": "Count to ten.", "max_output_tokens": 4}

    def respond(**more: Any) -> str:
        response = httpx.post(f"{url}/v1/responses", json={**new, **more}, timeout=300)
        assert response.status_code == 200, response.text
        return response.json()["id"]

    first = respond()
    for _ in range(4):
        assert httpx.get(f"{url}/v1/responses/{first}", timeout=60).json()["id"] == first
        respond(input="Go on.", previous_response_id=first)
        events = httpx.get(f"{url}/v1/timelines/{first}", timeout=60).json()["traceEvents"]
        assert any(event["name"] == "decode" for event in events)
    for _ in range(4):
        gone = respond()
        assert httpx.delete(f"{url}/v1/responses/{gone}", timeout=60).json()["deleted"]
        assert [httpx.get(f"{url}/v1/responses/{gone}", timeout=60).status_code for _ in range(2)] == [404, 404]
    assert httpx.get(f"{url}/v1/timelines/resp_none", timeout=60).status_code == 404


@pytest.mark.parametrize("who", ["replica", "coordinator"])
def test_who_is_killed_beside_another_takes_no_more_than_what_it_was_answering(two_replicas: str, who: str) -> None:
    clients = Clients(two_replicas)
    clients.wait_for_more(16)
    before = replica_pids()
    # The newest coordinator is one of the two's.
    os.kill(next(iter(before.values())) if who == "replica" else max(processes("Coordinator")), signal.SIGKILL)
    clients.wait_for_more(32)  # by the other one
    wait_for(lambda: len(replica_pids()) == 2 and replica_pids().keys() != before.keys(), 120, "another replica")
    wait_for(lambda: num_replicas() == 2, 120, "its readiness")
    clients.stop()
    # Those that ask again meet the replica until it has ended.
    assert len(clients.lost) <= (8 if who == "replica" else 24), clients.lost
    print(f"{len(clients.lost)} of 8 that were under way are lost, {clients.answered} answered")  # noqa: T201


def test_a_killed_controller_of_ray_serve_takes_nothing(two_replicas: str) -> None:
    import ray

    before = replica_pids()
    clients = Clients(two_replicas)
    clients.wait_for_more(8)
    ray.kill(ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve"), no_restart=False)
    clients.wait_for_more(32)
    wait_for(lambda: num_replicas() == 2, 60, "the controller")
    clients.wait_for_more(16)
    clients.stop()
    assert not clients.lost
    assert replica_pids() == before


@pytest.mark.exhaustive
def test_a_job_serves_the_example_on_a_cluster_that_has_not_our_code(
    smollm2_path: Path, bare_head: Head, free_port: int
) -> None:
    """The dashboard finds none of our packages; the job brings them, and HAProxy, to the controller that it starts."""
    head = bare_head
    command = ["python", "-m", "cluster", "serve", str(EXAMPLE.relative_to(ROOT))]
    port = ["--set", f"http_options.port={free_port}"]
    head.job("submit", "--no-wait", "--working-dir", ".", "--", *command, *port)
    url = f"http://127.0.0.1:{free_port}"
    wait_for(lambda: is_ready(url), 300, "the endpoint's readiness")
    chat(url, [{"role": "user", "content": "Hello"}], session="one")
    listening = [it for it in psutil.net_connections("tcp") if it.status == psutil.CONN_LISTEN]
    assert {psutil.Process(it.pid).name() for it in listening if it.laddr.port == free_port} == {"haproxy"}
    token = (Path.home() / ".ray" / "auth_token").read_text().strip()  # `bare_head` has made it
    asking = {"Authorization": f"Bearer {token}"}
    details = httpx.get(f"{head.dashboard_url}/api/serve/applications/", headers=asking, timeout=30).json()
    application = details["applications"]["smollm2-135m"]
    assert application["source"] == "declarative"
    config = application["deployments"]["Engine"]["deployment_config"]
    assert config["autoscaling_config"]["max_replicas"] == 2
    assert config["autoscaling_config"]["policy"]["policy_function"] == "cluster.serve.autoscaling:LoadPolicy"
