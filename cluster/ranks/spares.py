"""Spares: processes that wait to replace a dead rank. They have started and imported, which is most of a rebuild's
time.

A spare owns no device. It runs in the bundle of the CPU processes, on the node of the group's ranks, requests no
resources, and sees the node's GPUs. The dead rank's GPU stays reserved by its bundle, and the spare gets the GPU's
name. On the GPU of one of the ranks, the spare already has a context with the model's kernels.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray

from cluster.ranks.rank_actor import RankSpec

logger = logging.getLogger(__name__)

# Seconds in which a warm spare must answer, because it has nothing else to do.
_ANSWER_TIMEOUT_S = 1.0


class WarmSpares:
    """Up to `count` spares of one group. Only one thread at a time may use them.

    Args:
        start: starts a spare, given its number and a device or None, and returns its actor with the methods of
            `RankActor`.
    """

    def __init__(self, count: int, start: Callable[[int, str | None], Any]) -> None:
        self._count = count
        self._start = start
        self._numbers = itertools.count()
        # The spare and its device for each call that warms a spare up.
        self._spares: dict[ray.ObjectRef[int], tuple[Any, str | None]] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of the warm spares. Any thread may call this."""
        warm, _ = self._sorted()
        try:
            return ray.get(warm, timeout=_ANSWER_TIMEOUT_S)
        except ray.exceptions.RayError:  # a spare failed while it was warmed up
            return []

    def _sorted(self) -> tuple[list[ray.ObjectRef[int]], list[ray.ObjectRef[int]]]:
        """The finished calls of `warm_up`, and the unfinished ones."""
        calls = list(self._spares)
        return ray.wait(calls, num_returns=len(calls), timeout=0) if calls else ([], [])

    def fill(self, devices: Sequence[str]) -> None:
        """Starts missing spares. Does not wait for them.

        Args:
            devices: the ranks' GPUs. New spares go to the GPUs with the fewest spares. Empty on CPU.
        """
        while len(self._spares) < self._count:
            there = [device for _, device in self._spares.values()]
            device = min(devices, key=there.count, default=None)
            spare = self._start(next(self._numbers), device)
            self._spares[spare.warm_up.remote()] = spare, device

    def take(self, spec: RankSpec) -> Any | None:
        """Turns a spare into the rank of `spec`. None if no spare lives. A spare that is still warming up is used too,
        because it will be ready before a new process."""
        warm, warming = self._sorted()
        for call in sorted([*warm, *warming], key=lambda call: (call in warming, self._spares[call][1] != spec.device)):
            spare, _ = self._spares.pop(call)
            try:
                become = spare.become.remote(spec)
                if call in warm:
                    ray.get([call, become], timeout=_ANSWER_TIMEOUT_S)
            except ray.exceptions.RayError as error:  # includes GetTimeoutError
                logger.warning(
                    "a warm spare cannot be used; another spare or a new process takes its place: %s",
                    str(error).strip().split("\n")[0],
                )
                ray.kill(spare)
                continue
            return spare
        return None

    def close(self) -> None:
        """Ends all spares."""
        for spare, _ in self._spares.values():
            ray.kill(spare)
        self._spares.clear()
