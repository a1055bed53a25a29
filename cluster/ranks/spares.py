"""Processes that wait to take the place of a rank that dies: most of a rebuild, start and imports, is behind them.

A spare owns no device. It lies in the bundle of the CPU processes, which is on the node of a group's ranks, asks for
no resources, and sees the node's GPUs: the dead rank's GPU stays reserved by the bundle that it was in, and the spare
is told which one that is. On the GPU of one of the ranks it has a context already, with the model's kernels loaded.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from cluster.ranks.rank_actor import RankSpec

logger = logging.getLogger(__name__)

# One that is warm has nothing else to do than to answer.
_ANSWER_TIMEOUT_S = 1.0


class WarmSpares:
    """Up to `count` spares of one group. One thread at a time.

    Args:
        start: starts the spare of a number, for a device or None, as an actor with the methods of `RankActor`.
    """

    def __init__(self, count: int, start: Callable[[int, str | None], Any]) -> None:
        self._count = count
        self._start = start
        self._numbers = itertools.count()
        # A spare and its device, by the call that warms it up.
        self._spares: dict[ray.ObjectRef[int], tuple[Any, str | None]] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of those that are warm; callable from another thread."""
        warm, _ = self._sorted()
        try:
            return ray.get(warm, timeout=_ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError:  # one failed while it was warmed up
            return []

    def _sorted(self) -> tuple[list[ray.ObjectRef[int]], list[ray.ObjectRef[int]]]:
        """The calls that have ended, and the others."""
        calls = list(self._spares)
        return ray.wait(calls, num_returns=len(calls), timeout=0) if calls else ([], [])

    def fill(self, devices: Sequence[str]) -> None:
        """Starts as many as are missing; returns at once.

        Args:
            devices: the ranks' GPUs; those with the fewest spares get the new ones. Empty on CPU.
        """
        while len(self._spares) < self._count:
            there = [device for _, device in self._spares.values()]
            device = min(devices, key=there.count, default=None)
            spare = self._start(next(self._numbers), device)
            self._spares[spare.warm_up.remote()] = spare, device

    def take(self, spec: RankSpec) -> Any | None:
        """A spare that becomes the rank of `spec`, its `become` called; None: there is none that lives.

        One that is still being warmed up is further on than a new process would be.
        """
        warm, warming = self._sorted()
        for call in sorted([*warm, *warming], key=lambda call: (call in warming, self._spares[call][1] != spec.device)):
            spare, _ = self._spares.pop(call)
            try:
                become = spare.become.remote(spec)
                if call in warm:
                    ray.get([call, become], timeout=_ANSWER_TIMEOUT_S)
            except ray.exceptions.RayError as error:  # GetTimeoutError is one
                logger.warning("a warm spare is of no use: %s", str(error).strip().split("\n")[0])
                ray.kill(spare)
                continue
            return spare
        return None

    def close(self) -> None:
        """Ends them."""
        for spare, _ in self._spares.values():
            ray.kill(spare)
        self._spares.clear()
