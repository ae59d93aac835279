"""Seeded walks with window layers: pools of windows hardly larger than one request needs.

The fake worker's window pages know of how many layers their state is right. So a page that was let
go too early, given away twice, taken from a wrong place, or made anew from too high up changes an
answer or stops the walk.
"""

from __future__ import annotations

import functools
import random

import pytest

from phloem.cache import WindowConfig, check_invariants
from phloem.core.plan import RowPlan
from phloem.core.stats import EngineStats
from phloem.kv.sizing import least_window_pages
from tests.long import few
from tests.sched.rig import Rig, prompt_of
from tests.sched.test_random_walk import POLICIES, RANKS, add_some

WINDOWS = (1, 2, 4, 8, 16, 40)


def walk(
    seed: int, *, page_size: int, steps: int, owners: int = 1, placement: str = "striped"
) -> Rig:
    rng = random.Random(f"windows/{seed}/{page_size}")
    tokens = rng.choice(WINDOWS)
    least = least_window_pages(tokens, page_size)
    num_pages = max(least, rng.randrange(100, 400) // page_size)
    window = WindowConfig(
        tokens=tokens,
        layers=rng.randrange(1, 4),
        pages=(least + rng.choice((0, 0, 1, 3, 10, 30)),),
        checkpoint=rng.choice((0, 0, 2, 5)),
    )
    rig = Rig(
        page_size=page_size,
        num_pages=max(1, num_pages // owners),
        num_owners=owners,
        placement=placement,
        window=window,
        max_running=rng.choice((2, 6, 12)),
        max_prefill_tokens=rng.choice((page_size, 24, 100, 4096)),
        policy=rng.choice(POLICIES),
        overlap=rng.random() < 0.7,
        headroom_tokens=rng.choice((0, 0, 32)),
        cache_enabled=rng.random() < 0.85,
        eos_ids=tuple(range(rng.choice((0, 20)))),
        prefill_slice=rng.choice((None, 8, 40)),
        prefill_fill=rng.choice((None, 1, 16)),
    )
    if rng.random() < 0.4:  # retraction must cope with whatever was let in
        rig.scheduler._windows.has_room = lambda request, running: True
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
            rig.cache.evict_window(rng.randrange(1, 8))
        elif draw < 0.33:
            rig.cache.evict(rng.randrange(1, 10))
        rig.step()
        if owners > 1:
            rig.check_replicas()
        if number % 8 == 0:
            check_invariants(rig.cache)
            assert_holds_little(rig)
    rig.run()
    rig.check_idle()
    return rig


def assert_holds_little(rig: Rig) -> None:
    """A request holds a window, and what its last chunks computed, however long it is."""
    if not rig.cache.enabled:
        return
    tail = rig.cache.window.tail_pages(rig.page_size)
    recent = [row for plan in rig.worker.plans[-3:] for row in plan.rows]
    for request in rig.scheduler._running:
        window = request.reservation.window
        chunks = sum(row.count for row in recent if row.serial == request.serial)
        if chunks:  # else it waits, and lets go of pages when it goes on
            assert window.end - window.low <= tail + 2 + -(-chunks // rig.page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(14), 7))
def test_every_answer_of_a_walk_with_windows_is_cold(seed: int, page_size: int) -> None:
    figures(seed, page_size)


@functools.cache
def figures(seed: int, page_size: int) -> tuple[EngineStats, list[RowPlan]]:
    """Of one walk, which is taken once, whoever asks for them: and the rows of restarts."""
    rig = walk(seed, page_size=page_size, steps=250)
    rows = [row for plan in rig.worker.plans for row in plan.rows]
    return rig.loop.stats(), [row for row in rows if row.start < row.write_from]


@pytest.mark.parametrize(("owners", "placement"), RANKS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(2), 1))
def test_every_answer_with_windows_over_several_ranks_is_cold(
    seed: int, page_size: int, owners: int, placement: str
) -> None:
    """And no token is computed on a rank that has not its window page."""
    walk(seed, page_size=page_size, steps=200, owners=owners, placement=placement)


def test_walks_with_windows_do_what_they_are_for() -> None:
    """Hits, restarts of both kinds, retractions and evictions all occur, so that they can fail."""
    found = [figures(seed, 4) for seed in range(14)]
    stats = [each for each, _ in found]
    restarts = [row for _, rows in found for row in rows]
    assert sum(s.cached_tokens_total.total for s in stats) > 500
    assert sum(s.retractions_total for s in stats) > 10
    assert sum(s.cache.window.evicted_pages_total for s in stats) > 200
    assert sum(s.restarts_total for s in stats) > 10
    assert sum(s.restarted_tokens_total for s in stats) > 50
    assert sum(row.window_from > 0 for row in restarts) > 5  # from nothing
    assert sum(row.window_from == 0 for row in restarts) > 5  # from a valid length


def test_a_walk_with_windows_is_replayable() -> None:
    first, second = (walk(5, page_size=4, steps=120) for _ in range(2))
    assert len(first.worker.plans) == len(second.worker.plans)
    for one, two in zip(first.worker.plans, second.worker.plans, strict=True):
        assert one.rows == two.rows
        assert [(u.component, u.refs.tolist()) for u in one.table_updates] == [
            (u.component, u.refs.tolist()) for u in two.table_updates
        ]
        assert one.freed_window_pages.tolist() == two.freed_window_pages.tolist()
