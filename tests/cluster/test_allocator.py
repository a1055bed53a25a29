"""The page allocator: every page has one owner, and the same calls give the same pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduling.page_allocator import CACHED, FREE, PageAllocator
from configs.errors import EngineError


def test_a_fresh_pool_hands_out_pages_from_one_upwards_and_never_page_zero() -> None:
    allocator = PageAllocator(5)
    assert allocator.allocate(1, 2).tolist() == [1, 2]
    assert allocator.allocate(2, 3).tolist() == [3, 4, 5]
    assert allocator.num_free == 0
    allocator.check_integrity()


def test_one_call_can_give_a_page_to_each_of_several_owners() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(np.array([4, 2, 9], np.int32), 3)
    assert allocator.owners[pages].tolist() == [4, 2, 9]


def test_asking_for_more_than_is_free_is_an_error_that_takes_nothing() -> None:
    allocator = PageAllocator(3)
    allocator.allocate(1, 1)
    with pytest.raises(EngineError, match="asked for 3 pages, 2 are free"):
        allocator.allocate(1, 3)
    assert allocator.num_free == 2


def test_a_page_is_not_freed_twice() -> None:
    allocator = PageAllocator(3)
    pages = allocator.allocate(1, 2)
    allocator.free(pages)
    with pytest.raises(EngineError, match=r"\[1, 2\] are free already"):
        allocator.free(pages)
    with pytest.raises(EngineError, match="free already"):
        allocator.transfer(pages, CACHED)
    allocator.check_integrity()


def test_the_page_freed_last_is_handed_out_first() -> None:
    allocator = PageAllocator(6)
    allocator.allocate(1, 4)
    allocator.free(np.array([2, 3], np.int32))
    assert allocator.allocate(1, 3).tolist() == [2, 3, 5]


def test_a_free_page_with_an_owner_is_found() -> None:
    allocator = PageAllocator(3)
    allocator.owners[2] = 1
    with pytest.raises(AssertionError, match="disagree"):
        allocator.check_integrity()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "cache", "free"]), st.integers(0, 6)), max_size=60))
def test_owners_agree_with_a_plain_dict_after_any_calls(calls: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(12)
    owner_of: dict[int, int] = {}
    for index, (call, count) in enumerate(calls):
        if call == "take" and count <= allocator.num_free:
            pages = allocator.allocate(index + 1, count)
            assert not owner_of.keys() & set(pages.tolist())
            owner_of.update(dict.fromkeys(pages.tolist(), index + 1))
        chosen = np.array(sorted(owner_of)[:count], np.int32)
        if call == "cache":
            allocator.transfer(chosen, CACHED)
            owner_of.update(dict.fromkeys(chosen.tolist(), CACHED))
        if call == "free":
            allocator.free(chosen)
            for page in chosen.tolist():
                del owner_of[page]
        allocator.check_integrity()
        assert allocator.num_free == 12 - len(owner_of)
        assert allocator.owners.tolist() == [owner_of.get(page, FREE) for page in range(13)]
