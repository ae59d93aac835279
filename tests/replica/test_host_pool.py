"""The host arena's mirrored allocator: holds and limbo."""

from __future__ import annotations

import random
from array import array

import pytest

from phloem.replica import HostPool


def slots(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def test_a_held_slot_that_is_freed_comes_back_when_it_is_released():
    pool = HostPool(4)
    taken = pool.alloc(4)
    pool.hold(taken)
    pool.free(taken)
    assert (pool.num_free, pool.num_limbo) == (0, 4)
    pool.release(taken)
    assert (pool.num_free, pool.num_limbo, pool.num_held) == (4, 0, 0)


def test_holds_count():
    pool = HostPool(1)
    taken = pool.alloc(1)
    pool.hold(taken)
    pool.hold(taken)
    pool.free(taken)
    pool.release(taken)
    assert pool.num_free == 0
    pool.release(taken)
    assert pool.num_free == 1


@pytest.mark.parametrize("wrong", ["free twice", "hold a free one", "release unheld"])
def test_what_cannot_be_right_asserts(wrong: str):
    pool = HostPool(4)
    taken = pool.alloc(1)
    if wrong == "free twice":
        pool.hold(taken)
        pool.free(taken)
    act = {
        "free twice": lambda: pool.free(taken),
        "hold a free one": lambda: pool.hold(slots(3)),
        "release unheld": lambda: pool.release(taken),
    }[wrong]
    with pytest.raises(AssertionError):
        act()


def test_equal_histories_have_equal_digests_and_nothing_is_lost():
    """A seeded walk against sets."""
    rng = random.Random(5)
    pools = [HostPool(64), HostPool(64)]
    owned: list[bytes] = []
    holds: list[bytes] = []
    for _ in range(3000):
        draw = rng.random()
        if draw < 0.35 and pools[0].num_free:
            count = rng.randint(1, min(5, pools[0].num_free))
            first, second = (pool.alloc(count) for pool in pools)
            assert first == second
            owned.append(first)
        elif draw < 0.6 and owned:
            run = owned.pop(rng.randrange(len(owned)))
            for pool in pools:
                pool.free(run)
        elif draw < 0.8 and owned:
            holds.append(rng.choice(owned))
            for pool in pools:
                pool.hold(holds[-1])
        elif holds:
            run = holds.pop(rng.randrange(len(holds)))
            for pool in pools:
                pool.release(run)
        used = {slot for run in owned for slot in array("q", run)}
        held = {slot for run in holds for slot in array("q", run)}
        assert pools[0].num_limbo == len(held - used)
        assert pools[0].num_free == 64 - len(used | held)
        assert pools[0].digest() == pools[1].digest()
