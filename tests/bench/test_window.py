"""Memory and hits of sliding windows: issue 4, points 3 and 4, and what would show a step back."""

from __future__ import annotations

import pytest

from phloem.bench.tree import find_trace
from phloem.bench.window_capacity import GEMMA3, GPT_OSS, Mix, measure_capacity
from phloem.bench.window_hits import TRACE, hit_rates

NO_TRACE = find_trace(TRACE) is None


@pytest.mark.skipif(NO_TRACE, reason="no trace beside the checkout; set PHLOEM_SHARED")
def test_few_hits_are_lost_where_a_cache_without_tails_loses_a_third():
    """384 window pages for 16 sessions: within 2 points of no limit; page-wise LRU gets 64 %."""
    rates = hit_rates()
    assert rates["unlimited"] == pytest.approx(0.9343, abs=0.0001)
    assert rates["unlimited"] - rates["kept"] <= 0.02
    assert rates["tombstone_only"] == pytest.approx(0.64, abs=0.02)


@pytest.mark.parametrize("mix", [GEMMA3, GPT_OSS], ids=lambda mix: mix.name)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_small_memory_keeps_what_its_layers_allow_but_for_two_prompts(
    mix: Mix, checkpoints: bool
):
    """Of 12 prompts of 16K tokens; one pool would hold 3 (Gemma 3) or 6 (gpt-oss) of them."""
    found = measure_capacity(mix, checkpoints=checkpoints, num_prompts=12)
    assert found.tokens >= 10 * 16_384
    assert found.over_one_pool > 1.4


@pytest.mark.long
@pytest.mark.parametrize("mix", [GEMMA3, GPT_OSS], ids=lambda mix: mix.name)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_memory_keeps_95_percent_of_what_the_layers_allow(mix: Mix, checkpoints: bool, host: bool):
    found = measure_capacity(mix, checkpoints=checkpoints, host=host, num_prompts=64)
    assert found.over_limit >= 0.95
