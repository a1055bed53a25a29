"""How long requests wait while another number of ranks takes over, and whether their answers are the same.

    python -m benchmarks.resize CONFIG [--set KEY=VALUE ...] --sizes 1,2,1 [--streams 32] [--tokens 400] [--json OUT]

The requests decode when each resize begins. Figures of a resize: the pause that the engine reports, and the longest
time between tokens of one stream. At the end the engine falls asleep while they decode, and is woken up. With
`--set numerics=exact` every answer has to be that of before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from functools import partial
from typing import Any

import ray

from benchmarks.engine import Driver, add_arguments, run, started_engine
from benchmarks.report import Report
from cluster.requests.engine_client import RequestStream
from cluster.serve.placement import NodeResources, uses_gpus
from cluster.serve.running_engine import describe
from configs.schema import EngineConfig
from tests.helpers.streams import chunks_of

_PROMPT_TOKENS = 128


async def _read(stream: RequestStream) -> tuple[list[int], list[float]]:
    """The tokens of `stream`, and when its chunks came."""
    tokens: list[int] = []
    times: list[float] = []
    async for chunk in chunks_of(stream):
        if chunk.token_ids:
            tokens += chunk.token_ids
            times.append(time.perf_counter())
    assert chunk.finished is not None
    assert chunk.finished.error is None, chunk.finished.error
    return tokens, times


async def benchmark(config: EngineConfig, report: Report, *, sizes: list[int], streams: int, tokens: int) -> None:
    """Measures each resize into `report`, and prints it as it is known."""
    gpus = uses_gpus(config, NodeResources.from_ray(ray.nodes()))
    figures: list[dict[str, Any]] = []
    async with started_engine(describe(config, gpus=gpus), gpus=gpus) as (engine, _):
        driver = Driver(engine, "plain")
        prompts = driver.prompts(streams, _PROMPT_TOKENS)

        async def answers() -> list[tuple[list[int], list[float]]]:
            return await asyncio.gather(*map(_read, driver.submit(prompts, [tokens] * streams)))

        expected = [found for found, _ in await answers()]
        for size in sizes[1:]:
            running = asyncio.create_task(engine.resize(size))
            differ, longest = 0, 0.0
            while not running.done():
                for (found, times), meant in zip(await answers(), expected, strict=True):
                    differ += found != meant
                    longest = max(longest, *(b - a for a, b in itertools.pairwise(times)))
            resized = await running
            figures.append({"ranks": size, "pause_s": resized.pause_s, "longest_gap_s": longest, "differ": differ})
            report.add(resizes=figures)
            print(figures[-1], flush=True)
        interrupted = asyncio.create_task(answers())
        await asyncio.sleep(1)
        slept = {"falls_asleep_s": await engine.sleep(), "wakes_up_s": await engine.sleep(wakes=True)}
        slept["differ"] = sum(found != meant for (found, _), meant in zip(await interrupted, expected, strict=True))
        report.add(sleep=slept)
        print(slept, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1, 2, 1])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    args.overrides.append(f"tensor_parallel_size={args.sizes[0]}")
    measured = partial(benchmark, sizes=args.sizes, streams=args.streams, tokens=args.tokens)
    run("resize", args, Report(args.json), measured)


if __name__ == "__main__":
    main()
