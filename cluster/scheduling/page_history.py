"""Remembers by hashes which pages the prefix cache has under any salt, and which it evicted.

The hash of a page is that of all tokens up to the page's end, without the salt. It is a Python integer, and differs
between processes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from worker.protocol import Int32Array

MAX_EVICTED = 1 << 16
"""Number of evicted pages that are remembered, the last ones: some 8 MB."""


class PageHistory:
    """What the prefix cache has and had. `PrefixCache` reports each page.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._cached: Counter[int] = Counter()  # for each hash, the number of salts under which the page is cached
        self._evicted: OrderedDict[tuple[bytes, int], None] = OrderedDict()  # (salt, hash), the oldest first

    def hashes(self, before: Sequence[int], tokens: Int32Array) -> Iterator[int]:
        """The hashes of the whole pages of `tokens`, which follow pages with the hashes `before`."""
        data, size = tokens.tobytes(), self._page_size * tokens.itemsize
        last = before[-1] if before else 0
        for start in range(0, len(data) - size + 1, size):
            last = hash((last, data[start : start + size]))
            yield last

    def add(self, hashes: Iterable[int]) -> None:
        """Notes that pages entered the cache."""
        self._cached.update(hashes)

    def remove(self, hashes: Iterable[int]) -> None:
        """Notes that pages left the cache, because what they hold is lost or wrong."""
        for it in hashes:
            self._cached[it] -= 1
            if not self._cached[it]:
                del self._cached[it]

    def evict(self, salt: bytes, hashes: Sequence[int]) -> None:
        """Notes that consecutive pages left the cache to make room for others. The first of them is remembered for the
        longest, since later pages are only found after it."""
        self.remove(hashes)
        self._evicted.update(((salt, it), None) for it in reversed(hashes))
        while len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def count_known(self, salt: bytes, hashes: Iterable[int]) -> tuple[int, int]:
        """Counts leading pages that the cache lacks under `salt`: evicted ones, and others that it has under another
        salt. Ends at the first page that is neither."""
        num_evicted = num_elsewhere = 0
        for it in hashes:
            if (salt, it) in self._evicted:
                num_evicted += 1
            elif it in self._cached:
                num_elsewhere += 1
            else:
                break
        return num_evicted, num_elsewhere

    def check_integrity(self, cached: Counter[int]) -> None:
        """Raises AssertionError unless `cached` counts the hashes of the pages in the cache."""
        assert self._cached == cached, "hashes of cached pages are miscounted"
