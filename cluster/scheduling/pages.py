"""The pages of the KV pool: the owner of each page, the page table of every row, and window pages.

A page is free, then private to a row, then in the prefix cache, then free again. It may enter the cache as soon as the
step that computes it is launched: ranks run frames in order on one stream, so a later frame reads what an earlier one
wrote. If a step fails, the generation ends, and the cache drops at least the pages that the step was to compute. The
caller publishes pages after the frame is built, so no row reads a page that the same frame writes. A window page is
free as soon as the step that last reads it is launched, because later frames run later.

If two rows compute the same prefix at once, the first row puts its pages into the cache. The second row uses its
private copies until it ends (its table stays valid), then frees them. Each page has its own owner entry, so a private
copy is never mistaken for the cached page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.prefix_cache import Node, PrefixCache
from configs.errors import EngineError
from worker.protocol import Int32Array

FREE = 0
CACHED = -1
"""Owner of the pages in the prefix cache. An owner from 1 is the row that uses the page privately."""
_NO_PAGES = np.empty(0, np.int32)
_NO_DELTAS = np.empty((0, 3), np.int32)
_NO_CHANGES = np.empty((0, 2), np.int32)


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


class Prefix(NamedTuple):
    """A path in the prefix cache: the node at its end, and the pages that the row does not have yet."""

    end: Node
    pages: Int32Array


class RowPages:
    """Gives pages to rows and takes them back. Page deltas are [n, 3] int32: row, index in its table, page id."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.begin(limits)

    def begin(self, limits: SchedulerLimits) -> None:
        """Starts with empty pools of the sizes in `limits`."""
        num_rows = limits.max_num_seqs + 1
        self._page_size = limits.page_size
        self._caching = limits.enable_prefix_caching
        self.allocator = PageAllocator(limits.num_pages)
        self.cache = PrefixCache(limits.page_size)
        self._table = np.zeros((num_rows, limits.max_pages_per_row), np.int32)
        self._num_pages = np.zeros(num_rows, np.int32)
        self._weights_version = 0
        self._num_published = np.zeros(num_rows, np.int32)  # number of the row's leading pages that are in the cache
        self._nodes = [self.cache.root] * num_rows  # locked node at the end of those pages
        self._window: WindowPages | None = None
        if limits.num_window_pages is not None:
            self._window = WindowPages(limits, self._table, self.allocator.owners)

    @property
    def num_available(self) -> int:
        """Number of pages that are free or can be evicted."""
        return self.allocator.num_free + self.cache.num_evictable_pages

    @property
    def cached(self) -> Int32Array:
        """Ids of the pages in the prefix cache."""
        return np.flatnonzero(self.allocator.owners == CACHED).astype(np.int32)

    def has_room(self, num_missing: Sequence[int], num_more: int = 0) -> bool:
        """Whether the pools have pages for several rows that lack `num_missing` pages each, and `num_more` pages for
        other rows."""
        if sum(num_missing) + num_more > self.num_available:
            return False
        if (window := self._window) is None:
            return True
        return sum(min(num, window.most_row_pages) for num in num_missing) + num_more <= window.num_available

    def num_row_pages(self, row: int) -> int:
        return int(self._num_pages[row])

    def capacity(self, rows: Int32Array) -> Int32Array:
        """[len(rows)]: number of tokens that fit in each row's pages."""
        return self._num_pages[rows] * np.int32(self._page_size)

    def grow_rows(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array | None:
        """Gives each of `rows` pages for `num_tokens` tokens in total, and returns the page deltas. If too few pages
        are available, changes nothing and returns None."""
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
        pages = self.allocator.allocate(rows, count)
        self._table[rows, have] = pages
        if self._window is not None:
            self._window.place(pages)
        return np.stack((rows, have, pages), axis=1, dtype=np.int32)

    def grow(self, row: int, num_tokens: int) -> Int32Array | None:
        """Calls `grow_rows` for one row."""
        return self.grow_rows(np.array((row,), np.int32), np.array((num_tokens,), np.int32))

    def open(self, row: int, salt: bytes) -> None:
        """Starts a row without pages, until `release`. The row shares pages only with rows of the same salt and weights
        version."""
        self._nodes[row] = self.cache.lock_root(
            b"%d:%b" % (self._weights_version, salt) if self._weights_version else salt
        )

    def begin_weights_version(self) -> None:
        """Frees every page that no row uses. Rows opened from now on share nothing with older rows."""
        self.flush()
        self._weights_version += 1

    def find_prefix(self, row: int, tokens: Int32Array) -> Prefix:
        """Finds cached pages that continue the row's own pages with whole pages of `tokens`. Changes nothing.

        `tokens` follow the row's computed tokens. Nothing is found if one of the row's pages is not in the cache.
        """
        if not self._caching or self._num_published[row] != self._num_pages[row]:
            return self.no_prefix(row)
        end, pages = self.cache.match(self._nodes[row], tokens)
        if self._window is not None:
            num_usable = self._window.num_usable(int(self._num_pages[row]), pages)
            if num_usable < len(pages):
                end, pages = self.cache.match(self._nodes[row], tokens[: num_usable * self._page_size])
        return Prefix(end, pages)

    def no_prefix(self, row: int) -> Prefix:
        """The prefix that ends with the row's own pages in the cache, without pages after them."""
        return Prefix(self._nodes[row], _NO_PAGES)

    def adopt_prefix(self, row: int, prefix: Prefix) -> Int32Array:
        """Appends the pages that `find_prefix` has just found to the row, and locks them. Returns the page deltas."""
        if not len(prefix.pages):
            return _NO_DELTAS
        self.cache.lock(prefix.end)
        self.cache.unlock(self._nodes[row])
        self._nodes[row] = prefix.end
        self._num_published[row] += len(prefix.pages)
        num_own = int(self._num_pages[row])
        num_pages = num_own + len(prefix.pages)
        self._table[row, num_own:num_pages] = prefix.pages
        self._num_pages[row] = num_pages
        if self._window is not None:
            self._window.adopt(row, num_own, num_pages)
        deltas = np.full((len(prefix.pages), 3), row, np.int32)
        deltas[:, 1] = np.arange(num_own, num_pages)
        deltas[:, 2] = prefix.pages
        return deltas

    def next_page_key(self, row: int, prefix: Prefix, tokens: Int32Array) -> tuple[Node, bytes] | None:
        """A key that two rows share if all tokens up to the end of `prefix` and the page of `tokens` after it are
        equal. None if no page after `prefix` could be shared.

        `tokens` are those to compute once `prefix` is adopted.
        """
        num_pages = int(self._num_pages[row])
        if not self._caching or len(tokens) < self._page_size or self._num_published[row] != num_pages:
            return None
        return prefix.end, tokens[: self._page_size].tobytes()

    def publish(self, row: int, tokens: Int32Array, num_tokens: int) -> None:
        """Puts the whole pages of the row's first `num_tokens` tokens into the cache. The step that computes them must
        be built."""
        first, last = int(self._num_published[row]), num_tokens // self._page_size
        if not self._caching or last <= first:
            return
        pages = self._table[row, first:last]
        new_tokens = tokens[first * self._page_size : last * self._page_size]
        if self._window is not None:
            self._window.pair(pages, self.cache.match(self._nodes[row], new_tokens)[1])
        self._nodes[row], num_known = self.cache.extend(self._nodes[row], new_tokens, pages)
        self.allocator.transfer(pages[num_known:], CACHED)
        self._num_published[row] = last

    def advance_windows(self, rows: Int32Array, num_computed: Int32Array) -> None:
        """Moves the windows of distinct `rows` forward, once the step before is built. The next token of each row has
        at least position `num_computed`."""
        if self._window is not None:
            self._window.advance(rows, num_computed)

    def add_window_changes(self, builder: FrameBuilder) -> None:
        """Adds the window pages that the ranks do not know yet to the frame, as [n, 2] of (page, window page)."""
        if self._window is not None and len(changes := self._window.take_changes()):
            builder.add(window_pages=changes)

    def release(self, row: int, *, forget: bool = False) -> None:
        """Takes all pages from the row. Private pages become free, and cached pages can be evicted.

        Args:
            forget: evict the cached pages now, except pages that other rows use or continue.
        """
        if self._window is not None:
            self._window.release(row, int(self._num_pages[row]))
        pages = self._table[row, : self._num_pages[row]]
        self.allocator.free(pages[self.allocator.owners[pages] == row])
        self.cache.unlock(self._nodes[row])
        if forget:
            self._free(self.cache.forget(self._nodes[row]))
        self._nodes[row] = self.cache.root
        self._num_pages[row] = 0
        self._num_published[row] = 0

    def pages_from(self, row: int, num_tokens: int) -> Int32Array:
        """Copies the ids of the row's pages from the one with token `num_tokens` on."""
        return self._table[row, num_tokens // self._page_size : self._num_pages[row]].copy()

    def lose(self, runs: Sequence[Int32Array]) -> None:
        """Frees the pages of all `runs`, which the ranks may not have computed, and the cached pages after them. No row
        may have pages.

        With a window pool, all pages are freed: a window page may hold what was computed for another page with the same
        tokens.
        """
        if self._window is None:
            self._free(self.cache.forget_from(np.concatenate([_NO_PAGES, *runs])))
        else:
            self.flush()

    def flush(self) -> None:
        """Frees every page that no row uses."""
        self._free(self.cache.evict(self.cache.num_evictable_pages))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page has one owner, and every row has the pages that its table lists."""
        self.allocator.check_integrity()
        locked: list[Node] = [node for node in self._nodes if node is not self.cache.root]
        cached = self.cache.check_integrity(locked)
        owners = self.allocator.owners
        if self._window is not None:
            self._window.check_integrity(self._num_pages)
        assert np.array_equal(np.flatnonzero(owners == CACHED), cached), "cached pages and their owners disagree"
        for row, node in enumerate(self._nodes):
            pages = self._table[row, : self._num_pages[row]]
            private = owners[pages] == row
            assert np.array_equal(np.sort(pages[private]), np.flatnonzero(owners == row)) or row == 0, (
                f"row {row} owns pages outside its table, or one twice"
            )
            published = self.cache.path_pages(node)
            assert len(published) == self._num_published[row], f"row {row} locks another prefix than it published"
            shared = ~private
            assert not shared[len(published) :].any(), f"row {row} uses a page it does not own"
            assert np.array_equal(pages[shared], published[shared[: len(published)]]), (
                f"row {row} uses a cached page that it has not locked"
            )

    def _make_room(self, count: int) -> bool:
        """Evicts pages until `count` are free. If that is impossible, evicts nothing and returns False."""
        if count > self.num_available or (self._window is not None and count > self._window.num_available):
            return False
        short = count - self.allocator.num_free
        if short > 0:
            self._free(self.cache.evict(short))
        return True

    def _free(self, pages: Int32Array) -> None:
        """Frees pages that were removed from the cache."""
        if self._window is not None:
            self._window.forget(pages)
        self.allocator.free(pages)
