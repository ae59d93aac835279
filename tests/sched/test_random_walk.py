"""Seeded walks: requests come, go, are aborted; pools are small; every answer must be cold's."""

from __future__ import annotations

import functools
import random

import pytest

from phloem.cache import check_invariants
from phloem.core.errors import BadRequest
from phloem.core.stats import EngineStats
from tests.long import few
from tests.sched.rig import VOCAB, Rig, prompt_of

POLICIES = ("fcfs", "lpm", "hrrn", "routing_key")


# Ranks that own pages, and how they share them; one alone is what most walks have.
RANKS = ((2, "striped"), (4, "striped"), (4, "contiguous"), (2, "replicate"))


def walk(
    seed: int, *, page_size: int, steps: int, owners: int = 1, placement: str = "striped"
) -> Rig:
    rng = random.Random(f"{seed}/{page_size}")
    rig = Rig(
        page_size=page_size,
        num_pages=rng.randrange(100, 400) // page_size // owners,
        num_owners=owners,
        placement=placement,
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
    heads = [prompt_of(rng, rng.randrange(1, 50)) for _ in range(4)]
    refused = 0
    for number in range(steps):
        draw = rng.random()
        unfinished = [name for name in rig.requests if name not in rig.last]
        if draw < 0.25 and len(unfinished) < 20:
            refused += not add_some(rig, rng, f"r{number}", heads)
        elif draw < 0.28 and unfinished:
            rig.loop.abort(rng.choice(unfinished))
        elif draw < 0.29:
            rig.loop.flush()
        rig.step()
        if owners > 1:
            rig.check_replicas()
        if number % 16 == 0:
            check_invariants(rig.cache)
    rig.run()
    assert rig.loop.stats().refused_total == refused
    rig.check_idle()
    return rig


def add_some(rig: Rig, rng: random.Random, name: str, heads: list[list[int]]) -> bool:
    """A fresh prompt, one with a known head, or the next turn of a finished answer."""
    ended = list(rig.last)
    prompt = list(rng.choice(heads))
    if ended and rng.random() < 0.4:
        before = rng.choice(ended)
        ids = rig.requests[before].tokens
        prompt = [int.from_bytes(ids[i : i + 4], "little") for i in range(0, len(ids), 4)]
        prompt += rig.answers[before]
    prompt += prompt_of(rng, rng.randrange(0, 30))
    max_tokens = rng.choice((1, 2, 7, 40, 150))
    try:
        rig.add(
            name,
            prompt,
            max_tokens=max_tokens,
            min_tokens=rng.randrange(0, max_tokens + 1),
            stop_token_ids=(rng.randrange(VOCAB),),
            ignore_eos=rng.random() < 0.5,
            priority=rng.choice((0, 0, 0, 1)),
            routing_key=rng.choice((None, "a", "b")),
        )
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(28), 10))
def test_every_answer_of_a_walk_is_cold(seed: int, page_size: int) -> None:
    """Walks of 250 steps and their endings; 84 of them in all: more than 20,000 loop steps."""
    steps, _ = figures(seed, page_size)
    assert steps >= 250


@functools.cache
def figures(seed: int, page_size: int) -> tuple[int, EngineStats]:
    """Of one walk, which is taken once, whoever asks for them."""
    rig = walk(seed, page_size=page_size, steps=250)
    return rig.steps, rig.loop.stats()


@pytest.mark.parametrize(("owners", "placement"), RANKS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_every_answer_over_several_ranks_is_cold(
    seed: int, page_size: int, owners: int, placement: str
) -> None:
    """Pages of every rank are read and written, given away and poisoned."""
    walk(seed, page_size=page_size, steps=200, owners=owners, placement=placement)


def test_walks_do_what_they_are_for() -> None:
    """Hits, retractions, refusals, stops and aborts all occur, so that the walks can fail."""
    stats = [figures(seed, 4)[1] for seed in range(10)]
    assert sum(s.retractions_total for s in stats) > 20
    assert sum(s.cached_tokens_total.total for s in stats) > 500
    assert sum(s.cache.evicted_pages_total for s in stats) > 50
    assert sum(s.refused_total for s in stats) > 0
    finished = {why: sum(dict(s.finished_total)[why] for s in stats) for why in ("stop", "length")}
    assert min(finished.values()) > 20


def test_a_walk_is_replayable() -> None:
    """The same seed gives the same plans, rows and pages included."""
    first, second = (walk(3, page_size=4, steps=120) for _ in range(2))
    assert len(first.worker.plans) == len(second.worker.plans)
    for one, two in zip(first.worker.plans, second.worker.plans, strict=True):
        assert one.rows == two.rows
        assert one.admitted == two.admitted
        assert one.released == two.released
        assert [u.refs.tolist() for u in one.table_updates] == [
            u.refs.tolist() for u in two.table_updates
        ]
        assert one.freed_pages.tolist() == two.freed_pages.tolist()
