"""Both components against dictionaries of prefixes, step by step; and whether the walk notices."""

from __future__ import annotations

import itertools

import pytest

from phloem.cache import HostTier
from tests.cache.window_host_world import WindowHostWorld
from tests.cache.window_walks import WindowHostWalk, WindowWalk
from tests.cache.window_world import WindowWorld
from tests.cache.windows import make_windows

POOLS = ((80, 40), (140, 50), (300, 300))


def take_a_walk(page_size, window, seed, *, steps, max_pages=12, invariants=True):
    pages, window_pages = POOLS[seed % len(POOLS)]
    cache = make_windows(
        page_size,
        window=window,
        layers=1 + seed % 3,
        pages=pages,
        window_pages=window_pages,
        checkpoint=3 if seed % 2 else 0,
    )
    walk = WindowWalk(WindowWorld(cache, invariants=invariants), seed, max_pages=max_pages)
    walk.run(steps)
    return walk


@pytest.mark.parametrize(
    ("seed", "page_size", "window"),
    [(seed, *pair) for seed, pair in enumerate(itertools.product((1, 4, 16), (1, 2, 8, 17)))],
)
def test_walk_agrees_with_dictionaries_of_prefixes(seed, page_size, window):
    """Matches, restarts, tables, locks, victims, room in both pools, content, replicas."""
    take_a_walk(page_size, window, seed, steps=300, max_pages=12 + 2 * seed)


def take_a_host_walk(page_size, window, seed, *, steps):
    pages, window_pages = POOLS[seed % len(POOLS)]
    cache = make_windows(
        page_size,
        window=window,
        layers=1 + seed % 3,
        pages=pages,
        window_pages=window_pages,
        window_host_pages=window_pages,
        host=HostTier(pages=pages * 2),
    )
    walk = WindowHostWalk(WindowHostWorld(cache), seed, max_pages=12 + seed % 12)
    walk.run(steps)
    return walk.world.seen


@pytest.mark.parametrize(
    ("seed", "page_size", "window"),
    [(seed, *pair) for seed, pair in enumerate(itertools.product((1, 4, 16), (1, 2, 8, 17)))],
)
def test_walk_with_a_host_tier_agrees_too(seed, page_size, window):
    """Copies, loads that take their time and fail, and what both tiers then hold."""
    seen = take_a_host_walk(page_size, window, seed, steps=300)
    assert seen["loads"] > 1, "the walk does not do what it is for"
