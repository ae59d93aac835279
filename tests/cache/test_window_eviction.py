"""Which window pages go first (case O-33)."""

from __future__ import annotations

import random

import pytest

from phloem.bench.tree import find_trace, trace_prompts
from phloem.cache import check_invariants
from phloem.cache.window_eviction import TailClass, Tails
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


def test_classes_go_in_their_order():
    """Leftovers, checkpoints, ends that were passed twice; leaves, branch points and last ends."""
    cache = make_windows(PAGE, window=WINDOW, layers=99, checkpoint=25, window_pages=500)
    turns = [prompt(0, 20), prompt(0, 20) + run_of(1, 20 * PAGE)]
    turns.append(turns[1] + run_of(500, 20 * PAGE))
    for turn in turns:  # ends at 20, 40 and 60; checkpoints at 25 and 50
        run(cache, turn, check=False)
    branch = turns[2][: 4 * PAGE * 30] + prompt(7, 10)
    run(cache, branch, check=False)  # a branch point at 30, a leaf at 40
    tails = cache.leader.window.tails

    def left() -> list[int]:
        here = alive(cache, turns[2])
        assert set(range(36, 40)) <= alive(cache, branch)
        return [end for end in (20, 25, 30, 40, 50, 60) if set(range(end - TAIL, end)) <= here]

    assert [tail.kind for tail in tails.tails()] == [0, 0, 1, 1, 2, 2, 2]
    cache.evict_window(len(tails.leftovers()))
    assert left() == [20, 25, 30, 40, 50, 60]
    for expected in ([20, 30, 40, 50, 60], [20, 30, 40, 60], [30, 40, 60], [30, 60], [30]):
        cache.evict_window(1)
        assert left() == expected
        cache.evict_window(TAIL - 1)
        assert left() == expected
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
    """The end of an earlier turn goes first although later ones pass over it again and again."""
    cache = make_windows(PAGE, window=WINDOW, window_pages=200)
    tokens = prompt(0, 20)
    longer = tokens + run_of(1, 20 * PAGE)
    longest = longer + run_of(500, 20 * PAGE)
    for turn in (tokens, longer, prompt(1, 20), prompt(1, 40), longest, longest, longest):
        run(cache, turn, check=False)
    cache.evict_window(len(cache.leader.window.tails.leftovers()))
    cache.evict_window(TAIL)
    assert alive(cache, longest) == {*range(36, 40), *range(56, 60)}
    cache.evict_window(TAIL)
    assert hits(cache, prompt(1, 20)) == 0
    assert [hits(cache, turn) for turn in (prompt(1, 40), longer, longest)] == [40, 40, 60]


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
        return [tail.kind for tail in cache.leader.window.tails.tails()]

    run(cache, tokens + run_of(1, 20 * PAGE), check=False)
    assert kinds() == [TailClass.INTERIOR, TailClass.INTERIOR, TailClass.END]
    cache.evict(20)
    assert kinds() == [TailClass.END]
    check_invariants(cache, idle=True)


def test_a_crowd_of_growing_sessions_needs_little_more_than_their_leaves():
    """Twenty sessions in random order, room for 30 tails: nothing is computed twice. A leaf that
    goes as soon as a last end above another one turns this red.
    """
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
    assert computed[1] == computed[2] < computed[0]


def test_a_hook_that_makes_tombstones_leaves_the_books_in_order():
    cache = make_windows(PAGE, window=WINDOW, window_pages=60)
    tokens = prompt(0, 30)
    with open_request(cache, tokens) as request:
        compute(cache, request, tokens, 0, chunk=PAGE)
    tombstone(cache, tokens, [28])
    check_invariants(cache, idle=True)


def replay(prompts, window_pages):
    """Hit tokens of prompts, one after another, with all the full pages that they need."""
    cache = make_windows(16, window=256, pages=5000, window_pages=window_pages)
    return sum(run(cache, p, chunk=256, check=False) for p in prompts) / sum(
        len(p) // 4 for p in prompts
    )


def test_a_trace_of_agents_hits_nearly_as_with_unlimited_room(monkeypatch):
    """Room for 24 tails. Without tails, by the page used longest ago, 30 points are lost."""
    path = find_trace("claude_code_16sessions.jsonl")
    if path is None:
        pytest.skip("the traces are not beside the checkout")
    prompts = trace_prompts(path)
    unlimited, here = replay(prompts, 50_000), replay(prompts, 384)
    assert unlimited == pytest.approx(0.93427, abs=1e-5)
    assert here > unlimited - 0.01
    monkeypatch.setattr(Tails, "want", lambda self, pages, **how: None)
    assert replay(prompts, 384) == pytest.approx(0.64, abs=0.01)
