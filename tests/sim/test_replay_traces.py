"""Replay of the recorded traces: exact numbers with an unlimited pool, LRU's with a limited one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from phloem.sim import read_trace, replay

SHARED = Path(os.environ.get("PHLOEM_SHARED", Path(__file__).parents[3] / "shared"))
MINI = SHARED / "data" / "mini"
NAMES = ("claude_code_16sessions", "conversation_1000", "synthetic_1000")
POOLS = [
    ("claude_code_16sessions", (256, 512, 1024, 2048)),
    ("conversation_1000", (256, 1024, 4096, 8192)),
    ("synthetic_1000", (256, 1024, 4096, 8192)),
]

pytestmark = pytest.mark.skipif(
    not MINI.is_dir(), reason=f"no traces at {MINI}; set PHLOEM_SHARED to where data/mini lies"
)


def expected(name: str) -> dict:
    return json.loads((MINI / f"{name}.expected.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_with_an_unlimited_pool_every_line_is_exact(name: str):
    trace = list(read_trace(MINI / f"{name}.jsonl"))
    report = replay(trace)
    assert list(report.cached_by_request) == [request.expect_cached for request in trace]
    numbers = expected(name)
    assert report.requests == numbers["requests"]
    assert report.prompt_tokens == numbers["prompt_tokens"]
    assert report.cached_tokens == numbers["infinite_cached_tokens"]
    assert report.hit_rate == pytest.approx(numbers["infinite_ratio"])
    assert (report.refused, report.evicted_pages) == (0, 0)


@pytest.mark.parametrize(("name", "pools"), POOLS)
def test_a_limited_pool_reaches_the_totals_of_lru(name: str, pools: tuple[int, ...]):
    """At least 99 % of leaf-first LRU; prompts larger than the pool are refused and counted."""
    trace = list(read_trace(MINI / f"{name}.jsonl"))
    lru = expected(name)["lru"]
    assert sorted(lru, key=int) == [str(pool) for pool in pools]
    for pool in pools:
        report = replay(trace, num_pages=pool)
        assert report.cached_tokens >= 0.99 * lru[str(pool)], (pool, report)
        too_large = sum(request.num_prompt_tokens > pool * 16 for request in trace)
        assert report.refused == too_large
        assert [c is None for c in report.cached_by_request].count(True) == too_large


@pytest.mark.parametrize("policy", ["fcfs", "hrrn", "routing_key"])
def test_one_after_another_the_policy_makes_no_difference(policy: str):
    trace = list(read_trace(MINI / "conversation_1000.jsonl"))[:200]
    reports = [replay(trace, num_pages=1024, policy=name) for name in ("lpm", policy)]
    assert reports[0].cached_by_request == reports[1].cached_by_request
