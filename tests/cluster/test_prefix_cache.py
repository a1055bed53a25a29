"""The radix prefix cache against a dictionary of prefixes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cluster.scheduling import page_history
from cluster.scheduling.prefix_cache import Node, PrefixCache
from worker.protocol import Int32Array

PAGE = 4


class Holder:
    """Inserts prompts as a request does: match, lock, extend; the end is to be unlocked."""

    def __init__(self, cache: PrefixCache, pages: list[int]) -> None:
        self.cache = cache
        self.free = pages

    def insert(self, tokens: list[int], salt: bytes = b"") -> tuple[Node, int]:
        """The locked end of all whole pages of `tokens`, and how many were new."""
        array = np.array(tokens, np.int32)
        root = self.cache.lock_root(salt)
        node, found = self.cache.match(root, array)
        self.cache.lock(node)
        self.cache.unlock(root)
        rest = array[len(found) * PAGE : len(array) // PAGE * PAGE]
        pages = [self.free.pop() for _ in range(len(rest) // PAGE)]
        end, num_known = self.cache.extend(node, rest, np.array(pages, np.int32))
        assert num_known == 0
        return end, len(pages)

    def put(self, tokens: list[int], salt: bytes = b"") -> None:
        self.cache.unlock(self.insert(tokens, salt)[0])

    def evict(self, count: int) -> Int32Array:
        pages = self.cache.evict(count)
        self.free += pages.tolist()
        return pages


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PAGE)


@pytest.fixture
def holder(cache: PrefixCache) -> Holder:
    return Holder(cache, list(range(100, 0, -1)))


def found_pages(cache: PrefixCache, tokens: list[int], salt: bytes) -> list[int]:
    root = cache.lock_root(salt)
    _, pages = cache.match(root, np.array(tokens, np.int32))
    cache.unlock(root)
    return pages.tolist()


def num_cached(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> int:
    return len(found_pages(cache, tokens, salt)) * PAGE


def run(*parts: tuple[int, int]) -> list[int]:
    """Tokens: `value` repeated `count` times, for each part."""
    return [value for value, count in parts for _ in range(count)]


def test_only_whole_pages_match(cache: PrefixCache, holder: Holder) -> None:
    holder.put(run((1, 11)))
    assert cache.num_pages == 2
    assert num_cached(cache, run((1, 11))) == 8
    assert num_cached(cache, run((1, 7))) == 4
    assert num_cached(cache, run((1, 3))) == 0
    assert num_cached(cache, run((1, 6), (2, 6))) == 4


def test_a_match_inside_an_edge_splits_it_and_both_parts_stay(cache: PrefixCache, holder: Holder) -> None:
    holder.put(run((1, 16)))
    holder.put(run((1, 8), (2, 8)))
    assert cache.num_pages == 6
    assert num_cached(cache, run((1, 16))) == 16
    assert num_cached(cache, run((1, 8), (2, 8))) == 16
    cache.check_integrity([])


def test_pages_come_back_in_the_order_of_their_tokens(cache: PrefixCache, holder: Holder) -> None:
    holder.put(run((1, 8)))
    holder.put(run((1, 8), (2, 8)))
    holder.put(run((1, 4), (3, 4)))
    _, pages = cache.match(cache.root, np.array(run((1, 8), (2, 8)), np.int32))
    assert pages.tolist() == [1, 2, 3, 4]


def test_pages_known_already_stay_the_callers(cache: PrefixCache, holder: Holder) -> None:
    holder.put(run((1, 8)))
    tokens = np.array(run((1, 8), (2, 4)), np.int32)
    end, num_known = cache.extend(cache.root, tokens, np.array([50, 51, 52], np.int32))
    assert num_known == 2
    assert cache.path_pages(end).tolist() == [1, 2, 52]
    cache.check_integrity([end])


def test_a_prompt_inserted_chunk_by_chunk_stays_one_node(cache: PrefixCache) -> None:
    end = cache.root
    for chunk in range(5):
        tokens = np.full(2 * PAGE, chunk, np.int32)
        end, _ = cache.extend(end, tokens, np.array([2 * chunk + 1, 2 * chunk + 2], np.int32))
        cache.check_integrity([end])
    assert end.parent is cache.root
    assert cache.path_pages(end).tolist() == list(range(1, 11))
    cache.unlock(end)
    assert cache.num_evictable_pages == 10


def test_a_node_that_others_hold_is_not_lengthened(cache: PrefixCache, holder: Holder) -> None:
    end, _ = holder.insert(run((1, 8)))
    cache.lock(end)
    longer, _ = cache.extend(end, np.array(run((2, 4)), np.int32), np.array([60], np.int32))
    assert longer.parent is end
    cache.unlock(longer)
    cache.check_integrity([end])
    assert cache.num_evictable_pages == 1


def test_what_is_inserted_does_not_change_with_the_callers_buffer(cache: PrefixCache) -> None:
    tokens, pages = np.full(8, 1, np.int32), np.array([1, 2], np.int32)
    end, _ = cache.extend(cache.root, tokens, pages)
    tokens[:], pages[:] = 9, 9
    assert num_cached(cache, run((1, 8))) == 8
    assert cache.path_pages(end).tolist() == [1, 2]


def test_the_least_recently_used_leaf_goes_first_and_from_its_tail(cache: PrefixCache, holder: Holder) -> None:
    for value in (1, 2, 3):
        holder.put(run((value, 8)))
    holder.put(run((1, 8)))  # used again
    assert sorted(holder.evict(3).tolist()) == [3, 4, 6]
    assert num_cached(cache, run((1, 8))) == 8
    assert num_cached(cache, run((2, 8))) == 0
    assert num_cached(cache, run((3, 8))) == 4
    cache.check_integrity([])


def test_a_shared_prefix_outlives_its_continuations(cache: PrefixCache, holder: Holder) -> None:
    holder.put(run((1, 8), (2, 8)))
    holder.put(run((1, 8), (3, 8)))
    holder.evict(4)
    assert num_cached(cache, run((1, 8))) == 8
    holder.evict(2)
    assert cache.num_pages == 0
    cache.check_integrity([])


def test_locked_prefixes_are_never_evicted(cache: PrefixCache, holder: Holder) -> None:
    held, _ = holder.insert(run((1, 8), (2, 8)))
    holder.put(run((1, 8), (3, 8)))
    assert (cache.num_pages, cache.num_evictable_pages) == (6, 2)
    holder.evict(2)
    assert num_cached(cache, run((1, 8), (2, 8))) == 16
    assert num_cached(cache, run((1, 8), (3, 8))) == 8
    with pytest.raises(AssertionError, match="more pages than are evictable"):
        cache.evict(1)
    cache.unlock(held)
    holder.evict(4)
    assert cache.num_pages == 0


def test_a_split_of_a_locked_edge_keeps_both_parts_locked(cache: PrefixCache, holder: Holder) -> None:
    held, _ = holder.insert(run((1, 16)))
    holder.put(run((1, 8), (2, 4)))
    assert cache.num_evictable_pages == 1
    cache.check_integrity([held])
    assert cache.path_pages(held).tolist() == [1, 2, 3, 4]
    cache.unlock(held)
    cache.check_integrity([])


def test_salts_share_nothing_and_leave_nothing_behind(cache: PrefixCache, holder: Holder) -> None:
    holder.put(run((1, 8)))
    held, num_new = holder.insert(run((1, 8), (2, 4)), b"mine")
    assert num_new == 3
    assert num_cached(cache, run((1, 8), (2, 4))) == 8
    assert num_cached(cache, run((1, 8), (2, 4)), b"mine") == 12
    assert num_cached(cache, run((1, 8), (2, 4)), b"other") == 0
    cache.check_integrity([held])
    holder.evict(2)
    assert (num_cached(cache, run((1, 8))), num_cached(cache, run((1, 8)), b"mine")) == (0, 8)
    cache.unlock(held)
    assert len(cache._salted) == 1, "its pages are still there"
    holder.evict(3)
    assert (cache.num_pages, len(cache._salted)) == (0, 0)
    cache.check_integrity([])


def known(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> tuple[int, int]:
    """Pages after the cached ones that were evicted, and that another salt has."""
    root, array = cache.lock_root(salt), np.array(tokens, np.int32)
    node, found = cache.match(root, array)
    counts = cache.count_missing(node, array[len(found) * PAGE :])
    cache.unlock(root)
    return counts


def test_pages_that_were_evicted_or_that_another_salt_has_are_known(cache: PrefixCache, holder: Holder) -> None:
    tokens = run((1, 8), (2, 8), (3, 4))
    assert known(cache, tokens) == (0, 0)
    holder.put(tokens)
    holder.put(run((1, 8), (4, 8)), b"mine")
    assert known(cache, tokens) == (0, 0), "all of them are found"
    assert known(cache, tokens, b"other") == (0, 5)
    assert known(cache, run((1, 8), (4, 5), (3, 7))) == (0, 1), "whole pages up to the first that nobody has"
    holder.evict(3)
    assert known(cache, tokens) == (3, 0)
    assert known(cache, tokens, b"other") == (0, 2), "what was evicted under a salt is known to this salt only"
    assert known(cache, run((1, 4), (2, 8))) == (0, 0), "a page is known after the tokens before it only"
    holder.evict(2)
    assert known(cache, tokens) == (5, 0)
    holder.put(run((1, 8)))
    assert known(cache, tokens) == (3, 0)
    cache.check_integrity([])


def test_only_the_last_evicted_pages_are_remembered(
    cache: PrefixCache, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_history, "MAX_EVICTED", 3)
    holder.put(run((1, 16)))
    holder.evict(4)
    assert known(cache, run((1, 16))) == (3, 0), "the last page was evicted first"


def test_a_salt_whose_prompts_fill_no_page_is_forgotten_at_once(cache: PrefixCache, holder: Holder) -> None:
    for index in range(100):
        holder.put(run((1, PAGE - 1)), b"%d" % index)
    assert len(cache._salted) == 0


def test_a_wrong_lock_count_is_found(cache: PrefixCache, holder: Holder) -> None:
    held, _ = holder.insert(run((1, 8)))
    with pytest.raises(AssertionError, match="lock count"):
        cache.check_integrity([])
    with pytest.raises(AssertionError, match="lock count"):
        cache.check_integrity([held, held])


@pytest.mark.parametrize("seed", range(25))
def test_any_sequence_of_operations_agrees_with_a_dictionary_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(PAGE)
    holder = Holder(cache, list(range(60, 0, -1)))
    known: dict[tuple[bytes, tuple[int, ...]], int] = {}
    held: list[Node] = []
    for _ in range(120):
        tokens = [rng.randrange(2) for _ in range(PAGE) for _ in range(rng.randrange(1, 3))] * rng.randrange(1, 4)
        event, salt = rng.random(), rng.choice([b"", b"", b"a", b"b"])
        whole = [(salt, tuple(tokens[: end + PAGE])) for end in range(0, len(tokens) // PAGE * PAGE, PAGE)]
        if event < 0.5 and len(whole) <= len(holder.free):
            end, _ = holder.insert(tokens, salt)
            for prefix, page in zip(whole, cache.path_pages(end).tolist(), strict=True):
                assert known.setdefault(prefix, page) == page
            held.append(end)
        elif event < 0.7 and held:
            cache.unlock(held.pop(rng.randrange(len(held))))
        elif event < 0.9:
            count = rng.randrange(cache.num_evictable_pages + 1)
            gone = set(holder.evict(count).tolist())
            assert len(gone) == count
            known = {prefix: page for prefix, page in known.items() if page not in gone}
        assert found_pages(cache, tokens, salt) == [known[prefix] for prefix in whole if prefix in known]
        pages = cache.check_integrity([node for node in held if node is not cache.root])
        assert pages.tolist() == sorted(known.values())
    for node in held:
        cache.unlock(node)
    assert len(holder.evict(cache.num_pages)) == len(known)
    assert len(cache._salted) == 0
    assert cache.check_integrity([]).tolist() == []
