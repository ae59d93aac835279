"""The cache against a naive dictionary of prefixes, step by step."""

from __future__ import annotations

import pytest

from phloem.cache import PrefixCache
from tests.cache.world import Walk, World
from tests.long import few


@pytest.mark.parametrize("steps", few([700, 2000], 1))
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("num_pages", "seed"), [(12, 1), (40, 2), (40, 3), (200, 4)])
def test_walk_agrees_with_a_dictionary_of_prefixes(page_size, num_pages, seed, steps):
    """Twelve of them: matches, tables, LRU victims, room, counters, replicas."""
    cache = PrefixCache(page_size=page_size, num_pages=(num_pages,), record_freed=True)
    Walk(World(cache), seed).run(steps)


@pytest.mark.parametrize("steps", few([400, 1000], 1))
@pytest.mark.parametrize(
    ("owners", "placement"),
    [(2, "striped"), (4, "striped"), (2, "contiguous"), (4, "contiguous"), (2, "replicate")],
)
@pytest.mark.parametrize(("num_pages", "seed"), [(12, 1), (40, 2), (200, 3)])
def test_walk_over_several_ranks_agrees_too(owners, placement, num_pages, seed, steps):
    """The pools of all ranks are one room: the same victims by the book, the same refusals."""
    pools = (num_pages // owners,) * owners
    cache = PrefixCache(page_size=4, num_pages=pools, placement=placement, record_freed=True)
    Walk(World(cache), seed).run(steps, digest_every=1)
    assert cache.total_pages == (pools[0] if placement == "replicate" else sum(pools))


def test_walk_over_ranks_of_different_sizes():
    cache = PrefixCache(page_size=4, num_pages=(3, 17, 8), record_freed=True)
    Walk(World(cache), 6).run(1000)


def test_walk_with_the_cache_off_never_matches_and_never_leaks():
    cache = PrefixCache(page_size=4, num_pages=(40,), enabled=False, record_freed=True)
    Walk(World(cache), 5).run(500)
    assert cache.stats().nodes == 0
