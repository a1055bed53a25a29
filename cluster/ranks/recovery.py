"""Decides whether a failed group is rebuilt: never, how often, and why not.

A rebuild computes the lost steps again, so a request that causes a failure causes it again. Suppose that steps fail
twice in a row with the same message, and both times computed a request that got no token in between. Then that request
is taken for the cause. A killed process leaves no message, and after an out-of-memory error the steps are smaller; for
these failures only the number of rebuilds without a token in between counts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from configs.errors import ConfigError, LockstepError, OutOfMemoryError, RankLostError
from configs.schema import EngineConfig

_WINDOW_S = 600.0


def reason_never(config: EngineConfig, *, one_node: bool) -> str | None:
    """The reason why this group is never rebuilt, or None if it may be."""
    if config.recovery.max_rebuilds == 0:
        return "recovery.max_rebuilds=0"
    if not one_node:
        return "the ranks are on several nodes, where a stopped process cannot be ended"
    return None


class Recovery:
    """Decides whether one group is rebuilt after its failures. Used by one thread."""

    def __init__(self, max_rebuilds: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Allows `max_rebuilds` rebuilds without a token in between, `recovery.max_rebuilds`."""
        self._max_rebuilds = max_rebuilds
        self._clock = clock
        self._began: deque[float] = deque()  # times of the rebuilds since the last token
        self._num_tokens = 0
        self._last: tuple[str, frozenset[tuple[int, int]]] = ("", frozenset())

    def reason_against(
        self, failure: LockstepError, lost: frozenset[tuple[int, int]], num_tokens: int = 0
    ) -> str | None:
        """The reason why the group is not rebuilt after `failure`. None if it is rebuilt, which counts as one rebuild.

        Args:
            lost: requests in the lost steps, as returned by `Scheduler.requeue_all`.
            num_tokens: number of tokens that the group has sampled so far. If it is larger than at the last rebuild,
                the group works, so earlier rebuilds no longer count.
        """
        if isinstance(failure, ConfigError):
            return "it would fail again"
        words, before = self._last
        self._last = (str(failure), lost)
        if words == str(failure) and lost & before and not isinstance(failure, RankLostError | OutOfMemoryError):
            return f"request {min(lost & before)[0]} was computed both times that this happened"
        if num_tokens > self._num_tokens:
            self._began.clear()
        self._num_tokens = num_tokens
        now = self._clock()
        while self._began and self._began[0] <= now - _WINDOW_S:
            self._began.popleft()
        if len(self._began) >= self._max_rebuilds:
            return f"it was rebuilt recovery.max_rebuilds={self._max_rebuilds} times without a token in between"
        self._began.append(now)
        return None
