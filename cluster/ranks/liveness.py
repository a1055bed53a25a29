"""Whether processes hang or are stopped: whoever waits for one that does would wait for ever. No Ray and no torch.

A step may take long because a rank hangs, or because the machine is busy with something else. By the wall clock the two
look alike, so a step is timed by a clock that runs while the ranks could get on with it, and hangs when that shows far
more than steps like it took. A rank that compiles a kernel says so by its thread's name, and nobody knows how long that
takes. A process that a signal has stopped says so itself: the coordinator looks after the ranks and the Engine replica,
the replica after the coordinator.
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
"""How often a step that is awaited is looked after, and processes that may be stopped."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAUSED = frozenset("DTt")
# Whoever reads the clock may have been kept from it: what happened meanwhile is not known so well.
_MOST_S = 0.5
# The other threads of ranks that wait take up to this share of an interval.
_IDLE_SHARE = 0.2
# A step may take so many times what the slowest one like it took.
_HUNG_FACTOR = 3.0
# Before a step of a kind has ended, it is taken to need so many times what the peaks allow.
_FIRST_SLOWNESS = 10.0
# A step that was slow once, on a busy machine say, is forgotten in some hundred steps.
_FORGET = 0.99
# Every step takes this, whatever is in it.
_LEAST_S = 1e-3


@dataclass(frozen=True)
class ThreadTimes:
    """One thread."""

    name: str
    state: str
    """The letter of /proc: R runs or wants to, S sleeps, D waits for a disk, T is stopped, t is traced."""
    cpu_s: float
    """Processor time it has used."""


def _stat_fields(folder: str) -> list[str]:
    """Fields of the stat file in a directory of /proc, of a process or a thread, from the name on. Raises OSError."""
    # No Path: it has the interpreter intern its parts, process and thread ids, whose table grows by MiBs in an hour.
    with open(f"{folder}/stat") as file:
        # The name may have spaces and brackets.
        before, _, after = file.read().rpartition(")")
    return [before.partition("(")[2], *after.split()]


def _thread_times(pid: int) -> dict[int, ThreadTimes]:
    """The threads of a process, by id; none when it has ended."""
    found: dict[int, ThreadTimes] = {}
    with contextlib.suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                fields = _stat_fields(task.path)
                cpu_s = (int(fields[12]) + int(fields[13])) / _TICKS_PER_S
                found[int(task.name)] = ThreadTimes(fields[0], fields[1], cpu_s)
    return found


class RankClock:
    """Seconds since `restart` in which the ranks could get on: what other programs take from them does not count.

    An interval counts in full when no thread of any rank wants a processor, so that all of them wait for what does not
    come; and where one does, as the processor time that the busiest thread got, so that an endless loop is noticed but
    a rank that is kept from running is not. Threads that are stopped, traced by a debugger, wait for a disk, or
    compile what later steps find stop the clock. One thread.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Sets it to zero; the next look begins."""
        self._seconds, self._at = 0.0, 0.0
        self._before: dict[int, ThreadTimes] | None = None

    def look(self, pids: Iterable[int]) -> float:
        """Returns what it shows now; to be called a few times a second. `pids`: of the ranks, on this node."""
        now = time.monotonic()
        threads = {tid: times for pid in pids for tid, times in _thread_times(pid).items()}
        if self._before is not None:
            self._seconds += _runnable_s(self._before, threads, min(now - self._at, _MOST_S))
        self._before, self._at = threads, now
        return self._seconds


def _runnable_s(before: dict[int, ThreadTimes], now: dict[int, ThreadTimes], passed_s: float) -> float:
    """How much of `passed_s` the threads could run."""
    states = {times.state for times in now.values()}
    if not now or states & _PAUSED or any(times.name == PREPARING for times in now.values()):
        return 0.0
    used_s = max(times.cpu_s - before[tid].cpu_s if tid in before else 0.0 for tid, times in now.items())
    if "R" not in states and used_s < _IDLE_SHARE * passed_s:
        return passed_s
    return min(used_s, passed_s)


class Liveness:
    """Learns what steps take, and says when the one that is awaited hangs. One thread.

    Args:
        peaks: FLOP/s and bytes/s that all ranks together were measured to do.
        hang_timeout_s: `recovery.hang_timeout_s`; infinite: no step is found to hang.
        clock: of the ranks.
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
        """Begins anew with ranks that together do no less than this share of the peaks."""
        self._share = share
        # The duration of the slowest step lately over what the peaks allow, by whether prompts are in the step.
        self._slowness = [_FIRST_SLOWNESS, _FIRST_SLOWNESS]

    @property
    def expected_s(self) -> float:
        """Seconds that the awaited step takes if it is like the slowest before, by what it has to compute and read."""
        return self._slowness[self._kind] * self._least_s

    def began(self, has_prompts: bool, cost: tuple[float, float]) -> None:
        """A step with these FLOPs and bytes is awaited from now on."""
        self._kind = int(has_prompts)
        least_s = sum(amount / peak for amount, peak in zip(cost, self._peaks, strict=True))
        self._least_s = _LEAST_S + least_s / self._share
        self._runnable_s = math.inf
        self._clock.restart()

    def hang(self, pids: Iterable[int]) -> StepHungError | None:
        """Whether the awaited step has had far more time than it can need; to be asked every LOOK_S.

        Args:
            pids: processes of the ranks, on this node.
        """
        if self._hang_timeout_s == math.inf:
            return None
        runnable_s = self._clock.look(pids)
        self._runnable_s = runnable_s + 2 * LOOK_S  # before the first look and after the last
        if runnable_s < self._hang_timeout_s + _HUNG_FACTOR * self.expected_s:
            return None
        # These words do not vary: what happens twice to one request is not tried again.
        words = f"by more than recovery.hang_timeout_s={self._hang_timeout_s:g}"
        return StepHungError(f"a step hangs: it has run for longer than such steps take {words}")

    def ended(self, duration_s: float) -> None:
        """The awaited step took so long by the wall clock."""
        kind, own_s = self._kind, min(duration_s, self._runnable_s)
        self._slowness[kind] = max(self._slowness[kind] * _FORGET, own_s / self._least_s)


def is_replica(pid: int) -> bool:
    """Whether it is a replica of Ray Serve, which replaces it; a command in a shell is stopped as its user likes."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica")
    return False


class StoppedClock:
    """How long processes have been stopped by a signal, as far as looks at them can tell."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> dict[int, float]:
        """The stopped processes of `pids`, with the seconds since the first look that found them so, all looks after it
        in a row. A debugger stops processes in another way."""
        now = time.monotonic()
        self._since = {pid: self._since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return {pid: now - since for pid, since in self._since.items()}


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _stat_fields(f"/proc/{pid}")[1] == "T"
    return False


def end_stopped(processes: Callable[[], Mapping[str, int]], timeout_s: float, closing: threading.Event) -> None:
    """Until `closing`, ends those of `processes` that are stopped for so long; returns at once.

    Args:
        processes: names for the log, and process ids; called several times a second, on a thread.
    """
    clock = StoppedClock()

    def look() -> None:
        while not closing.wait(min(LOOK_S, timeout_s / 4)):
            names = {pid: name for name, pid in processes().items()}
            for pid, stopped_s in clock.look(names).items():
                if stopped_s >= timeout_s:
                    logger.warning("%s (pid %d) is stopped for %.1f s: it is ended", names[pid], pid, stopped_s)
                    with contextlib.suppress(OSError):  # it has ended
                        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=look, name="stopped-processes", daemon=True).start()
