"""Which window pages go first (case O-33)."""

from __future__ import annotations

import random

from phloem.cache import check_invariants
from phloem.cache.window_eviction import TailClass
from tests.cache.build import NS, run_of
from tests.cache.windows import alive, compute, make_windows, open_request, run, tombstone

PAGE, WINDOW, TAIL = 4, 16, 4


def prompt(who: int, pages: int) -> bytes:
    return run_of(100_000 * (who + 1), pages * PAGE + 1)


def hits(cache, tokens: bytes) -> int:
    return cache.match(NS, tokens).num_pages


def test_o33_idle_sessions_keep_their_tails_while_another_one_churns():
    """Ten sessions of 50 pages, room for 1.5 times their tails. An LRU over all window pages, or
    one that takes a page of a tail before what nobody wants, turns this red.
    """
    room = 10 * TAIL * 3 // 2
    cache = make_windows(PAGE, window=WINDOW, pages=3000, window_pages=room)
    for who in range(10):
        run(cache, prompt(who, 50), chunk=8 * PAGE, check=False)
    busy = prompt(99, 10)
    for turn in range(60):
        run(cache, busy, chunk=8 * PAGE)
        used = len(cache.leader.window.state.home) + cache.leader.window.free_pages
        assert used == room
        busy += run_of(77_000 + 100 * turn, 20)
    for who in range(10):
        assert hits(cache, prompt(who, 50)) == 50
        assert run(cache, prompt(who, 50)) == 50 * PAGE
    check_invariants(cache, idle=True)


def test_classes_go_in_their_order_and_each_by_its_last_use():
    """Leftovers, checkpoints, ends inside a run, leaves and branch points."""
    cache = make_windows(PAGE, window=WINDOW, layers=99, checkpoint=20, window_pages=500)
    first = prompt(0, 50)
    run(cache, first, check=False)  # a leaf at 50; checkpoints at 20, 40
    run(
        cache, first + run_of(1, 40), check=False
    )  # now 50 is inside; a leaf at 60 and a checkpoint
    other = first[: 4 * PAGE * 30]
    run(
        cache, other + prompt(7, 10), check=False
    )  # a branch point at 30, a leaf at 40, a checkpoint
    order = [kind for kind, _ in cache.leader.window.tails.in_order()]
    assert order == sorted(order)
    assert order.count(TailClass.CHECKPOINT) == 2
    assert order.count(TailClass.INTERIOR) == 1
    whole, branch = first + run_of(1, 40), other + prompt(7, 10)
    tails = cache.leader.window.tails

    def left() -> tuple[list[int], list[int]]:
        return [
            [
                length
                for length in range(1, 61)
                if set(range(length - TAIL, length)) <= alive(cache, tokens)
            ]
            for tokens in (whole, branch)
        ]

    cache.evict_window(len(tails.leftovers()))
    assert left() == [[20, 30, 40, 50, 60], [20, 30, 40]]
    cache.evict_window(1)
    assert left() == [[30, 40, 50, 60], [30, 40]]
    cache.evict_window(TAIL)
    assert left() == [[30, 50, 60], [30, 40]]
    cache.evict_window(TAIL)
    assert left() == [[30, 60], [30, 40]]
    check_invariants(cache, idle=True)
    cache.evict_window(TAIL)
    assert left() == [[30], [30, 40]]
    cache.evict_window(TAIL)
    check_invariants(cache, idle=True)


def test_a_tail_that_shares_pages_with_a_neighbour_leaves_them_to_it():
    """Ends one page apart: giving up the older one frees a single page."""
    cache = make_windows(PAGE, window=WINDOW, window_pages=200)
    tokens = prompt(0, 50)
    run(cache, tokens, check=False)
    run(cache, tokens + run_of(1, PAGE), check=False)
    run(cache, prompt(1, 50), check=False)
    cache.evict_window(len(cache.leader.window.tails.leftovers()))
    assert alive(cache, tokens + run_of(1, PAGE)) == set(range(46, 51))
    cache.evict_window(1)
    assert alive(cache, tokens + run_of(1, PAGE)) == set(range(47, 51))
    assert hits(cache, tokens + run_of(1, PAGE)) == 51
    assert not cache.leader.window.tails.leftovers()


def test_the_use_of_a_tail_refreshes_none_above_it():
    """The end of an earlier turn ages although later turns pass over it."""
    cache = make_windows(PAGE, window=WINDOW, window_pages=12)
    tokens = prompt(0, 20)
    run(cache, tokens, check=False)
    run(cache, prompt(1, 20), check=False)
    longer = tokens + run_of(1, 20 * PAGE)
    run(cache, longer, chunk=4 * PAGE, check=False)
    for _ in range(3):
        run(cache, longer, chunk=4 * PAGE, check=False)
    assert alive(cache, longer) & set(range(16, 20)) == set()
    assert hits(cache, prompt(1, 20)) == 20
    assert hits(cache, longer) == 40


def test_the_tail_used_longest_ago_goes_first():
    cache = make_windows(PAGE, window=WINDOW, window_pages=200)
    for who in (0, 1, 2):
        run(cache, prompt(who, 10), check=False)
    run(cache, prompt(0, 10), check=False)
    cache.evict_window(len(cache.leader.window.tails.leftovers()))
    for expected in ([10, 0, 10], [10, 0, 0], [0, 0, 0]):
        cache.evict_window(TAIL)
        assert [hits(cache, prompt(who, 10)) for who in (0, 1, 2)] == expected


def test_a_locked_page_is_never_a_victim_and_all_others_are():
    cache = make_windows(PAGE, window=WINDOW, window_pages=60)
    for who in (0, 1, 2):
        run(cache, prompt(who, 10), check=False)
    with open_request(cache, prompt(1, 10)) as request:
        held = request.window.shared_pages()
        assert len(held) == TAIL
        room = cache.leader.window.evictable_pages
        assert cache.evict_window(999) == room
        assert cache.leader.window.state.home.keys() == set(held)
        check_invariants(cache)
    check_invariants(cache, idle=True)


def test_a_parent_that_loses_its_last_child_is_a_leaf_again():
    """Full pages are evicted: what was inside a run is an end once more, and kept accordingly."""
    cache = make_windows(PAGE, window=WINDOW, pages=200, window_pages=200)
    tokens = prompt(0, 10)
    run(cache, tokens, check=False)
    run(cache, tokens + run_of(1, 10 * PAGE), check=False)

    def kinds() -> list[TailClass]:
        return [kind for kind, _ in cache.leader.window.tails.in_order()]

    assert kinds() == [TailClass.INTERIOR, TailClass.END]
    cache.evict(10)
    assert kinds() == [TailClass.END]
    check_invariants(cache, idle=True)


def test_more_room_never_hits_less_in_a_crowd_of_sessions():
    """Twenty sessions in random order: tails hit where an LRU over pages has lost them."""
    rng = random.Random(5)
    turns = [rng.randrange(20) for _ in range(300)]
    computed = []
    for room in (TAIL * 12, TAIL * 30, 5000):
        cache = make_windows(PAGE, window=WINDOW, pages=5000, window_pages=room)
        sessions = [prompt(who, 12) for who in range(20)]
        total = 0
        for turn, who in enumerate(turns):
            sessions[who] += run_of(50_000_000 + 100 * turn, 7)
            start = run(cache, sessions[who], chunk=4 * PAGE, check=False)
            total += len(sessions[who]) // 4 - start
        computed.append(total)
        check_invariants(cache, idle=True)
    assert computed == sorted(computed, reverse=True)
    assert computed[1] == computed[2] < computed[0]


def test_a_hook_that_makes_tombstones_leaves_the_books_in_order():
    cache = make_windows(PAGE, window=WINDOW, window_pages=60)
    tokens = prompt(0, 30)
    with open_request(cache, tokens) as request:
        compute(cache, request, tokens, 0, chunk=PAGE)
    tombstone(cache, tokens, [28])
    check_invariants(cache, idle=True)
