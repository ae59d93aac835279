"""The facade: counters, room, limits, versions, errors."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest

from phloem.cache import PrefixCache, check_invariants
from phloem.core.errors import ConfigError, NoRoom
from tests.cache.build import NS, cached, make, run_of, serve, start


def test_refs_are_int64_and_name_the_pages_in_order():
    cache = make(4)
    tokens = run_of(100, 12)
    with start(cache, tokens) as reservation:
        table = reservation.refs
        assert table.dtype == np.int64
        reservation.commit(tokens)
    match = cache.match(NS, tokens)
    assert match.refs().dtype == np.int64
    assert match.refs().tolist() == table.tolist()
    assert (match.num_pages, match.num_tokens) == (3, 12)


def test_a_hit_copies_no_page():
    """The next request's table starts with the very pages that the first one computed."""
    cache = make(4)
    tokens = run_of(100, 12)
    with start(cache, tokens) as one:
        one.commit(tokens)
        with start(cache, tokens + run_of(900, 4)) as two:
            assert two.refs[:3].tolist() == one.refs.tolist()
            assert two.num_cached_pages == 3
    assert cache.match(b"none", tokens).refs().tolist() == []


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_a_match_can_be_limited_in_pages(limit):
    cache = make(4)
    tokens = run_of(100, 12)
    serve(cache, tokens)
    match = cache.match(NS, tokens, max_pages=limit)
    assert match.num_pages == min(limit, 3)
    cache.evict(1)
    serve(cache, tokens)
    with cache.reserve(match, 0) as reservation:  # the limit holds when it is matched again
        assert reservation.num_pages == min(limit, 3)


def test_odd_tails_and_empty_prompts_are_no_pages():
    cache = make(4)
    serve(cache, run_of(100, 7))
    assert cached(cache, run_of(100, 7)) == 4
    assert cached(cache, run_of(100, 3)) == 0
    assert cached(cache, b"") == 0
    with cache.reserve(cache.match(NS, b""), 0) as reservation:
        assert reservation.num_pages == 0
        assert reservation.commit(b"") is None
        reservation.extend(0)
        reservation.extend(1)
        assert reservation.num_pages == 1
    check_invariants(cache, idle=True)


def test_no_room_leaves_everything_as_it_was():
    cache = make(1, 8)
    serve(cache, run_of(100, 3))
    one = start(cache, run_of(500, 4))
    before = cache.state.digest(), cache.leader.log.position
    match = cache.match(NS, run_of(100, 9))
    assert cache.can_reserve(match, 1)
    assert not cache.can_reserve(match, 2)
    with pytest.raises(NoRoom, match="2 pages asked"):
        cache.reserve(match, 2)
    with pytest.raises(NoRoom):
        one.extend(5)
    assert (cache.state.digest(), cache.leader.log.position) == before
    check_invariants(cache)
    one.close()
    check_invariants(cache, idle=True)


def test_a_request_never_evicts_its_own_prefix():
    """All room there is, is its own prefix and one free page."""
    cache = make(1, 5)
    serve(cache, run_of(100, 4))
    with cache.reserve(cache.match(NS, run_of(100, 4)), 1) as reservation:
        assert reservation.num_pages == 5
        with pytest.raises(NoRoom):
            reservation.extend(1)
    check_invariants(cache, idle=True)


def test_an_error_inside_the_block_gives_the_pages_back():
    cache = make(4)
    with pytest.raises(ZeroDivisionError), start(cache, run_of(100, 40)):
        raise ZeroDivisionError
    check_invariants(cache, idle=True)
    assert cache.free_pages == cache.total_pages


def test_committing_what_contradicts_the_past_asserts():
    cache = make(4)
    with start(cache, run_of(100, 12)) as reservation:
        reservation.commit(run_of(100, 4))
        with pytest.raises(AssertionError, match="differ"):
            reservation.commit(run_of(200, 8))
        with pytest.raises(AssertionError, match="4 pages committed of 3"):
            reservation.commit(run_of(100, 16))


def test_a_closed_reservation_takes_nothing_more():
    reservation = start(make(4), run_of(100, 12))
    reservation.close()
    with pytest.raises(AssertionError, match="closed"):
        reservation.extend(1)
    with pytest.raises(AssertionError, match="closed"):
        reservation.commit(run_of(100, 12))


def test_version_grows_exactly_when_matches_may_change():
    cache = make(4)
    versions = [cache.version]

    def changed() -> bool:
        versions.append(cache.version)
        return versions[-1] > versions[-2]

    reservation = start(cache, run_of(100, 12))
    assert not changed()
    reservation.commit(run_of(100, 8))
    assert changed()
    reservation.commit(run_of(100, 8))
    assert not changed()
    reservation.commit(run_of(100, 12))
    assert changed()
    reservation.close()
    cache.match(NS, run_of(100, 12))
    assert not changed()
    cache.reserve(cache.match(NS, run_of(100, 6)), 0).close()  # splits and joins
    assert not changed()
    cache.evict(1)
    assert changed()
    cache.flush()
    assert changed()


def test_stats_add_up_at_every_moment():
    cache = make(4, 32)
    serve(cache, run_of(100, 40))
    with start(cache, run_of(100, 20)):
        stats = cache.stats()
        assert (stats.free_pages, stats.evictable_pages, stats.locked_pages) == (21, 6, 5)
        assert stats.page_size == 4
        assert stats.total_pages == 32
    assert cache.stats().evictable_pages == 10


def test_flush_while_a_request_runs():
    """Nothing old is found again: not what was cached, nor what the request computes on."""
    cache = make(4, 32)
    tokens = run_of(100, 40)
    serve(cache, tokens)
    serve(cache, run_of(500, 8))
    running = start(cache, tokens[: 4 * 16])
    assert running.num_cached_pages == 3
    assert cache.flush() == 4
    assert cached(cache, tokens) == 0
    assert cache.free_pages == 28
    assert running.commit(tokens[: 4 * 16]) is None
    assert cached(cache, tokens) == 0
    check_invariants(cache)
    assert serve(cache, tokens) == 0  # a new generation beside the old one
    assert cached(cache, tokens) == 40
    check_invariants(cache)
    running.close()
    check_invariants(cache, idle=True)
    assert cache.free_pages == 22
    assert cache.flush() == 0
    assert cache.free_pages == 32


def test_a_session_stays_few_nodes():
    """Its turns are joined as they end, so the next one compares long runs."""
    cache = make(4, 4096)
    tokens = run_of(0, 8)
    for turn in range(1, 200):
        serve(cache, tokens)
        tokens += run_of(1000 * turn, 20)
        assert cache.stats().nodes <= 4
    assert cached(cache, tokens) == len(tokens) // 4 - 20


def test_chunks_of_interleaved_requests_are_joined_in_the_end():
    """Two requests that commit a long head in turns leave one node for it."""
    cache = make(4, 256)
    head = run_of(100, 160)
    one, two = start(cache, head + run_of(1000, 4)), start(cache, head + run_of(2000, 4))
    for end in range(16, 160, 16):
        first, second = (one, two) if end % 32 else (two, one)
        first.commit(head[: 4 * end])
        second.commit(head[: 4 * end])
    one.commit(head + run_of(1000, 4))
    two.commit(head + run_of(2000, 4))
    one.close()
    two.close()
    check_invariants(cache, idle=True)
    assert cache.stats().nodes == 3


def test_freed_pages_are_reported_once_and_only_when_asked_for():
    cache = make(4, 8)
    serve(cache, run_of(100, 16))
    assert cache.take_freed().tolist() == []
    cache.evict(2)
    assert len(cache.take_freed()) == 2
    assert len(cache.take_freed()) == 0
    silent = PrefixCache(page_size=4, num_pages=(8,))
    serve(silent, run_of(100, 16))
    silent.evict(2)
    assert len(silent.take_freed()) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"num_pages": (0,)}, "num_pages must be at least 1 for each rank, got (0,)"),
        ({"num_pages": (-5,)}, "got (-5,)"),
        ({"num_pages": ()}, "for each rank"),
        ({"num_pages": (4, 0)}, "for each rank"),
        ({"placement": "random"}, "unknown placement 'random'"),
        ({"eviction": "luck"}, "unknown eviction policy 'luck'; known: lru"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        PrefixCache(**{"page_size": 4, "num_pages": (8,), **options})


def test_evicted_nodes_do_not_wait_for_the_cycle_collector():
    """Parent and child know each other; what leaves the tree must not keep the rest alive."""
    cache = make(4, 64)
    gc.collect()
    gc.disable()
    try:
        for index in range(200):
            serve(cache, run_of(1000 * index, 16))
        assert gc.collect() == 0
    finally:
        gc.enable()
