"""Which lengths of a prompt are of use where layers have windows (case O-31)."""

from __future__ import annotations

import itertools

import pytest

from phloem.cache import WindowConfig, check_invariants
from phloem.core.errors import ConfigError
from tests.cache.build import NS, make, run_of, serve
from tests.cache.windows import (
    alive,
    make_windows,
    run,
    tombstone,
    valid_lengths,
    window_pages,
)

LENGTHS = [(1, 9, 2, 8, 3, 7), (4, 1, 1, 5, 6, 2), (9, 3, 1, 7, 1, 1)]


def six_nodes(page_size, lengths, **options):
    """A path of six nodes, kept apart by branches; all window state is there."""
    cache = make_windows(page_size, **options)
    tokens = run_of(0, sum(lengths) * page_size)
    run(cache, tokens, chunk=999, check=False)
    for border in itertools.accumulate(lengths[:-1]):
        run(
            cache,
            tokens[: 4 * border * page_size] + run_of(9000 + border, page_size),
            chunk=999,
            check=False,
        )
    ends = [0, *itertools.accumulate(lengths)]
    path = cache.match(NS, tokens).full_node
    nodes = []
    while path.parent is not None:
        nodes.insert(0, path.num_pages)
        path = path.parent
    assert nodes == list(lengths)
    return cache, tokens, [range(a, b) for a, b in itertools.pairwise(ends)]


def full_pages(cache, tokens):
    match = cache.match(NS, tokens)
    return match.ending_at(match.full_pages).refs().tolist()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_o31_every_pattern_of_tombstones(page_size, lengths):
    """All 64 patterns, every prefix: a counter that survives a tombstone, W off by one, or a page
    too many or too few in the tail turns this red.
    """
    window = 8
    for pattern in itertools.product((True, False), repeat=6):
        cache, tokens, nodes = six_nodes(page_size, lengths, window=window)
        dead = [
            page for node, lives in zip(nodes, pattern, strict=True) if not lives for page in node
        ]
        if dead:
            tombstone(cache, tokens, dead)
        check_invariants(cache, idle=True)
        refs = full_pages(cache, tokens)
        living = set(range(sum(lengths))) - set(dead)
        assert alive(cache, tokens) == living
        expected = valid_lengths(living, sum(lengths), window=window, page_size=page_size)
        for pages in range(sum(lengths) + 1):
            match = cache.match(NS, tokens, max_pages=pages)
            here = [length for length in expected if length <= pages]
            assert match.num_pages == here[-1]
            assert list(match.valid_lengths) == here
            assert match.full_pages == pages
            assert match.num_tokens == match.num_pages * page_size
            assert match.refs().tolist() == refs[: here[-1]]


@pytest.mark.parametrize(("window", "page_size", "tail"), [(8, 4, 2), (9, 4, 2), (10, 4, 3)])
def test_the_tail_covers_what_the_next_token_reads(window, page_size, tail):
    config = WindowConfig(tokens=window, layers=1, pages=(9,))
    assert config.tail_pages(page_size) == tail
    assert WindowConfig(tokens=1, layers=1, pages=(9,)).tail_pages(page_size) == 0
    assert WindowConfig(tokens=2, layers=1, pages=(9,)).tail_pages(page_size) == 1


def test_a_window_of_one_token_needs_no_state_at_all():
    """Every length is valid, and nothing is ever kept for others."""
    cache = make_windows(4, window=1)
    tokens = run_of(0, 40)
    run(cache, tokens)
    cache.evict_window(99)
    match = cache.match(NS, tokens)
    assert (match.num_pages, list(match.valid_lengths)) == (10, list(range(11)))
    assert run(cache, tokens) == 36


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("window", [4, 8, 13])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_restart_leaves_the_whole_tail_right(page_size, window, layers):
    """Layer by layer: where is what they compute right, if nothing before the start is known?

    One position later than that and some layer's state in the tail is wrong; one page later is
    wrong too, so it is the last page that will do.
    """
    config = WindowConfig(tokens=window, layers=layers, pages=(9,))
    tail = config.tail_pages(page_size)
    for pages in range(200):

        def is_right(start, pages=pages):
            right_from = start  # state of the first layer
            for _ in range(layers - 1):
                if right_from > 0:  # a query that reads before it gives a wrong output
                    right_from += window - 1
            return right_from <= (pages - tail) * page_size or start == 0

        start = config.deep_start(pages, page_size)
        assert start % page_size == 0
        assert is_right(start)
        assert not is_right(start + page_size) or start + page_size > (pages - tail) * page_size


def test_a_restart_starts_at_the_nearest_checkpoint_if_that_is_nearer():
    cache = make_windows(4, window=8, layers=3)
    tokens = run_of(0, 160)
    run(cache, tokens)
    size, whole = 4, 39
    tombstone(cache, tokens, range(30, 40))
    near = cache.match(NS, tokens, max_pages=whole)
    assert (near.num_pages, near.full_pages, near.restart_start()) == (30, whole, 132)
    assert near.restart_start() == (whole - 2) * size - 2 * 7 - 2  # rounded down to a page
    tombstone(cache, tokens, [*range(0, 20), *range(22, 30)])
    far = cache.match(NS, tokens, max_pages=24)
    assert (far.num_pages, far.restart_start()) == (22, 88)
    tombstone(cache, tokens, [21])
    none = cache.match(NS, tokens, max_pages=24)
    assert (none.num_pages, none.restart_start()) == (0, 72)


def test_matching_changes_nothing_and_a_stale_match_is_matched_again():
    """Evicting a tail between match and reserve: believing the match would read freed pages."""
    cache = make_windows(4, window=8)
    tokens = run_of(0, 81)
    run(cache, tokens)
    before = cache.state.digest()
    match = cache.match(NS, tokens)
    _ = match.valid_lengths, match.loadable_lengths, match.restart_start()
    assert cache.state.digest() == before
    tombstone(cache, tokens, [19])
    with cache.reserve(match, 1) as request:
        assert (request.start, request.num_cached_pages, request.num_pages) == (76, 19, 21)
        assert request.window_refs.tolist()[17:] == window_pages(cache, tokens)[17:19]
    check_invariants(cache, idle=True)


def test_a_cache_without_windows_has_every_length():
    cache = make(4)
    serve(cache, run_of(0, 40))
    match = cache.match(NS, run_of(0, 40))
    assert list(match.valid_lengths) == list(match.loadable_lengths) == list(range(11))
    assert match.full_pages == match.num_pages == 10
    assert cache.window_room() == ()
    assert cache.evict_window(3) == len(cache.take_freed_window()) == 0
    with cache.reserve(match, 1) as request:
        assert (request.start, request.write_from, request.window_from) == (40, 40, 0)
        assert request.window_extend(11) is None
        request.window_advance(40)
        assert len(request.window_refs) == 0


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"layers": 0}, {"pages": ()}, {"pages": (0,)}, {"host_pages": -1}],
)
def test_a_window_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        WindowConfig(**{"tokens": 8, "layers": 1, "pages": (4,), **wrong})


def test_pools_have_the_same_owners():
    with pytest.raises(ConfigError, match="owners"):
        make(4, window=WindowConfig(tokens=8, layers=1, pages=(4, 4)))
