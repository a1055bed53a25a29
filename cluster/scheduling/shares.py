"""Shares of clients in the rows of the batch and in the KV pages, and whose rows are preempted first.

Every client that runs or waits has an equal share. One may hold more as long as no other client waits for it. A client
may always have one row, also where there are more clients than rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Holding(NamedTuple):
    """A row that a request holds."""

    row: int
    client: str
    num_pages: int
    """Pages of the row, those that it shares with other rows included."""
    level: int
    priority: int
    admission: int
    """Order of admission: a larger number was admitted later."""


class Shares:
    """Rows and pages that each client holds, of as many as there are.

    Args:
        holdings: the rows of all requests that run.
        waiting: clients of requests that wait.
    """

    def __init__(self, holdings: Iterable[Holding], waiting: Iterable[str], num_rows: int, num_pages: int) -> None:
        self._holdings = list(holdings)
        self._rows: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        for holding in self._holdings:
            self.add(holding.client, holding.num_pages)
        self._num_rows, self._num_pages = num_rows, num_pages
        self._share = 1 / max(len({*waiting, *self._rows}), 1)

    def add(self, client: str, num_pages: int) -> None:
        """Counts one row more, with its pages."""
        self._rows[client] += 1
        self._pages[client] += num_pages

    def has_its_share(self, client: str) -> bool:
        """Whether one row more is more than the client's share."""
        rows, pages = self._rows[client], self._pages[client]
        return rows > 0 and max((rows + 1) / self._num_rows, pages / self._num_pages) > self._share

    def victim(self, *, level: int | None = None) -> int | None:
        """The row to preempt: at the last level, of the client that holds most, its last priority, the newest.

        Args:
            level: of a request that waits for a row or pages. Only a client over its share has to yield to it, with a
                row at this level or after it, and keeps at least one row. None: pages have run out, and one row must
                go.

        Returns:
            None if nobody has to yield.
        """
        rows = self._holdings
        if level is not None:
            rows = [it for it in rows if it.level >= level and self._rows[it.client] > 1 and self._is_over(it.client)]
        if not rows:
            return None
        last = max(holding.level for holding in rows)
        rows = [holding for holding in rows if holding.level == last]
        client = max(rows, key=lambda holding: (self._usage(holding.client), holding.admission)).client
        rows = [holding for holding in rows if holding.client == client]
        return max(rows, key=lambda holding: (holding.priority, holding.admission)).row

    def _usage(self, client: str) -> float:
        return max(self._rows[client] / self._num_rows, self._pages[client] / self._num_pages)

    def _is_over(self, client: str) -> bool:
        return self._usage(client) > self._share
