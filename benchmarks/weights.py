"""How long no step runs while other weights take the place of those that serve, and what streams notice of it.

    python -m benchmarks.weights CONFIG [--set KEY=VALUE ...] [--streams 16] [--rounds 3] [--json OUT]

Requests decode all the while. In each round, and for each way in which they may go on, the weights become random ones
of another revision, so that CONFIG has `load_format: dummy`. Figures of a round: seconds in which the weights were
read, the memory they waited in, the pause, and between tokens of one stream the median and the longest time; of
`finish`, that is the time in which new requests were held as well. Dummy weights on GPUs are made in the device's
memory, faster than files are read.

    python -m benchmarks.weights benchmarks/dummy.yaml --set model=benchmarks/models/qwen3-8b
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from functools import partial
from typing import Any

import ray

from benchmarks.engine import Driver, add_arguments, run, started_engine
from benchmarks.report import Report
from cluster.requests.engine_client import RequestStream
from cluster.serve.placement import NodeResources, uses_gpus
from cluster.serve.running_engine import describe
from configs.errors import ConfigError
from configs.schema import EngineConfig
from tests.helpers.streams import chunks_of

_PROMPT_TOKENS = 128


async def _times(stream: RequestStream) -> list[float]:
    """When tokens of `stream` came, to its end."""
    return [time.perf_counter() async for chunk in chunks_of(stream) if chunk.token_ids]


async def measure(driver: Driver, model: str, running: str, revision: str, streams: int) -> dict[str, Any]:
    """One change of weights under `streams` requests."""
    # Requests that have to end with the old weights are short.
    most = driver.max_model_len - _PROMPT_TOKENS - 1
    count = min(most, 512 if running == "finish" else most)
    asked = driver.submit(driver.prompts(streams, _PROMPT_TOKENS), [count] * streams)
    reading = [asyncio.create_task(_times(stream)) for stream in asked]
    await asyncio.sleep(1.0)
    changed = await driver.engine.update_weights(model, revision=revision, running=running)
    await asyncio.sleep(0.5)
    for stream in asked:
        stream.abort()
    gaps = [b - a for times in await asyncio.gather(*reading) for a, b in itertools.pairwise(times)]
    return {
        "running": running,
        "staged_in": changed.staged_in,
        "load_s": round(changed.load_s, 3),
        "pause_ms": round(1e3 * changed.pause_s, 2),
        "gap_ms": round(1e3 * statistics.median(gaps), 3),
        "longest_gap_ms": round(1e3 * max(gaps), 2),
    }


async def benchmark(config: EngineConfig, report: Report, *, streams: int, rounds: int) -> None:
    """Measures every way `rounds` times into `report`, and prints each round as it is known."""
    if config.load_format != "dummy":
        raise ConfigError("this measures random weights, of which there are others; set load_format=dummy")
    gpus = uses_gpus(config, NodeResources.from_ray(ray.nodes()))
    figures: list[dict[str, Any]] = []
    async with started_engine(describe(config, gpus=gpus), gpus=gpus) as (engine, _):
        driver = Driver(engine, "greedy")
        for i, running in itertools.product(range(rounds), ("continue", "recompute", "finish")):
            figures.append(await measure(driver, config.model, running, f"{running}-{i}", streams))
            report.add(changes=figures)
            print(figures[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    measured = partial(benchmark, streams=args.streams, rounds=args.rounds)
    run("weights", args, Report(args.json), measured)


if __name__ == "__main__":
    main()
