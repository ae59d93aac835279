"""The life of window pages: taken chunk by chunk, kept as tails, revived, let go (case O-32)."""

from __future__ import annotations

import pytest

from phloem.cache import check_invariants
from phloem.core.errors import NoRoom
from tests.cache.build import NS, run_of
from tests.cache.windows import (
    PLENTY,
    alive,
    compute,
    make_windows,
    open_request,
    run,
    tombstone,
    valid_lengths,
    window_pages,
)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("window", [4, 8, 16])
def test_o32_the_next_turn_of_a_session_finds_its_tail(window, page_size):
    """Prompts of 1 ... 5 pages, chunks of 1 ... 3: after each turn the tail of all whole pages is
    alive, also when what nobody wants has been evicted; so the next turn starts within its last
    page. A tail that is let go as soon as the request has moved past it (pages larger than the
    window) turns this red.
    """
    lengths = sorted({1, 2, *range(page_size, 5 * page_size + 1, page_size), 5 * page_size - 1})
    for first in lengths:
        for chunk_pages in (1, 2, 3):
            cache = make_windows(page_size, window=window)
            tokens, done = run_of(0, first), 0
            for turn in range(3):
                start = run(cache, tokens, chunk=chunk_pages * page_size, output=run_of(7000, 3))
                assert start >= done // page_size * page_size - page_size
                whole = tokens + run_of(7000, 3)
                done = len(whole) // 4
                pages = done // page_size
                cache.evict_window(len(cache.leader.window.tails.leftovers()))
                here = alive(cache, whole)
                assert valid_lengths(here, pages, window=window, page_size=page_size)[-1] == pages
                tokens = whole + run_of(1000 * turn + 500, 1 + turn * page_size)
            check_invariants(cache, idle=True)
            cache.flush()
            assert cache.leader.window.free_pages == PLENTY
            check_invariants(cache, idle=True)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_starts_within_its_last_page(page_size):
    """Also where the prompt ends with a page: its last token is computed, so one page less is of
    use. Keeping the tail of the whole prompt alone turns this red.
    """
    for tokens in range(1, 5 * page_size + 2):
        cache = make_windows(page_size, window=6, window_pages=5 * page_size + 30)
        prompt = run_of(0, tokens)
        run(cache, prompt, chunk=page_size, check=False)
        cache.evict_window(len(cache.leader.window.tails.leftovers()))
        assert run(cache, prompt, check=False) == (tokens - 1) // page_size * page_size
        check_invariants(cache, idle=True)


def test_a_request_holds_a_window_and_what_it_computes():
    """100,000 tokens in a pool of a few pages: window pages are taken and let go on the way."""
    page_size, window, chunk = 16, 128, 512
    cache = make_windows(page_size, window=window, pages=7000, window_pages=80)
    tokens = run_of(0, 100_000)
    assert run(cache, tokens, chunk=chunk, check=False) == 0
    check_invariants(cache, idle=True)
    assert run(cache, tokens, check=False) == 99_984


def test_window_pages_that_are_read_are_never_evicted():
    """Two requests and a pool for one: the second is refused, and nothing has changed."""
    cache = make_windows(4, window=17, window_pages=12)
    one = open_request(cache, run_of(0, 60))
    compute(cache, one, run_of(0, 40), 0, chunk=12)
    held = one.window_refs.tolist()[one.window.low :]
    other = open_request(cache, run_of(500, 60))
    before = cache.state.digest()
    assert cache.window_room() == [12 - len(held)] == [other.window_fitting(12)]
    with pytest.raises(NoRoom):
        other.window_extend(12 - len(held) + 1)
    assert cache.state.digest() == before
    assert other.window_extend(12 - len(held)).refs.tolist() == (other.window_refs.tolist())
    assert not cache.evict_window(99)
    assert one.window_refs.tolist()[one.window.low :] == held
    other.close()
    one.close()
    check_invariants(cache, idle=True)


def test_a_revived_tombstone_keeps_its_full_page_and_neither_copy_leaks():
    """The request computes everything again: its full pages are duplicates, its window pages are
    not. Losing either, or keeping both, turns this red.
    """
    cache = make_windows(4, window=8, pages=40, window_pages=30)
    tokens = run_of(0, 80)
    run(cache, tokens)
    full = cache.match(NS, tokens).refs().tolist()
    cache.evict_window(99)
    assert cache.leader.window.free_pages == 30
    with open_request(cache, tokens) as request:
        assert request.start == 0
        own = request.refs.tolist()
        changed = []
        for stop in range(16, 81, 16):
            request.window_advance(stop - 16)
            request.window_extend(stop // 4)
            changed.append(request.commit(tokens[: 4 * stop]))
            check_invariants(cache)
        assert [c.first_page for c in changed] == [0, 4, 8, 12, 16]
        assert request.refs.tolist() == full
        assert set(own).isdisjoint(full)
    match = cache.match(NS, tokens)
    assert (match.num_pages, match.refs().tolist()) == (20, full)
    assert cache.free_pages == 20
    assert cache.leader.window.free_pages + len(alive(cache, tokens)) == 30


def test_a_restart_from_a_checkpoint_revives_what_it_computes():
    """No full page is replaced, and where there is window state already, it stays: the request's
    own of those pages is freed.
    """
    cache = make_windows(4, window=8, layers=9, window_pages=40)
    tokens = run_of(0, 81)
    run(cache, tokens)
    tombstone(cache, tokens, [15, 17, 19])
    kept = window_pages(cache, tokens)
    full = cache.match(NS, tokens)
    full = full.ending_at(full.full_pages).refs().tolist()
    with open_request(cache, tokens, restart=True) as request:
        assert (request.start, request.write_from, request.window_from) == (60, 80, 0)
        assert (request.num_committed_pages, request.num_shared_pages) == (15, 20)
        assert request.window_refs.tolist()[13:] == kept[13:15]
        compute(cache, request, tokens, 60, chunk=8)
        assert request.refs.tolist()[:20] == full
    after = window_pages(cache, tokens)
    assert alive(cache, tokens) == set(range(20))
    assert [after[page] for page in (16, 18)] == [kept[page] for page in (16, 18)]
    check_invariants(cache, idle=True)
    assert cache.leader.window.free_pages == 20


def test_a_restart_from_nothing_commits_the_tail_alone():
    """What is computed before it is wrong: in the tree it would be served to others."""
    cache = make_windows(4, window=8, layers=2, window_pages=40)
    tokens = run_of(0, 81)
    run(cache, tokens)
    cache.evict_window(99)
    with open_request(cache, tokens, restart=True) as request:
        assert (request.start, request.write_from, request.window_from) == (64, 80, 64)
        compute(cache, request, tokens, 64, chunk=4)
    assert alive(cache, tokens) == {18, 19}
    assert cache.match(NS, tokens).num_pages == 20
    check_invariants(cache, idle=True)


@pytest.mark.parametrize("stop", range(64, 81, 4))
def test_a_restart_that_is_given_up_leaves_nothing_wrong_behind(stop):
    cache = make_windows(4, window=8, layers=2, window_pages=40)
    tokens = run_of(0, 81)
    run(cache, tokens)
    cache.evict_window(99)
    with open_request(cache, tokens, restart=True) as request:
        compute(cache, request, tokens[: 4 * stop], 64, chunk=4)
    check_invariants(cache, idle=True)
    assert alive(cache, tokens) == set(range(18, stop // 4))


def test_a_restart_takes_no_more_full_pages_than_a_hit_of_all_of_them():
    """num_new_pages counts from the valid length; what the restart finds is not allocated."""
    cache = make_windows(4, window=8, pages=22)
    tokens = run_of(0, 81)
    run(cache, tokens)
    cache.evict_window(99)
    match = cache.match(NS, tokens)
    assert (match.num_pages, match.full_pages) == (0, 20)
    assert cache.can_reserve(match, 22, restart=True)
    with cache.reserve(match, 22, restart=True) as request:
        assert (request.num_cached_pages, request.num_pages) == (20, 22)
        assert cache.free_pages == 0
    check_invariants(cache, idle=True)


def test_a_branch_point_is_kept_from_the_second_visitor_on():
    """The first to share a prefix computes it again, or restarts; everybody after it hits."""
    cache = make_windows(4, window=8, layers=2, window_pages=40)
    shared = run_of(0, 100)
    starts = []
    for who in range(4):
        starts.append(run(cache, shared + run_of(1000 + 100 * who, 100), chunk=8))
        cache.evict_window(len(cache.leader.window.tails.leftovers()))
    assert starts == [0, 0, 100, 100]


def test_checkpoints_are_kept_for_those_who_branch_off_anywhere():
    cache = make_windows(4, window=8, layers=40, checkpoint=10, window_pages=100)
    tokens = run_of(0, 401)
    run(cache, tokens, chunk=48)
    cache.evict_window(len(cache.leader.window.tails.leftovers()))
    assert alive(cache, tokens) == {c - t for c in range(10, 101, 10) for t in (1, 2)}
    for pages in range(100):
        assert cache.match(NS, tokens, max_pages=pages).num_pages == pages // 10 * 10


def test_what_is_not_shared_leaves_nothing():
    cache = make_windows(4, window=8, window_pages=40)
    with open_request(cache, run_of(0, 81), share=False) as request:
        compute(cache, request, run_of(0, 81), 0, chunk=8)
        assert request.window.low == 18
    assert cache.leader.window.free_pages == 40
    check_invariants(cache, idle=True)


def test_a_flush_forgets_windows_and_running_requests_go_on():
    cache = make_windows(4, window=8, window_pages=40)
    run(cache, run_of(500, 50))
    tokens = run_of(0, 81)
    one, other = open_request(cache, tokens), open_request(cache, run_of(0, 30))
    compute(cache, one, tokens[: 4 * 40], 0, chunk=8)
    held = one.window_refs.tolist()[one.window.low :]
    cache.flush()
    check_invariants(cache)
    assert one.window_refs.tolist()[one.window.low :] == held
    compute(cache, one, tokens, 40, chunk=8)
    assert cache.match(NS, tokens).full_pages == 0
    one.close()
    other.close()
    check_invariants(cache, idle=True)
    assert cache.leader.window.free_pages == 40


def test_full_pages_take_their_window_state_along():
    """Evicted from the device: a window page without full state would never be found again."""
    cache = make_windows(4, window=8, window_pages=40)
    tokens = run_of(0, 81)
    run(cache, tokens)
    cache.take_freed_window()
    before = window_pages(cache, tokens)
    cache.evict(3)
    check_invariants(cache, idle=True)
    assert sorted(cache.take_freed_window().tolist()) == sorted(before[17:20])
    assert cache.match(NS, tokens).full_pages == 17
    cache.evict(99)
    assert cache.leader.window.free_pages == 40
    check_invariants(cache, idle=True)


def test_a_table_that_was_read_is_never_written_to():
    cache = make_windows(4, window=8, window_pages=40)
    tokens = run_of(0, 81)
    with open_request(cache, tokens) as request:
        seen = []
        for stop in range(8, 81, 8):
            request.window_advance(stop - 8)
            changed = request.window_extend(stop // 4)
            assert changed.first_page == stop // 4 - 2
            seen.append((changed.refs, changed.refs.tolist(), request.window_refs))
            request.commit(tokens[: 4 * stop])
            assert request.window_refs.tolist()[-2:] == changed.refs.tolist()
        assert all(refs.tolist() == before for refs, before, _ in seen)
        assert [len(table) for *_, table in seen] == list(range(2, 21, 2))
