"""What several ranks hold and hit together: issue 5, points 2 and 3; what shows a step back.

A tree per rank, or a pool that is copied, loses the capacity; eviction on the wrong rank, or a
refusal where only one rank is full, loses hits.
"""

from __future__ import annotations

import pytest

from phloem.bench import cp_hits
from phloem.bench.tree import find_trace
from phloem.sim import Ranks, read_trace

needs_traces = pytest.mark.skipif(
    any(find_trace(f"{name}.jsonl") is None for name in cp_hits.TRACES),
    reason="no traces beside the checkout; set PHLOEM_SHARED",
)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("placement", ["striped", "contiguous"])
def test_every_rank_adds_its_memory(num_ranks: int, placement: str):
    assert cp_hits.capacity_ratio(num_ranks, placement) >= 0.98 * num_ranks


def test_replicas_add_none():
    assert cp_hits.capacity_ratio(4, "replicate") == 1.0


@needs_traces
@pytest.mark.parametrize("placement", ["striped", "contiguous"])
@pytest.mark.parametrize("name", cp_hits.TRACES)
def test_small_pools_of_four_ranks_hit_like_one_pool(name: str, placement: str):
    """The pools in which an evicted page matters most; the others are in the long run."""
    path = find_trace(f"{name}.jsonl")
    assert cp_hits.hit_ratio_over_one(4, [path], placement, most_pages=512) >= 0.99


@needs_traces
def test_two_ranks_that_share_hit_far_more_than_two_that_hold_the_same():
    assert cp_hits.sharded_over_replicated(find_trace(f"{cp_hits.AGENTS}.jsonl")) >= 1.6


@needs_traces
def test_two_ranks_that_hold_the_same_hit_like_one():
    trace = list(read_trace(find_trace(f"{cp_hits.AGENTS}.jsonl")))
    one, same = (
        cp_hits.cached_tokens(trace, 256, Ranks(count=count, placement="replicate"))
        for count in (1, 2)
    )
    assert one == same


@needs_traces
@pytest.mark.long
def test_all_figures_are_what_the_project_promises():
    found = cp_hits.figures()
    least = {
        "capacity_ratio_cp2": 1.96,
        "capacity_ratio_cp4": 3.92,
        "hit_ratio_cp4_over_one": 0.99,
        "hits_sharded_over_replicated": 1.6,
    }
    assert found.keys() == least.keys()
    assert all(found[name] >= value for name, value in least.items()), found
