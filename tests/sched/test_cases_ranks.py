"""Cases of several ranks, as far as the control plane goes: O-27 and O-28."""

from __future__ import annotations

import random

import pytest

from phloem.cache import PrefixCache, check_invariants
from phloem.core.errors import BadRequest
from phloem.core.refs import owners_of
from phloem.sched import Scheduler, SchedulerConfig
from tests.cache.build import NS
from tests.sched.rig import Rig, prompt_of
from tests.sched.test_ranks_walk import LaggingReplica, Walk

PAGE = 4


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("placement", ["striped", "contiguous"])
@pytest.mark.parametrize("hit", [0, 1, PAGE, 3 * PAGE + 1])
def test_o28_a_hit_is_what_it_is_on_one_rank_whatever_is_new(hit: int, placement: str, cp: int):
    """For every number of new tokens: the prefix, the positions computed, and the answer.

    Were lengths padded to the ranks, some of these would cache more or fewer tokens.
    """
    for new in range(1, 4 * cp + 2):
        rng = random.Random(f"{hit}/{new}")
        rig = Rig(page_size=PAGE, num_pages=40, num_owners=cp, placement=placement)
        head = prompt_of(rng, hit)
        if hit:
            rig.add("first", head, max_tokens=1)
            rig.run()
        plans = len(rig.worker.plans)
        rig.add("second", head + prompt_of(rng, new), max_tokens=3)
        rig.run()
        kept = min(hit, hit + new - 1) // PAGE * PAGE
        assert rig.last["second"].cached.total == kept
        rows = [row for plan in rig.worker.plans[plans:] for row in plan.rows]
        assert (rows[0].start, rows[0].count) == (kept, hit + new - kept)
        rig.check_idle()  # the answer is cold's


def test_o28_the_pages_of_a_prompt_are_shared_out_whole():
    """Each position is computed by one rank, and no rank has a page more than another."""
    rig = Rig(page_size=PAGE, num_pages=40, num_owners=4)
    for length in range(1, 60):
        rig.add(str(length), prompt_of(random.Random(length), length), max_tokens=1)
        rig.run()
        (update,) = rig.worker.plans[-1].table_updates
        shares = [owners_of(update.refs).tolist().count(owner) for owner in range(4)]
        assert sum(shares) == -(-length // PAGE)
        assert max(shares) - min(shares) <= 1
        rig.cache.flush()


def test_o27_a_rank_with_a_page_less_is_filled_to_the_last_page_too():
    """Admission asks for the sum: not one rank's free pages, of which each has its own number."""
    cache = PrefixCache(page_size=PAGE, num_pages=(9, 10, 10, 10), record_freed=True)
    scheduler = Scheduler(SchedulerConfig(max_model_len=1000), cache)
    rig = Rig(page_size=PAGE, num_pages=10, num_owners=4)
    request = rig.add("whole", prompt_of(random.Random(1), 39 * PAGE), max_tokens=1)
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.table_updates[0].refs) == 39
    assert cache.free_pages == 0
    check_invariants(cache)
    too_long = Rig(page_size=PAGE, num_pages=10, num_owners=4).add(
        "more", prompt_of(random.Random(1), 39 * PAGE + 1), max_tokens=1
    )
    with pytest.raises(BadRequest, match="need 40 KV pages of 4 tokens; the pool has 39"):
        scheduler.add(too_long)


def test_o27_a_request_that_does_not_fit_is_passed_by_others_that_do():
    rig = Rig(page_size=PAGE, num_pages=5, num_owners=4, max_running=4)
    rng = random.Random(2)
    rig.add("runs", prompt_of(rng, 40), max_tokens=12)
    rig.step(2)
    rig.add("large", prompt_of(rng, 60), max_tokens=1)
    rig.add("small", prompt_of(rng, 8), max_tokens=1)
    rig.run()
    assert rig.started_at["small"] < rig.started_at["large"]
    rig.check_idle()


def test_o27_a_rank_whose_free_count_drifts_by_a_page_is_noticed_at_the_next_step():
    walk = Walk(3, windows=False, placement="striped")
    walk._begin()
    rig = walk.rig
    sound, drifting = walk.replicas[:2]
    rig.add("a", prompt_of(random.Random(1), 30), max_tokens=1)
    rig.run()
    compare(rig, sound)
    drifting.catch_up(len(drifting.mail))
    drifting.state.allocators[2].alloc(1)
    with pytest.raises(AssertionError, match="ranks differ"):
        compare(rig, drifting)


def compare(rig: Rig, replica: LaggingReplica) -> None:
    replica.mark(rig.cache.state.now, rig.cache.state.digest())
    replica.catch_up(len(replica.mail))


def test_o27_whole_prompts_in_a_cache_that_is_full_of_others_evict_on_every_rank():
    """Ranks that are full of others' pages are no reason to wait: all of them give some up."""
    cache = PrefixCache(page_size=PAGE, num_pages=(8,) * 4, record_freed=True)
    rng = random.Random(5)
    for _ in range(6):
        tokens = rng.randbytes(4 * PAGE * 8)
        with cache.reserve(cache.match(NS, tokens), 8) as reservation:
            reservation.commit(tokens)
    with cache.reserve(cache.match(NS, b"\1" * 4 * PAGE), 32) as reservation:
        owners = owners_of(reservation.refs).tolist()
        assert [owners.count(owner) for owner in range(4)] == [8] * 4
    check_invariants(cache, idle=True)
