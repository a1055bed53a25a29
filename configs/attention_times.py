"""Measured times of the attention backends, and the backends' order by these times.

`python -m benchmarks.attention --times` writes the table attention_times.csv. Do not edit it by hand.
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
    """Measured times of one step on one GPU. Its rows are all alike, with 16-bit queries, keys and values."""

    compute_capability: tuple[int, int]
    kv_heads: str
    """Number of KV heads, or `LATENT`."""
    num_q_heads: int
    batch_size: int
    new: int
    """Number of input tokens per row."""
    prefix: int
    """Number of cached tokens per row."""
    run: str = field(compare=False)
    """Date, commit and GPU of the measurement."""
    us: dict[str, float] = field(compare=False)
    """Microseconds per layer, by backend."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Backends ordered by their times in some of the measured steps."""

    us: dict[str, float]
    """Microseconds per layer by backend, fastest first: the geometric mean over the steps."""
    what: str
    """A description of the steps."""


def read_times(path: Path = TIMES) -> list[StepTimes]:
    """Reads the table at `path`."""
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
    """Writes `measured` into the table at `path` and replaces older times of the same steps. Steps with times of a
    single backend are dropped, since they decide nothing."""
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
    """Orders the backends for decodes or for all other steps. Empty if nothing was measured.

    Layers with keys and values have one order, whatever their number of heads.

    Args:
        capability: compute capability of the GPUs. The nearest measured one is used. If None, all are used.
        latent_heads: number of query heads of latent layers. The nearest measured number is used. If None, the order is
            for layers with keys and values.
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
