"""Prefill packing: budgets, page borders, short ones first, nobody left behind."""

from __future__ import annotations

import random

import pytest

from phloem.sched.packing import pack_prefills, would_get_tokens
from tests.sched.rig import Rig, prompt_of


@pytest.mark.parametrize("seed", range(3))
def test_any_batch_is_packed_within_the_budget_and_on_page_borders(seed: int):
    rng = random.Random(seed)
    for _ in range(300):
        check_one_batch(rng)


def check_one_batch(rng: random.Random) -> None:
    page = rng.choice((1, 4, 16, 64))
    budget = rng.randrange(page, 20 * page)
    remaining = [rng.randrange(1, 12 * page) for _ in range(rng.randrange(1, 9))]
    counts = pack_prefills(remaining, budget, page)
    assert sum(counts) <= budget
    assert counts[0] > 0, "the one that runs longest got nothing"
    for count, left in zip(counts, remaining, strict=True):
        assert 0 <= count <= left
        assert count == left or count % page == 0


def test_short_prompts_are_fitted_first():
    """Short ones whole, chunks of pages from what is left; a quarter is the oldest one's."""
    assert pack_prefills([100, 30, 20], 120, 16) == [64, 30, 20]
    assert pack_prefills([1000, 90, 50], 128, 16) == [32, 32, 50]


def test_a_budget_below_a_page_still_computes_a_page():
    assert pack_prefills([100], 10, 64) == [64]
    assert pack_prefills([], 10, 64) == []


@pytest.mark.parametrize("seed", range(3))
def test_the_forecast_of_admission_is_what_packing_does(seed: int):
    """`would_get_tokens` says yes exactly when packing then gives the newcomer tokens."""
    rng = random.Random(seed)
    for _ in range(300):
        check_one_forecast(rng)


def check_one_forecast(rng: random.Random) -> None:
    page = rng.choice((1, 4, 16))
    budget = rng.randrange(1, 10 * page)
    remaining = [rng.randrange(1, 8 * page) for _ in range(rng.randrange(0, 6))]
    new = rng.randrange(1, 8 * page)
    packed = pack_prefills([*remaining, new], budget, page)[-1] > 0
    assert would_get_tokens(remaining, new, budget, page) == packed


def test_a_long_prefill_advances_in_every_step_under_a_stream_of_short_ones():
    rng = random.Random(3)
    rig = Rig(page_size=16, num_pages=400, max_prefill_tokens=64, max_running=16)
    rig.add("long", prompt_of(rng, 16 * 40), max_tokens=1)
    number = 0
    while "long" not in rig.last:
        for _ in range(4):
            rig.add(f"s{number}", prompt_of(rng, 30), max_tokens=1)
            number += 1
        rig.step()
        assert rig.steps < 45
    for plan in rig.worker.plans[:39]:
        assert any(row.serial == 0 for row in plan.rows), "the long prefill stood still"
    assert rig.worker.max_step_tokens <= 64
    rig.run()
    rig.check_idle()


def test_decodes_run_beside_every_prefill_chunk():
    """Chunked prefill never stops a running answer: one token in every step."""
    rng = random.Random(4)
    rig = Rig(page_size=4, num_pages=300, max_prefill_tokens=32)
    rig.add("talks", prompt_of(rng, 4), max_tokens=30)
    rig.step(2)
    rig.add("long", prompt_of(rng, 320), max_tokens=1)
    rig.step(10)
    assert len(rig.worker.plans[-1].rows) == 2
    for plan in rig.worker.plans[2:]:
        assert sorted(row.count for row in plan.rows)[0] == 1
    rig.run()
    rig.check_idle()
