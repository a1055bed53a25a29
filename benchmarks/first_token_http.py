"""The way of one client's first token: through HTTP against the engine's own client, in one run on one machine.

    python -m benchmarks.first_token_http CONFIG [--set KEY=VALUE ...] [--rounds 200] [--tokens 8,256]

An endpoint and an engine beside it, of the same config and each in a Ray cluster of its own, get the same requests in
turn: the endpoint by its proxy and by its replica's own port, as streams of completions of token ids; the engine as
`benchmarks.engine` does it. Nothing else runs. Prints medians in ms, and what the endpoint's timelines say of its time:
  client   from the sending to the replica's app, and from the token's event back; the proxy too
  prepare  from the headers to the scheduler: body, JSON, checks, tokens, the way to the coordinator
  queue    from there to the step that takes it
  step     to that step's end
  deliver  from there to the replica's event loop
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray

from benchmarks.engine import Driver, started_engine
from benchmarks.report import circumstances, describe_circumstances, table
from benchmarks.serving import endpoint
from cluster.requests.engine_client import wait_ready
from cluster.serve.placement import NodeResources, uses_gpus
from cluster.serve.running_engine import describe
from cluster.serve.session import ray_session
from configs.load import load_app_config
from tests.helpers.streams import chunks_of

_STAGES = ("client", "prepare", "queue", "step", "deliver")
_REPLICA_PORTS = range(30_000, 30_020)  # Ray Serve's, behind HAProxy
_NUM_WARM_UP = 20
_REPORT_S = 2.0  # by then the coordinator has told of its last step


class HttpClient:
    """One connection, with one request at a time."""

    def __init__(self, port: int, model: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._model = model

    def first_token_s(self, prompt: list[int], max_tokens: int) -> tuple[float, str]:
        """Seconds from sending a request to the first event of its stream, and the answer's id."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        began = time.perf_counter()
        response = self._ask("POST", "/v1/completions", json.dumps(body).encode())
        line = b""
        while not line.startswith(b"data: {"):
            line = response.readline()
        seconds = time.perf_counter() - began
        response.read()
        return seconds, json.loads(line[6:])["id"]

    def stages_ms(self, request_id: str, ttft_s: float) -> list[float] | None:
        """The time of each of _STAGES of a request that has ended; None where its step is no longer known."""
        spans = json.loads(self._ask("GET", f"/v1/timelines/{request_id}").read())["traceEvents"]
        ends = {span["name"]: span["ts"] + span["dur"] for span in reversed(spans) if span["ph"] == "X"}
        steps = [span["ts"] + span["dur"] for span in spans if span["ph"] == "X" and span["tid"] == 2]
        if not steps:
            return None
        # The engine is idle otherwise, so the first step is the request's. Its phases end with the first token at the
        # replica, and their lengths are the coordinator's: they lie later by the way between these.
        first = ends["prefill"]
        deliver = first - steps[0]
        queued, admitted = ends["prepare"] - deliver, ends["queue"] - deliver
        parts = (ttft_s * 1e6 - first, queued, admitted - queued, steps[0] - admitted, deliver)
        return [part / 1e3 for part in parts]

    def _ask(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {response.read()!r}")
        return response


async def engine_first_token_s(driver: Driver, prompt: list[int], max_tokens: int) -> float:
    """Seconds from the submission of a request to its first token."""
    began = time.perf_counter()
    [stream] = driver.submit([np.array(prompt, np.int32).tobytes()], [max_tokens])
    await wait_ready((stream,))
    seconds = time.perf_counter() - began
    async for _ in chunks_of(stream):
        pass
    return seconds


async def measure(args: argparse.Namespace, ways: dict[str, HttpClient]) -> list[dict[str, Any]]:
    """Medians of the endpoint's `ways` and of an engine that is started here, for each kind of request."""
    config = load_app_config(args.config, args.overrides).engine
    gpus = uses_gpus(config, NodeResources.from_ray(ray.nodes()))
    rng = np.random.default_rng()
    rows: list[dict[str, Any]] = []
    async with started_engine(describe(config, gpus=gpus), gpus=gpus) as (engine, _):
        driver = Driver(engine, "plain")
        for num_tokens, max_tokens in itertools.product(args.tokens, (1, 16)):
            times: dict[str, list[float]] = {name: [] for name in (*ways, "engine")}
            asked: list[tuple[str, float]] = []
            for _ in range(_NUM_WARM_UP + args.rounds):
                prompts = rng.integers(100, 10_000, (3, num_tokens)).tolist()
                for name, client in ways.items():
                    seconds, request_id = client.first_token_s(prompts.pop(), max_tokens)
                    times[name].append(1e3 * seconds)
                    if name == "proxy":
                        asked.append((request_id, seconds))
                times["engine"].append(1e3 * await engine_first_token_s(driver, prompts.pop(), max_tokens))
            await asyncio.sleep(_REPORT_S)
            stages = [ways["proxy"].stages_ms(*each) for each in asked[_NUM_WARM_UP:]]
            row = {name: statistics.median(part[_NUM_WARM_UP:]) for name, part in times.items()}
            parts = [statistics.median(part) for part in zip(*filter(None, stages), strict=True)]
            rows.append({"in": num_tokens, "out": max_tokens} | row | dict(zip(_STAGES, parts, strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[8, 256])
    args = parser.parse_args()
    with endpoint(str(args.config), args.overrides) as url:
        port = int(url.removesuffix("/v1").rpartition(":")[2])
        model = _model_at(port)
        replica_port = next(each for each in _REPLICA_PORTS if _model_at(each) == model)
        ways = {name: HttpClient(at, model["id"]) for name, at in (("proxy", port), ("replica", replica_port))}
        with ray_session(None, min_cpus=2):
            rows = asyncio.run(measure(args, ways))
    cells = [[f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    print(describe_circumstances(circumstances()))
    print(table(list(rows[0]), cells))


def _model_at(port: int) -> dict[str, Any]:
    """The first model of a server, with the time of its start; nothing where there is none."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()
    except httpx.HTTPError:
        return {}
    return dict(answer["data"][0])


if __name__ == "__main__":
    main()
