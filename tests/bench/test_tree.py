"""The bench of the tree: stable names, and what can be asserted without a clock."""

from __future__ import annotations

import pytest

from phloem.bench import tree

NAMES = [
    "match_131072_256_nodes_us",
    "rematch_next_turn_us",
    "insert_256_us",
    "evict_256_leaf16_us",
    "evict_256_leaf1024_us",
    "match_1024_us",
]


def test_every_figure_has_its_name_unit_and_samples():
    report = tree.run(quick=True)
    assert report["bench"] == "tree"
    timed = [result for result in report["results"] if result["unit"] == "us"]
    assert [result["name"] for result in timed] == NAMES
    for result in timed:
        assert min(result["samples"]) <= result["value"] <= max(result["samples"])
        assert len(result["samples"]) >= 20


def test_a_cached_token_costs_at_most_ten_bytes_of_heap():
    path = tree.find_trace()
    if path is None:
        pytest.skip("the traces are not beside the checkout")
    prompts = tree.trace_prompts(path)
    assert 4 < tree.bytes_per_token(prompts) <= 10  # the tokens alone are four
