"""Which pages of the KV pool are free, and who owns the others. Knows no tokens and no devices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from configs.errors import EngineError
from worker.protocol import Int32Array

FREE = 0
CACHED = -1
"""Owner of the pages in the prefix cache. Other owners are rows, from 1."""


class PageAllocator:
    """A stack of free page ids and one owner per page. Every operation costs the pages it names, not the pool.

    The order is last in, first out: the same calls give the same pages, and a page freed too early is soon reused,
    so a test sees it.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        # Page 1 on top: a fresh pool is handed out in ascending order.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages
        self._owners = np.full(num_pages + 1, FREE, np.int32)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def owners(self) -> Int32Array:
        """[num_pages + 1] FREE, CACHED or a row, by page id. Read only; page 0 belongs to nobody."""
        return self._owners

    def allocate(self, owners: Int32Array | int, count: int) -> Int32Array:
        """Takes `count` pages for one owner, or for `owners[i]` each. Raises EngineError when fewer are free."""
        if count > self._num_free:
            raise EngineError(f"asked for {count} pages, {self._num_free} are free")
        self._num_free -= count
        pages = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self._owners[pages] = owners
        return pages

    def transfer(self, pages: Int32Array, owners: Int32Array | int) -> None:
        """Gives owned pages to another owner, or to `owners[i]` each."""
        self._check_owned(pages)
        self._owners[pages] = owners

    def free(self, pages: Int32Array) -> None:
        """Takes pages back. Raises EngineError when one of them is free already."""
        self._check_owned(pages)
        self._owners[pages] = FREE
        self._stack[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)

    def free_pages(self) -> npt.NDArray[np.int32]:
        """The free page ids, ascending. For checks."""
        return np.sort(self._stack[: self._num_free])

    def check_integrity(self) -> None:
        """Raises AssertionError unless free stack and owners say the same."""
        free = self.free_pages()
        expected = np.flatnonzero(self._owners[1:] == FREE) + 1
        assert np.array_equal(free, expected), "free stack and page owners disagree"

    def _check_owned(self, pages: Int32Array) -> None:
        if np.count_nonzero(self._owners[pages]) != len(pages):  # FREE is 0
            raise EngineError(f"pages {pages[self._owners[pages] == FREE].tolist()} are free already")
