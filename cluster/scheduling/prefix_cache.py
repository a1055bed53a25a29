"""Finds the whole pages that hold the KV of a token prefix: a radix tree with locks and LRU eviction.

The cache knows page ids and tokens, not rows; `RowPages` knows which rows use a page. An edge of the tree is a run of
whole pages, so the tokens of a node fill whole pages, and siblings differ in their first page.

A lock counts on every node up to the root. So an unlocked node only has unlocked nodes below it, and all pages outside
the locked paths can be evicted, leaf by leaf. Each salt has a separate tree below a node without pages, so that two
salts share nothing. Such a node is removed with its last lock and its last page, so that salts take no more memory than
pages and running requests.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

import numpy as np

from cluster.scheduling.page_history import PageHistory
from worker.protocol import Int32Array

_NOTHING = np.empty(0, np.int32)


class Node:
    """A run of whole pages. Its prefix is its parent's prefix followed by `tokens`."""

    __slots__ = ("children", "hashes", "in_heap", "last_use", "num_locks", "pages", "parent", "salt", "state", "tokens")

    def __init__(self, parent: Node | None, tokens: Int32Array, pages: Int32Array, salt: bytes = b"") -> None:
        self.parent = parent
        self.tokens = tokens
        """[num_pages * page_size]: token ids."""
        self.pages = pages
        """[num_pages]: page ids."""
        self.hashes: list[int] = []
        """[num_pages]: hashes of `PageHistory`."""
        self.children: dict[bytes, Node] = {}
        """Child nodes. A key is the bytes of the tokens in the child's first page."""
        self.salt = salt
        """The salt, if this is the top of a salt's tree (a node without pages). Empty for all other nodes."""
        self.state = 0
        """Slot of the recurrent layers' state after the node's prefix. 0 if no such state is stored."""
        self.num_locks = 0
        self.last_use = 0
        self.in_heap = False


class PrefixCache:
    """A radix tree over pages of `page_size` tokens. Deterministic: its clock counts its own operations.

    Args:
        drop_state: called with each node that has a state and loses its last page.
    """

    def __init__(self, page_size: int, drop_state: Callable[[Node], None] = lambda _node: None) -> None:
        self._page_size = page_size
        self._drop_state = drop_state
        self._history = PageHistory(page_size)
        self.root = Node(None, _NOTHING, _NOTHING)
        """The empty prefix without a salt. Locking it has no effect."""
        self._salted: dict[bytes, Node] = {}
        self.num_pages = 0
        """Number of pages in the tree."""
        self._num_locked_pages = 0
        self._clock = 0
        # Heap of evictable leaves by last use. Entries may be outdated; each node occurs at most once.
        self._heap: list[tuple[int, int, Node]] = []
        self._heap_serial = 0

    def lock_root(self, salt: bytes) -> Node:
        """Locks and returns the node of a salt's empty prefix."""
        if not salt:
            return self.root
        node = self._salted.get(salt)
        if node is None:
            node = self._salted[salt] = Node(self.root, _NOTHING, _NOTHING, salt)
        node.num_locks += 1
        return node

    @property
    def num_evictable_pages(self) -> int:
        """Number of pages that `evict` could remove now."""
        return self.num_pages - self._num_locked_pages

    def match(self, node: Node, tokens: Int32Array) -> tuple[Node, Int32Array]:
        """Finds the longest cached continuation of `node`'s prefix by whole pages of `tokens`: its end node and pages.

        If the match ends inside an edge, the edge is split, so that a node ends exactly where the match ends.
        """
        size = self._page_size
        num_left = len(tokens) // size
        offset = 0
        found: list[Int32Array] = []
        while num_left > 0:
            child = node.children.get(tokens[offset : offset + size].tobytes())
            if child is None:
                break
            num_same = self._num_common_pages(child.tokens, tokens[offset : offset + num_left * size])
            ends_inside = num_same < len(child.pages)
            node = self._split(child, num_same) if ends_inside else child
            found.append(node.pages)
            if ends_inside:
                break
            offset += num_same * size
            num_left -= num_same
        return node, np.concatenate(found) if found else _NOTHING

    def extend(self, node: Node, tokens: Int32Array, pages: Int32Array) -> tuple[Node, int]:
        """Inserts `pages`, which hold `tokens` after `node`'s prefix, and moves the caller's lock to their end. The
        caller must have a lock on `node`, unless `node` is the root.

        Returns:
            The end node, locked for the caller, and the number of leading pages with tokens that the tree already had.
            The caller keeps these pages; the pages after them now belong to the cache.
        """
        end, known = self.match(node, tokens)
        num_known = len(known)
        if num_known < len(pages):
            # The arrays are copied, because the row table reuses its buffers.
            new_tokens = tokens[num_known * self._page_size :].copy()
            new_pages = pages[num_known:].copy()
            new_hashes = list(self._history.hashes(end.hashes, new_tokens))
            self._history.add(new_hashes)
            self.num_pages += len(new_pages)
            if end is node and len(node.pages) and not node.children and node.num_locks == 1 and not node.state:
                # Only the caller uses this leaf, so it is extended: a prompt with many chunks stays one node.
                node.tokens = np.concatenate((node.tokens, new_tokens))
                node.pages = np.concatenate((node.pages, new_pages))
                node.hashes += new_hashes
                self._num_locked_pages += len(new_pages)
                return node, num_known
            leaf = Node(end, new_tokens, new_pages)
            leaf.hashes = new_hashes
            end.children[self._key(new_tokens)] = leaf
            end = leaf
        self._lock_between(end, node)
        return end, num_known

    def count_missing(self, node: Node, tokens: Int32Array) -> tuple[int, int]:
        """Counts the leading pages of `tokens`, which continue `node`'s prefix and are not in its tree: those that were
        evicted from this tree, and those that are in another salt's."""
        return self._history.count_known(self._salt(node), self._history.hashes(node.hashes, tokens))

    def _salt(self, node: Node) -> bytes:
        """The salt of `node`'s tree."""
        while node.parent is not None and not node.salt:
            node = node.parent
        return node.salt

    def lock(self, node: Node) -> None:
        """Prevents the eviction of all pages of `node`'s prefix until `unlock`."""
        self._lock_between(node, self.root)

    def unlock(self, node: Node) -> None:
        """Removes one lock from `node`. This counts as a use of its prefix."""
        self._clock += 1
        leaf = node
        while node is not self.root:
            assert node.num_locks > 0, "unlock of a prefix that is not locked"
            node.num_locks -= 1
            node.last_use = self._clock
            if node.num_locks == 0:
                self._num_locked_pages -= len(node.pages)
            assert node.parent is not None, "unlock of a prefix that is not in the tree"
            node = node.parent
        self._offer(leaf)

    def evict(self, count: int) -> Int32Array:
        """Removes the `count` least recently used pages and returns them. At least `count` pages must be evictable."""
        assert count <= self.num_evictable_pages, "evicting more pages than are evictable"
        evicted: list[Int32Array] = []
        num_left = count
        while num_left > 0:
            last_use, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.num_locks or node.children or node.parent is None:
                # Offered again when its lock or its last child is removed; or removed from the tree already.
                continue
            if last_use < node.last_use:
                self._offer(node)
                continue
            num_taken = min(num_left, len(node.pages))
            num_kept = len(node.pages) - num_taken
            # Eviction begins at the tail, because other requests share the front of a prefix.
            evicted.append(node.pages[num_kept:])
            self._history.evict(self._salt(node), node.hashes[num_kept:])
            num_left -= num_taken
            if num_kept:
                self._lose_state(node)
                node.pages = node.pages[:num_kept]
                node.tokens = node.tokens[: num_kept * self._page_size]
                node.hashes = node.hashes[:num_kept]
                self._offer(node)
                continue
            self._cut(node)
        self.num_pages -= count
        return np.concatenate(evicted) if evicted else _NOTHING

    def forget(self, node: Node) -> Int32Array:
        """Removes the last nodes of `node`'s prefix until a node is locked or has children. Returns their pages."""
        forgotten: list[Int32Array] = []
        while len(node.pages) and not node.num_locks and not node.children:
            forgotten.append(node.pages)
            self._history.remove(node.hashes)
            self.num_pages -= len(node.pages)
            node = self._cut(node)
        return np.concatenate(forgotten) if forgotten else _NOTHING

    def forget_from(self, lost: Int32Array) -> Int32Array:
        """Removes the pages `lost` from the tree, with all pages that continue them, and returns the removed pages.
        Nothing may be locked. Pages that are not in the tree are ignored."""
        forgotten: list[Int32Array] = []
        stack = [(child, False) for top in (self.root, *self._salted.values()) for child in top.children.values()]
        while stack:
            node, is_cut = stack.pop()
            assert not node.num_locks, "pages are lost while rows lock them"
            is_lost = np.isin(node.pages, lost)
            if not is_cut and is_lost.any():
                if num_kept := int(is_lost.argmax()):
                    self._split(node, num_kept)  # the node is the lower part from now on
                self._cut(node)
                is_cut = True
            stack += [(child, is_cut) for child in node.children.values()]
            if is_cut:
                self._lose_state(node)
                node.parent = None  # None marks the node as removed: `evict` may still find it in the heap
                forgotten.append(node.pages)
                self._history.remove(node.hashes)
        pages = np.concatenate(forgotten) if forgotten else _NOTHING
        self.num_pages -= len(pages)
        return pages

    def node_before(self, node: Node, num_pages: int) -> Node:
        """The node at the end of `node`'s prefix without its last `num_pages` pages. Splits an edge that ends later."""
        while num_pages and num_pages >= len(node.pages):
            num_pages -= len(node.pages)
            assert node.parent is not None, "the prefix has fewer pages"
            node = node.parent
        return self._split(node, len(node.pages) - num_pages) if num_pages else node

    def path_pages(self, node: Node) -> Int32Array:
        """Pages of `node`'s whole prefix, in order. For checks."""
        runs: list[Int32Array] = []
        while node is not self.root:
            runs.append(node.pages)
            assert node.parent is not None, "path of a node that was evicted"
            node = node.parent
        return np.concatenate(runs[::-1]) if runs else _NOTHING

    def check_integrity(self, locked: list[Node]) -> Int32Array:
        """Returns all pages of the tree, ascending. Raises AssertionError if counts, locks or keys are wrong.

        Args:
            locked: the locked nodes, one entry per lock.
        """
        expected_locks: dict[int, int] = {}
        for held in locked:
            walk: Node | None = held
            while walk is not None and walk is not self.root:
                expected_locks[id(walk)] = expected_locks.get(id(walk), 0) + 1
                walk = walk.parent
            assert walk is self.root, "a lock is held on an evicted node"
        pages: list[Int32Array] = [self.root.pages]
        hashes: Counter[int] = Counter()
        num_locked = 0
        for salt, top in self._salted.items():
            assert top.salt == salt, "the top of a salt's tree is under another salt"
            assert top.num_locks == expected_locks.get(id(top), 0), "lock count of a salt is wrong"
            assert top.num_locks or top.children, "a salt without locks and pages was kept"
        stack = [self.root, *self._salted.values()]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node, "parent link is wrong"
                assert len(child.pages) > 0, "empty node"
                assert len(child.tokens) == len(child.pages) * self._page_size, "tokens and pages disagree"
                assert key == self._key(child.tokens), "child key is wrong"
                assert child.num_locks == expected_locks.get(id(child), 0), "lock count is wrong"
                evictable = not child.num_locks and not child.children
                assert child.in_heap or not evictable, "an evictable leaf is not in the heap"
                num_locked += len(child.pages) if child.num_locks else 0
                pages.append(child.pages)
                assert child.hashes == list(self._history.hashes(node.hashes, child.tokens)), "a hash is wrong"
                hashes.update(child.hashes)
                stack.append(child)
        self._history.check_integrity(hashes)
        every = np.sort(np.concatenate(pages))
        assert len(np.unique(every)) == len(every), "a page is in the tree twice"
        assert len(every) == self.num_pages, "page count is wrong"
        assert num_locked == self._num_locked_pages, "locked page count is wrong"
        return every

    def _key(self, tokens: Int32Array) -> bytes:
        return tokens[: self._page_size].tobytes()

    def _num_common_pages(self, a: Int32Array, b: Int32Array) -> int:
        num = min(len(a), len(b))
        differ = a[:num] != b[:num]
        first = int(differ.argmax()) if num else 0
        if num and differ[first]:
            num = first
        return num // self._page_size

    def _split(self, node: Node, num_pages: int) -> Node:
        """Splits `node` after `num_pages` and returns the new upper node. `node` becomes the lower part."""
        assert node.parent is not None, "the root is never split"
        cut = num_pages * self._page_size
        upper = Node(node.parent, node.tokens[:cut], node.pages[:num_pages])
        upper.num_locks = node.num_locks
        upper.last_use = node.last_use
        node.parent.children[self._key(upper.tokens)] = upper
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[num_pages:]
        upper.hashes, node.hashes = node.hashes[:num_pages], node.hashes[num_pages:]
        node.parent = upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _lock_between(self, node: Node, ancestor: Node) -> None:
        """Locks `node` and its ancestors below `ancestor`."""
        while node is not ancestor:
            if node.num_locks == 0:
                self._num_locked_pages += len(node.pages)
            node.num_locks += 1
            assert node.parent is not None, "lock of a prefix that is not in the tree"
            node = node.parent

    def _cut(self, leaf: Node) -> Node:
        """Removes a leaf from the tree and returns its parent."""
        parent = leaf.parent
        assert parent is not None, "the root is never evicted"
        del parent.children[self._key(leaf.tokens)]
        self._lose_state(leaf)
        leaf.parent = None
        self._offer(parent)
        return parent

    def _lose_state(self, node: Node) -> None:
        if node.state:
            self._drop_state(node)

    def _offer(self, node: Node) -> None:
        """Pushes `node` to the heap if it can be evicted now. Removes the empty top of a salt's tree at once."""
        if node is self.root or node.num_locks or node.children or node.in_heap:
            return
        if node.salt:
            del self._salted[node.salt]
            node.parent = None
            return
        node.in_heap = True
        self._heap_serial += 1
        heapq.heappush(self._heap, (node.last_use, self._heap_serial, node))
