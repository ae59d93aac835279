"""Which pages go, how many, and what is remembered of them."""

from __future__ import annotations

import pytest

from phloem.cache import check_invariants
from phloem.cache.chain import chain_keys, default_hasher, pack_keys, unpack_keys
from phloem.cache.ghosts import Ghosts
from tests.cache.build import NS, cached, make, run_of, serve, start


def test_the_page_released_longest_ago_goes_first():
    cache = make(4, 64)
    prompts = [run_of(1000 * i, 16) for i in range(4)]
    for prompt in prompts:
        serve(cache, prompt)
    serve(cache, prompts[0] + run_of(9000, 4))
    cache.evict(4)
    assert [cached(cache, prompt) for prompt in prompts] == [16, 0, 16, 16]
    cache.evict(4)
    assert [cached(cache, prompt) for prompt in prompts] == [16, 0, 0, 16]
    check_invariants(cache, idle=True)


def test_a_running_request_counts_from_its_end():
    cache = make(4, 64)
    old = start(cache, run_of(0, 8))
    old.commit(run_of(0, 8))
    serve(cache, run_of(1000, 8))
    old.close()
    cache.evict(2)
    assert cached(cache, run_of(0, 8)) == 8
    assert cached(cache, run_of(1000, 8)) == 0


def test_a_leaf_loses_its_tail_and_no_page_more():
    cache = make(4, 64)
    tokens = run_of(0, 40)
    serve(cache, tokens)
    for left in range(9, -1, -1):
        assert cache.evict(1) == 1
        assert cached(cache, tokens) == 4 * left
        check_invariants(cache, idle=True)
    assert cache.evict(1) == 0
    assert cache.stats().nodes == 0


def test_parents_go_after_their_children():
    cache = make(4, 64)
    head = run_of(0, 8)
    for index in range(5):
        serve(cache, head + run_of(1000 * index, 8))
    cache.evict(9)
    assert cached(cache, head + run_of(4000, 8)) == 12
    cache.evict(1)
    assert cached(cache, head) == 8
    check_invariants(cache, idle=True)
    assert cache.evict(99) == 2


def test_only_as_much_as_is_missing_is_evicted():
    cache = make(4, 16)
    serve(cache, run_of(0, 40))
    with start(cache, run_of(1000, 32)):
        assert cache.stats().evicted_pages_total == 2
        assert cached(cache, run_of(0, 40)) == 32
    check_invariants(cache, idle=True)


@pytest.mark.parametrize("pages", [0, -3])
def test_evicting_nothing_is_nothing(pages):
    cache = make(4, 16)
    serve(cache, run_of(0, 40))
    before = cache.state.digest()
    assert cache.evict(pages) == 0
    assert cache.state.digest() == before


def test_ghosts_count_what_was_evicted_and_asked_for_again():
    cache = make(4, 64)
    serve(cache, run_of(0, 40))
    cache.evict(6)
    cache.match(NS, run_of(0, 40))  # asking alone counts nothing
    assert cache.stats().evicted_then_requested_pages_total == 0
    serve(cache, run_of(0, 40))  # the last token is computed anyhow: 5 of the 6 could have hit
    assert cache.stats().evicted_then_requested_pages_total == 5
    serve(cache, run_of(0, 41))
    assert cache.stats().evicted_then_requested_pages_total == 5
    assert cache.stats().evicted_pages_total == 6


def test_a_flush_is_no_eviction():
    cache = make(4, 64)
    serve(cache, run_of(0, 40))
    cache.evict(2)
    cache.flush()
    serve(cache, run_of(0, 41))
    assert cache.stats().evicted_then_requested_pages_total == 0
    assert cache.stats().evicted_pages_total == 2


def test_ghosts_are_content_not_place():
    """The same page elsewhere, or in another namespace, is another page."""
    cache = make(4, 64)
    serve(cache, run_of(0, 8))
    cache.evict(2)
    serve(cache, run_of(500, 4) + run_of(4, 4) + run_of(0, 8))
    serve(cache, run_of(0, 9), namespace=b"other")
    assert cache.stats().evicted_then_requested_pages_total == 0
    serve(cache, run_of(0, 9))
    assert cache.stats().evicted_then_requested_pages_total == 2


def test_ghosts_are_bounded_and_forget_the_oldest():
    ghosts = Ghosts(3)
    tokens = run_of(0, 5)
    keys = chain_keys(default_hasher, 7, tokens, 4)
    ghosts.remember(pack_keys(keys))
    assert len(ghosts.keys) == 3
    assert ghosts.recall(default_hasher, 7, tokens, 0, 20, 4) == 0
    assert ghosts.recall(default_hasher, keys[1], tokens, 8, 20, 4) == 3
    assert not ghosts.keys


def test_a_chain_key_stands_for_all_tokens_before_it():
    tokens = run_of(0, 16)
    keys = chain_keys(default_hasher, 7, tokens, 16)
    assert len(keys) == 4
    assert chain_keys(default_hasher, keys[1], tokens[32:], 16) == keys[2:]
    changed = chain_keys(default_hasher, 7, run_of(9, 1) + tokens[4:], 16)
    assert all(one != two for one, two in zip(keys, changed, strict=True))
    assert unpack_keys(pack_keys(keys)) == keys
