"""How a budget is split between the pools of a model with window layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phloem.core.errors import ConfigError
from phloem.kv.sizing import (
    PoolDemand,
    default_checkpoint,
    least_window_pages,
    pool_pages,
    pool_pages_beside,
    tail_pages,
)
from phloem.kv.spec import AttentionKind, KVDtype, KVSpec

GIB = 1 << 30


def specs(full_layers: int, window_layers: int, window: int, page_size: int = 16):
    full = KVSpec(
        kind=AttentionKind.GQA,
        dtype=KVDtype.BF16,
        num_layers=full_layers,
        num_kv_heads=16,
        head_dim=128,
        page_size=page_size,
    )
    return full, replace(full, num_layers=window_layers, retention=window)


DEMAND = PoolDemand(max_model_len=131_072, max_running=64, max_prefill_tokens=2048)
GEMMA = specs(10, 52, 1024)
GPT_OSS = specs(18, 18, 128)
MISTRAL = specs(0, 32, 4096)


@pytest.mark.parametrize(
    ("window", "page_size", "pages"),
    [(1, 16, 0), (2, 16, 1), (16, 16, 1), (17, 16, 1), (18, 16, 2), (4, 16, 1), (128, 16, 8)],
)
def test_a_tail_is_what_the_next_token_reads_of_the_past(window: int, page_size: int, pages: int):
    """The token itself is one of the window, so W - 1 lie before it."""
    assert tail_pages(window, page_size) == pages


@pytest.mark.parametrize("mix", [GEMMA, GPT_OSS, MISTRAL, specs(1, 1, 4, 32), specs(2, 2, 1)])
@pytest.mark.parametrize("budget", [GIB // 4, GIB, 80 * GIB, 80 * GIB + 12_345])
@pytest.mark.parametrize("checkpoint", [0, 8192])
@pytest.mark.parametrize("ratio", [None, 0.01, 0.5, 1.0])
def test_both_pools_fit_in_the_budget_and_waste_less_than_a_page_of_each(
    mix, budget: int, checkpoint: int, ratio
):
    demand = replace(DEMAND, checkpoint=checkpoint, ratio=ratio)
    num_full, num_window = pool_pages(mix, budget, demand)
    used = num_full * mix[0].page_bytes + num_window * mix[1].page_bytes
    assert budget - mix[0].page_bytes - mix[1].page_bytes < used <= budget
    window, page_size = mix[1].retention, mix[1].page_size
    assert min(num_full, least_window_pages(window, page_size)) <= num_window <= num_full


def test_a_large_budget_holds_as_many_long_prompts_as_their_ends_allow():
    """At 16K tokens: full pages for all of a prompt, window pages for its last 1,024 tokens.

    At most 6 % more: the chunks of what runs, and a second end a page further.
    """
    num_full, num_window = pool_pages(GEMMA, 800 * GIB, DEMAND)
    assert 1.0 <= num_window / num_full / (64 / 1024) <= 1.06
    with_checkpoints = replace(DEMAND, checkpoint=default_checkpoint(1024))
    num_full, num_window = pool_pages(GEMMA, 800 * GIB, with_checkpoints)
    assert 1.0 <= num_window / num_full / (64 / 512) <= 1.06


def test_a_ratio_that_was_asked_for_is_kept():
    num_full, num_window = pool_pages(GEMMA, 80 * GIB, replace(DEMAND, ratio=0.3))
    assert num_window / num_full == pytest.approx(0.3, rel=0.01)
    assert pool_pages_beside(GEMMA, 1000, replace(DEMAND, ratio=0.3)) == (1000, 300)


def test_a_small_pool_still_lets_one_request_run():
    demand = replace(DEMAND, ratio=0.01)
    assert pool_pages_beside(GPT_OSS, 100, demand) == (100, 10)
    assert pool_pages_beside(GPT_OSS, 6, demand) == (6, 6)
    short = replace(demand, max_model_len=32)
    assert pool_pages_beside(GPT_OSS, 100, short) == (100, 2)


def test_what_runs_together_is_provided_for_within_a_quarter():
    assert pool_pages_beside(GPT_OSS, 50_000, DEMAND) == (50_000, 64 * 9 + 2 * 128)
    num_full, num_window = pool_pages_beside(GPT_OSS, 1000, DEMAND)
    assert num_window == num_full // 4


def test_a_window_as_long_as_the_context_keeps_everything():
    demand = replace(DEMAND, max_model_len=1024)
    num_full, num_window = pool_pages(GEMMA, 8 * GIB, demand)
    assert num_full == num_window


def test_a_spine_costs_nothing_and_holds_the_prefixes_of_all_tails():
    num_full, num_window = pool_pages(MISTRAL, 64 * GIB, replace(DEMAND, max_model_len=32_768))
    assert num_window == 64 * GIB // MISTRAL[1].page_bytes
    assert num_full >= num_window // 256 * 2048  # whole prompts of 32K, a tail of 256 pages each
    assert num_full <= 64 * num_window
    assert pool_pages_beside(MISTRAL, 300, DEMAND)[1] == 300


def test_one_component_is_as_it_was():
    assert pool_pages(GEMMA[:1], 3 * GEMMA[0].page_bytes + 1, DEMAND) == (3,)
    assert pool_pages_beside(GEMMA[:1], 7, DEMAND) == (7,)


@pytest.mark.parametrize("mix", [GEMMA, MISTRAL, GEMMA[:1]])
def test_a_budget_without_a_page_says_what_to_do(mix):
    with pytest.raises(ConfigError, match="--kv-memory"):
        pool_pages(mix, mix[-1].page_bytes - 1, DEMAND)


def test_a_budget_that_the_window_alone_would_need_is_refused_or_met():
    """Just above one page of each: whatever comes out fits."""
    both = GEMMA[0].page_bytes + GEMMA[1].page_bytes
    for budget in (both, 2 * both, 10 * both, 66 * both, 67 * both):
        num_full, num_window = pool_pages(GEMMA, budget, DEMAND)
        assert 1 <= num_window <= num_full
        assert num_full * GEMMA[0].page_bytes + num_window * GEMMA[1].page_bytes <= budget
