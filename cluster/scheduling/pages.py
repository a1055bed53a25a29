"""The pages of the KV pool: the page table of every row, and which pages and states the prefix cache has.

A page is free, then private to a row, then in the prefix cache, then free again. It may enter the cache as soon as the
step that computes it is launched: ranks run frames in order on one stream, so a later frame reads what an earlier one
wrote. If a step fails, the generation ends, and the cache drops at least the pages that the step was to compute. The
caller publishes pages after the frame is built, so no row reads a page that the same frame writes.

If two rows compute the same prefix at once, the first row puts its pages into the cache. The second row uses its
private copies until it ends (its table stays valid), then frees them. Each page has its own owner entry, so a private
copy is never mistaken for the cached page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cluster.messages.engine import Miss
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.page_allocator import CACHED, PageAllocator
from cluster.scheduling.prefix_cache import Node, PrefixCache
from cluster.scheduling.state_slots import StateSlots
from cluster.scheduling.window_pages import WindowPages
from configs.recurrent import STATE_CHUNK
from worker.protocol import Int32Array

_NO_PAGES = np.empty(0, np.int32)
_NO_DELTAS = np.empty((0, 3), np.int32)


class Prefix(NamedTuple):
    """A path in the prefix cache: the node at its end, and the pages that the row does not have yet."""

    end: Node
    pages: Int32Array
    missed: dict[Miss, int]
    """Number of tokens after `pages` that the cache has or had, for each reason why a new row cannot use them."""


class Kept(NamedTuple):
    """What is in the prefix cache, for ranks that take it over."""

    pages: Int32Array
    """Ids of its pages."""
    slots: Int32Array
    """Slots of its states."""


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
        self._states = None if limits.num_states is None else StateSlots(limits.max_num_seqs, limits.num_states)
        drop_state = {} if self._states is None else {"drop_state": self._states.drop}
        self.cache = PrefixCache(limits.page_size, **drop_state)
        self._table = np.zeros((num_rows, limits.max_pages_per_row), np.int32)
        self._num_pages = np.zeros(num_rows, np.int32)
        self._weights_version = 0
        # Tokens on the ranks after the last retired step, and how many of them its state may cover.
        self._num_on_ranks = np.zeros(num_rows, np.int32)
        self._num_certain = np.zeros(num_rows, np.int32)
        self._branch = np.zeros(num_rows, np.int32)  # number of tokens where cached pages, but no state, were found
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
    def num_dropped_states(self) -> int:
        """Number of states that the prefix cache dropped for others since `begin`."""
        return 0 if self._states is None else self._states.num_dropped

    @property
    def kept(self) -> Kept:
        """What other ranks have to take over to continue with the prefix cache."""
        slots = np.empty(0, np.int32) if self._states is None else self._states.used
        return Kept(np.flatnonzero(self.allocator.owners == CACHED).astype(np.int32), slots)

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
        self._branch[row] = self._num_certain[row] = 0

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
        size, num_own = self._page_size, int(self._num_pages[row])
        end, pages = self.cache.match(self._nodes[row], tokens)
        missed: dict[Miss, int] = {}
        if not num_own:
            evicted, elsewhere = self.cache.count_missing(end, tokens[len(pages) * size :])
            missed |= {Miss.EVICTED: evicted * size, Miss.OTHER_SALT: elsewhere * size}
        if self._window is not None:
            num_usable = self._window.num_usable(num_own, pages)
            if num_usable < len(pages):
                missed[Miss.NO_WINDOW] = (len(pages) - num_usable) * size
                end, pages = self.cache.match(self._nodes[row], tokens[: num_usable * size])
        if self._states is not None:
            self._branch[row] = (num_own + len(pages)) * size
            while end is not self._nodes[row] and not end.state:
                pages = pages[: len(pages) - len(end.pages)]
                assert end.parent is not None, "the row's node is above"
                end = end.parent
            whole = int(self._branch[row]) // STATE_CHUNK * STATE_CHUNK
            missed[Miss.NO_STATE] = max(whole - (num_own + len(pages)) * size, 0)
        return Prefix(end, pages, {why: num for why, num in missed.items() if num})

    def no_prefix(self, row: int) -> Prefix:
        """The prefix that ends with the row's own pages in the cache, without pages after them."""
        return Prefix(self._nodes[row], _NO_PAGES, {})

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
        if self._states is not None:
            self._states.adopt(row, prefix.end, num_pages * self._page_size)
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

    def num_shareable(self, start: int, length: int, num_same: int) -> int:
        """How many tokens of another row's chunk a row can take from the prefix cache after the step. The chunk begins
        at token `start` and has `length` tokens; the row's next tokens equal its first `num_same`. Without recurrent
        layers the row takes whole pages. With them it takes all tokens up to the state at the chunk's end."""
        if self._states is None:
            return num_same // self._page_size * self._page_size
        covered = (start + length) // STATE_CHUNK * STATE_CHUNK - start
        return covered if 0 < covered <= num_same else 0

    def state_end(self, row: int, start: int, stop: int, prompt_end: int) -> int:
        """The end of a chunk that would cover tokens `start` to `stop` of a prompt. The chunk ends before `stop` if
        other rows can then use the state there: where the prompt parts from a cached one, or before the prompt's last
        `STATE_CHUNK` tokens, because no row takes the last token from the cache. Others end in whole chunks of
        `STATE_CHUNK` tokens. A chunk that begins after a stored state ends where the next one is, so that no kernel
        reads recent entries while it replaces them."""
        if self._states is None:
            return stop
        if start % STATE_CHUNK:
            return min(stop, -(-start // STATE_CHUNK) * STATE_CHUNK)
        if not self._caching:
            return stop
        if stop < prompt_end and stop - start > STATE_CHUNK:
            stop = stop // STATE_CHUNK * STATE_CHUNK
        places = self._state_places(row, prompt_end)
        ends_before = stop % STATE_CHUNK == 0 and stop == prompt_end
        return min((it for it in places if start < it < stop and (it == places[0] or ends_before)), default=stop)

    def _state_places(self, row: int, prompt_end: int) -> tuple[int, int]:
        """Numbers of tokens after which other rows can use the row's state: where its prompt parts from a cached one,
        and before the prompt's last tokens."""
        return int(self._branch[row]) // STATE_CHUNK * STATE_CHUNK, (prompt_end - 1) // STATE_CHUNK * STATE_CHUNK

    def keep_state(self, row: int, num_known: int, prompt_end: int = 0) -> None:
        """Stores the row's state in the prefix cache, if the state covers only tokens among the first `num_known`. Call
        once the copies of states before the last step are in its frame, and the row's pages are published.

        Args:
            prompt_end: number of tokens to prefill, of a row in prefill.
        """
        if self._states is None or not self._caching:
            return
        covered = int(self._num_certain[row]) // STATE_CHUNK * STATE_CHUNK
        num_pages = covered // self._page_size
        if not covered or covered > num_known or self._num_published[row] < num_pages:
            return
        node = self.cache.node_before(self._nodes[row], int(self._num_published[row]) - num_pages)
        places = self._state_places(row, prompt_end)
        self._states.keep(row, node, covered, is_inside=covered < places[1] and covered != places[0])

    def lose_states(self, first_lost: int | None) -> None:
        """Removes states from the prefix cache: those that steps from `first_lost` on were to store, or all if it is
        None. Call before rows of lost steps are released."""
        if self._states is not None:
            self._num_certain[self._states.lose(first_lost)] = 0

    def lose_state(self, row: int, start: int, most: int) -> None:
        """Notes that steps are lost that would have computed the row's tokens from `start` to at most `most`. If they
        would have moved its state forward, nobody knows what the state covers, and it is not kept."""
        certain = min(int(self._num_certain[row]), start)
        self._num_certain[row] = certain if most // STATE_CHUNK == certain // STATE_CHUNK else 0

    def note_chunk(self, row: int, end: int) -> None:
        """Notes that a step computes a chunk of the row's prompt that ends before token `end`."""
        self._num_certain[row] = self._num_on_ranks[row] = end

    def note_tokens(self, rows: Int32Array, counts: Int32Array | int) -> None:
        """Notes that a step has retired that brought `counts` tokens to distinct `rows`, dropped ones included. Its
        state covers no tokens of drafts, and so those before these tokens."""
        self._num_certain[rows] = self._num_on_ranks[rows]
        self._num_on_ranks[rows] += counts

    def add_state_copies(self, builder: FrameBuilder, step: int) -> None:
        """Adds the copies of states before `step` to its frame."""
        if self._states is not None and len(copies := self._states.take_copies(step)):
            builder.add(state_copies=copies)

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
        if self._states is not None:
            self._states.release(row)
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
        if self._states is not None:
            self._states.check_integrity()
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
