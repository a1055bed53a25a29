"""Times of attention backends, as `benchmarks.attention` measured them, and the order in which they put backends.

The table, attention_times.csv, is written by `python -m benchmarks.attention --times`, never by hand.
"""

from __future__ import annotations

import csv
import functools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

TIMES = Path(__file__).with_name("attention_times.csv")
LATENT = "latent"
_SIZES = ("kv_heads", "num_q_heads", "batch_size", "new", "prefix")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a step of rows that are alike, on a GPU; queries, keys and values have 16 bits an element."""

    compute_capability: tuple[int, int]
    kv_heads: str
    """Their number, or `LATENT`."""
    num_q_heads: int
    batch_size: int
    new: int
    """Input tokens of each row."""
    prefix: int
    """Tokens of each row that are in the cache."""
    run: str = field(compare=False)
    """The date, the commit and the GPU that it was measured on."""
    us: dict[str, float] = field(compare=False)
    """Microseconds of one layer by backend."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Backends by their times in some steps."""

    us: dict[str, float]
    """Microseconds of one layer by backend, the fastest first: the geometric mean over the steps."""
    what: str
    """The steps, in words."""


def read_times(path: Path = TIMES) -> list[StepTimes]:
    """The table at `path`."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        StepTimes(
            _capability(line.pop("compute_capability")),
            line.pop("kv_heads"),
            int(line.pop("num_q_heads")),
            int(line.pop("batch_size")),
            int(line.pop("new")),
            int(line.pop("prefix")),
            line.pop("run"),
            {name: float(us) for name, us in line.items() if us},
        )
        for line in lines
    ]


def write_times(measured: Iterable[StepTimes], path: Path = TIMES) -> None:
    """Writes `measured` into the table at `path`, in the place of what it had of the same steps.

    Steps of which one backend alone was timed are left out: they leave nothing to choose.
    """
    rows = {step: step for step in read_times(path)} if path.exists() else {}
    for step in measured:
        if len(step.us) > 1:
            rows.pop(step, None)
            rows[step] = step
    names = sorted({name for step in rows.values() for name in step.us})
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["compute_capability", *_SIZES, *names, "run"])
        for step in rows.values():
            sizes = (getattr(step, name) for name in _SIZES)
            times = (f"{step.us[name]:.1f}" if name in step.us else "" for name in names)
            writer.writerow(["{}.{}".format(*step.compute_capability), *sizes, *times, step.run])


@functools.cache
def rank(*, is_decode: bool, capability: tuple[int, int] | None, latent_heads: int | None) -> Ranking:
    """The order of backends for decodes, or for all other steps; without a backend where none was measured.

    Heads that share keys have one order, whatever their numbers.

    Args:
        capability: compute capability of the GPUs, for which the nearest that was measured stands. None: all do.
        latent_heads: query heads of latent layers, likewise. None: of layers with keys and values.
    """
    steps = [it for it in read_times() if (it.kv_heads == LATENT) == (latent_heads is not None)]
    steps = [it for it in steps if (it.new == 1) == is_decode]
    if capability is not None:
        steps = _nearest(steps, lambda it: abs(_number(it.compute_capability) - _number(capability)))
    if latent_heads is not None:
        steps = _nearest(steps, lambda it: abs(math.log(it.num_q_heads / latent_heads)))
    names = set[str]().union(*(it.us for it in steps)).intersection(*(it.us for it in steps))
    means = {name: statistics.geometric_mean(it.us[name] for it in steps) for name in sorted(names)}
    where = " and ".join(f"sm{_number(it)}" for it in sorted({it.compute_capability for it in steps}))
    what = f"{len(steps)} steps measured on {where}"
    if latent_heads is not None and steps:
        what += f" with {steps[0].num_q_heads} heads"
    return Ranking(dict(sorted(means.items(), key=lambda it: it[1])), what)


def _nearest(steps: list[StepTimes], distance: Callable[[StepTimes], float]) -> list[StepTimes]:
    least = min(map(distance, steps), default=0.0)
    return [it for it in steps if distance(it) == least]


def _number(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
