"""Prefill packing: budgets, page borders, short ones first, nobody left behind."""

from __future__ import annotations

import random

import pytest

from phloem.sched.packing import Slice, pack_prefills, would_get_tokens
from phloem.sched.turns import OLDEST_TURN
from tests.sched.rig import Rig, prompt_of


@pytest.mark.parametrize("seed", range(3))
def test_any_batch_is_packed_within_the_budget_and_on_page_borders(seed: int):
    rng = random.Random(seed)
    for _ in range(300):
        check_one_batch(rng)


def any_slice(rng: random.Random) -> Slice:
    page = rng.choice((1, 4, 16, 64))
    tokens = rng.randrange(1, 20 * page)
    return Slice(tokens, rng.choice((tokens, rng.randrange(1, tokens + 1))), page)


def check_one_batch(rng: random.Random) -> None:
    step = any_slice(rng)
    page = step.page_size
    remaining = [rng.randrange(1, 12 * page) for _ in range(rng.randrange(1, 9))]
    oldest_first = rng.random() < 0.5
    counts = pack_prefills(remaining, step, oldest_first=oldest_first)
    assert 0 < sum(counts) <= max(step.tokens, page)
    first = 0 if oldest_first else min(range(len(remaining)), key=lambda i: remaining[i])
    assert counts[first] > 0, "whose turn it is got nothing"
    beside = sum(counts) - counts[first]
    assert not beside or sum(counts) <= step.fill, "others joined a step that was full"
    for count, left in zip(counts, remaining, strict=True):
        assert 0 <= count <= left
        assert count == left or count % page == 0


def test_short_prompts_are_fitted_first():
    """A step that is filled up: short ones whole, then chunks of pages from what is left."""
    step = Slice(128, 128, 16)
    assert pack_prefills([1000, 90, 50], step, oldest_first=False) == [0, 64, 50]
    assert pack_prefills([100, 30, 20], step, oldest_first=False) == [64, 30, 20]
    assert pack_prefills([1000, 90, 50], step, oldest_first=True) == [128, 0, 0]


def test_prompts_do_not_wait_for_each_other():
    """Others join the shortest one only while a step has fewer than `fill` tokens."""
    step = Slice(512, 64, 16)
    assert pack_prefills([300, 200], step, oldest_first=False) == [0, 200]
    assert pack_prefills([300, 20, 30], step, oldest_first=False) == [0, 20, 30]
    assert pack_prefills([300, 20], step, oldest_first=False) == [32, 20]
    assert pack_prefills([300, 20], step, oldest_first=True) == [300, 0]
    assert pack_prefills([600], step, oldest_first=False) == [512]


def test_a_slice_below_a_page_still_computes_a_page():
    assert pack_prefills([100], Slice(10, 10, 64), oldest_first=False) == [64]
    assert pack_prefills([], Slice(10, 10, 64), oldest_first=True) == []


@pytest.mark.parametrize("seed", range(3))
def test_the_forecast_of_admission_is_what_packing_does(seed: int):
    """`would_get_tokens` says yes exactly when packing then gives the newcomer tokens."""
    rng = random.Random(seed)
    for _ in range(300):
        check_one_forecast(rng)


def check_one_forecast(rng: random.Random) -> None:
    step = any_slice(rng)
    remaining = [rng.randrange(1, 8 * step.page_size) for _ in range(rng.randrange(0, 6))]
    new = rng.randrange(1, 8 * step.page_size)
    packed = pack_prefills([*remaining, new], step, oldest_first=False)[-1] > 0
    assert would_get_tokens(remaining, new, step) == packed


def test_a_long_prefill_advances_under_a_stream_of_short_ones():
    """Every OLDEST_TURN-th slice is its own."""
    rng = random.Random(3)
    rig = Rig(page_size=16, num_pages=400, max_prefill_tokens=64, max_running=16)
    rig.add("long", prompt_of(rng, 16 * 40), max_tokens=1)
    number = 0
    while "long" not in rig.last:
        for _ in range(4):
            rig.add(f"s{number}", prompt_of(rng, 30), max_tokens=1)
            number += 1
        rig.step()
        assert rig.steps < 10 * OLDEST_TURN + 5
    mine = [sum(r.count for r in plan.rows if not r.serial) for plan in rig.worker.plans]
    for at in range(0, 9 * OLDEST_TURN, OLDEST_TURN):
        assert sum(mine[at : at + OLDEST_TURN]) >= 64, "the long prefill stood still"
    assert rig.worker.max_step_tokens <= 64
    rig.run()
    rig.check_idle()


def test_decodes_run_beside_every_prefill_chunk():
    """Where a step may have all prompt tokens, an answer has one token in every step."""
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
