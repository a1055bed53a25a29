"""Which pages have a place in the window pool: the pool of the layers whose queries see the last few tokens only.

Page ids, page tables and the prefix cache know nothing of it. A page is *resident* while it has a page of the window
pool beside the one that all other layers keep. It must be while it is in the window of a row, that is, while a token
that the row has yet to compute sees it. What has left the windows of all rows goes on without its place: at once if no
other row can ever find it, else when places run short, the ones that left first before the others.

A cached prefix whose last window is not resident is computed again, into pages of the row's own. Where such a copy has
left the row's window its place goes to the cached page, so that others find the prefix again.

Why a place is free as soon as the step that last reads it is launched: ranks run frames in order on one stream.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from cluster.scheduling.allocator import CACHED, PageAllocator
from cluster.scheduling.limits import SchedulerLimits
from worker.protocol import Int32Array

_NO_CHANGES = np.empty((0, 2), np.int32)


class WindowPages:
    """Gives places in the window pool to pages of rows, and takes them back.

    Args:
        limits: with a window.
        table: [num_rows, max_pages] the pages of every row.
        owners: [num_pages + 1] of each page: FREE, CACHED or a row.
    """

    def __init__(self, limits: SchedulerLimits, table: Int32Array, owners: Int32Array) -> None:
        assert limits.num_window_pages is not None, "no window pool"
        self._page_size = limits.page_size
        self._window = limits.window
        self._most_row_pages = limits.max_window_pages_per_row
        self._table = table
        self._owners = owners
        self._first = np.zeros(len(table), np.int32)  # of each row: index of the first page in its window
        self._allocator = PageAllocator(limits.num_window_pages)  # its owners are pages
        self._places = np.zeros(len(owners), np.int32)  # by page; 0: not resident
        self._num_users = np.zeros(len(owners), np.int32)
        self._originals = np.zeros(len(owners), np.int32)  # of a row's copy: the cached page with the same tokens
        self._idle: OrderedDict[int, None] = OrderedDict()  # resident, in no window; those that left first come first
        self._placed: list[Int32Array] = []

    @property
    def num_available(self) -> int:
        """Places that are free or can be taken from pages in no window."""
        return self._allocator.num_free + len(self._idle)

    def num_needed(self, num_missing: int) -> int:
        """Most places that a row with a prompt takes at any time, if it lacks `num_missing` pages."""
        return min(num_missing, self._most_row_pages)

    def place(self, pages: Int32Array) -> None:
        """Makes pages resident that rows have just got; `num_available` are at least as many."""
        short = len(pages) - self._allocator.num_free
        if short > 0:
            self._vacate(np.array([self._idle.popitem(last=False)[0] for _ in range(short)], np.int32))
        self._places[pages] = self._allocator.allocate(pages, len(pages))
        self._num_users[pages] = 1
        self._originals[pages] = 0
        self._placed.append(pages)

    def num_usable(self, num_computed_pages: int, found: Int32Array) -> int:
        """How many of the cached pages `found` behind a row's own a row can go on after: its window must be resident.

        The row has computed its own pages and no more, and those in its window are resident.
        """
        index = num_computed_pages + np.arange(len(found), dtype=np.int32)
        last_missing = np.maximum.accumulate(np.where(self._places[found] == 0, index, -1))
        usable = np.flatnonzero(last_missing < self._first_seen((index + 1) * self._page_size))
        return int(usable[-1]) + 1 if len(usable) else 0

    def adopt(self, row: int, num_own: int, num_pages: int) -> None:
        """The row got usable cached pages behind `num_own` of its own, `num_pages` in all, and goes on after them."""
        first, pages = int(self._first_seen(num_pages * self._page_size)), self._table[row]
        self._leave(pages[self._first[row] : min(first, num_own)])
        entered = pages[max(first, num_own) : num_pages]
        self._num_users[entered] += 1
        for page in entered.tolist():
            self._idle.pop(page, None)
        self._first[row] = first

    def advance(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """Moves the windows of distinct `rows` on: the next token of each has at least position `num_computed`."""
        first = self._first_seen(num_computed)
        counts = first - self._first[rows]
        moved = counts > 0
        if not moved.any():
            return
        rows, first, counts = rows[moved], first[moved], counts[moved]
        self._first[rows] = first
        index = np.repeat(first - np.cumsum(counts), counts) + np.arange(int(counts.sum()))
        self._leave(self._table[np.repeat(rows, counts), index])

    def pair(self, copies: Int32Array, originals: Int32Array) -> None:
        """The first of a row's private pages `copies` hold what the cached pages `originals` hold, which the row locks
        as long as it has the copies."""
        self._originals[copies[: len(originals)]] = originals

    def release(self, row: int, num_pages: int) -> None:
        """The row gives its `num_pages` pages up."""
        self._leave(self._table[row, self._first[row] : num_pages])
        self._first[row] = 0

    def forget(self, pages: Int32Array) -> None:
        """Pages in no window are free."""
        pages = pages[self._places[pages] > 0]
        for page in pages.tolist():
            self._idle.pop(page, None)
        self._vacate(pages)

    def take_changes(self) -> Int32Array:
        """[n, 2] of (page, place), for what has become resident since the last call, each page once."""
        if not self._placed:
            return _NO_CHANGES
        pages = np.unique(np.concatenate(self._placed))
        pages = pages[self._places[pages] > 0]
        self._placed.clear()
        return np.stack((pages, self._places[pages]), axis=1)

    def check_integrity(self, num_pages: Int32Array) -> None:
        """Raises AssertionError unless every place has one page, and windows, users and idle pages agree.

        Args:
            num_pages: [num_rows] of each row.
        """
        self._allocator.check_integrity()
        resident = np.flatnonzero(self._places)
        assert np.array_equal(self._allocator.owners[self._places[resident]], resident), "a place has another page"
        assert len(resident) + self._allocator.num_free == self._allocator.num_pages, "a place is lost"
        users = np.zeros_like(self._num_users)
        for row, end in enumerate(num_pages):
            assert self._first[row] <= end, f"the window of row {row} begins past its pages"
            users[self._table[row, self._first[row] : end]] += 1
        assert np.array_equal(users, self._num_users), "users of pages are miscounted"
        assert (self._places[users > 0] > 0).all(), "a page in a window is not resident"
        assert sorted(self._idle) == resident[users[resident] == 0].tolist(), "idle pages are wrong"
        assert (self._owners[list(self._idle)] == CACHED).all(), "a page that no row can find is resident"

    def _first_seen(self, position: int | Int32Array) -> npt.NDArray[np.int32]:
        """Index of the first page that a token at `position` sees."""
        return np.maximum(position - (self._window - 1), 0) // self._page_size

    def _leave(self, pages: Int32Array) -> None:
        """Pages leave a window each."""
        np.subtract.at(self._num_users, pages, 1)
        pages = np.unique(pages[self._num_users[pages] == 0])
        is_cached = self._owners[pages] == CACHED
        self._idle.update(dict.fromkeys(pages[is_cached].tolist()))
        pages = pages[~is_cached]
        if self._originals[pages].any():
            self._bequeath(pages)
        self._vacate(pages[self._places[pages] > 0])

    def _bequeath(self, copies: Int32Array) -> None:
        """Gives the places of copies in no window to their originals that have none."""
        originals, first = np.unique(self._originals[copies], return_index=True)
        lacks_place = (originals > 0) & (self._places[originals] == 0)
        originals, copies = originals[lacks_place], copies[first[lacks_place]]
        places = self._places[copies]
        self._allocator.transfer(places, originals)
        self._places[originals], self._places[copies] = places, 0
        self._idle.update(dict.fromkeys(originals.tolist()))
        self._placed.append(originals)

    def _vacate(self, pages: Int32Array) -> None:
        self._allocator.free(self._places[pages])
        self._places[pages] = 0
