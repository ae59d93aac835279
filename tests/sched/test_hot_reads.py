"""What the scheduler says of pages that ranks read from each other, and what comes of it."""

from __future__ import annotations

import random

import pytest

from phloem.cache import ReplicaConfig, check_invariants
from phloem.core.plan import ReplicaPlan
from phloem.core.refs import owner_of
from phloem.sched.hot_reads import HotReads
from tests.sched.rig import Rig, prompt_of
from tests.sched.test_random_walk import add_some

P = 4
EAGER = ReplicaConfig(fraction=0.5, reserve=0.0, reads=1, pages_per_step=100)


def rig_of(replicas: ReplicaConfig | None = EAGER, **more) -> Rig:
    settings = {"page_size": P, "num_pages": 40, "num_owners": 2, "overlap": False, **more}
    return Rig(replicas=replicas, **settings)


def changes(rig: Rig) -> list[ReplicaPlan]:
    return [plan.replicas or ReplicaPlan() for plan in rig.worker.plans]


def test_a_prompt_that_hits_is_copied_to_the_ranks_that_compute_its_rest():
    rig, head = rig_of(), prompt_of(random.Random(1), 8 * P)
    rig.add("a", head + [1], max_tokens=1)
    rig.run()
    assert all(not len(change.made) for change in changes(rig))  # nothing of it was in the tree
    rig.add("b", [*head, 2, 3, 4, 5, 6], max_tokens=2)  # tokens on two pages
    rig.step()
    pages = rig.cache.match(rig.requests["a"].namespace, rig.requests["a"].tokens).refs().tolist()
    made = changes(rig)[-1]
    assert sorted(made.made.tolist()) == sorted(pages)
    assert all(
        owner_of(copy) == 1 - owner_of(page)
        for page, copy in zip(made.made.tolist(), made.made_at.tolist(), strict=True)
    )
    assert rig.loop.stats().cache.replicas.served_pages_total == 0
    rig.step()  # a decode, on one rank
    assert changes(rig)[-1].ready.tolist() == made.made.tolist()
    assert rig.loop.stats().cache.replicas.served_pages_total == len(pages) // 2
    assert rig.worker.replicas.num_reads == len(pages) // 2
    rig.run()
    rig.check_idle()


def test_reads_that_replicas_serve_are_counted_in_every_step_of_a_page():
    """As the worker counts them: it looks at every row in every step."""
    rig = rig_of(num_pages=200)
    rng = random.Random(2)
    head = prompt_of(rng, 20 * P)
    for number in range(3):
        rig.add(f"r{number}", head + prompt_of(rng, 3), max_tokens=30)
        rig.run()
    counted = rig.loop.stats().cache.replicas.served_pages_total
    # In the step in which a replica becomes ready a row in the middle of a page goes by what it
    # found when it began the page.
    assert 0.9 * rig.worker.replicas.num_reads <= counted <= rig.worker.replicas.num_reads


@pytest.mark.parametrize("owners", [1, 2])
def test_plans_say_nothing_where_the_cache_keeps_no_replicas(owners):
    rig = rig_of(None, num_owners=owners)
    head = prompt_of(random.Random(3), 6 * P)
    for number in range(3):
        rig.add(f"r{number}", [*head, number], max_tokens=9)
        rig.run()
    assert all(plan.replicas is None for plan in rig.worker.plans)
    assert rig.loop.stats().cache.replicas is None


def test_a_slot_that_a_replica_leaves_is_freed_in_the_same_plan():
    """So tests poison it before its next tenant writes to it, and nobody reads it any more."""
    rig = rig_of()
    head = prompt_of(random.Random(4), 8 * P)
    for number in range(2):
        rig.add(f"r{number}", [*head, number], max_tokens=2)
        rig.run()
    assert rig.cache.state.replicas.num_pages > 0
    replicas = {replica for _, replica in rig.cache.state.replicas.pairs()}
    rig.cache.flush()
    rig.add("last", head, max_tokens=1)
    rig.run()
    plan = next(plan for plan in rig.worker.plans if plan.replicas and len(plan.replicas.gone))
    assert set(plan.replicas.gone_at.tolist()) <= replicas
    assert replicas <= set(plan.freed_pages.tolist())


def test_a_copy_of_what_the_same_step_computes_is_noticed(monkeypatch):
    """A mutation: a worker may copy at the beginning of the step, when nothing is there yet."""

    def read(self, row, page, *, times):
        end = (row.start + row.count) // P
        table = self._running.get(row.serial).reservation.refs[:end]
        return self._cache.leader.replicas.read((0, 1), table, times)

    monkeypatch.setattr(HotReads, "_read", read)
    rig = rig_of()
    rig.add("a", prompt_of(random.Random(5), 8 * P), max_tokens=1)
    with pytest.raises(AssertionError, match="changes while it is copied"):
        rig.run()


@pytest.mark.parametrize("seed", range(6))
def test_replicas_change_no_answer_and_no_hit(seed):
    """Small pools, aborts, flushes: every answer is cold's, and as many tokens hit as without."""
    hits = []
    for replicas in (EAGER, None):
        rng = random.Random(seed)
        rig = rig_of(
            replicas,
            num_pages=rng.randrange(20, 60),
            num_owners=rng.choice((2, 4)),
            placement=rng.choice(("striped", "contiguous")),
            overlap=rng.random() < 0.7,
            max_prefill_tokens=rng.choice((24, 100)),
            eos_ids=tuple(range(20)),
        )
        heads = [prompt_of(rng, rng.randrange(10, 50)) for _ in range(3)]
        for number in range(120):
            draw = rng.random()
            unfinished = [name for name in rig.requests if name not in rig.last]
            if draw < 0.25 and len(unfinished) < 10:
                add_some(rig, rng, f"r{number}", heads)
            elif draw < 0.28 and unfinished:
                rig.loop.abort(rng.choice(unfinished))
            elif draw < 0.29:
                rig.loop.flush()
            rig.step()
            rig.check_replicas()
            if number % 16 == 0:
                check_invariants(rig.cache)
        rig.run()
        stats = rig.loop.stats()
        hits.append((stats.cached_tokens_total, stats.cache.evicted_pages_total, rig.answers))
        if replicas is not None:
            assert stats.cache.replicas.made_pages_total > 0
        rig.check_idle()
    assert hits[0] == hits[1]
