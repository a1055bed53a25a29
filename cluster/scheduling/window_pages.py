"""The window pages of the KV pool: the pages of layers with a sliding window.

A window page is free as soon as the step that last reads it is launched, because later frames run later.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.page_allocator import CACHED, PageAllocator
from worker.protocol import Int32Array

_NO_CHANGES = np.empty((0, 2), np.int32)


class WindowPages:
    """The window pages, and which pages have one in the window pool.

    Page ids, page tables and the prefix cache do not depend on window pages. A page must have a window page while the
    page is in the window of a row, that is, while a token that the row has yet to compute sees it.

    A page outside all windows loses its window page. It does so at once if no other row can ever find the page.
    Otherwise it does so when window pages run short, in the order in which the pages left the last window. If the last
    window of a cached prefix has lost window pages, a row computes that prefix again, into private pages. When such a
    copy leaves the row's window, its window page goes to the cached page, so that other rows find the prefix again.

    Args:
        limits: limits with a window pool.
        table: [num_rows, max_pages]: page ids of every row.
        owners: [num_pages + 1]: owner of each page: FREE, CACHED or a row.
    """

    def __init__(self, limits: SchedulerLimits, table: Int32Array, owners: Int32Array) -> None:
        assert limits.num_window_pages is not None, "no window pool"
        self._page_size = limits.page_size
        self._window = limits.window
        self.most_row_pages = limits.max_window_pages_per_row
        """Maximum number of window pages that a row uses at any time."""
        self._table = table
        self._owners = owners
        self._first = np.zeros(len(table), np.int32)  # index of the first page in each row's window
        self._allocator = PageAllocator(limits.num_window_pages)  # the owner of a window page is the page that has it
        self._window_page_of = np.zeros(len(owners), np.int32)  # window page of each page; 0 if it has none
        self._num_users = np.zeros(len(owners), np.int32)
        self._originals = np.zeros(len(owners), np.int32)  # the cached page with the same tokens as each private copy
        # Pages with a window page outside all windows, in the order in which they left the last one.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._placed: list[Int32Array] = []

    @property
    def num_available(self) -> int:
        """Number of window pages that are free or can be taken from pages outside all windows."""
        return self._allocator.num_free + len(self._idle)

    def place(self, pages: Int32Array) -> None:
        """Gives each of a row's new pages a window page. At least `len(pages)` window pages must be available."""
        short = len(pages) - self._allocator.num_free
        if short > 0:
            self._vacate(np.array([self._idle.popitem(last=False)[0] for _ in range(short)], np.int32))
        self._window_page_of[pages] = self._allocator.allocate(pages, len(pages))
        self._num_users[pages] = 1
        self._originals[pages] = 0
        self._placed.append(pages)

    def num_usable(self, num_computed_pages: int, found: Int32Array) -> int:
        """Number of the cached pages `found` that a row can use: the window after them must have all window pages.

        The row has computed exactly its own pages, and those in its window have window pages.
        """
        index = num_computed_pages + np.arange(len(found), dtype=np.int32)
        last_missing = np.maximum.accumulate(np.where(self._window_page_of[found] == 0, index, -1))
        usable = np.flatnonzero(last_missing < self._first_seen((index + 1) * self._page_size))
        return int(usable[-1]) + 1 if len(usable) else 0

    def adopt(self, row: int, num_own: int, num_pages: int) -> None:
        """Adds the row's cached pages, from `num_own` to `num_pages` in its table, to its window. The row continues
        after them."""
        first, pages = int(self._first_seen(num_pages * self._page_size)), self._table[row]
        self._leave(pages[self._first[row] : min(first, num_own)])
        entered = pages[max(first, num_own) : num_pages]
        self._num_users[entered] += 1
        for page in entered.tolist():
            self._idle.pop(page, None)
        self._first[row] = first

    def advance(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """Moves the windows of distinct `rows` forward. The next token of each is at `num_computed` or later."""
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
        """Records that a row's private pages `copies` hold the same tokens as the cached pages `originals`. The
        originals stay locked while the row has the copies."""
        self._originals[copies[: len(originals)]] = originals

    def release(self, row: int, num_pages: int) -> None:
        """Removes all of the row's `num_pages` pages from its window, because the row ends."""
        self._leave(self._table[row, self._first[row] : num_pages])
        self._first[row] = 0

    def forget(self, pages: Int32Array) -> None:
        """Frees the window pages of `pages`, which are outside all windows."""
        pages = pages[self._window_page_of[pages] > 0]
        for page in pages.tolist():
            self._idle.pop(page, None)
        self._vacate(pages)

    def take_changes(self) -> Int32Array:
        """Returns [n, 2] of (page, window page) for pages that got a window page since the last call, each once."""
        if not self._placed:
            return _NO_CHANGES
        pages = np.unique(np.concatenate(self._placed))
        pages = pages[self._window_page_of[pages] > 0]
        self._placed.clear()
        return np.stack((pages, self._window_page_of[pages]), axis=1)

    def check_integrity(self, num_pages: Int32Array) -> None:
        """Raises AssertionError if window pages, windows, users and idle pages contradict each other.

        Args:
            num_pages: [num_rows]: number of pages of each row.
        """
        self._allocator.check_integrity()
        resident = np.flatnonzero(self._window_page_of)
        assert np.array_equal(self._allocator.owners[self._window_page_of[resident]], resident), (
            "a place has another page"
        )
        assert len(resident) + self._allocator.num_free == self._allocator.num_pages, "a window page is lost"
        users = np.zeros_like(self._num_users)
        for row, end in enumerate(num_pages):
            assert self._first[row] <= end, f"the window of row {row} begins past its pages"
            users[self._table[row, self._first[row] : end]] += 1
        assert np.array_equal(users, self._num_users), "users of pages are miscounted"
        assert (self._window_page_of[users > 0] > 0).all(), "a page in a window is not resident"
        assert sorted(self._idle) == resident[users[resident] == 0].tolist(), "idle pages are wrong"
        assert (self._owners[list(self._idle)] == CACHED).all(), "a page that no row can find is resident"

    def _first_seen(self, position: int | Int32Array) -> npt.NDArray[np.int32]:
        """Index of the first page that a token at `position` sees."""
        return np.maximum(position - (self._window - 1), 0) // self._page_size

    def _leave(self, pages: Int32Array) -> None:
        """Removes each of `pages` from one window. A page may occur several times."""
        np.subtract.at(self._num_users, pages, 1)
        pages = np.unique(pages[self._num_users[pages] == 0])
        is_cached = self._owners[pages] == CACHED
        self._idle.update(dict.fromkeys(pages[is_cached].tolist()))
        pages = pages[~is_cached]
        if self._originals[pages].any():
            self._transfer_window_pages(pages)
        self._vacate(pages[self._window_page_of[pages] > 0])

    def _transfer_window_pages(self, copies: Int32Array) -> None:
        """Gives window pages of copies outside all windows to their originals that have none."""
        originals, first = np.unique(self._originals[copies], return_index=True)
        lacks_window_page = (originals > 0) & (self._window_page_of[originals] == 0)
        originals, copies = originals[lacks_window_page], copies[first[lacks_window_page]]
        window_pages = self._window_page_of[copies]
        self._allocator.transfer(window_pages, originals)
        self._window_page_of[originals], self._window_page_of[copies] = window_pages, 0
        self._idle.update(dict.fromkeys(originals.tolist()))
        self._placed.append(originals)

    def _vacate(self, pages: Int32Array) -> None:
        self._allocator.free(self._window_page_of[pages])
        self._window_page_of[pages] = 0
