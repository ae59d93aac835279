"""Both components against dictionaries of prefixes, step by step; and whether the walk notices."""

from __future__ import annotations

import itertools

import pytest

from tests.cache.window_world import WindowWalk, WindowWorld
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
