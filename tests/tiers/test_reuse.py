"""Which pages are worth a copy under write_through_selective."""

from __future__ import annotations

import random

from phloem.tiers.reuse import LEAST_SEEN, Reuse
from tests.cache.build import NS, make, serve, toks


def path(cache, tokens: bytes):
    serve(cache, tokens)
    node, _, _ = cache.state.tree.find(NS, tokens, len(tokens) // 16 * 16)
    return node


def test_a_page_is_worth_a_copy_when_it_is_used_again_even_after_eviction():
    cache, reuse = make(4, 64), Reuse(2)
    rng = random.Random(1)
    cold = [toks([rng.randrange(1000) for _ in range(16)]) for _ in range(LEAST_SEEN)]
    hot = toks([rng.randrange(1000) for _ in range(16)])
    for tokens in cold:  # enough of them that the class is known to be cold
        reuse.note(path(cache, tokens))
    for _ in range(2 * LEAST_SEEN):  # others, of another class, are used again and again
        other = path(cache, toks([rng.randrange(1000) for _ in range(4)]))
        reuse.note(other)
        reuse.note(other)
    assert reuse.note(path(cache, hot)) == 0
    cache.evict(64)
    assert reuse.note(path(cache, hot)) == 4


def test_new_pages_of_a_class_that_does_well_are_copied_at_once():
    cache, reuse = make(4, 256), Reuse(2)
    rng = random.Random(2)
    for _ in range(LEAST_SEEN):
        short = toks([rng.randrange(1000) for _ in range(4)])
        long = toks([rng.randrange(1000) for _ in range(64)])
        reuse.note(path(cache, short))
        reuse.note(path(cache, short))  # short prompts always come again, long ones never
        reuse.note(path(cache, long))
    assert reuse.note(path(cache, toks([rng.randrange(1000) for _ in range(4)]))) == 1
    assert reuse.note(path(cache, toks([rng.randrange(1000) for _ in range(64)]))) == 0


def test_the_memory_is_bounded():
    cache, reuse = make(4, 256), Reuse(2, capacity=100)
    rng = random.Random(3)
    for _ in range(100):
        reuse.note(path(cache, toks([rng.randrange(1000) for _ in range(40)])))
    assert len(reuse._pages) == 100
