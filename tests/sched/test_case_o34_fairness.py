"""Case O-34: a cold request among hot ones starts within K passes, and the hot ones hardly lose."""

from __future__ import annotations

import random

import pytest

from phloem.cache import check_invariants
from phloem.sched import STARTS_WITHIN_PASSES
from tests.sched.rig import Rig, prompt_of

CLIENTS = 16
OVERTAKING = ("lpm", "hrrn", "routing_key")  # fcfs puts what came before first, always


class ClosedLoop:
    """`clients` clients, each sending its next request (hot prefix, own tail) after an answer."""

    def __init__(self, *, clients: int, policy: str, page_size: int, **config) -> None:
        self.rng = random.Random(34)
        self.rig = Rig(page_size=page_size, policy=policy, max_queued=2000, **config)
        self.hot = prompt_of(self.rng, 20 * page_size)
        self.clients = clients
        self.sent = 0
        self.done = 0

    def send(self) -> None:
        tail = prompt_of(self.rng, self.rng.randrange(1, 3 * self.rig.page_size))
        # Answers of different lengths: otherwise all clients march in step.
        self.rig.add(f"hot{self.sent}", self.hot + tail, max_tokens=self.rng.randrange(4, 13))
        self.sent += 1

    def step(self) -> None:
        self.rig.step()
        ended = sum(1 for name in self.rig.last if name.startswith("hot"))
        self.done = ended
        for _ in range(self.clients - (self.sent - ended)):
            self.send()

    def passes_until_started(self, name: str, limit: int) -> int:
        for passes in range(1, limit + 1):
            self.step()
            if name in self.rig.started_at:
                return passes
        raise AssertionError(f"{name} has not started within {limit} passes")


def closed_loop(policy: str, page_size: int, clients: int = CLIENTS) -> ClosedLoop:
    """Rows for half of the clients, so that somebody always waits; room for the cold prompt."""
    loop = ClosedLoop(
        clients=clients,
        policy=policy,
        page_size=page_size,
        num_pages=20 + 8 * 8 * max(1, 16 // page_size) + 60,
        max_running=8,
    )
    for _ in range(clients):
        loop.send()
    for _ in range(60):
        loop.step()
    return loop


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("policy", "clients"),
    [("fcfs", CLIENTS), *((policy, n) for policy in OVERTAKING for n in (CLIENTS, 1000))],
)
def test_o34_a_cold_request_starts_within_k_passes(policy: str, clients: int, page_size: int):
    """Also when a thousand hot ones have been waiting since before it came."""
    loop = closed_loop(policy, page_size, clients)
    loop.rig.add("cold", prompt_of(random.Random(1), 40 * page_size), max_tokens=4)
    passes = loop.passes_until_started("cold", STARTS_WITHIN_PASSES)
    assert passes <= STARTS_WITHIN_PASSES
    check_invariants(loop.rig.cache)


def test_o34_without_ageing_it_would_starve(monkeypatch: pytest.MonkeyPatch):
    """The endless stream does starve a cold request if nothing ages: the tests above can fail."""
    monkeypatch.setattr("phloem.sched.queue.AGED_PASSES", 10**9)
    loop = closed_loop("lpm", 16)
    loop.rig.add("cold", prompt_of(random.Random(1), 40 * 16), max_tokens=4)
    with pytest.raises(AssertionError, match="not started"):
        loop.passes_until_started("cold", 4 * STARTS_WITHIN_PASSES)


def test_o34_hot_throughput_loses_less_than_a_tenth():
    """Answers within 300 passes, with a new cold request whenever the last one has ended."""
    done = {}
    for with_cold in (False, True):
        loop = closed_loop("lpm", 16)
        before = loop.done
        for number in range(300):
            if with_cold and number % 100 == 0:
                cold = prompt_of(random.Random(number), 40 * 16)
                loop.rig.add(f"cold{number}", cold, max_tokens=4)
            loop.step()
        done[with_cold] = loop.done - before
        assert not with_cold or "cold200" in loop.rig.last
    assert done[True] > 0.9 * done[False], done


def test_o34_a_large_request_is_not_overtaken_for_ever():
    """What does not fit is skipped at first; aged, it is a barrier until running ones make room."""
    rng = random.Random(2)
    rig = Rig(page_size=4, num_pages=40, max_running=8, policy="lpm")
    for number in range(6):
        rig.add(f"small{number}", prompt_of(rng, 8), max_tokens=rng.randrange(10, 20))
    rig.step(2)
    rig.add("large", prompt_of(rng, 140), max_tokens=4)
    sent = 6
    for _ in range(2 * STARTS_WITHIN_PASSES):
        rig.step()
        if "large" in rig.started_at:
            break
        while sum(1 for name in rig.requests if name not in rig.last) < 7:
            rig.add(f"small{sent}", prompt_of(rng, 8), max_tokens=rng.randrange(10, 20))
            sent += 1
    assert sent > 20, "nobody overtook it: the case is not met"
    assert rig.started_at["large"] <= STARTS_WITHIN_PASSES
    rig.run()
    rig.check_idle()


def test_o34_priority_goes_first_and_ages_too():
    """Among endless urgent requests one without priority still starts within K passes."""
    rng = random.Random(3)
    rig = Rig(page_size=4, num_pages=200, max_running=2, policy="fcfs")
    for number in range(4):
        rig.add(f"urgent{number}", prompt_of(rng, 9), max_tokens=5, priority=1)
    rig.add("patient", prompt_of(rng, 9), max_tokens=5)
    sent = 4
    while "patient" not in rig.started_at:
        rig.step()
        assert rig.steps <= STARTS_WITHIN_PASSES
        while sum(1 for name in rig.requests if name not in rig.last) < 5:
            rig.add(f"urgent{sent}", prompt_of(rng, 9), max_tokens=5, priority=1)
            sent += 1
    assert sent > 15, "it was not overtaken: priority had no effect"
    rig.run()
    rig.check_idle()
