"""The order in which requests start."""

from __future__ import annotations

import random

import pytest

from phloem.core.errors import ConfigError
from phloem.sched import policy_names
from phloem.sched.policies import get_policy
from tests.sched.rig import Rig, prompt_of


def start_order(rig: Rig) -> list[str]:
    """Names in order of admission."""
    by_prompt = {request.tokens: name for name, request in rig.requests.items()}
    return [by_prompt[i.tokens] for plan in rig.worker.plans for i in plan.admitted]


def one_at_a_time(policy: str, **config) -> Rig:
    return Rig(policy=policy, max_running=1, num_pages=200, overlap=False, **config)


def test_every_file_is_a_policy():
    assert policy_names() == ("fcfs", "hrrn", "lpm", "routing_key")
    for name in policy_names():
        get_policy(name)
    with pytest.raises(ConfigError, match="choose from"):
        get_policy("../lpm")


def warm_then_queue(policy: str) -> tuple[Rig, dict[str, list[int]]]:
    """Two prefixes are cached; four requests wait behind a running one."""
    rng = random.Random(5)
    rig = one_at_a_time(policy)
    long, short = prompt_of(rng, 32), prompt_of(rng, 12)
    for name, prompt in (("w1", long), ("w2", short)):
        rig.add(name, prompt, max_tokens=1)
        rig.run()
    rig.add("busy", prompt_of(rng, 4), max_tokens=3)
    rig.step()
    prompts = {
        "cold": prompt_of(rng, 50),
        "some": short + prompt_of(rng, 9),
        "most": long + prompt_of(rng, 9),
        "tiny": prompt_of(rng, 3),
    }
    for name, prompt in prompts.items():
        rig.add(name, prompt, max_tokens=1)
    rig.run()
    return rig, prompts


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["cold", "some", "most", "tiny"]),
        ("lpm", ["most", "some", "cold", "tiny"]),
        ("hrrn", ["tiny", "some", "most", "cold"]),
        ("routing_key", ["most", "some", "cold", "tiny"]),
    ],
)
def test_the_order_of_a_policy(policy: str, expected: list[str]):
    """tiny has 3 tokens to compute, some 9 + 4, most 9 + 4 of 45, cold 50."""
    rig, _ = warm_then_queue(policy)
    assert start_order(rig)[3:] == expected
    rig.check_idle()


def test_a_prefix_that_becomes_cached_while_queued_moves_its_request_up():
    """Matches of waiting requests are kept fresh, not taken once at arrival."""
    rng = random.Random(6)
    rig = one_at_a_time("lpm")
    shared = prompt_of(rng, 24)
    rig.add("leader", [*shared, 1], max_tokens=2)
    rig.add("stranger", prompt_of(rng, 30), max_tokens=1)
    rig.add("follower", [*shared, 2], max_tokens=1)  # nothing of it is cached yet
    rig.run()
    assert start_order(rig) == ["leader", "follower", "stranger"]
    rig.check_idle()


def test_hrrn_lets_a_long_request_wait_its_turn_but_not_for_ever():
    """Its ratio grows as tokens are computed: short ones that come later do not all overtake it."""
    rng = random.Random(7)
    rig = one_at_a_time("hrrn")
    rig.add("busy", prompt_of(rng, 4), max_tokens=3)
    rig.step()
    rig.add("long", prompt_of(rng, 60), max_tokens=1)
    for number in range(20):
        rig.add(f"s{number}", prompt_of(rng, 10), max_tokens=1)
        rig.step(2)
    rig.run()
    order = start_order(rig)
    assert 2 < order.index("long") < 20
    rig.check_idle()


def test_routing_key_follows_what_runs():
    rng = random.Random(8)
    rig = Rig(policy="routing_key", max_running=2, num_pages=200, overlap=False)
    rig.add("a1", prompt_of(rng, 9), max_tokens=9, routing_key="a")
    rig.add("a2", prompt_of(rng, 9), max_tokens=4, routing_key="a")
    rig.step()
    rig.add("none", prompt_of(rng, 9), max_tokens=1)
    rig.add("b", prompt_of(rng, 9), max_tokens=1, routing_key="b")
    rig.add("a3", prompt_of(rng, 9), max_tokens=1, routing_key="a")
    rig.run()
    assert start_order(rig) == ["a1", "a2", "a3", "none", "b"]
    rig.check_idle()


@pytest.mark.parametrize("policy", policy_names())
def test_higher_priority_goes_first_under_every_policy(policy: str):
    rng = random.Random(9)
    rig = one_at_a_time(policy)
    rig.add("busy", prompt_of(rng, 4), max_tokens=3)
    rig.step()
    for name, priority in (("low", -1), ("mid", 0), ("high", 7)):
        rig.add(name, prompt_of(rng, 20), max_tokens=1, priority=priority)
    rig.run()
    assert start_order(rig) == ["busy", "high", "mid", "low"]
    rig.check_idle()


def test_skip_ahead_lets_a_small_request_past_one_that_does_not_fit():
    rng = random.Random(10)
    rig = Rig(policy="fcfs", num_pages=20, page_size=4, headroom_tokens=0)
    rig.add("busy", prompt_of(rng, 40), max_tokens=8)
    rig.step()
    rig.add("big", prompt_of(rng, 60), max_tokens=2)
    rig.add("small", prompt_of(rng, 4), max_tokens=2)
    rig.run()
    assert start_order(rig) == ["busy", "small", "big"]
    rig.check_idle()


@pytest.mark.parametrize("policy", policy_names())
def test_a_retracted_request_goes_before_all_that_wait(policy: str):
    """It comes back first, and nobody takes the pages that it waits for."""
    rng = random.Random(11)
    rig = Rig(policy=policy, num_pages=24, page_size=4, max_running=2, headroom_tokens=0)
    rig.add("old", prompt_of(rng, 20), max_tokens=60)
    rig.step()
    rig.add("new", prompt_of(rng, 20), max_tokens=60)
    rig.step(2)
    for number in range(3):
        rig.add(f"urgent{number}", prompt_of(rng, 4), max_tokens=2, priority=5)
    rig.run()
    admitted = [init.tokens for plan in rig.worker.plans for init in plan.admitted]
    again = [len(tokens) > 20 * 4 for tokens in admitted]
    assert again.index(True) == 2, "one was retracted, and it started again right after"
    rig.check_idle()


def test_headroom_spares_most_retractions():
    """Keeping pages free ahead of running answers costs little and avoids computing twice."""
    retractions, steps = {}, {}
    for headroom in (0, 32):
        rng = random.Random(12)
        rig = Rig(num_pages=60, page_size=4, headroom_tokens=headroom)
        for number in range(40):
            rig.add(str(number), prompt_of(rng, 12), max_tokens=40)
        rig.run()
        retractions[headroom] = rig.loop.stats().retractions_total
        steps[headroom] = rig.steps
        rig.check_idle()
    assert retractions[32] * 3 < retractions[0], retractions
    assert steps[32] < 1.1 * steps[0], steps
