"""A naive world in which ranks make replicas of pages: the world of `world.py`, and what workers do
with what plans say of replicas.

A page of memory knows its namespace and all tokens up to its end. A worker copies a page when the
step that makes the replica ends, and reads a replica where a plan has said that it is ready: what
it finds there must be the page, whatever happened between.
"""

from __future__ import annotations

import random
from collections import deque

from phloem.cache import PrefixCache, ReplicaConfig
from phloem.core.plan import ReplicaPlan
from phloem.core.refs import owner_of
from tests.cache.world import Runner, Walk, World

__all__ = ["ReplicaWalk", "ReplicaWorld"]


class ReplicaWorld(World):
    """With `config` the cache keeps replicas; a world without is what it must decide like."""

    def __init__(
        self, cache: PrefixCache, config: ReplicaConfig | None, *, invariants: bool = True
    ) -> None:
        super().__init__(cache, invariants=invariants)
        if config is not None:
            cache.keep_replicas(config)
        self.ledger = cache.leader.replicas
        self.reads: dict[tuple[int, int], int] = {}  # (rank, page) -> its replica, as workers know
        self.flying: deque[int] = deque()
        self.copying: dict[int, ReplicaPlan] = {}  # by step
        self.step = 0
        self.num_read = 0

    def read(self, runner: Runner, owners: list[int], times: int) -> None:
        """Some ranks read what the request has in the tree."""
        shared = runner.reservation.num_shared_pages
        if self.ledger is not None and shared:
            self.ledger.read(owners, runner.reservation.refs[:shared], times)

    def plan(self) -> None:
        """A step is planned, while one may run: what it frees and redirects counts from now on."""
        if self.ledger is None:
            return
        plan = self.ledger.plan(self.step)
        self._settle(evicting=0)
        if plan is not None:
            for page, copy in zip(plan.gone.tolist(), plan.gone_at.tolist(), strict=True):
                assert self.reads.pop((owner_of(copy), page)) == copy, "another replica ends"
            for page, copy in zip(plan.ready.tolist(), plan.ready_at.tolist(), strict=True):
                assert self.reads.setdefault((owner_of(copy), page), copy) == copy
            for copy in plan.made_at.tolist():
                self.memory[copy] = None
            self.copying[self.step] = plan
        self.flying.append(self.step)
        self.step += 1
        self.check_reads()
        while len(self.flying) > 2:
            self.finish()

    def finish(self) -> None:
        """The oldest step ends."""
        if self.ledger is not None and self.flying:
            step = self.flying.popleft()
            self._copy(step)
            self.ledger.finished(step)

    def commit(self, runner: Runner, pages: int) -> None:
        """A later step than those in flight computes: they end before it writes."""
        for step in list(self.copying):
            self._copy(step)
        super().commit(runner, pages)

    def _copy(self, step: int) -> None:
        plan = self.copying.pop(step, None)
        if plan is not None:
            for page, copy in zip(plan.made.tolist(), plan.made_at.tolist(), strict=True):
                self.memory[copy] = self.memory[page]

    def check_reads(self) -> None:
        """As a step that begins now reads: every replica is its page, and the page is there."""
        held = {ref for runner in self.runners for ref in runner.table[: runner.computed]}
        for (rank, page), copy in self.reads.items():
            assert owner_of(copy) == rank != owner_of(page)
            content = self.memory.get(page)
            assert content is not None, "a replica of a page that is gone"
            assert page in held or self.known.get(content) == page, "a page that nobody has"
            assert self.memory[copy] == content, "a replica holds something else"
            self.num_read += 1

    def _written_exclusively(self, runner: Runner) -> None:
        super()._written_exclusively(runner)
        replicas = {replica for _, replica in self.cache.state.replicas.pairs()}
        own = set(runner.table[runner.computed :])
        assert not own & replicas, "a page to be written is a replica"


class ReplicaWalk(Walk):
    """A walk with steps: requests are read by ranks, plans are made, steps end."""

    def __init__(self, world: ReplicaWorld, seed: int, *, max_pages: int = 10) -> None:
        super().__init__(world, seed, max_pages=max_pages)
        self.steps = world
        # Of its own: a world without replicas takes the same walk.
        self.chance = random.Random(seed + 1)

    def step(self) -> None:
        super().step()
        chance, world = self.chance, self.steps
        ranks = len(world.cache.num_pages)
        for runner in world.runners:
            if chance.random() < 0.5:
                owners = sorted(chance.sample(range(ranks), chance.randint(1, ranks)))
                world.read(runner, owners, chance.choice((1, 1, 4)))
        if chance.random() < 0.7:
            world.plan()
        if chance.random() < 0.5:
            world.finish()
