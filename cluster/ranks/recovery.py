"""Whether a group that failed is rebuilt in place, or fails as a whole: what cannot be rebuilt, how often, and why not.

A rebuild computes again what the steps in flight were about, so what is wrong with a request comes back with it. A step
that fails twice in a row with the same words, a request among what it computes that got no token in between, is taken
for that. A process that was killed leaves no words of its own, and where memory was gone the steps are smaller now:
there only the budget counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from configs.errors import ConfigError, LockstepError, OutOfMemoryError, RankLostError
from configs.schema import EngineConfig

_WINDOW_S = 600.0


def reason_never(config: EngineConfig, *, one_node: bool) -> str | None:
    """Why this group is not rebuilt whatever happens to it; None: it may be."""
    if config.recovery.max_rebuilds == 0:
        return "recovery.max_rebuilds=0"
    if not one_node:
        return "the ranks are on several nodes, where a stopped process cannot be ended"
    return None


class Recovery:
    """The judgement over one group's failures. One thread."""

    def __init__(self, max_rebuilds: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_rebuilds`: `recovery.max_rebuilds`."""
        self._max_rebuilds = max_rebuilds
        self._clock = clock
        self._began: deque[float] = deque()
        self._last: tuple[str, frozenset[tuple[int, int]]] = ("", frozenset())

    def reason_against(self, failure: LockstepError, lost: frozenset[tuple[int, int]]) -> str | None:
        """Why the group is not rebuilt after `failure`; None: it is, and that counts.

        Args:
            lost: what the steps in flight were about, as `Scheduler.requeue_all` has it.
        """
        if isinstance(failure, ConfigError):
            return "it would fail again"
        words, before = self._last
        self._last = (str(failure), lost)
        if words == str(failure) and lost & before and not isinstance(failure, RankLostError | OutOfMemoryError):
            return f"request {min(lost & before)[0]} was computed both times that this happened"
        now = self._clock()
        while self._began and self._began[0] <= now - _WINDOW_S:
            self._began.popleft()
        if len(self._began) >= self._max_rebuilds:
            return f"it was rebuilt recovery.max_rebuilds={self._max_rebuilds} times in the last ten minutes"
        self._began.append(now)
        return None
