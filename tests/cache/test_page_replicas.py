"""Replicas of pages: they are made of hot ones, belong to them, and give way to everything."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.cache import PrefixCache, ReplicaConfig, check_invariants
from phloem.cache.invariants import violations
from phloem.cache.page_replicas import PageReplicas
from phloem.cache.replica_ledger import ReplicaLedger
from phloem.cache.state import CacheState
from phloem.core.errors import ConfigError, NoRoom
from phloem.core.plan import ReplicaPlan
from phloem.core.refs import make_ref, owner_of
from tests.cache.build import run_of, serve, start
from tests.cache.replica_world import ReplicaWalk, ReplicaWorld

EAGER = ReplicaConfig(fraction=1.0, reserve=0.0, reads=1, half_life_steps=20, pages_per_step=3)
TAME = ReplicaConfig(fraction=0.25, reserve=0.1, reads=3, half_life_steps=7)
POOLS = [((6,) * 2, 1), ((10,) * 4, 2), ((40, 12, 24), 3), ((8, 8), 4)]


def make(*pools: int, config: ReplicaConfig = EAGER, placement: str = "contiguous") -> PrefixCache:
    cache = PrefixCache(page_size=4, num_pages=pools, placement=placement, record_freed=True)
    cache.keep_replicas(config)
    return cache


def ledger_of(cache: PrefixCache) -> ReplicaLedger:
    assert cache.leader.replicas is not None
    return cache.leader.replicas


def read(cache: PrefixCache, tokens: bytes, owner: int, times: int = 9) -> int:
    """One rank reads a cached prefix; the reads of a step that replicas serve."""
    return ledger_of(cache).read([owner], cache.match(b"model", tokens).refs(), times)


def plan(cache: PrefixCache, step: int) -> ReplicaPlan:
    return ledger_of(cache).plan(step) or ReplicaPlan()


def replicated(cache: PrefixCache, tokens: bytes, owner: int, step: int = 0) -> ReplicaPlan:
    """Replicas of a cached prefix on one rank, ready; the plan that says so."""
    read(cache, tokens, owner)
    plan(cache, step)
    ledger_of(cache).finished(step)
    return plan(cache, step + 1)


# Walks.


@pytest.mark.parametrize(("pools", "seed"), POOLS)
@pytest.mark.parametrize("placement", ["striped", "contiguous"])
@pytest.mark.parametrize("config", [EAGER, TAME], ids=["eager", "tame"])
def test_walk_reads_no_replica_that_is_not_its_page(pools, seed, placement, config):
    """And the cache beside it, which makes none, holds, evicts and refuses the very same.

    Red if a replica is read before it is whole, after its page or its slot has changed hands, or if
    it costs a page of the tree or moves one to another rank.
    """
    worlds = []
    for with_replicas in (config, None):
        cache = PrefixCache(page_size=4, num_pages=pools, placement=placement, record_freed=True)
        worlds.append(ReplicaWorld(cache, with_replicas))
    walks = [ReplicaWalk(world, seed) for world in worlds]
    for number in range(250):
        for walk in walks:
            walk.step()
        assert owners_of(worlds[0]) == owners_of(worlds[1])
        ours, theirs = (world.cache.stats() for world in worlds)
        spare = ours.free_pages + worlds[0].cache.state.replicas.num_pages
        assert (spare, ours.evictable_pages) == (theirs.free_pages, theirs.evictable_pages)
        assert ours.evicted_pages_total == theirs.evicted_pages_total
        if number % 20 == 0:
            worlds[0].check_replicas()
    for walk in walks:
        walk.run(0)
    assert worlds[0].num_read > 0
    assert worlds[0].cache.state.replicas.num_pages == 0


def owners_of(world: ReplicaWorld) -> tuple[dict, list[list[int]]]:
    """Where everything lies, by rank."""
    tables = [[owner_of(ref) for ref in runner.table] for runner in world.runners]
    return {content: owner_of(ref) for content, ref in world.known.items()}, tables


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_walk_over_tens_of_thousands_of_steps(seed):
    """20 x 2,500 steps."""
    pools = ((8,) * 2, (12,) * 4, (200, 40, 90), (7,) * 3)[seed % 4]
    cache = PrefixCache(
        page_size=4,
        num_pages=pools,
        placement=("striped", "contiguous")[seed % 2],
        record_freed=True,
    )
    world = ReplicaWorld(cache, (EAGER, TAME)[seed // 2 % 2])
    ReplicaWalk(world, seed).run(2500)
    assert world.num_read > 200


# One life.


def test_a_replica_is_read_only_after_the_step_that_makes_it():
    cache = make(16, 16)
    serve(cache, run_of(0, 16))
    assert read(cache, run_of(0, 16), 1) == 0
    first = plan(cache, 0)
    pages = cache.match(b"model", run_of(0, 16)).refs().tolist()
    assert sorted(first.made.tolist()) == sorted(pages[:3])  # as many as a step copies
    assert {owner_of(copy) for copy in first.made_at.tolist()} == {1}
    assert not len(first.ready)
    second = plan(cache, 1)
    assert (second.made.tolist(), len(second.ready)) == (pages[3:], 0)
    ledger_of(cache).finished(0)
    third = plan(cache, 2)
    assert third.ready.tolist() == first.made.tolist()
    assert third.ready_at.tolist() == first.made_at.tolist()
    assert read(cache, run_of(0, 16), 1) == 3
    assert read(cache, run_of(0, 16), 0) == 0
    check_invariants(cache)


def test_nobody_gets_a_replica_of_a_page_of_its_own():
    cache = make(16, 16)
    serve(cache, run_of(0, 12))
    read(cache, run_of(0, 12), 0)
    assert ledger_of(cache).plan(0) is None


def test_a_page_must_be_read_so_often():
    cache = make(16, 16, config=ReplicaConfig(fraction=1.0, reads=3))
    serve(cache, run_of(0, 4))
    for step in range(2):
        read(cache, run_of(0, 4), 1, times=1)
        assert ledger_of(cache).plan(step) is None
    read(cache, run_of(0, 4), 1, times=1)
    assert len(plan(cache, 2).made) == 1


def test_replicas_take_a_share_of_the_pool_and_leave_a_reserve():
    cache = make(40, 40, config=ReplicaConfig(fraction=0.25, reserve=0.5, reads=1))
    serve(cache, run_of(0, 80))
    read(cache, run_of(0, 80), 1)
    assert len(plan(cache, 0).made) == 10
    cache = make(40, 40, config=ReplicaConfig(fraction=1.0, reserve=0.9, reads=1))
    serve(cache, run_of(0, 80))
    read(cache, run_of(0, 80), 1)
    assert len(plan(cache, 0).made) == 4
    check_invariants(cache)


def test_what_nobody_reads_any_more_is_dropped():
    config = ReplicaConfig(fraction=1.0, reads=2, half_life_steps=4)
    cache = make(16, 16, config=config)
    serve(cache, run_of(0, 8))
    replicated(cache, run_of(0, 8), 1)
    gone = [step for step in range(2, 40) if len(plan(cache, step).gone)]
    assert len(gone) == 1
    assert gone[0] % 4 == 3  # nine reads are less than one after five halvings
    assert cache.state.replicas.num_pages == 0
    assert dict(cache.stats().replicas.dropped_pages_total)["cold"] == 2


def test_replicas_give_way_before_anything_is_evicted():
    cache = make(8, 8)
    serve(cache, run_of(0, 32))  # all of rank 0
    replicated(cache, run_of(0, 12), 1)
    stats = cache.stats()
    assert (stats.free_pages, stats.replicas.pages, cache.free_pages) == (5, 3, 8)
    with start(cache, run_of(500, 28)) as reservation:  # seven pages of rank 1
        assert [owner_of(ref) for ref in reservation.refs.tolist()] == [1] * 7
        stats = cache.stats()
        assert (stats.free_pages, stats.replicas.pages) == (0, 1)
        assert stats.evicted_pages_total == 0
        assert dict(stats.replicas.dropped_pages_total) == {"room": 2, "cold": 0, "page left": 0}
        assert len(plan(cache, 2).gone) == 2
        check_invariants(cache)
        reservation.extend(1)
        assert cache.state.replicas.num_pages == 0
        assert cache.stats().evicted_pages_total == 0
    check_invariants(cache)


def test_the_coldest_gives_way_first():
    cache = make(8, 4)
    serve(cache, run_of(0, 32))
    replicated(cache, run_of(0, 12), 1)
    read(cache, run_of(0, 4), 1)
    read(cache, run_of(0, 12), 1)
    with start(cache, run_of(500, 12)):
        left = cache.state.replicas.pairs()
        assert [page for page, _ in left] == cache.match(b"model", run_of(0, 4)).refs().tolist()


def test_who_gives_way_next_changes_with_what_is_read():
    cache = make(8, 3)
    serve(cache, run_of(0, 32))
    replicated(cache, run_of(0, 12), 1)
    pages = cache.match(b"model", run_of(0, 12)).refs().tolist()
    with start(cache, run_of(500, 4)) as reservation:  # of three that are equally cold
        assert sorted(page for page, _ in cache.state.replicas.pairs()) == pages[1:]
        read(cache, run_of(0, 8), 1)
        reservation.extend(1)
        assert [page for page, _ in cache.state.replicas.pairs()] == [pages[1]]


@pytest.mark.parametrize("end", ["evict", "flush", "abort"])
def test_a_replica_ends_with_its_page(end):
    cache = make(8, 8)
    reservation = start(cache, run_of(0, 12))
    reservation.commit(run_of(0, 12))
    replicated(cache, run_of(0, 8), 1)
    assert cache.state.replicas.num_pages == 2
    if end == "evict":
        reservation.close()
        assert cache.evict(3) == 3
    elif end == "flush":
        cache.flush()
        assert cache.state.replicas.num_pages == 2  # the request still reads its pages
        reservation.close()
    else:
        reservation.close()
        cache.flush()
    assert cache.state.replicas.num_pages == 0
    assert len(plan(cache, 5).gone) == 2
    assert cache.stats().free_pages == 16
    assert len(cache.take_freed()) == 5
    check_invariants(cache, idle=True)


def test_a_page_that_was_computed_twice_has_the_winners_replica():
    """The loser's own page was never shared, so it had none."""
    cache = make(8, 8, placement="striped")
    with start(cache, run_of(0, 12)) as one, start(cache, run_of(0, 12)) as two:
        one.commit(run_of(0, 12))
        for owner in (0, 1):
            replicated(cache, run_of(0, 12), owner, step=2 * owner)
        before = sorted(cache.state.replicas.pairs())
        assert two.commit(run_of(0, 12)) is not None
        assert sorted(cache.state.replicas.pairs()) == before
        check_invariants(cache)


def test_a_slot_that_becomes_another_replica_is_not_ready_with_the_first():
    """Made in step 0 and dropped; the slot is another page's replica in step 1."""
    cache = make(8, 3)
    serve(cache, run_of(0, 4))
    serve(cache, run_of(200, 28))
    read(cache, run_of(0, 4), 1)
    (slot,) = plan(cache, 0).made_at.tolist()
    with start(cache, run_of(300, 12)):  # rank 1 whole
        assert cache.state.replicas.num_pages == 0
    read(cache, run_of(200, 12), 1)
    again = plan(cache, 1)
    assert slot in again.made_at.tolist()
    ledger_of(cache).finished(0)
    assert not len(plan(cache, 2).ready)
    ledger_of(cache).finished(1)
    assert plan(cache, 3).ready.tolist() == again.made.tolist()
    check_invariants(cache)


def test_a_replica_that_was_never_read_ends_unsaid():
    """Dropped while it is made, or before a plan has said that it is ready."""
    for finished in (False, True):
        cache = make(8, 8)
        serve(cache, run_of(0, 8))
        read(cache, run_of(0, 8), 1)
        plan(cache, 0)
        if finished:
            ledger_of(cache).finished(0)
        cache.evict(1)
        cache.flush()
        if not finished:
            ledger_of(cache).finished(0)
        assert ledger_of(cache).plan(1) is None
        check_invariants(cache, idle=True)


def test_no_room_changes_nothing_and_drops_nothing():
    cache = make(4, 4)
    with start(cache, run_of(0, 16)) as reservation:
        reservation.commit(run_of(0, 16))
        replicated(cache, run_of(0, 8), 1)
        before = cache.state.digest()
        with pytest.raises(NoRoom):
            start(cache, run_of(500, 20))
        assert cache.state.digest() == before
        assert cache.state.replicas.num_pages == 2


def test_followers_apply_what_the_leader_does():
    cache = make(8, 8)
    follower = CacheState(4, (8, 8))
    cache.leader.log.attach(follower)
    serve(cache, run_of(0, 16))
    digests = [follower.digest()]
    replicated(cache, run_of(0, 16), 1)
    digests.append(follower.digest())
    assert follower.digest() == cache.state.digest()
    cache.flush()
    digests.append(follower.digest())
    assert follower.digest() == cache.state.digest()
    assert len(set(digests)) == 3
    assert follower.replicas.num_pages == 0


def test_digests_tell_replicas_apart():
    pages, copies = np.array([3]), np.array([make_ref(1, 5)])
    tables = [PageReplicas(2) for _ in range(3)]
    for table in tables:
        table.add(pages.tobytes(), copies.tobytes())
    tables[1].commit(copies.tobytes())
    tables[2].drop(copies.tobytes())
    assert len({table.digest() for table in tables}) == 3


@pytest.mark.parametrize("pools", [(8,), (8,) * 65])
def test_replicas_need_several_owners_and_a_bit_for_each(pools):
    cache = PrefixCache(page_size=4, num_pages=pools)
    with pytest.raises(ConfigError, match="2 to 64"):
        cache.keep_replicas(EAGER)


@pytest.mark.parametrize("bad", [{"fraction": 0}, {"reserve": 1.0}, {"reads": 0}])
def test_a_config_that_cannot_be(bad):
    with pytest.raises(ConfigError):
        ReplicaConfig(**bad)


# What checks and walks notice.


def outlives_its_page(patch):
    patch.setattr(PageReplicas, "leave", lambda self, pages: b"")


def ready_as_soon_as_any_step_ends(patch):
    original = ReplicaLedger.finished

    def finished(self, step):
        self._making = dict.fromkeys(self._making, step)
        original(self, step)

    patch.setattr(ReplicaLedger, "finished", finished)


def nobody_is_told_of_the_end(patch):
    original = ReplicaLedger.plan

    def plan(self, step):
        self._gone.clear()
        return original(self, step)

    patch.setattr(ReplicaLedger, "plan", plan)


def evicts_before_replicas_give_way(patch):
    """Room is what the allocators have."""
    original = CacheState._replicate

    def replicate(self, command):
        self.free_pages -= len(command[2]) // 8
        return original(self, command)

    patch.setattr(CacheState, "_replicate", replicate)


def placed_where_no_replica_is(patch):
    patch.setattr(CacheState, "room", lambda self: [pool.num_free for pool in self.allocators])


def copied_whatever_the_page_holds_by_now(patch):
    patch.setattr(ReplicaLedger, "_may_have", lambda self, owner, page: True)


@pytest.mark.parametrize(
    "mutate",
    [
        outlives_its_page,
        ready_as_soon_as_any_step_ends,
        nobody_is_told_of_the_end,
        evicts_before_replicas_give_way,
        placed_where_no_replica_is,
        copied_whatever_the_page_holds_by_now,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_walk_notices(mutate, monkeypatch):
    """Without the invariants checker: the naive world alone."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        take_walks()


def test_the_same_walks_are_green_without_a_mutation():
    take_walks()


def take_walks() -> None:
    """Eager replicas, and the same without any."""
    for pools, seed in POOLS:
        worlds = []
        for config in (EAGER, None):
            cache = PrefixCache(page_size=4, num_pages=pools, record_freed=True)
            worlds.append(ReplicaWorld(cache, config, invariants=False))
        walks = [ReplicaWalk(world, seed) for world in worlds]
        for _ in range(250):
            for walk in walks:
                walk.step()
            assert owners_of(worlds[0]) == owners_of(worlds[1])


def damage(cache: PrefixCache, what: str) -> None:
    state, ledger = cache.state, ledger_of(cache)
    (page, replica), *_ = state.replicas.pairs()
    if what == "page":
        state.replicas._by_owner[1][replica] = make_ref(0, 7)
    elif what == "count":
        state.replicas.num_pages += 1
    elif what == "twice":
        state.replicas._by_owner[1][make_ref(1, 7)] = page
    elif what == "bits":
        ledger._ready[:] = 0
    elif what == "stage":
        ledger._told.clear()
    elif what == "free":
        state.allocators[1].free(np.array([replica]).tobytes())
    else:
        state.free_pages -= 1


@pytest.mark.parametrize("what", ["page", "count", "twice", "bits", "stage", "free", "room"])
def test_every_rule_notices(what):
    cache = make(8, 8)
    serve(cache, run_of(0, 8))
    replicated(cache, run_of(0, 8), 1)
    assert violations(cache) == []
    damage(cache, what)
    assert violations(cache)
