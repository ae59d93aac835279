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


def take_a_walk(
    page_size, window, seed, *, steps, max_pages=12, invariants=True, owners=1, placement="striped"
):
    pages, window_pages = POOLS[seed % len(POOLS)]
    cache = make_windows(
        page_size,
        window=window,
        layers=1 + seed % 3,
        pages=pages // owners,
        window_pages=window_pages // owners,
        checkpoint=3 if seed % 2 else 0,
        num_owners=owners,
        placement=placement,
    )
    walk = WindowWalk(WindowWorld(cache, invariants=invariants), seed, max_pages=max_pages)
    walk.run(steps, digest_every=1 if owners > 1 else 50)
    return walk


@pytest.mark.parametrize(
    ("seed", "page_size", "window"),
    [(seed, *pair) for seed, pair in enumerate(itertools.product((1, 4, 16), (1, 2, 8, 17)))],
)
def test_walk_agrees_with_dictionaries_of_prefixes(seed, page_size, window):
    """Matches, restarts, tables, locks, victims, room in both pools, content, replicas."""
    take_a_walk(page_size, window, seed, steps=300, max_pages=12 + 2 * seed)


OWNERS = ((1, "striped"), (2, "striped"), (4, "striped"), (4, "contiguous"), (2, "replicate"))


@pytest.mark.parametrize(("owners", "placement"), OWNERS[1:])
@pytest.mark.parametrize("window", [1, 2, 8, 17])
def test_walk_over_several_ranks_agrees(window, owners, placement):
    """A window page always lies beside its full page, however full that rank is."""
    walks = [
        take_a_walk(4, window, seed, steps=200, owners=owners, placement=placement)
        for seed in range(3)
    ]
    assert sum(walk.world.seen["hits"] for walk in walks) > 10


def test_walks_over_several_ranks_do_what_they_are_for():
    """Some requests lose a race: their window pages then lie on another rank than the tree's."""
    walks = [take_a_walk(4, 8, seed, steps=300, owners=4) for seed in range(4)]
    assert sum(walk.world.seen["misplaced"] for walk in walks) > 0


def take_a_host_walk(page_size, window, seed, *, steps, owners=1, placement="striped"):
    pages, window_pages = POOLS[seed % len(POOLS)]
    cache = make_windows(
        page_size,
        window=window,
        layers=1 + seed % 3,
        pages=pages // owners,
        window_pages=window_pages // owners,
        window_host_pages=window_pages,
        num_owners=owners,
        placement=placement,
        host=HostTier(pages=pages * 2),
    )
    walk = WindowHostWalk(WindowHostWorld(cache), seed, max_pages=12 + seed % 12)
    walk.run(steps, digest_every=1 if owners > 1 else 50)
    return walk.world.seen


@pytest.mark.parametrize(
    ("seed", "page_size", "window"),
    [(seed, *pair) for seed, pair in enumerate(itertools.product((1, 4, 16), (1, 2, 8, 17)))],
)
def test_walk_with_a_host_tier_agrees_too(seed, page_size, window):
    """Copies, loads that take their time and fail, and what both tiers then hold."""
    seen = take_a_host_walk(page_size, window, seed, steps=300)
    assert seen["loads"] > 1, "the walk does not do what it is for"


@pytest.mark.parametrize(("owners", "placement"), OWNERS[1:])
@pytest.mark.parametrize("window", [2, 17])
def test_walk_with_a_host_tier_over_several_ranks_agrees(window, owners, placement):
    """Tails that are loaded go beside full pages, which may be on any rank."""
    seen = [
        take_a_host_walk(4, window, seed, steps=300, owners=owners, placement=placement)
        for seed in range(2)
    ]
    assert sum(each["loads"] for each in seen) > 1, "the walk does not do what it is for"
