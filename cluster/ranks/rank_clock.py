"""A clock that runs while ranks could get on with their step: what other programs take from them does not count.

A step may take long because a rank hangs, or because the machine is busy with something else. By the wall clock the two
look alike. Here an interval counts in full when no thread of any rank wants a processor, so that all of them wait for
what does not come; and where one does, as the processor time that the busiest thread got, so that an endless loop is
noticed but a rank that is kept from running is not. Threads that are stopped, traced by a debugger, or wait for a disk
stop the clock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.ranks.stopped import stat_fields

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSED = frozenset("DTt")
# Whoever reads the clock may have been kept from it: what happened meanwhile is not known so well.
_MOST_S = 0.5
# Of an interval in which the ranks waited, but for what their other threads do beside.
_IDLE_SHARE = 0.2


@dataclass(frozen=True)
class ThreadTimes:
    """One thread."""

    state: str
    """The letter of /proc: R runs or wants to, S sleeps, D waits for a disk, T is stopped, t is traced."""
    cpu_s: float
    """Processor time it has used."""


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """The threads of a process, by id; none when it has ended."""
    found: dict[int, ThreadTimes] = {}
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                fields = stat_fields(task.path)
                found[int(task.name)] = ThreadTimes(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    return found


class RankClock:
    """Seconds since `restart` in which the ranks could get on. One thread.

    Args:
        pids: of the ranks; all on this node.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        read: Callable[[int], dict[int, ThreadTimes]] = thread_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pids = pids
        self._read = read
        self._clock = clock
        self._seconds = 0.0
        self._before: dict[int, ThreadTimes] | None = None
        self._at = 0.0

    def restart(self) -> None:
        """Sets it to zero; the next look begins."""
        self._seconds, self._before = 0.0, None

    def look(self) -> float:
        """What it shows now; to be called a few times a second."""
        now = self._clock()
        threads = {tid: times for pid in self._pids() for tid, times in self._read(pid).items()}
        if self._before is not None:
            self._seconds += _possible_s(self._before, threads, min(now - self._at, _MOST_S))
        self._before, self._at = threads, now
        return self._seconds


def _possible_s(before: dict[int, ThreadTimes], now: dict[int, ThreadTimes], passed_s: float) -> float:
    """How much of `passed_s` the threads could get on."""
    states = {times.state for times in now.values()}
    if not now or states & _PAUSED:
        return 0.0
    used_s = max(times.cpu_s - before[tid].cpu_s if tid in before else 0.0 for tid, times in now.items())
    if "R" not in states and used_s < _IDLE_SHARE * passed_s:
        return passed_s
    return min(used_s, passed_s)
