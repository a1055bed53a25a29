"""Free pages, and the owner of each page."""

from __future__ import annotations

import numpy as np

from configs.errors import EngineError
from worker.protocol import Int32Array

FREE = 0
CACHED = -1
"""Owner of the pages in the prefix cache. An owner from 1 is the row that uses the page privately."""


class PageAllocator:
    """A stack of free page ids, and one owner per page.

    Each operation costs O(number of pages that it names). The order is last in, first out: the same calls give the same
    pages, and a page freed too early is soon reused, so that a test notices.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Page 1 is on top, so a new pool hands out pages in ascending order.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.num_free = num_pages
        self.owners = np.full(num_pages + 1, FREE, np.int32)
        """[num_pages + 1]: FREE, CACHED or a row, by page id. Only this class writes it. Page 0 has no owner."""

    def allocate(self, owners: Int32Array | int, count: int) -> Int32Array:
        """Takes `count` free pages for one owner, or for `owners[i]` each. Raises EngineError if fewer are free."""
        if count > self.num_free:
            raise EngineError(f"asked for {count} pages, {self.num_free} are free; please report this bug")
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self.owners[pages] = owners
        return pages

    def transfer(self, pages: Int32Array, owners: Int32Array | int) -> None:
        """Gives pages that are not free to the owners `owners[i]`, or to the one owner given."""
        self._check_owned(pages)
        self.owners[pages] = owners

    def free(self, pages: Int32Array) -> None:
        """Frees pages. Raises EngineError if one of them is free already."""
        self._check_owned(pages)
        self.owners[pages] = FREE
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the pages without an owner are on the stack of free pages."""
        free = np.sort(self._stack[: self.num_free])
        expected = np.flatnonzero(self.owners[1:] == FREE) + 1
        assert np.array_equal(free, expected), "free stack and page owners disagree"

    def _check_owned(self, pages: Int32Array) -> None:
        if np.count_nonzero(self.owners[pages]) != len(pages):  # FREE is 0
            raise EngineError(
                f"pages {pages[self.owners[pages] == FREE].tolist()} are free already; please report this bug"
            )
