"""Real traces, one request after another: the hits are exactly those of leaf-first LRU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phloem.bench.tree import find_trace, trace_prompts
from phloem.cache import PrefixCache, check_invariants
from phloem.core.errors import NoRoom
from tests.cache.build import NS

TRACES = ["conversation_1000", "claude_code_16sessions", "synthetic_1000"]


def trace(name: str) -> Path:
    path = find_trace(f"{name}.jsonl")
    if path is None:
        pytest.skip("the traces are not beside the checkout")
    return path


def replay(prompts: list[bytes], pages: int) -> list[int]:
    cache = PrefixCache(page_size=16, num_pages=(pages,))
    hits = []
    for prompt in prompts:
        match = cache.match(NS, prompt[:-4])
        try:
            with cache.reserve(match, -(-len(prompt) // 64) - match.num_pages) as reservation:
                reservation.commit(prompt)
        except NoRoom:
            hits.append(0)
            continue
        hits.append(match.num_tokens)
    check_invariants(cache, idle=True)
    return hits


@pytest.mark.parametrize("name", TRACES)
def test_an_unlimited_pool_hits_whatever_was_there(name):
    path = trace(name)
    with path.open() as lines:
        expected = [json.loads(line)["expect_cached_infinite"] for line in lines]
    assert replay(trace_prompts(path), 1 << 30) == expected


@pytest.mark.parametrize("name", TRACES)
def test_a_limited_pool_hits_as_often_as_leaf_first_lru(name):
    path = trace(name)
    prompts = trace_prompts(path)
    limits = json.loads(path.with_suffix(".expected.json").read_text())["lru"]
    for pages, tokens in limits.items():
        assert sum(replay(prompts, int(pages))) >= 0.99 * tokens, pages
