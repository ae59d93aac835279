"""The waiting requests: order, turns and bookkeeping, without an engine around them."""

from __future__ import annotations

import random

import pytest

from phloem.core.request import GenerateRequest, SamplingParams
from phloem.core.tokens import tokens_to_bytes
from phloem.sched.policies import PolicyView, get_policy, policy_names
from phloem.sched.queue import AGED_PASSES, AGED_TURN, MAX_TRIES, WaitQueue
from phloem.sched.state import RequestState


def state(name: str, *, matched: int = 0, priority: int = 0, length: int = 8) -> RequestState:
    request = GenerateRequest(
        request_id=name,
        tokens=tokens_to_bytes([1] * length),
        sampling=SamplingParams(),
        namespace=b"",
        priority=priority,
    )
    out = RequestState(request, seed=0, eos_ids=())
    out.matched_pages = matched
    return out


def view(pass_no: int = 0, planned_tokens: int = 0) -> PolicyView:
    return PolicyView(pass_no=pass_no, planned_tokens=planned_tokens, running_key=None)


def names(queue: WaitQueue, now: PolicyView) -> list[str]:
    return [request.request_id for request, _ in queue.candidates(now)]


def test_a_request_that_left_during_a_round_is_not_refreshed_under_its_old_name():
    """An id may be used again after its request has ended: that is another request."""
    queue = WaitQueue(get_policy("lpm"))
    for name in "abc":
        queue.add(state(name), view())
    assert queue.next_to_refresh() is None  # a round begins
    assert queue.next_to_refresh().request_id == "a"
    (old,) = [request for request in queue if request.request_id == "b"]
    queue.remove(old)
    new = state("b")
    queue.add(new, view())
    assert queue.next_to_refresh().request_id == "c"
    assert queue.next_to_refresh() is None
    round_two = [queue.next_to_refresh() for _ in range(3)]
    assert new in round_two
    assert old not in round_two


def test_one_aged_request_a_turn_least_liked_and_oldest_by_turns():
    queue = WaitQueue(get_policy("lpm"))
    for number in range(10):
        queue.add(state(f"r{number}", matched=(number * 7 + 3) % 10), view())
    young = view(pass_no=AGED_PASSES - 1)
    assert not any(barrier for _, barrier in queue.candidates(young))
    old = view(pass_no=AGED_PASSES)
    (first, barrier), *rest = queue.candidates(old)
    assert (first.matched_pages, barrier) == (0, True)
    assert not any(barrier for _, barrier in rest)
    queue.admit(first, barrier=True)
    for _ in range(AGED_TURN):
        request, barrier = queue.candidates(old)[0]
        assert not barrier, "it was not the turn of the aged"
        queue.admit(request, barrier=False)
    oldest, barrier = queue.candidates(old)[0]
    assert barrier
    assert oldest is next(iter(queue))


def test_candidates_are_bounded_and_never_name_a_request_twice():
    queue = WaitQueue(get_policy("lpm"))
    for number in range(500):
        queue.add(state(str(number), matched=number % 5), view())
    for pass_no in (0, AGED_PASSES, 1000):
        found = names(queue, view(pass_no))
        assert len(found) <= MAX_TRIES
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("seed", range(5))
def test_the_order_kept_by_insertions_is_the_order_of_a_full_sort(policy: str, seed: int):
    """Adds, removals and changed matches in any order against sorting everything each time."""
    rng = random.Random(seed)
    chosen = get_policy(policy)
    queue = WaitQueue(chosen)
    alive: list[RequestState] = []
    for number in range(300):
        now = view(planned_tokens=number * 10)
        draw = rng.random()
        if draw < 0.5 or not alive:
            new = state(str(number), matched=rng.randrange(5), priority=rng.randrange(2), length=9)
            new.queued_at_tokens = number * 10
            alive.append(new)
            queue.add(new, now)
        elif draw < 0.75:
            queue.remove(alive.pop(rng.randrange(len(alive))))
        else:
            changed = rng.choice(alive)
            changed.matched_pages = rng.randrange(5)
            changed.num_uncached = rng.randrange(1, 9)
            queue.rerank(changed, now)
        expected = sorted(alive, key=lambda request: chosen.rank(request, now))
        assert names(queue, now) == [r.request_id for r in expected[:MAX_TRIES]]
        assert len(queue) == len(alive)
