"""Case O-12: requests with the same new prefix share the work, and never what is not computed."""

from __future__ import annotations

import random

import pytest

from phloem.cache import check_invariants
from phloem.core.namespace import make_namespace
from tests.sched.rig import Rig, prompt_of

PAGE_SIZES = [1, 4, 16]


def eight_with_one_prefix(page_size: int, **config) -> Rig:
    rng = random.Random(12)
    head = prompt_of(rng, 6 * page_size)
    rig = Rig(
        page_size=page_size, num_pages=200, max_prefill_tokens=4 * page_size, policy="lpm", **config
    )
    for number in range(8):
        rig.add(str(number), [*head, number, 100 + number], max_tokens=5)
    return rig


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("overlap", [True, False])
def test_o12_eight_at_once_compute_the_prefix_once(page_size: int, overlap: bool):
    rig = eight_with_one_prefix(page_size, overlap=overlap)
    while rig.step():
        check_invariants(rig.cache)
    assert rig.last["0"].cached.total == 0
    assert [rig.last[str(n)].cached.total for n in range(1, 8)] == [6 * page_size] * 7
    prefill = sum(row.count for plan in rig.worker.plans for row in plan.rows) - 8 * 4
    assert prefill == 6 * page_size + 8 * 2
    rig.check_idle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_o12_the_leader_is_aborted_before_it_has_computed(page_size: int, steps: int):
    """Its pages never counted; another one takes over and the rest share with that one."""
    rig = eight_with_one_prefix(page_size)
    rig.step(steps)
    rig.loop.abort("0")
    check_invariants(rig.cache)
    while rig.step():
        check_invariants(rig.cache)
    computed_by_leader = 4 * page_size if steps == 2 else 0  # its first chunk was applied
    assert rig.last["1"].cached.total == computed_by_leader
    assert [rig.last[str(n)].cached.total for n in range(2, 8)] == [6 * page_size] * 6
    rig.check_idle()


def test_o12_nobody_waits_for_another_namespace_or_without_a_cache():
    """Same tokens under another salt are other pages, and with the cache off nothing is shared."""
    prompt = prompt_of(random.Random(1), 41)
    rig = Rig(page_size=4, num_pages=64, max_prefill_tokens=4096)
    rig.add("a", prompt, max_tokens=2)
    rig.add("b", prompt, max_tokens=2, namespace=make_namespace(model="fake", salt="s"))
    rig.step()
    assert len(rig.worker.plans[0].rows) == 2
    rig.run()
    assert rig.last["b"].cached.total == 0
    rig.check_idle()
    off = Rig(page_size=4, num_pages=64, max_prefill_tokens=4096, cache_enabled=False)
    off.add("a", prompt, max_tokens=2)
    off.add("b", prompt, max_tokens=2)
    off.step()
    assert len(off.worker.plans[0].rows) == 2
    off.run()
    off.check_idle()


def test_o12_a_flush_in_the_middle_lets_the_waiting_go_on():
    """Pages of before the flush are served to nobody, and nobody waits for them for ever."""
    rig = eight_with_one_prefix(4)
    rig.step(2)
    rig.loop.flush()
    rig.run()
    rig.check_idle()


def test_o12_nobody_waits_for_pages_that_a_flush_took_from_sight():
    """What the leader computed before the flush is never found: the follower computes its own."""
    rng = random.Random(13)
    rig = Rig(page_size=4, num_pages=200, max_prefill_tokens=16)
    prompt = prompt_of(rng, 200)
    rig.add("leader", prompt, max_tokens=2)
    rig.step(4)
    rig.loop.flush()
    rig.add("follower", [*prompt[:40], 1], max_tokens=2)
    rig.run()
    assert rig.started_at["follower"] < rig.started_at["leader"]
    assert rig.last["follower"].cached.total == 0
    rig.check_idle()
