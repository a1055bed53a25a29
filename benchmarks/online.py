"""An OpenAI endpoint under load: time to first token, time per token and throughput by number of clients.

    python -m benchmarks.online URL [--model NAME] [--clients 1,16,64,256] [--requests N] [--json OUT]
    python -m benchmarks.online --serve CONFIG [--set KEY=VALUE ...] ...

URL ends in /v1 and may be any server's. Each client streams a completion of --output-len tokens (ignore_eos) and then
asks for the next. Prompts are random, none twice: token ids where the server takes them, else words. Clients are spread
over processes, so that none of them becomes the bottleneck; how busy they were is reported.
  TTFT  from sending a request to its first event with a choice
  TPOT  from there to the last such event, over the tokens after the first
  ITL   between one piece of text and the next; a piece may hold several tokens
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from benchmarks.report import Report, circumstances, describe_circumstances, table
from benchmarks.serving import endpoint
from benchmarks.stream_client import READ_TIMEOUT_S, Sample, Share, run_share

_IDS = (100, 10_000)  # of random prompts: text in every vocabulary, and no special tokens in most
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
_CLIENTS_PER_PROCESS = 32
_START_DELAY_S = 0.2


def summarise(samples: Sequence[Sample]) -> dict[str, Any]:
    """Figures of one level. Requests that failed are counted, and are in no other figure."""
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


def _median_and_p99(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    median, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {"median": round(float(median), 3), "p99": round(float(p99), 3)}


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every client asks for."""

    url: str
    model: str
    input_tokens: int
    output_tokens: int
    as_ids: bool
    """Whether prompts are token ids; else they are words of about one token each."""
    seed: str

    def bodies(self, level: str, count: int) -> list[bytes]:
        """JSON of `count` requests, their prompts unlike those of any other level."""
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


def measure_level(lanes: Sequence[Executor], load: Load, level: str, clients: int, requests: int) -> dict[str, Any]:
    """Figures of `clients` clients that take `requests` requests between them.

    Args:
        lanes: executors of one process each; as many as the clients need are used.
        level: names the prompts; each level of a run has its own.
    """
    processes = min(len(lanes), -(-clients // _CLIENTS_PER_PROCESS))
    bodies = load.bodies(level, requests)
    begin = time.perf_counter() + _START_DELAY_S
    shares = []
    for i in range(processes):
        num_clients = len(range(i, clients, processes))
        shares.append(Share(load.url, tuple(bodies[i::processes]), load.output_tokens, num_clients, begin))
    futures = [lane.submit(run_share, share) for lane, share in zip(lanes, shares, strict=False)]
    results = [future.result() for future in futures]
    busy = max(cpu for _, cpu in results)
    samples = [sample for part, _ in results for sample in part]
    return {"clients": clients, **summarise(samples), "client_processes": processes, "busiest_client": round(busy, 2)}


def takes_ids(url: str, model: str) -> bool:
    """Whether the server takes token ids as a prompt. Raises SystemExit when it takes no text either."""
    body = {"model": model, "max_tokens": 1}
    with httpx.Client(timeout=READ_TIMEOUT_S, trust_env=False) as client:
        for prompt in ([_IDS[0], _IDS[1] - 1], "Hello"):
            response = client.post(f"{url}/completions", json={**body, "prompt": prompt})
            if response.is_success:
                return isinstance(prompt, list)
    raise SystemExit(f"{url} does not complete for model {model}: HTTP {response.status_code} {response.text}")


def first_model(url: str) -> str:
    """The first model that the server lists."""
    response = httpx.get(f"{url}/models", timeout=READ_TIMEOUT_S, trust_env=False).raise_for_status()
    name: str = response.json()["data"][0]["id"]
    return name


def render(figures: dict[str, Any]) -> str:
    """The levels of one run as a table."""
    header = ["clients", "requests", "errors", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "ITL p50/p99 ms", "out tok/s"]
    rows = []
    for level in figures["levels"]:
        cells = [str(level[key]) for key in ("clients", "requests", "errors")]
        cells += [_cell(level.get(key)) for key in ("ttft_ms", "tpot_ms", "itl_ms")]
        rows.append([*cells, f"{level.get('output_tok_s', 0):,.0f}", f"{level.get('request_s', 0):,.2f}"])
    return "\n".join(
        [
            "",
            f"{figures['model']} at {figures['served']} {' '.join(figures['overrides'])}".strip(),
            f"{figures['input_len']} {figures['prompts']} in, {figures['output_len']} tokens out",
            describe_circumstances(figures),
            "",
            table([*header, "requests/s"], rows),
        ]
    )


def level_line(level: dict[str, Any]) -> str:
    """One level, as it is known."""
    line = f"{level['clients']} clients, {level['requests']} requests, {level['errors']} errors"
    if "output_tok_s" in level:
        line += (
            f": TTFT {_cell(level['ttft_ms'])} ms, TPOT {_cell(level['tpot_ms'])} ms, {level['output_tok_s']:,.0f} "
            f"tok/s; busiest client process {100 * level['busiest_client']:.0f} %"
        )
    return line + (f"; first error: {level['first_error']}" if "first_error" in level else "")


def _cell(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{times['median']:,.1f}/{times['p99']:,.1f}"


def run(url: str, args: argparse.Namespace, report: Report) -> None:
    """Measures every level into `report` and prints it."""
    model = args.model or first_model(url)
    as_ids = takes_ids(url, model) if args.prompts == "auto" else args.prompts == "ids"
    load = Load(
        url=url,
        model=model,
        input_tokens=args.input_len,
        output_tokens=args.output_len,
        as_ids=as_ids,
        # A run's prompts are its own: a server that ran before may still hold those of the last run.
        seed=str(args.seed if args.seed is not None else time.time_ns()),
    )
    report.add(model=model, input_len=args.input_len, output_len=args.output_len, seed=load.seed)
    report.add(prompts="token ids" if as_ids else "words", levels=[])
    levels: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        most = -(-max(args.clients) // _CLIENTS_PER_PROCESS)
        spawn = multiprocessing.get_context("spawn")
        lanes = [
            stack.enter_context(ProcessPoolExecutor(1, spawn))
            for _ in range(max(1, min(most, len(os.sched_getaffinity(0)) // 2)))
        ]
        for started in [lane.submit(os.getpid) for lane in lanes]:
            started.result()
        for clients in args.clients:
            measure_level(lanes, load, f"warm-up {clients}", clients, clients)
            levels.append(measure_level(lanes, load, str(clients), clients, args.requests or max(8, 2 * clients)))
            report.add(levels=levels)
            print(level_line(levels[-1]), flush=True)
    print(render(report.figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="base URL of the server, /v1 included")
    parser.add_argument("--serve", metavar="CONFIG", help="start this config's endpoint and measure it")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--requests", type=int, help="of each level; default: 2 for each client, at least 8")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--prompts", choices=("auto", "ids", "text"), default="auto")
    parser.add_argument("--seed", help="default: another at every run")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--commit", help="of the code measured, where the checkout has no git directory")
    args = parser.parse_args()
    if (args.url is None) == (args.serve is None):
        parser.error("give either URL or --serve CONFIG")
    served = args.serve or args.url
    report = Report(
        args.json, benchmark="online", served=served, overrides=args.overrides, **circumstances(args.commit)
    )
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(endpoint(args.serve, args.overrides)) if args.serve else args.url.rstrip("/")
        run(url, args, report)


if __name__ == "__main__":
    main()
