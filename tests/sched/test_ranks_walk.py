"""Four ranks under one leader: replicas that lag behind, reads that fail, requests that go away.

Case O-27: nothing that happens on one rank - a late transfer, a failed read, a replica that has not
caught up - changes what the leader decides, makes anybody wait for it, or makes two ranks differ.
Decisions are commands in one log, and how many pages each rank has free is arithmetic on mirrors.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from phloem.cache import CacheState, ReplicaConfig, WindowConfig, check_invariants
from phloem.core.transfer import TransferKind
from phloem.kv.sizing import least_window_pages
from phloem.replica import Command
from phloem.sim import SimStorage
from phloem.tiers import PREFETCH_POLICIES, WRITE_POLICIES, TierConfig
from tests.sched.rig import Rig, prompt_of
from tests.sched.test_random_walk import POLICIES, add_some

NUM_RANKS = 4
FAILS = {
    TransferKind.BACKUP_HOST: 0.1,
    TransferKind.LOAD_BACK: 0.3,
    TransferKind.BACKUP_STORAGE: 0.1,
    TransferKind.PREFETCH: 0.5,
    TransferKind.PROBE: 0.1,
}


REPLICAS = ReplicaConfig(fraction=0.5, reserve=0.0, reads=1, half_life_steps=30, pages_per_step=5)


class LaggingReplica:
    """A follower that applies commands when it is let, and is compared wherever the leader was."""

    def __init__(self, rig: Rig) -> None:
        cache = rig.cache
        self.state = CacheState(
            cache.page_size,
            cache.num_pages,
            host_pages=cache.leader.host.capacity,
            window=cache.window,
        )
        self.mail: deque[Command] = deque()
        self.marks: deque[tuple[int, str]] = deque()  # (commands applied, the leader's digest)
        self.num_compared = self.most_behind = 0

    def apply(self, command: Command) -> None:
        self.mail.append(command)

    def digest(self) -> str:
        return self.state.digest()

    def mark(self, position: int, digest: str) -> None:
        """The leader was here at the end of a step."""
        self.marks.append((position, digest))
        self.most_behind = max(self.most_behind, len(self.mail))

    def catch_up(self, num_commands: int) -> None:
        """Apply so many commands; at each mark on the way the digests must agree."""
        self._compare()
        for _ in range(num_commands):
            self.state.apply(self.mail.popleft())
            self._compare()

    def _compare(self) -> None:
        while self.marks and self.marks[0][0] == self.state.now:
            _, digest = self.marks.popleft()
            assert self.state.digest() == digest, f"ranks differ after {self.state.now} commands"
            self.num_compared += 1


class Walk:
    """One seeded walk of two lives: the second finds in storage what the first has written."""

    def __init__(self, seed: int, *, windows: bool, placement: str) -> None:
        self.rng = rng = random.Random(f"ranks/{seed}/{windows}/{placement}")
        self.page_size = rng.choice((1, 4, 16))
        self.num_pages = max(2, rng.randrange(120, 400) // self.page_size // NUM_RANKS)
        self.window = self._window(self.page_size, self.num_pages) if windows else None
        self.heads = [prompt_of(rng, rng.randrange(20, 60)) for _ in range(4)]
        self.storage = SimStorage()
        self.seed, self.placement = seed, placement
        self.rigs: list[Rig] = []
        self.most_behind = 0

    def run(self, steps: int) -> None:
        """So many steps in all; each life goes on until everything has ended."""
        for _ in range(2):
            self._live(steps // 2)

    def _begin(self) -> None:
        rng, chance = self.rng, random.Random(self.seed)
        host_pages = int(self.num_pages * NUM_RANKS * rng.choice((0.3, 1, 3)))
        self.rig = Rig(
            page_size=self.page_size,
            num_pages=self.num_pages,
            num_owners=NUM_RANKS,
            placement=self.placement,
            host_pages=max(4, host_pages),
            window=self.window,
            tiers=TierConfig(
                write_policy=rng.choice(WRITE_POLICIES),
                prefetch_policy=rng.choice(PREFETCH_POLICIES),
            ),
            transfers={
                "seed": self.seed,
                "fails": lambda transfer: chance.random() < FAILS[transfer.kind],
                "blocked": lambda transfer: chance.random() < 0.3,
            },
            policy=rng.choice(POLICIES),
            max_running=rng.choice((3, 8)),
            max_prefill_tokens=rng.choice((24, 100, 4096)),
            overlap=rng.random() < 0.7,
            eos_ids=tuple(range(20)),
            storage=self.storage,
            replicas=REPLICAS if self.seed % 2 else None,
            prefill_slice=rng.choice((None, 8, 40)),
            prefill_fill=rng.choice((None, 1, 16)),
        )
        self.rigs.append(self.rig)
        self.replicas = [LaggingReplica(self.rig) for _ in range(NUM_RANKS - 1)]
        for replica in self.replicas:
            self.rig.cache.leader.log.attach(replica)

    def _window(self, page_size: int, num_pages: int) -> WindowConfig:
        tokens = self.rng.choice((1, 4, 16, 40))
        pages = least_window_pages(tokens, page_size) + self.rng.choice((0, 2, num_pages))
        return WindowConfig(
            tokens=tokens,
            layers=self.rng.choice((1, 3)),
            pages=(pages,),
            host_pages=2 * pages,
            checkpoint=self.rng.choice((0, 3)),
        )

    def _live(self, steps: int) -> None:
        self._begin()
        rig = self.rig
        for number in range(steps):
            self._happen(number)
            rig.step()
            self._compare()
            if number % 64 == 0:
                check_invariants(rig.cache)
        rig.run()
        rig.check_idle()
        for replica in self.replicas:
            replica.mark(rig.cache.state.now, rig.cache.state.digest())
            replica.catch_up(len(replica.mail))
            assert not replica.marks
            assert replica.num_compared == steps + 1, "a step was not compared"
            self.most_behind = max(self.most_behind, replica.most_behind)

    def _happen(self, number: int) -> None:
        rig, rng = self.rig, self.rng
        draw = rng.random()
        unfinished = rig.requests.keys() - rig.last.keys()
        if draw < 0.25 and len(unfinished) < 16:
            add_some(rig, rng, f"r{number}", self.heads)
        elif draw < 0.30 and unfinished:
            rig.loop.abort(rng.choice(sorted(unfinished)))
        elif draw < 0.305:
            rig.loop.flush()
        elif draw < 0.32:
            rig.cache.evict(rng.randrange(10))
        elif draw < 0.35:
            rig.cache.leader.host.evict(rng.randrange(40))
        elif draw < 0.36 and self.storage.pages:
            self.storage.lose(rng.sample(sorted(self.storage.pages), 1))

    def _compare(self) -> None:
        """Every replica has its own idea of how far it gets in this step."""
        state = self.rig.cache.state
        digest = state.digest()
        for replica in self.replicas:
            replica.mark(state.now, digest)
            most = len(replica.mail)
            replica.catch_up(self.rng.choice((0, most, most, self.rng.randint(0, most))))


@pytest.mark.parametrize("windows", [False, True])
def test_o27_ranks_agree_at_every_step(windows: bool):
    walks = [Walk(seed, windows=windows, placement="striped") for seed in range(2)]
    for walk in walks:
        walk.run(250)
    assert max(walk.most_behind for walk in walks) > 20, "nobody lags"


@pytest.mark.long
@pytest.mark.parametrize("placement", ["striped", "contiguous"])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("seed", range(10, 23))
def test_o27_ranks_agree_over_fifty_thousand_steps(seed: int, windows: bool, placement: str):
    """13 x 2 x 2 walks of 1,000 steps: 52,000."""
    Walk(seed, windows=windows, placement=placement).run(1000)


def test_walks_over_ranks_do_what_they_are_for():
    """Hits, failed reads of storage, aborts, evictions and reads of replicas all occur, so that
    they can fail."""
    walks = [Walk(seed, windows=False, placement="striped") for seed in range(100, 106)]
    for walk in walks:
        walk.run(150)
    rigs = [rig for walk in walks for rig in walk.rigs]
    stats = [rig.loop.stats() for rig in rigs]
    assert sum(s.cached_tokens_total.total for s in stats) > 200
    assert sum(s.cache.evicted_pages_total for s in stats) > 50
    assert sum(dict(s.finished_total)["abort"] for s in stats) > 10
    assert sum(s.tiers.load_failures_total for s in stats) > 0
    assert sum(len(reads_of(rig)) for rig in rigs) > 10
    assert sum(rig.worker.replicas.num_reads for rig in rigs) > 1000
    dropped = [dict(s.cache.replicas.dropped_pages_total) for s in stats if s.cache.replicas]
    assert sum(each["room"] for each in dropped) > 100
    assert sum(len(reads_of(rig) & rig.transfers.failed) for rig in rigs) > 2


def reads_of(rig: Rig) -> set[int]:
    """Ids of all reads of storage."""
    return {t.id for t in rig.transfers.log if t.kind is TransferKind.PREFETCH}
