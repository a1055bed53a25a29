"""When requests expire. Knows ids and times only; whoever calls it brings the clock."""

from __future__ import annotations

import heapq
from collections.abc import Container


class Deadlines:
    """Deadlines by request id. Each operation costs O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Deadlines kept, of ended requests too."""
        return len(self._heap)

    def add(self, request_id: int, at: float, live: Container[int], num_live: int) -> None:
        """Sets the deadline of a request.

        Args:
            live: ids that have not ended, at least `num_live`; the deadlines of all others may be forgotten.
        """
        heapq.heappush(self._heap, (at, request_id))
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[int]:
        """Ids whose deadline is `now` or has passed, earliest first; each is named once, whether it lives or not."""
        expired: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            expired.append(heapq.heappop(self._heap)[1])
        return expired
