"""The cache against a naive dictionary of prefixes, step by step."""

from __future__ import annotations

import pytest

from phloem.cache import PrefixCache
from tests.cache.world import Walk, World


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("num_pages", "seed"), [(12, 1), (40, 2), (40, 3), (200, 4)])
def test_walk_agrees_with_a_dictionary_of_prefixes(page_size, num_pages, seed):
    """24,000 steps in all: matches, tables, LRU victims, room, counters, replicas."""
    cache = PrefixCache(page_size=page_size, num_pages=(num_pages,), record_freed=True)
    Walk(World(cache), seed).run(2000)


def test_walk_with_the_cache_off_never_matches_and_never_leaks():
    cache = PrefixCache(page_size=4, num_pages=(40,), enabled=False, record_freed=True)
    Walk(World(cache), 5).run(500)
    assert cache.stats().nodes == 0
