"""The host tier end to end: real loop, scheduler, cache and controller over page memory."""

from __future__ import annotations

import functools
import random

import pytest

from phloem.cache import check_invariants
from phloem.core.stats import EngineStats
from phloem.core.transfer import TransferKind
from phloem.sim import SimStorage
from phloem.tiers import PREFETCH_POLICIES, WRITE_POLICIES, TierConfig
from tests.long import few
from tests.sched.rig import Rig, prompt_of
from tests.sched.test_random_walk import RANKS, add_some


def served(rig: Rig, name: str, prompt: list[int], max_tokens: int = 1):
    rig.add(name, prompt, max_tokens=max_tokens)
    rig.run()
    check_invariants(rig.cache, idle=True)
    return rig.last[name].cached


def test_a_prefix_that_left_the_device_comes_back_from_the_host():
    rng = random.Random(1)
    rig = Rig(page_size=4, num_pages=16, host_pages=128)
    first = prompt_of(rng, 41)
    served(rig, "a", first)
    for number in range(4):
        served(rig, f"other{number}", prompt_of(rng, 41))
    cached = served(rig, "again", first)
    assert (cached.device, cached.host) == (0, 40)
    assert served(rig, "third", first).device == 40
    rig.check_idle()


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("host_pages", [20, 128])
def test_device_and_host_together_hold_more_than_the_host_alone(policy: str, host_pages: int):
    """Whatever the sizes, every page of a working set that fits into both tiers hits."""
    rng = random.Random(2)
    rig = Rig(
        page_size=4, num_pages=16, host_pages=host_pages, tiers=TierConfig(write_policy=policy)
    )
    prompts = [prompt_of(rng, 21) for _ in range(5)]  # 5 x 5 pages, a sixth for what runs
    for turn in range(3):
        cached = [served(rig, f"{turn}/{i}", prompt).total for i, prompt in enumerate(prompts)]
        assert turn == 0 or cached == [20] * 5
    rig.check_idle()


FAILS = {
    TransferKind.BACKUP_HOST: 0.2,
    TransferKind.LOAD_BACK: 0.8,
    TransferKind.BACKUP_STORAGE: 0.3,
    TransferKind.PREFETCH: 0.3,
    TransferKind.PROBE: 0.3,
}


def walk(
    seed: int,
    *,
    page_size: int,
    steps: int,
    storage: SimStorage | None = None,
    owners: int = 1,
    placement: str = "striped",
) -> Rig:
    rng = random.Random(f"host/{seed}/{page_size}")
    num_pages = rng.randrange(80, 300) // page_size
    broken = rng.random() < 0.6
    chance = random.Random(seed)
    rig = Rig(
        page_size=page_size,
        num_pages=num_pages // owners,
        num_owners=owners,
        placement=placement,
        host_pages=max(1, int(num_pages * rng.choice((0.3, 1, 2, 5)))),
        tiers=TierConfig(
            write_policy=rng.choice(WRITE_POLICIES), prefetch_policy=rng.choice(PREFETCH_POLICIES)
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
        elif draw < 0.29:
            rig.loop.flush()
        elif draw < 0.32:  # at any moment, and not only when room is needed
            rig.cache.leader.host.evict(rng.randrange(30))
        elif draw < 0.33:
            rig.cache.evict(rng.randrange(10))
        elif draw < 0.34 and storage is not None and storage.pages:
            storage.lose(rng.sample(sorted(storage.pages), min(9, len(storage.pages))))
        rig.step()
        if owners > 1:
            rig.check_replicas()
        if number % 8 == 0:
            check_invariants(rig.cache)
    rig.run()
    rig.check_idle()
    return rig


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(20), 10))
def test_every_answer_of_a_walk_with_a_host_tier_is_cold(seed: int, page_size: int):
    figures(seed, page_size)


@functools.cache
def figures(seed: int, page_size: int) -> EngineStats:
    """Of one walk, which is taken once, whoever asks for them."""
    return walk(seed, page_size=page_size, steps=200).loop.stats()


@pytest.mark.parametrize(("owners", "placement"), RANKS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(3), 2))
def test_every_answer_with_a_host_tier_over_several_ranks_is_cold(
    seed: int, page_size: int, owners: int, placement: str
):
    walk(seed, page_size=page_size, steps=150, owners=owners, placement=placement)


@pytest.mark.parametrize("seed", range(4))
def test_what_one_rank_count_stores_another_one_finds(seed: int):
    """Engines with 2, 1 and 4 ranks after each other, on one storage."""
    storage = SimStorage()
    for owners in (2, 1, 4):
        walk(seed, page_size=4, steps=80, storage=storage, owners=owners)
    assert storage.puts > 0


def test_walks_with_a_host_tier_do_what_they_are_for():
    stats = [figures(seed, 4) for seed in range(12)]
    assert sum(s.cached_tokens_total.host for s in stats) > 100
    assert sum(s.tiers.load_failures_total for s in stats) > 0
    assert sum(s.cache.demoted_pages_total for s in stats) > 50
    assert sum(s.cache.host_evicted_pages_total for s in stats) > 10


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(12), 5))
def test_every_answer_of_walks_over_restarts_is_cold(seed: int, page_size: int):
    """Three engines, one after another, with one storage that loses pages, also silently."""
    storage = SimStorage()
    rng = random.Random(seed)
    for life in range(3):
        walk(seed + 100 * (life == 2), page_size=page_size, steps=80, storage=storage)
        for link in list(storage.pages):
            if rng.random() < 0.05:
                del storage.pages[link]
    assert storage.puts > 0


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("host_pages", [20, 200])
def test_after_an_orderly_restart_everything_comes_from_storage(write_policy: str, host_pages: int):
    rng = random.Random(3)
    storage = SimStorage()
    tiers = TierConfig(write_policy=write_policy, prefetch_policy="wait_complete")
    head = prompt_of(rng, 16)
    prompts = [head + prompt_of(rng, 33) for _ in range(8)]
    for life in range(2):
        rig = Rig(page_size=4, num_pages=40, host_pages=host_pages, tiers=tiers, storage=storage)
        for number, prompt in enumerate(prompts):
            cached = served(rig, f"r{number}", prompt)
            if life:
                assert cached.total >= min(48, 4 * host_pages // 2)
                assert host_pages < 200 or cached.storage == (48 if number == 0 else 32)
        assert rig.tiers.flush(60.0) == 0
        assert len(storage.pages) == 4 + 8 * 8
        rig.check_idle()


def test_o14_other_weights_find_nothing_in_storage():
    rng = random.Random(4)
    storage = SimStorage()
    prompt = prompt_of(rng, 41)
    found = []
    for seed in (1, 2, 1):
        rig = Rig(page_size=4, num_pages=40, host_pages=200, storage=storage, seed_of_weights=seed)
        found.append(served(rig, "r", prompt).storage)
        rig.check_idle()
    assert found == [0, 0, 40]
