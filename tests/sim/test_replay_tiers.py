"""The conversation trace on two tiers: pages of 512 tokens, device 1,024, host 32,768."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from phloem.sim import ReplayReport, read_trace, replay, simulated_target

SHARED = Path(os.environ.get("PHLOEM_SHARED", Path(__file__).parents[3] / "shared"))
TRACE = SHARED / "data" / "mooncake" / "conversation_trace.jsonl.gz"

pytestmark = [
    pytest.mark.skipif(not TRACE.is_file(), reason=f"no trace at {TRACE}; set PHLOEM_SHARED"),
    pytest.mark.long,
]


@functools.cache
def report(write_policy: str, pages: int = 1024, host_pages: int = 32768) -> ReplayReport:
    target = simulated_target(
        num_pages=pages, page_size=512, host_pages=host_pages, write_policy=write_policy
    )
    return replay(read_trace(TRACE, tokens_per_id=512), target=target)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_two_tiers_hit_as_one_of_their_size(write_policy: str):
    """34 %, of 37.4 % that room for everything would give."""
    assert report(write_policy).hit_rate >= 0.34


def test_selective_writes_less_and_hits_nearly_as_much():
    full, selective = report("write_through"), report("write_through_selective")
    assert selective.cached_tokens >= 0.85 * full.cached_tokens
    assert selective.written_pages <= 0.60 * full.written_pages


def test_a_small_host_is_not_spent_on_duplicates():
    """Copies of what the device holds anyway would leave 18.5 %; both tiers together give 23 %."""
    assert report("write_through", 4096, 8192).hit_rate >= 0.23


def test_only_what_is_missing_moves():
    """A cache that copied every prompt out and every hit in would move a third more, at least."""
    found = report("write_through")
    assert found.written_pages + found.loaded_pages < 0.75 * found.full_copy_pages
