"""A rate over the last seconds."""

from __future__ import annotations

_RATE_WINDOW_S = 10.0
# Time that the counts must span at least. A shorter time gives no usable rate.
_MIN_SPAN_S = 0.5


class RecentRate:
    """Units per second, averaged over the last one to two windows of `_RATE_WINDOW_S`."""

    def __init__(self) -> None:
        self._began: float | None = None  # start of the current window
        self._num = 0
        self._before_began = 0.0  # start of the previous window
        self._num_before = 0

    def add(self, num: int, now: float) -> None:
        """Counts `num` units at the time `now`, in seconds. `now` never decreases from call to call."""
        if self._began is None or now - self._began >= 2 * _RATE_WINDOW_S:
            # After a whole window without units, older counts do not predict the next ones.
            self._began = self._before_began = now
            self._num = self._num_before = 0
        elif now - self._began >= _RATE_WINDOW_S:
            self._before_began, self._num_before = self._began, self._num
            self._began, self._num = now, 0
        self._num += num

    def per_second(self, now: float) -> float | None:
        """The rate at the time `now`. None if the counts span less than `_MIN_SPAN_S`."""
        span = now - self._before_began
        if self._began is None or span < _MIN_SPAN_S:
            return None
        return (self._num_before + self._num) / span
