"""Processes that a signal has stopped: who waits for one waits for ever, so each is ended after a while.

Ranks and the Engine replica are looked after by the coordinator, the coordinator by the replica.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 0.2


def stat_fields(of: str) -> list[str]:
    """What the stat file in a directory of /proc, of a process or a thread, says from the state on. Raises OSError."""
    # The name before the state may have spaces and brackets.
    return Path(of, "stat").read_text().rpartition(")")[2].split()


def is_stopped(pid: int) -> bool:
    """Whether the process has been stopped by a signal; a debugger does that in another way."""
    with contextlib.suppress(OSError):
        return stat_fields(f"/proc/{pid}")[0] == "T"
    return False


def is_replica(pid: int) -> bool:
    """Whether it is a replica of Ray Serve, which replaces it; a command in a shell is stopped as its user likes."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ServeReplica")
    return False


def end_stopped(processes: Callable[[], Mapping[str, int]], timeout_s: float, closing: threading.Event) -> None:
    """Until `closing`, ends those of `processes` that are stopped for so long; returns at once.

    Args:
        processes: names for the log, and process ids; called several times a second, on a thread.
    """
    args = (processes, timeout_s, closing)
    threading.Thread(target=_end_stopped, args=args, name="stopped-processes", daemon=True).start()


def _end_stopped(processes: Callable[[], Mapping[str, int]], timeout_s: float, closing: threading.Event) -> None:
    since: dict[int, float] = {}  # by process id
    while not closing.wait(min(_LOOK_INTERVAL_S, timeout_s)):
        stopped = {pid: name for name, pid in processes().items() if is_stopped(pid)}
        now = time.monotonic()
        since = {pid: since.get(pid, now) for pid in stopped}
        for pid, name in stopped.items():
            if now - since[pid] >= timeout_s:
                logger.warning("%s (pid %d) is stopped for %.1f s: it is ended", name, pid, now - since[pid])
                with contextlib.suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGKILL)


class StoppedClock:
    """How long a process has been stopped, as far as looks at it can tell."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid = pid
        self._clock = clock
        self._since: float | None = None

    def look(self) -> float:
        """Seconds since the first of the looks that found it stopped, all of them in a row; 0: it is not."""
        now = self._clock()
        if not is_stopped(self._pid):
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since
