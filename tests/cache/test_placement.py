"""Which rank owns which page: striping, runs, copies, and where pages go when a rank is full."""

from __future__ import annotations

import itertools
import random
from array import array

import numpy as np
import pytest

from phloem.cache import PrefixCache, Reservation, check_invariants
from phloem.cache.placement import (
    PLACEMENTS,
    Contiguous,
    Striped,
    make_placement,
    num_displaced,
    settle,
    take_pages,
    take_shares,
)
from phloem.core.errors import ConfigError, NoRoom
from phloem.core.refs import make_ref, owner_of, owners_of
from phloem.replica import PageAllocator, give_back
from tests.cache.build import NS, run_of, start


def owners(cache: PrefixCache, tokens: bytes) -> list[int]:
    return owners_of(cache.match(NS, tokens).refs()).tolist()


def pools(count: int, pages: int, placement: str = "striped") -> PrefixCache:
    return PrefixCache(
        page_size=4, num_pages=(pages,) * count, placement=placement, record_freed=True
    )


def serve(cache: PrefixCache, tokens: bytes) -> None:
    with start(cache, tokens) as reservation:
        reservation.commit(tokens)
    check_invariants(cache)


def test_pages_of_a_chain_go_from_rank_to_rank():
    cache = pools(3, 20)
    tokens = run_of(0, 4 * 8)
    serve(cache, tokens)
    assert owners(cache, tokens) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_decoded_pages_go_on_where_the_prompt_ended():
    cache = pools(3, 20)
    tokens = run_of(0, 4 * 9)
    with start(cache, tokens[: 16 * 4]) as reservation:
        for pages in range(5, 10):
            reservation.extend(1)
            reservation.commit(tokens[: 16 * pages])
    assert owners(cache, tokens) == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    check_invariants(cache, idle=True)


def test_short_chains_are_spread_evenly_whatever_they_share():
    """Eight questions of a page behind one system prompt: two of them on each of four ranks."""
    cache = pools(4, 50)
    head = run_of(0, 4 * 8)
    serve(cache, head)
    questions = [run_of(1000 * n, 4) for n in range(1, 9)]
    for question in questions:
        serve(cache, head + question)
    last = [owners(cache, head + question)[-1] for question in questions]
    assert sorted(last) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_full_rank_sends_its_pages_to_one_with_room():
    cache = PrefixCache(page_size=4, num_pages=(2, 9, 4), record_freed=True)
    tokens = run_of(0, 4 * 15)
    serve(cache, tokens)
    assert cache.free_pages == cache.leader.evicted_pages == 0
    assert np.bincount(owners(cache, tokens)).tolist() == [2, 9, 4]


@pytest.mark.parametrize("allowed", [True, False])
def test_a_stripe_costs_at_most_half_as_many_cached_pages_as_it_has(allowed):
    """All of rank 0 is locked, so nothing makes room there: four go in vain, and no more."""
    cache = PrefixCache(page_size=4, num_pages=(4, 40), record_freed=True)
    cache.leader.evicts_for_placement = allowed
    with start(cache, run_of(9000, 4 * 8)) as holder:
        assert np.bincount(owners_of(holder.refs)).tolist() == [4, 4]
        for number in range(36):
            serve(cache, run_of(100 * number, 4))
        assert cache.free_pages == 0
        with start(cache, run_of(5000, 4 * 8)) as reservation:
            assert owners_of(reservation.refs).tolist() == [1] * 8
        assert cache.leader.evicted_pages == 8 + 4 * allowed
    check_invariants(cache, idle=True)


def test_a_stripe_is_made_even_at_the_cost_of_what_was_used_longest_ago():
    """Of the next four victims three lie on rank 1: two more make it two and two."""
    cache = pools(2, 12)
    for number in range(12):
        serve(cache, run_of(100 * number, 8))  # two pages each, the second on rank 1
    for number in range(2):  # the first page alone is used again: the second is older now
        cache.reserve(cache.match(NS, run_of(100 * number, 4)), 0).close()
    assert cache.free_pages == 0
    with start(cache, run_of(5000, 4 * 4)) as reservation:
        assert np.bincount(owners_of(reservation.refs)).tolist() == [2, 2]
    assert cache.leader.evicted_pages == 6
    check_invariants(cache, idle=True)


def test_contiguous_keeps_a_run_on_one_rank_while_there_is_room():
    cache = pools(3, 6, "contiguous")
    one, two = run_of(0, 4 * 4), run_of(500, 4 * 7)
    serve(cache, one)
    serve(cache, two)
    assert owners(cache, one) == [0] * 4
    assert owners(cache, two) == [1] * 6 + [2]
    with start(cache, run_of(900, 4)) as reservation:
        reservation.extend(5)
        assert owners_of(reservation.refs).tolist() == [2] * 5 + [0]


def test_replicate_has_room_for_what_one_rank_holds():
    cache = pools(4, 6, "replicate")
    assert (cache.total_pages, cache.num_pages, cache.num_ranks) == (6, (6,), 4)
    assert cache.replicates
    assert not pools(4, 6).replicates
    serve(cache, run_of(0, 4 * 6))
    assert owners(cache, run_of(0, 4 * 6)) == [0] * 6
    with pytest.raises(NoRoom):
        start(cache, run_of(0, 4 * 7))


def test_a_request_may_fill_all_ranks_and_no_more():
    """Whatever is cached goes, on whatever rank it lies; one page too many changes nothing."""
    cache = pools(4, 5)
    for number in range(6):
        serve(cache, run_of(100 * number, 4 * 3))
    before = cache.state.digest()
    with pytest.raises(NoRoom):
        start(cache, run_of(900, 4 * 21))
    assert cache.state.digest() == before
    with start(cache, run_of(900, 4 * 20)) as reservation:
        assert np.bincount(owners_of(reservation.refs)).tolist() == [5] * 4
        check_invariants(cache)


@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_no_owner_is_named_more_often_than_it_has_pages(name):
    """2,000 random pools, runs and ends: as many owners as pages, each with room, as was wished."""
    rng = random.Random(7)
    for _ in range(2000):
        policy = make_placement(name)
        free = [rng.randrange(6) for _ in range(rng.randint(1, 5))]
        if name == "replicate":
            free = free[:1]
        count = rng.randint(0, sum(free))
        start = policy.start(count, free, [0] * 9, rng.choice((None, rng.randrange(len(free)))))
        placed = settle(count, free, start, policy.step)
        assert len(placed) == count
        assert all(placed.count(owner) <= have for owner, have in enumerate(free))
        wish = [(start + policy.step * page) % len(free) for page in range(count)]
        moved = sum(one != other for one, other in zip(wish, placed, strict=True))
        assert moved == num_displaced(count, free, start, policy.step), "moved for no reason"


def test_a_stripe_is_even_to_a_page():
    rng = random.Random(3)
    for _ in range(300):
        ranks, count = rng.randint(1, 6), rng.randint(1, 40)
        free = [count] * ranks
        start = Striped().start(count, free, [0] * 9, rng.choice((None, rng.randrange(ranks))))
        owners = settle(count, free, start, Striped.step)
        shares = [owners.count(rank) for rank in range(ranks)]
        assert max(shares) - min(shares) <= 1
        assert all((b - a) % ranks == 1 % ranks for a, b in itertools.pairwise(owners))


def test_a_run_goes_on_from_its_last_page():
    assert Striped().start(5, [9, 9, 9], [0, 0, 7], 1) == 2
    assert Striped().start(5, [9, 9, 9], [0, 0, 0], 2) == 0
    assert Contiguous().start(5, [9, 9, 9], [0, 9, 0], 1) == 1


def test_a_page_is_added_where_fewest_others_decode():
    assert Striped().start(1, [9, 9, 9], [0, 0, 0], 1) == 2
    assert Striped().start(1, [9, 9, 9], [3, 3, 3], 1) == 2
    assert Striped().start(1, [9, 9, 9], [2, 1, 2], 1) == 1
    assert Striped().start(1, [9, 9, 9], [1, 1, 2], 1) == 0


def test_a_run_begins_where_it_leaves_the_room_most_even():
    """One page more than a multiple goes to the roomiest rank, two to the roomiest neighbours."""
    idle = [0, 0, 0]
    assert Striped().start(4, [3, 5, 4], idle, None) == 1
    assert Striped().start(5, [3, 5, 4], idle, None) == 1
    assert Striped().start(5, [5, 3, 4], idle, None) == 2
    assert Striped().start(6, [5, 3, 4], [1, 0, 1], None) == 2  # ends on rank 1
    assert Contiguous().start(5, [3, 2, 4], idle, None) == 2
    rng = random.Random(9)
    for _ in range(500):
        free = [rng.randrange(20, 26) for _ in range(rng.randint(2, 6))]
        count, policy = rng.randint(1, 20), Striped()

        def left(start, free=free, count=count):
            owners = settle(count, free, start, 1)
            return sum((have - owners.count(rank)) ** 2 for rank, have in enumerate(free))

        busy = [rng.randrange(9) for _ in free]
        assert left(policy.start(count, free, busy, None)) == min(map(left, range(len(free))))


@pytest.mark.parametrize("odd", [False, True])
def test_requests_of_equal_length_do_not_all_decode_on_the_same_rank(odd):
    """64 prompts of 16 pages on 4 ranks, one of which has a page more in use, or not."""
    cache = pools(4, 400)
    first = [start(cache, run_of(10**6, 4))] if odd else []
    running = [start(cache, run_of(100 * number, 64)) for number in range(64)]
    for _ in range(3):
        assert max(ends(running)) <= 17
        for each in running:
            each.extend(1)
    check_invariants(cache)
    for each in running + first:
        each.close()
    assert cache.leader.ends == [0] * 4


def test_requests_of_any_length_soon_decode_evenly():
    """40 prompts of 1 to 30 pages; after a page more for each, every rank computes for ten."""
    cache, rng = pools(4, 400), random.Random(1)
    lengths = [rng.randint(1, 30) for _ in range(40)]
    running = [start(cache, run_of(1000 * i, 4 * n)) for i, n in enumerate(lengths)]
    for _ in range(5):
        for each in running:
            each.extend(1)
        assert max(ends(running)) <= 11
    for each in running:
        each.close()
    check_invariants(cache, idle=True)


def test_a_request_counts_where_its_last_page_is_after_another_one_was_first():
    """Two compute the same: the second one's pages give way to the first one's, on other ranks."""
    cache, tokens = pools(2, 20), run_of(0, 4 * 3)
    first, second = start(cache, tokens), start(cache, tokens)
    assert cache.leader.ends == [1, 1]
    for each in (first, second):
        each.commit(tokens)
    assert (first.refs == second.refs).all()
    assert sorted(cache.leader.ends) == [0, 2]
    check_invariants(cache)
    first.close()
    second.close()
    assert cache.leader.ends == [0, 0]


def ends(running: list[Reservation]) -> list[int]:
    """How many requests write to each rank's pages next."""
    owners = [int(owners_of(each.refs)[-1]) for each in running]
    return [owners.count(rank) for rank in range(4)]


def test_the_last_pages_of_a_full_rank_go_to_the_one_with_most_room():
    assert settle(5, [1, 3, 4], 0, 1) == [0, 1, 2, 2, 1]
    assert settle(5, [3, 0, 4], 0, 1) == [0, 2, 2, 0, 2]
    assert settle(1, [0, 5, 9], 0, 1) == [2]
    assert settle(6, [3, 2, 4], 2, 0) == [2, 2, 2, 2, 0, 0]
    assert settle(9, [3, 2, 4], 0, 0) == [0, 0, 0, 2, 2, 2, 2, 1, 1]


def test_refs_come_in_page_order_from_each_owners_allocator():
    """The quick way of a run that has room, and the one page by page, are the same."""
    rng = random.Random(5)
    for _ in range(200):
        free = [rng.randrange(9) for _ in range(rng.randint(2, 5))]
        count = rng.randint(1, max(1, sum(free)))
        start, step = rng.randrange(len(free)), rng.randrange(2)
        if count > sum(free):
            continue
        one, two = ([PageAllocator(o, n) for o, n in enumerate(free)] for _ in range(2))
        placed = settle(count, free, start, step)
        quick = take_pages(count, free, start, step, lambda o, n: one[o].alloc(n))  # noqa: B023
        slow = take_shares(placed, lambda o, n: two[o].alloc(n))  # noqa: B023
        assert quick == slow
        assert [owner_of(ref) for ref in array("q", quick)] == placed


@pytest.mark.parametrize("count", [3, 200])
def test_pages_go_back_to_their_owners_in_order(count):
    """Few are sorted one by one, many at once: the free lists that follow are the same."""
    allocators = [PageAllocator(owner, 100) for owner in range(3)]
    refs = [ref for a in allocators for ref in np.frombuffer(a.alloc(100), np.int64).tolist()]
    random.Random(1).shuffle(refs)
    refs = refs[:count]
    give_back(allocators, np.array(refs, np.int64).tobytes())
    for allocator in allocators:
        mine = [ref - make_ref(allocator.owner, 0) for ref in refs]
        mine = [
            slot for slot, ref in zip(mine, refs, strict=True) if owner_of(ref) == allocator.owner
        ]
        assert allocator.free_slots() == mine


def test_unknown_names_and_empty_pools_are_refused():
    with pytest.raises(ConfigError, match="contiguous, replicate, striped"):
        make_placement("spread")
    for sizes in ((), (4, 0)):
        with pytest.raises(ConfigError, match="at least 1 for each rank"):
            PrefixCache(page_size=4, num_pages=sizes)
