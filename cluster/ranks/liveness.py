"""Detects processes that hang or are stopped, because their peers would wait for them without end. Uses neither Ray nor
torch.

A step may be slow because a rank hangs, or because the machine is busy with other programs. Wall-clock time cannot
distinguish the two. So a step is timed by a clock that runs only while the ranks could make progress. The step hangs if
that clock shows far more time than similar steps took. A rank that compiles a kernel marks this in its thread's name,
because compilation takes an unknown time. /proc shows whether a signal has stopped a process: the coordinator checks
the ranks and the Engine replica, and the replica checks the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.errors import StepHungError
from worker.step.preparing import PREPARING

logger = logging.getLogger(__name__)

LOOK_S = 0.2
"""Seconds between two checks whether a step hangs, or whether processes are stopped."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSED = frozenset("DTt")
# Maximum seconds that one interval adds to the clock. After a longer one, the checking thread itself was delayed.
_MOST_S = 0.5
# Ranks count as waiting if their busiest thread used less than this share of an interval.
_IDLE_SHARE = 0.2
# Multiple of the slowest similar step's time that a step may take, besides `hang_timeout_s`.
_HUNG_FACTOR = 3.0
# Before a first step has ended, steps are expected to take this multiple of what the measured peaks allow.
_FIRST_SLOWNESS = 10.0
# Decay per step, so that a step that was slow once (on a busy machine) is forgotten after some hundred steps.
_FORGET = 0.99
# Seconds that every step takes, whatever it computes.
_LEAST_S = 1e-3


@dataclass(frozen=True)
class ThreadTimes:
    """The state of one thread."""

    name: str
    state: str
    """State letter in /proc: R running or runnable, S sleeping, D waiting for a disk, T stopped, t traced."""
    cpu_s: float
    """CPU seconds that the thread has used."""


def _stat_fields(folder: str) -> list[str]:
    """The fields of a stat file in /proc, from the process's name on. Raises OSError if the process has ended."""
    # A Path interns its parts, and process and thread ids would grow that table by MiBs per hour, so this is a string.
    with open(f"{folder}/stat") as file:
        # The name may contain spaces and brackets.
        before, _, after = file.read().rpartition(")")
    return [before.partition("(")[2], *after.split()]


def _thread_times(pid: int) -> dict[int, ThreadTimes]:
    """The threads of a process by thread id. Empty if the process has ended."""
    found: dict[int, ThreadTimes] = {}
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                fields = _stat_fields(task.path)
                cpu_s = (int(fields[12]) + int(fields[13])) / _TICKS_PER_S
                found[int(task.name)] = ThreadTimes(fields[0], fields[1], cpu_s)
    return found


class RankClock:
    """Counts the seconds since `restart` in which the ranks could make progress. Time that other programs take from
    them does not count.

    An interval counts in full if no thread of any rank wants a processor: all of them then wait for something that does
    not come. Otherwise the interval counts as the CPU time of the busiest thread. So an endless loop is noticed, but a
    rank that gets no processor is not blamed. The clock stops while a thread is stopped, traced by a debugger, waiting
    for a disk, or compiling a kernel. One thread uses the clock.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Sets the clock to zero and starts the next interval."""
        self._seconds, self._at = 0.0, 0.0
        self._before: dict[int, ThreadTimes] | None = None

    def look(self, pids: Iterable[int]) -> float:
        """Advances the clock and returns its value in seconds. Call this a few times a second.

        Args:
            pids: processes of the ranks, on this node.
        """
        now = time.monotonic()
        threads = {tid: times for pid in pids for tid, times in _thread_times(pid).items()}
        if self._before is not None:
            self._seconds += _runnable_s(self._before, threads, min(now - self._at, _MOST_S))
        self._before, self._at = threads, now
        return self._seconds


def _runnable_s(before: dict[int, ThreadTimes], now: dict[int, ThreadTimes], passed_s: float) -> float:
    """The part of an interval of `passed_s` seconds in which the threads could make progress."""
    states = {times.state for times in now.values()}
    if not now or states & _PAUSED or any(times.name == PREPARING for times in now.values()):
        return 0.0
    used_s = max(times.cpu_s - before[tid].cpu_s if tid in before else 0.0 for tid, times in now.items())
    if "R" not in states and used_s < _IDLE_SHARE * passed_s:
        return passed_s
    return min(used_s, passed_s)


class Liveness:
    """Learns how long steps take, and detects when the step that the coordinator waits for hangs. Used by one thread.

    Args:
        peaks: measured FLOP/s and bytes/s, all ranks together.
        hang_timeout_s: `recovery.hang_timeout_s`. Infinite: no step counts as hung.
        clock: counts the time in which the ranks could make progress.
    """

    def __init__(
        self,
        peaks: tuple[float, float] = (math.inf, math.inf),
        hang_timeout_s: float = math.inf,
        clock: RankClock | None = None,
    ) -> None:
        self._peaks = peaks
        self._hang_timeout_s = hang_timeout_s
        self._clock = clock or RankClock()
        self._kind, self._least_s = 0, _LEAST_S
        self._runnable_s = math.inf
        self.begin(1.0)

    def begin(self, share: float) -> None:
        """Forgets earlier steps, because other ranks run now, which reach `share` of the peaks together."""
        self._share = share
        # The slowest recent step without prompts, and with prompts: duration divided by what the peaks allow.
        self._slowness = [_FIRST_SLOWNESS, _FIRST_SLOWNESS]

    @property
    def expected_s(self) -> float:
        """Expected seconds of the current step, from what it computes and reads, if it is as slow as the slowest recent
        one."""
        return self._slowness[self._kind] * self._least_s

    def began(self, has_prompts: bool, cost: tuple[float, float]) -> None:
        """Starts to time a step with `cost` (FLOPs, bytes)."""
        self._kind = int(has_prompts)
        least_s = sum(amount / peak for amount, peak in zip(cost, self._peaks, strict=True))
        self._least_s = _LEAST_S + least_s / self._share
        self._runnable_s = math.inf
        self._clock.restart()

    def hang(self, pids: Iterable[int]) -> StepHungError | None:
        """An error if the current step has had far more time than it can need, else None. Call this every LOOK_S.

        Args:
            pids: processes of the ranks, on this node.
        """
        if self._hang_timeout_s == math.inf:
            return None
        runnable_s = self._clock.look(pids)
        self._runnable_s = runnable_s + 2 * LOOK_S  # before the first check and after the last one
        if runnable_s < self._hang_timeout_s + _HUNG_FACTOR * self.expected_s:
            return None
        # This text is always the same, because a failure that repeats for the same request is recognised by its text.
        words = f"by more than recovery.hang_timeout_s={self._hang_timeout_s:g}"
        return StepHungError(f"a step hangs: it has run for longer than such steps take {words}")

    def ended(self, duration_s: float) -> None:
        """Records the wall-clock seconds that the current step took."""
        kind, own_s = self._kind, min(duration_s, self._runnable_s)
        self._slowness[kind] = max(self._slowness[kind] * _FORGET, own_s / self._least_s)


def is_replica(pid: int) -> bool:
    """Whether this process is a Ray Serve replica, which Ray Serve would replace. Other processes, such as a command in
    a shell, may be stopped on purpose."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica")
    return False


class StoppedClock:
    """Measures how long processes have been stopped by a signal, from repeated checks."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> dict[int, float]:
        """Seconds for which each stopped process in `pids` has been stopped, counted from the first check that found it
        so. A process that a debugger stops does not count."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return {pid: now - since for pid, since in self._since.items()}


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _stat_fields(f"/proc/{pid}")[1] == "T"
    return False


def end_stopped(processes: Callable[[], Mapping[str, int]], timeout_s: float, closing: threading.Event) -> None:
    """Starts a thread that kills processes that have been stopped for `timeout_s` seconds, until `closing` is set.

    Args:
        processes: returns the process ids by name, for the log. The thread calls it several times a second.
    """
    clock = StoppedClock()

    def look() -> None:
        while not closing.wait(min(LOOK_S, timeout_s / 4)):
            names = {pid: name for name, pid in processes().items()}
            for pid, stopped_s in clock.look(names).items():
                if stopped_s >= timeout_s:
                    logger.warning("killing %s (pid %d), which has been stopped for %.1f s", names[pid], pid, stopped_s)
                    with contextlib.suppress(OSError):  # the process has ended meanwhile
                        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=look, name="stopped-processes", daemon=True).start()
