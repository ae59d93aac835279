"""Turns: prompts before answers within bounds, short prompts before long ones."""

from __future__ import annotations

import random

import pytest

from tests.sched.rig import Rig, prompt_of

PAGE = 4


def sliced(**more) -> Rig:
    """Slices of 32 tokens; a running answer waits for 64 of them."""
    settings = {"max_prefill_tokens": 64, "prefill_slice": 32, "prefill_fill": 8, **more}
    return Rig(page_size=PAGE, num_pages=400, **settings)


def counts_of(rig: Rig) -> list[list[int]]:
    return [sorted(row.count for row in plan.rows) for plan in rig.worker.plans]


def test_answers_join_every_second_slice_of_two_to_the_budget() -> None:
    """Red if an answer waits for longer than the budget, or if prompts go no faster for it."""
    rng = random.Random(1)
    rig = sliced(overlap=False)
    rig.add("talks", prompt_of(rng, 4), max_tokens=40)
    rig.step(2)
    rig.add("long", prompt_of(rng, 320), max_tokens=1)
    rig.step(10)
    assert counts_of(rig)[2:12] == [[32], [1, 32]] * 5
    rig.run()
    rig.check_idle()


@pytest.mark.parametrize("seed", range(4))
def test_no_answer_waits_for_more_prompts_than_the_budget_and_a_slice(seed: int) -> None:
    """Whatever prompts come: between two tokens of a running answer lie at most so many tokens."""
    rng = random.Random(seed)
    rig = sliced(max_running=12)
    rig.add("talks", prompt_of(rng, 4), max_tokens=200)
    number = 0
    while "talks" not in rig.last:
        if rng.random() < 0.5:
            prompt = prompt_of(rng, rng.choice((3, 20, 33, 90)))
            rig.add(f"r{number}", prompt, max_tokens=rng.randrange(1, 5))
            number += 1
        rig.step()
    between, waited = 0, []
    for plan in rig.worker.plans:
        between += sum(row.count for row in plan.rows if row.serial)
        if any(not row.serial for row in plan.rows):
            waited.append(between)
            between = 0
    assert max(waited[1:]) > 32, "no answer ever waited: the case is not met"
    # Beside a slice in the same step: one token of each other answer.
    assert max(waited[1:]) <= 64 + 32 + 12 * 3
    rig.run()
    rig.check_idle()


def test_a_stream_of_cached_prompts_stops_no_answer() -> None:
    """Red if a slice of a token kept answers out: the budget has room for a thousand of them."""
    rng = random.Random(5)
    rig = sliced(overlap=False, max_running=12)
    head = prompt_of(rng, 40)
    rig.add("head", head, max_tokens=1)
    rig.run()
    rig.add("talks", prompt_of(rng, 4), max_tokens=30)
    rig.step(2)
    before = len(rig.worker.plans)
    for number in range(20):
        rig.add(f"r{number}", [*head, number], max_tokens=1)
        rig.step()
    assert all(len(plan.rows) == 2 for plan in rig.worker.plans[before:])
    rig.run()
    rig.check_idle()


def test_a_short_prompt_overtakes_a_long_one_at_the_next_slice() -> None:
    rng = random.Random(2)
    rig = sliced(overlap=False)
    rig.add("long", prompt_of(rng, 320), max_tokens=1)
    rig.step(3)
    rig.add("short", prompt_of(rng, 20), max_tokens=1)
    rig.step(1)
    assert rig.last["short"].finish is not None
    assert counts_of(rig)[3] == [20]
    rig.run()
    rig.check_idle()


def test_a_long_step_is_not_planned_beside() -> None:
    """Who comes while a slice is computed starts right after it, not one step later."""
    rng = random.Random(3)
    rig = sliced()
    rig.add("long", prompt_of(rng, 320), max_tokens=1)
    rig.step(1)
    assert rig.scheduler.num_in_flight == 1
    rig.add("short", prompt_of(rng, 20), max_tokens=1)
    rig.step(2)
    assert counts_of(rig) == [[32], [20]]
    rig.run()
    rig.check_idle()


def test_a_waiting_request_keeps_its_prefix() -> None:
    """What it will reuse was released first, and others want pages: theirs go first."""
    rng = random.Random(4)
    rig = Rig(page_size=PAGE, num_pages=24, max_running=1, policy="lpm")
    wanted, others = prompt_of(rng, 32), prompt_of(rng, 32)
    for name, prompt in (("a", wanted), ("b", others)):
        rig.add(name, prompt, max_tokens=1)
        rig.run()
    rig.add("runs", prompt_of(rng, 20), max_tokens=16)
    rig.step(2)
    rig.add("waits", [*wanted, 1], max_tokens=1)
    rig.run()
    assert rig.last["waits"].cached.total == 32
    rig.check_idle()
