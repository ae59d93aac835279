"""Seeded walks with window layers and all tiers: nothing wrong is ever found, in whatever order.

Window pages of the fake worker know of how many layers their state is right, so a tail that was
copied too early, mixed up, half read, or made anew from too high up fails the walk.
"""

from __future__ import annotations

import random

import pytest

from phloem.cache import WindowConfig, check_invariants
from phloem.kv.sizing import least_window_pages
from phloem.sim import SimStorage
from phloem.tiers import PREFETCH_POLICIES, WRITE_POLICIES, TierConfig
from tests.long import few
from tests.sched.rig import Rig, prompt_of
from tests.sched.test_host_tier import FAILS
from tests.sched.test_random_walk import RANKS, add_some

WINDOWS = (1, 2, 4, 8, 16, 40)


def window_of(rng: random.Random, page_size: int, num_pages: int) -> WindowConfig:
    tokens = rng.choice(WINDOWS)
    least = least_window_pages(tokens, page_size)
    pages = least + rng.choice((0, 1, least, num_pages))
    return WindowConfig(
        tokens=tokens,
        layers=rng.choice((1, 2, 3)),
        pages=(pages,),
        host_pages=max(1, int(pages * rng.choice((0.4, 1, 3, 6)))),
        checkpoint=rng.choice((0, 0, 2, 5)),
    )


def walk(
    seed: int,
    *,
    page_size: int,
    steps: int,
    storage: SimStorage | None = None,
    calm: bool = False,
    owners: int = 1,
    placement: str = "striped",
) -> Rig:
    """`calm`: nothing fails, and requests wait for storage."""
    rng = random.Random(f"window/{seed}/{page_size}")
    num_pages = rng.randrange(80, 300) // page_size
    broken = rng.random() < 0.6 and not calm
    chance = random.Random(seed)
    rig = Rig(
        page_size=page_size,
        num_pages=max(1, num_pages // owners),
        num_owners=owners,
        placement=placement,
        host_pages=max(1, int(num_pages * rng.choice((0.3, 1, 2, 5)))),
        window=window_of(random.Random(f"{seed // 100}/{page_size}"), page_size, num_pages),
        tiers=TierConfig(
            write_policy=rng.choice(WRITE_POLICIES),
            prefetch_policy="wait_complete" if calm else rng.choice(PREFETCH_POLICIES),
        ),
        transfers={
            "seed": seed,
            "fails": lambda transfer: broken and chance.random() < FAILS[transfer.kind],
            "blocked": lambda transfer: chance.random() < 0.3,
        },
        max_running=rng.choice((2, 6, 12)),
        max_prefill_tokens=rng.choice((page_size, 24, 100, 4096)),
        overlap=rng.random() < 0.7,
        headroom_tokens=rng.choice((0, 0, 32)),
        eos_ids=tuple(range(rng.choice((0, 20)))),
        storage=storage,
    )
    heads = [prompt_of(rng, rng.randrange(1, 50)) for _ in range(4)]
    for number in range(steps):
        draw = rng.random()
        unfinished = [name for name in rig.requests if name not in rig.last]
        if draw < 0.25 and len(unfinished) < 20:
            add_some(rig, rng, f"r{number}", heads)
        elif draw < 0.28 and unfinished:
            rig.loop.abort(rng.choice(unfinished))
        elif draw < 0.29 and not calm:
            rig.loop.flush()
        elif draw < 0.36 and not calm:
            lose_something(rig, rng)
        rig.step()
        if owners > 1:
            rig.check_replicas()
        if number % 8 == 0:
            check_invariants(rig.cache)
    rig.run()
    rig.check_idle()
    return rig


def lose_something(rig: Rig, rng: random.Random) -> None:
    """Evict at any moment, and not only when room is needed."""
    cache = rig.cache
    ways = (
        lambda n: cache.leader.host.evict(3 * n),
        cache.evict,
        cache.evict_window,
        cache.leader.window_host.evict,
    )
    rng.choice(ways)(rng.randrange(10))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(0, 700, 100), 4))
def test_every_answer_of_a_walk_with_windows_and_tiers_is_cold(seed: int, page_size: int):
    walk(seed, page_size=page_size, steps=120)


@pytest.mark.parametrize(("owners", "placement"), RANKS)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("seed", few(range(0, 300, 100), 2))
def test_every_answer_with_windows_and_tiers_over_several_ranks_is_cold(
    seed: int, page_size: int, owners: int, placement: str
):
    walk(seed, page_size=page_size, steps=100, owners=owners, placement=placement)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(0, 300, 100), 2))
def test_every_answer_of_walks_over_restarts_is_cold(seed: int, page_size: int):
    """Three engines with the same windows, and one storage that also loses pages of either kind."""
    storage = SimStorage()
    rng = random.Random(seed)
    for life in range(3):
        changes = {"calm": seed % 200 == 0, "storage": storage}
        walk(seed + (life == 2), page_size=page_size, steps=60, **changes)
        for link in list(storage.pages):
            if rng.random() < 0.05:
                del storage.pages[link]
    assert storage.puts > 0


def test_walks_do_what_they_are_for():
    """Window pages cross every border, are evicted on the host, and are loaded."""
    storage = SimStorage()
    rigs = [
        walk(seed, page_size=4, steps=80, storage=storage, calm=calm)
        for seed in range(0, 400, 100)
        for calm in (True, True, False)  # the same prompts, after a restart
    ]
    moved = {}
    for rig in rigs:
        for (kind, component), count in rig.transfers.num_bytes.items():
            if component:
                moved[kind.value] = moved.get(kind.value, 0) + count
    for kind in ("backup_host", "load_back", "backup_storage", "prefetch"):
        assert moved.get(kind, 0) > 10, moved
    stats = [rig.loop.stats() for rig in rigs]
    chosen = {
        way: sum(dict(s.tiers.load_choices_total)[way] for s in stats)
        for way in ("load", "part", "recompute")
    }
    assert chosen["load"] > 10
    assert sum(rig.cache.leader.window_host.evicted_pages for rig in rigs) > 10
