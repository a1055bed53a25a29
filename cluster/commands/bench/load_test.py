"""A load test of any OpenAI endpoint: time to first token, time per token and throughput by number of clients.

Each client streams a completion of a fixed number of tokens (ignore_eos) and then requests the next. Prompts are random
and never repeated: token ids if the server accepts them, else words. Clients are spread over processes, so that no
process becomes the bottleneck. The report includes how busy the processes were.
  TTFT  from sending a request to its first event with a choice
  TPOT  from its first to its last event with a choice, divided by the number of tokens after the first
  ITL   between one piece of text and the next; a piece may contain several tokens
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from cluster.commands.bench.stream_client import Sample, Share, run_share
from cluster.commands.endpoint_client import EndpointClient
from configs.errors import EngineError

_IDS = (100, 10_000)  # ids of random prompts: ordinary text in every vocabulary, and no special tokens in most
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
_CLIENTS_PER_PROCESS = 32
_START_DELAY_S = 0.2
_MIN_REQUESTS = 8


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What every client requests."""

    url: str
    """Base URL of the server, including `/v1`."""
    model: str
    input_tokens: int
    output_tokens: int
    as_ids: bool
    """Whether prompts are token ids. If False, they are words of about one token each."""
    seed: str
    """Makes the prompts of each run different, because a server may still have earlier prompts in its cache."""
    headers: Mapping[str, str] = field(default_factory=dict)

    def bodies(self, level: str, count: int) -> list[bytes]:
        """JSON of `count` requests. Their prompts differ from the prompts of every other level."""
        generator = random.Random(f"{self.seed}/{level}")
        common = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        prompts: list[list[int] | str] = []
        for _ in range(count):
            if self.as_ids:
                prompts.append([generator.randrange(*_IDS) for _ in range(self.input_tokens)])
            else:
                prompts.append(" ".join(generator.choice(_WORDS) for _ in range(self.input_tokens)))
        return [msgspec.json.encode({**common, "prompt": prompt}) for prompt in prompts]


def takes_ids(endpoint: EndpointClient, model: str) -> bool:
    """Whether the server accepts token ids as a prompt. Raises EngineError if it accepts no text either."""
    for prompt in ([_IDS[0], _IDS[1] - 1], "Hello"):
        if endpoint.accepts("completions", {"model": model, "max_tokens": 1, "prompt": prompt}):
            return isinstance(prompt, list)
    raise EngineError(f"{endpoint.url} does not complete text for model {model}; check --model")


def run_levels(traffic: Traffic, levels: Sequence[int], requests: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields the figures for each number of clients in `levels`. A warm-up with one request per client precedes each
    level. `requests` is the number of requests in each level. If None, two for each client, at least 8."""
    with contextlib.ExitStack() as stack:
        most = -(-max(levels) // _CLIENTS_PER_PROCESS)
        spawn = multiprocessing.get_context("spawn")
        lanes = [
            stack.enter_context(ProcessPoolExecutor(1, spawn))
            for _ in range(max(1, min(most, len(os.sched_getaffinity(0)) // 2)))
        ]
        for started in [lane.submit(os.getpid) for lane in lanes]:
            started.result()
        for clients in levels:
            measure_level(lanes, traffic, f"warm-up {clients}", clients, clients)
            yield measure_level(lanes, traffic, str(clients), clients, requests or max(_MIN_REQUESTS, 2 * clients))


def measure_level(
    lanes: Sequence[Executor], traffic: Traffic, level: str, clients: int, requests: int
) -> dict[str, Any]:
    """The figures of `clients` clients that share `requests` requests. Uses as many `lanes` (executors of one process
    each) as needed. `level` seeds the prompts, and must be unique within a run."""
    processes = min(len(lanes), -(-clients // _CLIENTS_PER_PROCESS))
    bodies = traffic.bodies(level, requests)
    begin = time.perf_counter() + _START_DELAY_S
    shares = []
    for i in range(processes):
        num_clients = len(range(i, clients, processes))
        share = Share(
            traffic.url, tuple(bodies[i::processes]), traffic.output_tokens, num_clients, begin, dict(traffic.headers)
        )
        shares.append(share)
    futures = [lane.submit(run_share, share) for lane, share in zip(lanes, shares, strict=False)]
    results = [future.result() for future in futures]
    busy = max(cpu for _, cpu in results)
    samples = [sample for part, _ in results for sample in part]
    return {"clients": clients, **summarise(samples), "client_processes": processes, "busiest_client": round(busy, 2)}


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """The figures of one level. Failed requests are counted, but do not affect any other figure."""
    good = [sample for sample in samples if sample.error is None and sample.first is not None]
    errors = [sample.error for sample in samples if sample.error is not None]
    summary: dict[str, Any] = {"requests": len(samples), "errors": len(samples) - len(good)}
    if errors:
        summary["first_error"] = errors[0]
    if not good:
        return summary
    seconds = max(sample.last for sample in good) - min(sample.sent for sample in good)
    ttft = [sample.first - sample.sent for sample in good if sample.first is not None]
    tpot = [
        (sample.last - sample.first) / (sample.output_tokens - 1)
        for sample in good
        if sample.first is not None and sample.output_tokens > 1
    ]
    input_tokens = sum(sample.input_tokens for sample in good)
    return summary | {
        "s": round(seconds, 3),
        "ttft_ms": _median_and_p99(ttft),
        "tpot_ms": _median_and_p99(tpot),
        "itl_ms": _median_and_p99([gap for sample in good for gap in sample.gaps]),
        "output_tok_s": round(sum(sample.output_tokens for sample in good) / seconds, 1),
        "request_s": round(len(good) / seconds, 2),
        "mean_input_tokens": round(input_tokens / len(good), 1),
        "cached_share": round(sum(sample.cached_tokens for sample in good) / max(input_tokens, 1), 4),
    }


def table_of(levels: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of a table of `run_levels`' results. Times are median/p99."""
    titles = ["clients", "requests", "errors", "TTFT ms", "TPOT ms", "ITL ms", "out tok/s"]
    rows = []
    for level in levels:
        cells = [str(level[key]) for key in ("clients", "requests", "errors")]
        cells += [_cell(level.get(key)) for key in ("ttft_ms", "tpot_ms", "itl_ms")]
        rows.append([*cells, f"{level.get('output_tok_s', 0):,.0f}", f"{level.get('request_s', 0):,.2f}"])
    return [*titles, "requests/s"], rows


def level_line(level: Mapping[str, Any]) -> str:
    """A line with the figures of one level."""
    line = f"{level['clients']} clients, {level['requests']} requests, {level['errors']} errors"
    if "output_tok_s" in level:
        line += (
            f": TTFT {_cell(level['ttft_ms'])} ms, TPOT {_cell(level['tpot_ms'])} ms, {level['output_tok_s']:,.0f} "
            f"tok/s; busiest client process {100 * level['busiest_client']:.0f} %"
        )
    return line + (f"; first error: {level['first_error']}" if "first_error" in level else "")


def _median_and_p99(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    median, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {"median": round(float(median), 3), "p99": round(float(p99), 3)}


def _cell(times: Mapping[str, float] | None) -> str:
    return "-" if times is None else f"{times['median']:,.1f}/{times['p99']:,.1f}"
