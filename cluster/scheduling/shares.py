"""Each client's share of rows and KV pages, and which request is preempted first.

Every client with a running or waiting request has an equal share. A client may hold more than its share while no other
client waits. A client may always have one row, even if there are more clients than rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cluster.scheduling.request import Request


class Shares:
    """The rows and pages that each client holds.

    Args:
        running: each request with a row, and its number of pages. The request admitted last comes first.
        waiting: clients of waiting requests.
    """

    def __init__(
        self, running: Sequence[tuple[Request, int]], waiting: Iterable[str], num_rows: int, num_pages: int
    ) -> None:
        self._running = [request for request, _ in running]
        self._rows: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        for request, count in running:
            self.add(request.terms.client, count)
        self._num_rows, self._num_pages = num_rows, num_pages
        self._share = 1 / max(len({*waiting, *self._rows}), 1)

    def add(self, client: str, num_pages: int) -> None:
        """Counts one more row of a client, with its pages."""
        self._rows[client] += 1
        self._pages[client] += num_pages

    def has_its_share(self, client: str) -> bool:
        """Whether the client has a row, and one more would exceed its share."""
        return self._rows[client] > 0 and self._usage(client, num_more=1) > self._share

    def victim(self, *, level: int | None = None) -> Request | None:
        """The request to preempt, or None if no request has to yield. It is chosen by the last level, then the client
        that holds most, then the last priority, then the latest admission.

        Args:
            level: level of a request that waits for a row or pages. Only a client over its share yields to that
                request: it gives up a request at this level or after it, and keeps at least one row. None: pages have
                run out, and any running request may have to yield.
        """
        requests = self._running
        if level is not None:
            over = {it for it, rows in self._rows.items() if rows > 1 and self._usage(it) > self._share}
            requests = [it for it in requests if it.terms.level >= level and it.terms.client in over]
        if not requests:
            return None
        first = max(requests, key=lambda it: (it.terms.level, self._usage(it.terms.client)))
        same = [it for it in requests if (it.terms.level, it.terms.client) == (first.terms.level, first.terms.client)]
        return max(same, key=lambda it: it.terms.priority)

    def _usage(self, client: str, num_more: int = 0) -> float:
        return max((self._rows[client] + num_more) / self._num_rows, self._pages[client] / self._num_pages)
