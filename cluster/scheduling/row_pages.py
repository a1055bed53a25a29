"""The page table of every row, and the life of a page: free, private to a row, in the prefix cache, free again.

Why a page may enter the cache as soon as the step that computes it is launched: ranks run frames in order on one
stream, so a later frame reads what an earlier one wrote; if a step fails, the generation ends and the cache with it.
The caller publishes after the frame is built, so no row reads a page that the same frame writes.

When two rows compute the same prefix at once, the first puts its pages into the cache; the second keeps its private
copies until it ends (its table stays valid) and frees them then. Ownership is kept per page, so such a copy is never
mistaken for the cached page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cluster.scheduling.allocator import CACHED, PageAllocator
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.prefix_cache import Node, PrefixCache
from cluster.scheduling.window_pages import WindowPages
from worker.protocol import Int32Array

_NO_PAGES = np.empty(0, np.int32)
_NO_DELTAS = np.empty((0, 3), np.int32)
_NO_CHANGES = np.empty((0, 2), np.int32)


class Prefix(NamedTuple):
    """A path of the prefix cache: the node it ends at, and the pages that are new to the row."""

    end: Node
    pages: Int32Array


class RowPages:
    """Gives pages to rows and takes them back. Page deltas are [n, 3] int32 of (row, index in the table, page id)."""

    def __init__(self, limits: SchedulerLimits) -> None:
        num_rows = limits.max_num_seqs + 1
        self._page_size = limits.page_size
        self._caching = limits.enable_prefix_caching
        self._allocator = PageAllocator(limits.num_pages)
        self._cache = PrefixCache(limits.page_size)
        self._table = np.zeros((num_rows, limits.max_pages_per_row), np.int32)
        self._num_pages = np.zeros(num_rows, np.int32)
        self._num_published = np.zeros(num_rows, np.int32)  # leading pages of the row that are known to the cache
        self._nodes = [self._cache.root] * num_rows  # the end of those pages, locked
        self._window: WindowPages | None = None
        if limits.num_window_pages is not None:
            self._window = WindowPages(limits, self._table, self._allocator.owners)

    @property
    def allocator(self) -> PageAllocator:
        return self._allocator

    @property
    def cache(self) -> PrefixCache:
        return self._cache

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self._allocator.num_free + self._cache.num_evictable_pages

    def has_room(self, num_missing: Sequence[int], num_more: int = 0) -> bool:
        """Whether rows with prompts that lack `num_missing` pages each can have them, and others `num_more` pages."""
        if sum(num_missing) + num_more > self.num_available:
            return False
        window = self._window
        return window is None or sum(map(window.num_needed, num_missing)) + num_more <= window.num_available

    def num_row_pages(self, row: int) -> int:
        return int(self._num_pages[row])

    def grow_rows(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array | None:
        """Gives each of `rows` pages for `num_tokens` tokens in all; returns the deltas, or None, with nothing done."""
        have = self._num_pages[rows]
        needy = num_tokens > have * self._page_size
        rows, have = rows[needy], have[needy]
        if not len(rows):
            return _NO_DELTAS
        counts = -(-num_tokens[needy] // self._page_size) - have
        count = int(counts.sum())
        if not self._make_room(count):
            return None
        self._num_pages[rows] = have + counts
        if count > len(rows):
            have = np.repeat(have - np.cumsum(counts) + counts, counts) + np.arange(count, dtype=np.int32)
            rows = np.repeat(rows, counts)
        pages = self._allocator.allocate(rows, count)
        self._table[rows, have] = pages
        if self._window is not None:
            self._window.place(pages)
        return np.stack((rows, have, pages), axis=1, dtype=np.int32)

    def grow(self, row: int, num_tokens: int) -> Int32Array | None:
        """Gives `row` pages for `num_tokens` tokens in all; returns the deltas, or None, with nothing done."""
        count = -(-num_tokens // self._page_size) - int(self._num_pages[row])
        if count <= 0:
            return _NO_DELTAS
        if not self._make_room(count):
            return None
        pages = self._allocator.allocate(row, count)
        if self._window is not None:
            self._window.place(pages)
        return self._append(row, pages)

    def open(self, row: int, salt: bytes) -> None:
        """Begins a row without pages, which shares pages only with rows of the same salt. Ended by `release`."""
        self._nodes[row] = self._cache.lock_root(salt)

    def find_prefix(self, row: int, tokens: Int32Array) -> Prefix:
        """Cached pages that go on where the row's own end, with whole pages of `tokens`. Changes nothing.

        `tokens` follow what the row has computed. Nothing is found unless all its pages are known to the cache.
        """
        if not self._caching or self._num_published[row] != self._num_pages[row]:
            return self.no_prefix(row)
        end, pages = self._cache.match(self._nodes[row], tokens)
        if self._window is not None:
            num_usable = self._window.num_usable(int(self._num_pages[row]), pages)
            if num_usable < len(pages):
                end, pages = self._cache.match(self._nodes[row], tokens[: num_usable * self._page_size])
        return Prefix(end, pages)

    def no_prefix(self, row: int) -> Prefix:
        """The end of the row's own pages that are known to the cache, and nothing more."""
        return Prefix(self._nodes[row], _NO_PAGES)

    def adopt_prefix(self, row: int, prefix: Prefix) -> Int32Array:
        """Appends what `find_prefix` has just found for the row, locked; returns the deltas."""
        if not len(prefix.pages):
            return _NO_DELTAS
        self._cache.lock(prefix.end)
        self._cache.unlock(self._nodes[row])
        self._nodes[row] = prefix.end
        self._num_published[row] += len(prefix.pages)
        num_own = int(self._num_pages[row])
        deltas = self._append(row, prefix.pages)
        if self._window is not None:
            self._window.adopt(row, num_own, num_own + len(prefix.pages))
        return deltas

    def next_page_key(self, row: int, prefix: Prefix, tokens: Int32Array) -> tuple[Node, bytes] | None:
        """What two rows have in common when all up to the end of `prefix` and the page of `tokens` after it are alike.

        `tokens` are those not computed once `prefix` is adopted. None where no page after them could be shared.
        """
        num_pages = int(self._num_pages[row])
        if not self._caching or len(tokens) < self._page_size or self._num_published[row] != num_pages:
            return None
        return prefix.end, tokens[: self._page_size].tobytes()

    def publish(self, row: int, tokens: Int32Array, num_tokens: int) -> None:
        """Makes the whole pages of the row's first `num_tokens` tokens, all computed, known to the cache."""
        first, last = int(self._num_published[row]), num_tokens // self._page_size
        if not self._caching or last <= first:
            return
        pages = self._table[row, first:last]
        new_tokens = tokens[first * self._page_size : last * self._page_size]
        if self._window is not None:
            self._window.pair(pages, self._cache.match(self._nodes[row], new_tokens)[1])
        self._nodes[row], num_known = self._cache.extend(self._nodes[row], new_tokens, pages)
        self._allocator.transfer(pages[num_known:], CACHED)
        self._num_published[row] = last

    def advance_windows(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """The next token of each of distinct `rows` has at least position `num_computed`: pages before its window are
        in it no more. To be called when the step before is built."""
        if self._window is not None:
            self._window.advance(rows, num_computed)

    def take_window_changes(self) -> Int32Array:
        """[n, 2] of (page, page of the window pool) that ranks do not know yet."""
        return _NO_CHANGES if self._window is None else self._window.take_changes()

    def release(self, row: int, *, forget: bool = False) -> None:
        """Takes all pages from the row: its private ones are free, those of the cache can be evicted.

        Args:
            forget: evict them now, but for those that others use or have gone on from.
        """
        if self._window is not None:
            self._window.release(row, int(self._num_pages[row]))
        pages = self._table[row, : self._num_pages[row]]
        self._allocator.free(pages[self._allocator.owners[pages] == row])
        self._cache.unlock(self._nodes[row])
        if forget:
            self._free(self._cache.forget(self._nodes[row]))
        self._nodes[row] = self._cache.root
        self._num_pages[row] = 0
        self._num_published[row] = 0

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has exactly one owner and every row holds what its table says."""
        self._allocator.check_integrity()
        locked: list[Node] = [node for node in self._nodes if node is not self._cache.root]
        cached = self._cache.check_integrity(locked)
        owners = self._allocator.owners
        if self._window is not None:
            self._window.check_integrity(self._num_pages)
        assert np.array_equal(np.flatnonzero(owners == CACHED), cached), "cached pages and their owners disagree"
        for row, node in enumerate(self._nodes):
            pages = self._table[row, : self._num_pages[row]]
            private = owners[pages] == row
            assert np.array_equal(np.sort(pages[private]), np.flatnonzero(owners == row)) or row == 0, (
                f"row {row} owns pages outside its table, or one twice"
            )
            published = self._cache.path_pages(node)
            assert len(published) == self._num_published[row], f"row {row} locks another prefix than it published"
            shared = ~private
            assert not shared[len(published) :].any(), f"row {row} uses a page it does not own"
            assert np.array_equal(pages[shared], published[shared[: len(published)]]), (
                f"row {row} uses a cached page that it has not locked"
            )

    def _append(self, row: int, pages: Int32Array) -> Int32Array:
        first = int(self._num_pages[row])
        last = first + len(pages)
        self._table[row, first:last] = pages
        self._num_pages[row] = last
        deltas = np.empty((len(pages), 3), np.int32)
        deltas[:, 0] = row
        deltas[:, 1] = np.arange(first, last)
        deltas[:, 2] = pages
        return deltas

    def flush(self) -> None:
        """Frees every page that no row uses."""
        self._evict(self._cache.num_evictable_pages)

    def _make_room(self, count: int) -> bool:
        """Evicts until `count` pages are free. False, with nothing evicted, if that cannot be."""
        if count > self.num_available or (self._window is not None and count > self._window.num_available):
            return False
        short = count - self._allocator.num_free
        if short > 0:
            self._evict(short)
        return True

    def _evict(self, count: int) -> None:
        self._free(self._cache.evict(count))

    def _free(self, pages: Int32Array) -> None:
        """Frees pages that the cache has given up."""
        if self._window is not None:
            self._window.forget(pages)
        self._allocator.free(pages)
