"""The notice that streams take of ranks that die and stop: nothing but a pause, and how long that is.

    python -m benchmarks.chaos MODEL [--ranks 3] [--streams 32] [--tokens 64] [--kills 50] [--stops 20]
        [--double 0] [--spares N] [--calm 0] [--seed 0] [--out FILE]
    python -m benchmarks.chaos --config CONFIG [--set KEY=VALUE ...] [--ranks 3] ...
    python -m benchmarks.chaos --plot RESULT.json

Streams greedy, sampled, guided, with penalties and logprobs, with stop strings and of several answers run again and
again, while a rank drawn at random is killed (SIGKILL) or stopped (SIGSTOP), each fault --calm seconds and some steps
after the rebuild from the one before: a spare takes some seconds to be made ready. --double of the faults strike a
second rank too, by turns at once and while the group is being rebuilt. What each stream brings is compared
with what it brought before the first fault. The pause of a stream is the time between its chunks before and after a
fault. MODEL is a directory, served on CPUs; CONFIG one of `cluster serve`, on GPUs where there are any.
What the processes hold is noted after each fault, when the group runs again: it has to stay as it was. --plot draws
that beside the JSON file of a run, as an SVG.
There only `--set numerics=exact` makes a recomputed stream the same to the bit, and random weights need a `tokenizer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]  # ships no types
import ray

from benchmarks.engine import prepared
from benchmarks.report import circumstances
from cluster.serve.placement import NodeResources, uses_gpus
from configs.load import load_app_config, parse_engine_config
from configs.schema import EngineConfig
from tests.helpers.served_group import ServedGroup, Streamed, served_config

_WORDS = "The lock of the canal holds water, the boat waits, and the keeper of the gate counts his steps. "
_KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "frequency_penalty": 0.7, "presence_penalty": 0.3, "logprobs": 3},
    {"temperature": 0.8, "repetition_penalty": 1.2, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1, "structured_outputs": {"regex": "([a-z]{2,9} ){20,}[a-z]+\\."}},
    {"temperature": 1, "n": 3, "max_tokens": 48},
    {"temperature": 1, "stop": ["the", "and"], "min_tokens": 40, "top_k": 50},
    {"temperature": 0, "prompt": 6 * _WORDS, "logit_bias": {"260": -5}, "logprobs": 1},
]

_DOUBLE = "two ranks"
_INTO_REBUILD_S = 0.3
"""Seconds after a kill at which the group is being rebuilt, but does not answer yet."""

_PANEL_WIDTH, _PANEL_HEIGHT = 240, 100  # pixels


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    """Bodies of `count` different streams of up to `tokens` tokens, of all kinds."""
    return [
        {"prompt": f"Rivers of {index} countries are", "seed": index, "max_tokens": tokens}
        | _KINDS[index % len(_KINDS)]
        for index in range(count)
    ]


def configuration(arguments: argparse.Namespace) -> EngineConfig:
    """The configuration that is served, but for `recovery`."""
    size = arguments.ranks
    if arguments.config is None:
        given = {"model": str(arguments.model), "device": "cpu", "kv_cache": {"num_tokens": 16384}}
        return parse_engine_config({**given, "tensor_parallel_size": size})
    config = load_app_config(arguments.config, [*arguments.set, f"tensor_parallel_size={size}"]).engine
    gpus = uses_gpus(config, NodeResources.from_ray(ray.nodes()))
    return config.model_copy(update={"device": "cuda" if gpus else "cpu"})


class Chaos:
    """Streams without end, and faults among them."""

    def __init__(self, group: ServedGroup, requests: list[dict[str, Any]]) -> None:
        self._group = group
        self._bodies = requests
        self._expected: list[Streamed] = []
        self._running: dict[asyncio.Task[Streamed], int] = {}
        self._ending = False
        self.struck: list[tuple[str, float, float]] = []
        """Name, time and time of the rebuild of each fault so far."""
        self.pauses: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": [], _DOUBLE: []}
        """Seconds that streams paused, by fault."""
        self.num_ended = self.num_failed = 0
        self.differing: list[dict[str, Any]] = []
        self.held: list[dict[str, float]] = []
        """Figures of `held` after each fault."""

    async def run(
        self, faults: list[tuple[signal.Signals, float | None]], random_: random.Random, calm_s: float
    ) -> None:
        """Ends when the streams that ran at the last of `faults` have. With each fault: seconds until another rank gets
        the same, or None."""
        began = time.monotonic()
        self._expected = list(await asyncio.gather(*map(self._group.stream, self._bodies)))
        streaming = asyncio.create_task(self._stream())
        await asyncio.sleep(1)
        for fault, also_after_s in faults:
            await asyncio.sleep(calm_s)
            name = fault.name if also_after_s is None else _DOUBLE
            self.struck.append((name, *await self._group.strike(fault, random_, also_after_s)))
            status = await self._group.status()
            of_processes = held(self._group.engine.facts.pid, status["pids"].values())
            at_s = round(time.monotonic() - began)
            self.held.append({"at_s": at_s, **of_processes, "pages": status["num_owned_pages"]})
        self._ending = True
        await streaming

    async def _stream(self) -> None:
        """Begins each stream again when it ends, until `_ending`."""
        for index, body in enumerate(self._bodies):
            self._running[asyncio.create_task(self._group.stream(body))] = index
        while self._running:
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, streamed = self._running.pop(task), task.result()
                self.count(streamed)
                if (difference := first_difference(self._expected[index], streamed)) is not None:
                    self.differing.append({"body": self._bodies[index], **difference})
                if not self._ending:
                    self._running[asyncio.create_task(self._group.stream(self._bodies[index]))] = index

    def count(self, streamed: Streamed) -> None:
        """Counts a stream that has ended. None is kept: this process serves HTTP, and what it holds is noted."""
        self.num_ended += 1
        self.num_failed += streamed.error is not None
        for name, at, to in self.struck:
            if (pause := streamed.pause_between(at, to)) is not None:
                self.pauses[name].append(pause)


def held(coordinator: int, ranks: Iterable[int]) -> dict[str, float]:
    """Memory in MiB, file descriptors and threads of the coordinator, the ranks together and this process, which serves
    HTTP; and what lies in /dev/shm."""
    found: dict[str, float] = {}
    for name, pids in (("coordinator", [coordinator]), ("ranks", ranks), ("http", [os.getpid()])):
        processes = [psutil.Process(pid) for pid in pids]
        found[f"{name} MiB"] = sum(it.memory_info().rss for it in processes) >> 20
        found[f"{name} files"] = sum(it.num_fds() for it in processes)
        found[f"{name} threads"] = sum(it.num_threads() for it in processes)
    shared = [entry.stat().st_size for entry in os.scandir("/dev/shm")]
    return {**found, "/dev/shm MiB": sum(shared) >> 20, "/dev/shm files": len(shared)}


def flatness(samples: list[dict[str, float]]) -> dict[str, list[float]]:
    """The median of each figure of what was held in each of ten equal parts of the run."""
    if len(samples) < 20:
        return {}
    parts = [part.tolist() for part in np.array_split(np.arange(len(samples)), 10)]
    return {name: [float(np.median([samples[index][name] for index in part])) for part in parts] for name in samples[0]}


def drawn(held: dict[str, list[float]]) -> str:
    """An SVG with a panel for each figure of `flatness`: three to a row, time and figure from 0 on."""
    times, left = held["at_s"], 60
    names = [name for name in held if name != "at_s"]
    panels = []
    for index, name in enumerate(names):
        values = held[name]
        most = max(*values, 1)
        step = 10 ** math.floor(math.log10(most))
        top = step * math.ceil(most / step)
        points = " ".join(
            f"{_PANEL_WIDTH * at / times[-1]:.1f},{_PANEL_HEIGHT * (1 - value / top):.1f}"
            for at, value in zip(times, values, strict=True)
        )
        row, column = divmod(index, 3)
        panels.append(
            f'<g transform="translate({left + column * (_PANEL_WIDTH + left)},{40 + row * (_PANEL_HEIGHT + 60)})">\n'
            f'<text y="-10" font-weight="bold">{name}: {values[0]:g} to {values[-1]:g}</text>\n'
            f'<path d="M0,0V{_PANEL_HEIGHT}H{_PANEL_WIDTH}" fill="none" stroke="#888"/>\n'
            f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/>\n'
            f'<text x="-6" y="4" text-anchor="end">{top}</text>'
            f'<text x="-6" y="{_PANEL_HEIGHT}" text-anchor="end">0</text>'
            f'<text x="{_PANEL_WIDTH}" y="{_PANEL_HEIGHT + 16}" text-anchor="end">{times[-1]:.0f} s</text>\n</g>'
        )
    width, height = left + 3 * (_PANEL_WIDTH + left), 40 + math.ceil(len(names) / 3) * (_PANEL_HEIGHT + 60)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def first_difference(expected: Streamed, got: Streamed) -> dict[str, Any] | None:
    """The place where two answers part: what of them, from which element on, and a few elements of both."""
    for what in ("error", "texts", "reasons", "tokens", "logprobs"):
        one, other = getattr(expected, what), getattr(got, what)
        if one == other:
            continue
        if what in ("error", "reasons") or one.keys() != other.keys():
            return {"what": what, "expected": str(one)[:200], "got": str(other)[:200]}
        choice = next(index for index in one if one[index] != other[index])
        one, other = one[choice], other[choice]
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        part = slice(at, at + 40)
        lengths = [len(one), len(other)]
        return {
            "what": what,
            "at": at,
            "lengths": lengths,
            "expected": str(one[part])[:200],
            "got": str(other[part])[:200],
        }
    return None


def summary(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum of seconds."""
    if not values:
        return {}
    median, p99 = np.percentile(values, (50, 99))
    return {"median_s": round(float(median), 2), "p99_s": round(float(p99), 2), "max_s": round(max(values), 2)}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    random_ = random.Random(arguments.seed)
    faults = [signal.SIGKILL] * arguments.kills + [signal.SIGSTOP] * arguments.stops
    random_.shuffle(faults)
    doubles = random_.sample(range(len(faults)), arguments.double)
    struck = [
        (fault, doubles.index(i) % 2 * _INTO_REBUILD_S if i in doubles else None) for i, fault in enumerate(faults)
    ]
    config = configuration(arguments)
    if arguments.spares is not None:
        config = config.model_copy(
            update={"recovery": config.recovery.model_copy(update={"warm_spares": arguments.spares})}
        )
    async with served_config(config, "chaos") as group:
        await prepared(group.engine)
        began = time.monotonic()
        chaos = Chaos(group, bodies(arguments.streams, arguments.tokens))
        await chaos.run(struck, random_, arguments.calm)
        await asyncio.sleep(1)  # steps of streams that have ended may be under way
        status = await group.status()
    return {
        "circumstances": circumstances(),
        "model": config.model,
        "device": config.device,
        "ranks": arguments.ranks,
        "spares": group.engine.spec.config.recovery.warm_spares,
        "calm_s": arguments.calm,
        "streams": arguments.streams,
        "faults": {name: sum(kind == name for kind, _, _ in chaos.struck) for name in chaos.pauses},
        "seconds": round(time.monotonic() - began, 1),
        "streams_ended": chaos.num_ended,
        "streams_failed": chaos.num_failed,
        "streams_that_differ": len(chaos.differing),
        "differing": chaos.differing[:5],
        "held": flatness(chaos.held),
        "num_rebuilds": status["num_rebuilds"],
        "pages_left": status["num_owned_pages"],
        "rebuilt_after": {
            name: summary([to - at for kind, at, to in chaos.struck if kind == name]) for name in chaos.pauses
        },
        "pause": {name: summary(values) for name, values in chaos.pauses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    served = parser.add_mutually_exclusive_group(required=True)
    served.add_argument("model", type=Path, nargs="?")
    served.add_argument("--config", type=Path)
    served.add_argument("--plot", type=Path, metavar="RESULT.json")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--double", type=int, default=0)
    parser.add_argument("--spares", type=int, help="default: what the config decides")
    parser.add_argument("--calm", type=float, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.plot is not None:
        arguments.plot.with_suffix(".svg").write_text(drawn(json.loads(arguments.plot.read_text())["held"]))
        return
    # The workers' way to this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    num_gpus = None if arguments.config else 0
    ray.init(address="local", num_cpus=16, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
    report = json.dumps(asyncio.run(measure(arguments)), indent=2)
    print(report)
    if arguments.out is not None:
        arguments.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
