"""Every admission is explained: where the pages were, what was expected of each way, and why."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from phloem.core.transfer import Transfer, TransferKind
from phloem.sim import SimStorage, TransferCosts
from phloem.tiers import Choice, Decision, Decisions, TierConfig
from tests.sched.rig import Rig, prompt_of

P = 4


def ask(rig: Rig, name: str, prompt: list[int]) -> Decision:
    """One request to its end; the newest of what is remembered about it."""
    rig.add(name, prompt, max_tokens=1)
    rig.run()
    rig.check_answers()
    assert rig.tiers is not None
    return rig.tiers.decisions.newest(1, name)[0]


def full_pages(rig: Rig, decision: Decision) -> int:
    return decision.device_pages + decision.host_pages + decision.new_pages


def test_a_new_prompt_has_nothing_to_decide():
    rig = Rig(page_size=P, num_pages=40, host_pages=400)
    decision = ask(rig, "new", prompt_of(random.Random(1), 22))
    assert (decision.choice, decision.load_pages) == (Choice.NONE, 0)
    assert (decision.device_pages, decision.host_pages, decision.new_pages) == (0, 0, 6)
    assert decision.storage is None
    assert not decision.measured


@pytest.mark.parametrize(
    ("load_s", "prefill_s", "expected"),
    [
        (1e-6, 1.0, Choice.LOAD),
        (10.0, 1e-9, Choice.RECOMPUTE),
        (1.0, 0.25, Choice.PART),  # a page costs the same either way: half of them each
    ],
)
def test_the_choice_and_what_it_was_chosen_from(load_s: float, prefill_s: float, expected: Choice):
    """Red if what is remembered is not what was done, or the seconds are not the model's."""
    rig = Rig(page_size=P, num_pages=40, host_pages=400)
    assert rig.tiers is not None
    prompt = prompt_of(random.Random(2), 8 * P + 1)
    ask(rig, "first", prompt)
    rig.cache.evict(40)
    rig.tiers.cost.transfers[TransferKind.LOAD_BACK].prior = (0.0, load_s)
    for tokens in (100, 200):
        rig.tiers.cost.prefill.observe(tokens, tokens * prefill_s)
    decision = ask(rig, "again", prompt)
    assert decision.choice is expected
    assert (decision.device_pages, decision.host_pages, decision.new_pages) == (0, 8, 1)
    assert rig.last["again"].cached.host == decision.load_pages * P
    assert decision.load_all_s == pytest.approx(max(8 * load_s, prefill_s))
    assert decision.compute_all_s == pytest.approx((8 * P + 1) * prefill_s)
    assert decision.chosen_s <= min(decision.load_all_s, decision.compute_all_s)
    assert expected is not Choice.PART or 0 < decision.load_pages < 8
    assert not decision.measured  # no load has been timed yet


def test_pages_from_storage_and_how_they_came():
    storage, rng = SimStorage(), random.Random(3)
    config = TierConfig(prefetch_policy="wait_complete")
    shape = {"page_size": P, "num_pages": 40, "host_pages": 400, "tiers": config}
    prompt = prompt_of(rng, 8 * P + 1)
    rig = Rig(**shape, storage=storage)
    ask(rig, "first", prompt)
    assert rig.tiers is not None
    assert rig.tiers.flush(60.0) == 0
    rig = Rig(**shape, storage=storage)
    decision = ask(rig, "again", prompt)
    assert (decision.host_pages, decision.storage_pages) == (8, 8)
    assert decision.storage_pages * P == rig.last["again"].cached.storage
    way = decision.storage
    assert way is not None
    assert (way.asked_pages, way.found_pages, way.read_pages) == (8, 8, 8)
    assert way.reason == "all that storage has was read"
    assert way.waited_s > 0
    other = ask(rig, "other", prompt_of(rng, 30)).storage
    assert other is not None
    assert (other.found_pages, other.reason) == (0, "storage has none of it")


def test_a_policy_that_does_not_wait_is_the_reason():
    storage, rng = SimStorage(), random.Random(4)
    prompt = prompt_of(rng, 8 * P + 1)
    shape = {"page_size": P, "num_pages": 40, "host_pages": 400}
    rig = Rig(**shape, storage=storage)
    ask(rig, "first", prompt)
    assert rig.tiers is not None
    assert rig.tiers.flush(60.0) == 0
    rig = Rig(**shape, storage=storage, tiers=TierConfig(prefetch_policy="best_effort"))
    way = ask(rig, "again", prompt).storage
    assert way is not None
    assert (way.read_pages, way.reason) == (0, "the policy is not to wait")


def test_after_a_failed_load_there_are_two_entries():
    def fails(transfer: Transfer) -> bool:
        return transfer.kind is TransferKind.LOAD_BACK

    rig = Rig(page_size=P, num_pages=40, host_pages=400, transfers={"fails": fails})
    prompt = prompt_of(random.Random(5), 8 * P + 1)
    ask(rig, "first", prompt)
    rig.cache.evict(40)
    last = ask(rig, "again", prompt)
    assert rig.tiers is not None
    both = rig.tiers.decisions.newest(10, "again")
    assert [each.choice for each in both] == [Choice.RECOMPUTE, Choice.LOAD]
    assert last.reason == "a load of it has failed"


@pytest.mark.parametrize("seed", range(3))
def test_what_is_remembered_adds_up(seed: int):
    """Seeded sessions: pages of every entry make up its prompt, and the choices are the counted
    ones."""
    rng = random.Random(seed)
    costs = TransferCosts(host_page_s=1e-3, jitter=0.5)
    rig = Rig(page_size=P, num_pages=60, host_pages=400, transfers={"costs": costs})
    assert rig.tiers is not None
    prompts = [prompt_of(rng, rng.randrange(5, 120)) for _ in range(8)]
    for number in range(60):
        rig.tiers.cost.prefill.observe(16, rng.choice((1e-4, 2e-3)))
        prompt = rng.choice(prompts)
        rig.add(f"r{number}", prompt[: rng.randrange(1, len(prompt) + 1)], max_tokens=2)
        if rng.random() < 0.5:
            rig.run()
    rig.run()
    kept = rig.tiers.decisions.newest(1000)
    assert len({each.request_id for each in kept}) == 60
    for each in kept:
        assert full_pages(rig, each) == -(-each.prompt_tokens // P)
        assert each.load_pages <= each.host_pages
    counted = Counter(each.choice.value for each in kept)
    del counted["none"]
    assert counted == Counter(rig.tiers.cost.chosen)
    assert counted["load"] > 0


def test_the_memory_is_bounded_and_asked_by_id():
    decisions = Decisions(capacity=3)
    rig = Rig(page_size=P, num_pages=40, host_pages=400)
    one = ask(rig, "a", prompt_of(random.Random(6), 9))
    for name in ("a", "b", "b 1", "bc"):
        decisions.note(_renamed(one, name))
    assert [each.request_id for each in decisions.newest(9)] == ["bc", "b 1", "b"]
    assert [each.request_id for each in decisions.newest(9, "b")] == ["b 1", "b"]
    assert decisions.newest(1)[0].request_id == "bc"
    assert decisions.newest(9, "a") == []


def _renamed(decision: Decision, name: str) -> Decision:
    return replace(decision, request_id=name)
