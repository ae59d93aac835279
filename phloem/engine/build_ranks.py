"""Joins ranks with an engine: agreed pools, a worker of all ranks, the log that they follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from phloem.config import Config
from phloem.core.errors import ConfigError
from phloem.engine.apart_ranks import ApartRanks
from phloem.engine.build_pools import Pools
from phloem.engine.core import BuildHooks
from phloem.engine.loop_core import LoopCore
from phloem.engine.rank_talk import RankTalk
from phloem.engine.ranks import Ranks
from phloem.replica import RecordWriter
from phloem.worker import LoadedWorker, RankedWorker, RankHooks, RankPlace, pool_layouts

__all__ = [
    "DIGEST_EVERY",
    "RankBuild",
    "RankMaker",
    "agreed",
    "check_ranks",
    "starting_ranks",
    "starting_ranks_apart",
]

# Steps from one comparison of the ranks' caches to the next: a digest reads the whole tree.
DIGEST_EVERY = 1024


@dataclass(frozen=True, slots=True)
class RankBuild:
    """Ranks on the way to the first step. `pools`: what all of them can have."""

    ranks: RankTalk
    pools: Pools
    place: RankPlace

    def joined(self, loaded: LoadedWorker) -> LoadedWorker:
        """Rank 0 has been loaded: wait for the others, and make one worker of all."""
        assert not isinstance(loaded.worker, RankedWorker), "one rank's own"
        self.ranks.wait_ready(loaded)
        worker = RankedWorker(loaded.worker, self.ranks.wires)
        return replace(loaded, worker=worker, reload=partial(_reload, worker, loaded.reload))

    def connected(self, core: LoopCore, hooks: BuildHooks, *, verify: bool) -> LoopCore:
        """The ranks follow the core's log from its beginning; the core notices their ends.

        `verify`: they compare what is free in every step.
        """
        worker, cache = core.worker, core.loop.scheduler.cache
        assert isinstance(worker, RankedWorker), "made by `joined`"
        log = RecordWriter(cache.leader.log, cache.state, digest_every=DIGEST_EVERY)
        worker.connect(
            RankHooks(
                log=log.take,
                free=log.free_by_pool if verify else None,
                on_failure=hooks.wake,
                end_of=self.ranks.end_of,
                moved=self.place.peers.moved,
                reap=self.ranks.reap,
            )
        )
        return replace(core, failure=worker.failure, tell=worker.farewell)


def _reload(
    worker: RankedWorker, own: Callable[[Path], Callable[[], None]], path: Path
) -> Callable[[], None]:
    """`LoadedWorker.reload` of all ranks: they read at the same time."""
    worker.begin_load(str(path))
    try:
        own_swap = own(path)
    finally:
        errors = worker.finish_load()
    if errors:
        raise ConfigError(errors[0])

    def swap() -> None:
        worker.swap()
        own_swap()

    return swap


def check_ranks(config: Config, pools: Pools) -> None:
    """Raise ConfigError for settings of ranks that contradict each other."""
    if config.parallel.placement == "replicate" and any(pools.host):
        raise ConfigError(
            "--placement replicate has no host tier: a page is loaded into one pool only; add "
            "--host-memory 0, or use striped or contiguous"
        )
    travels = config.parallel.remote_kv not in ("auto", "direct")
    if config.parallel.placement == "replicate" and travels:
        raise ConfigError(
            f"--remote-kv {config.parallel.remote_kv} has nothing to do with --placement "
            "replicate, where every rank has every page; leave it out"
        )


@contextmanager
def starting_ranks(config: Config, pools: Pools) -> Iterator[RankBuild]:
    """Start all ranks but this one; they load while the caller does. On an error none is left.

    Raises ConfigError or EngineDead if a rank cannot.
    """
    check_ranks(config, pools)
    with agreed(Ranks(pools.axis, len(pools.specs)), config, pools) as build:
        yield build


@contextmanager
def starting_ranks_apart(config: Config, pools: Pools) -> Iterator[RankBuild]:
    """The same where ranks share no memory, since each has a GPU of its own."""
    ranks = ApartRanks(pools.axis, pools.runs_on, config.parallel.join_timeout_s)
    with agreed(ranks, config, pools) as build:
        yield build


@contextmanager
def agreed(ranks: RankTalk, config: Config, pools: Pools) -> Iterator[RankBuild]:
    """Let ranks that live load what all of them can have. On an error none is left."""
    try:
        device = ranks.start(config, pools.device)
        pools = pools.resized(device=device)
        place = ranks.place(
            pool_layouts(pools.specs, device), pools.host, config.scheduler.max_running
        )
        yield RankBuild(ranks, pools, place)
    except BaseException:  # also Ctrl-C while it loads: no process may be left behind
        ranks.kill()
        raise


# What brings the other ranks to life, or waits for them: as `starting_ranks`.
RankMaker: TypeAlias = Callable[[Config, Pools], AbstractContextManager[RankBuild]]
