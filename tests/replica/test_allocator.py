"""Mirrored allocators: exact, deterministic, and deaf to a second free."""

from __future__ import annotations

import random
from array import array

import pytest

from phloem.core.refs import owner_of, slot_of
from phloem.replica import PageAllocator


def refs_of(packed: bytes) -> list[int]:
    return array("q", packed).tolist()


def test_pages_are_handed_out_once_and_come_back():
    allocator = PageAllocator(0, 8)
    first = refs_of(allocator.alloc(5))
    second = refs_of(allocator.alloc(3))
    assert sorted(first + second) == list(range(8))
    assert allocator.num_free == 0
    allocator.free(array("q", first).tobytes())
    assert allocator.num_free == 5
    assert sorted(refs_of(allocator.alloc(5))) == sorted(first)


def test_more_than_is_free_asserts_and_takes_nothing():
    allocator = PageAllocator(0, 4)
    allocator.alloc(3)
    with pytest.raises(AssertionError, match="2 pages asked, 1 free"):
        allocator.alloc(2)
    assert allocator.num_free == 1


def test_refs_name_their_owner():
    allocator = PageAllocator(3, 4)
    refs = refs_of(allocator.alloc(4))
    assert {owner_of(ref) for ref in refs} == {3}
    assert sorted(slot_of(ref) for ref in refs) == [0, 1, 2, 3]
    allocator.free(array("q", refs).tobytes())
    assert allocator.num_free == 4


@pytest.mark.parametrize("owner", [0, 2])
def test_o05_a_page_cannot_be_freed_twice(owner):
    allocator = PageAllocator(owner, 4)
    refs = allocator.alloc(2)
    allocator.free(refs[8:])
    with pytest.raises(AssertionError, match="not in use"):
        allocator.free(refs[8:])
    with pytest.raises(AssertionError, match="not in use"):
        allocator.free(array("q", [refs_of(refs)[0]] * 2).tobytes())


def test_a_page_that_was_never_handed_out_cannot_be_freed():
    allocator = PageAllocator(0, 4)
    allocator.alloc(1)
    for ref in (1, 3, 4, -1):
        with pytest.raises(AssertionError, match="not in use"):
            allocator.free(array("q", [ref]).tobytes())


def test_equal_histories_give_equal_pages_and_digests():
    one, two = PageAllocator(0, 64), PageAllocator(0, 64)
    rng = random.Random(7)
    held: list[bytes] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            refs = held.pop(rng.randrange(len(held)))
            one.free(refs)
            two.free(refs)
        else:
            count = rng.randint(0, min(6, one.num_free))
            refs = one.alloc(count)
            assert refs == two.alloc(count)
            held.append(refs)
        assert one.digest() == two.digest()
    assert one.num_free == 64 - sum(len(refs) // 8 for refs in held)


def test_digest_sees_the_order_of_the_free_list():
    one, two = PageAllocator(0, 4), PageAllocator(0, 4)
    refs = one.alloc(2)
    two.alloc(2)
    one.free(refs)
    two.free(refs[8:] + refs[:8])
    assert one.digest() != two.digest()


def test_an_unused_pool_costs_nothing():
    """A pool of 2^40 pages can be mirrored: memory follows the pages in use."""
    allocator = PageAllocator(0, 1 << 40)
    assert refs_of(allocator.alloc(3)) == [0, 1, 2]
    assert allocator.num_free == (1 << 40) - 3
