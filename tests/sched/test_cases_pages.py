"""Cases about pages: none lost, none given twice, none short."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from phloem.cache import check_invariants
from phloem.core.request import FinishReason
from phloem.sched import Scheduler
from phloem.sim import cold, hash_model
from tests.long import few
from tests.sched.rig import VOCAB, Rig, prompt_of

PAGE_SIZES = [1, 4, 16]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("end", ["length", "eos", "stop_id", "abort"])
def test_o05_pages_are_exact_after_every_kind_of_end(end: str, overlap: bool, page_size: int):
    """A step in flight has one more slot than the committed tokens; it is freed exactly once."""
    prompt = [5, 6, 7]
    answer = cold_answer(prompt, 200)
    rig = Rig(
        page_size=page_size,
        num_pages=256,
        max_prefill_tokens=max(4, page_size),
        overlap=overlap,
        eos_ids=(answer[37],) if end == "eos" else (),
    )
    stops = (answer[50],) if end == "stop_id" else ()
    rig.add("r", prompt, max_tokens=200, stop_token_ids=stops)
    if end == "abort":
        rig.step(40)
        assert rig.scheduler.num_in_flight == (1 if overlap else 0)
        rig.loop.abort("r")
    rig.run()
    check_invariants(rig.cache, idle=True)
    expect = {"length": "length", "eos": "stop", "stop_id": "stop", "abort": "abort"}[end]
    assert rig.last["r"].finish is FinishReason(expect)
    rig.check_idle()


def cold_answer(prompt: list[int], max_tokens: int) -> list[int]:
    rig = Rig()
    request = rig.add("x", prompt, max_tokens=max_tokens)
    return cold(hash_model(VOCAB), request.tokens, request.sampling)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_o05_what_is_cached_after_the_end_is_all_but_the_last_token(page_size: int):
    """cached = full pages of prompt + output, less the last sampled token (it has no KV)."""
    for length in range(1, 3 * page_size + 2):
        rig = Rig(page_size=page_size, num_pages=64)
        rig.add("first", list(range(length)), max_tokens=7)
        rig.run()
        turn = list(range(length)) + rig.answers["first"] + [1, 2]
        rig.add("second", turn, max_tokens=1)
        rig.run()
        assert rig.last["second"].cached.total == (length + 7 - 1) // page_size * page_size
        rig.check_idle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_o06_chunked_prefill_with_the_cache_off(page_size: int):
    """Chunks extend the pages that they have; each page is allocated once; all come back."""
    prompt = prompt_of(random.Random(6), 10 * page_size + 1)
    need = 11  # pages of one request
    rig = Rig(
        page_size=page_size,
        num_pages=2 * need,
        cache_enabled=False,
        max_prefill_tokens=3 * page_size,
    )
    rig.add("a", prompt, max_tokens=1)
    rig.add("b", prompt, max_tokens=1)
    most_locked = 0
    while rig.step():
        most_locked = max(most_locked, rig.cache.locked_pages)
        check_invariants(rig.cache)
    assert most_locked <= 2 * need
    assert [rig.last[name].cached.total for name in "ab"] == [0, 0]
    chunks = [row.count for plan in rig.worker.plans for row in plan.rows]
    assert sum(chunks) == 2 * len(prompt)
    rig.check_idle()


def outgrow_a_pool(seed: int) -> Rig:
    rng = random.Random(seed)
    page_size = (16, 4, 1)[seed % 3]
    lengths = [rng.randrange(5, 61) for _ in range(6)]
    need = -(-(max(lengths) + 99) // page_size)
    rig = Rig(
        page_size=page_size,
        num_pages=need + rng.randrange(0, need),
        max_prefill_tokens=rng.choice((page_size, 24, 64)),
        overlap=seed % 2 == 0,
        headroom_tokens=0,
    )
    for number, length in enumerate(lengths):
        rig.add(str(number), prompt_of(rng, length), max_tokens=100)
        rig.step(rng.randrange(3))
    rig.run()
    rig.check_idle()
    return rig


@pytest.mark.parametrize("seed", few(range(200), 60))
def test_o07_retraction_anywhere_loses_no_page_and_no_token(seed: int):
    """Six requests outgrow a small pool: retracted in prefill and in decode, all end as cold."""
    outgrow_a_pool(seed)


def test_o07_the_seeds_retract_in_prefill_and_in_decode(monkeypatch: pytest.MonkeyPatch):
    """The rigs above do retract, in both phases: otherwise they would prove nothing."""
    phases: Counter[str] = Counter()
    retract = Scheduler._retract

    def spy(scheduler, request) -> None:
        phases[request.phase.value] += 1
        retract(scheduler, request)

    monkeypatch.setattr(Scheduler, "_retract", spy)
    for seed in range(9):
        outgrow_a_pool(seed)
    assert min(phases["prefill"], phases["decode"]) >= 2, phases


@pytest.mark.parametrize("page_size", [64, 16])
def test_o10_budgets_are_rounded_to_pages(page_size: int):
    """20 requests of a page and one token each, in a pool that holds a part of them."""
    rig = Rig(page_size=page_size, num_pages=30, max_prefill_tokens=100)
    rng = random.Random(10)
    for number in range(20):
        rig.add(str(number), prompt_of(rng, page_size + 1), max_tokens=1)
    while rig.step():
        check_invariants(rig.cache)
    assert rig.loop.dead is None
    ends = {}
    for plan in rig.worker.plans:
        for row in plan.rows:
            ends.setdefault(row.serial, []).append(row.start + row.count)
    for chunk_ends in ends.values():
        assert all(end % page_size == 0 for end in chunk_ends[:-1])
        assert chunk_ends[-1] == page_size + 1
    assert rig.worker.max_step_tokens <= 100
    assert rig.loop.stats().retractions_total == 0
    rig.check_idle()
