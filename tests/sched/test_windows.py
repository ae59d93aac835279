"""Window layers in the scheduler, case by case."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from phloem.cache import WindowConfig, check_invariants
from phloem.core.errors import BadRequest, ConfigError
from phloem.core.plan import StepPlan
from tests.sched.rig import Rig, prompt_of


def make(
    *, tokens: int = 8, layers: int = 2, pages: int = 40, checkpoint: int = 0, **config
) -> Rig:
    window = WindowConfig(tokens=tokens, layers=layers, pages=(pages,), checkpoint=checkpoint)
    return Rig(**{"page_size": 4, "num_pages": 200, "window": window, **config})


def served(rig: Rig, name: str, prompt: list[int], max_tokens: int = 1) -> int:
    """Cached tokens of a request that runs alone."""
    rig.add(name, prompt, max_tokens=max_tokens)
    rig.run()
    check_invariants(rig.cache, idle=True)
    return rig.last[name].cached.total


def first_row(rig: Rig, name: str):
    """The first row of the request that was added last under that name."""
    tokens = rig.requests[name].tokens
    for plan in reversed(rig.worker.plans):
        for init in plan.admitted:
            if init.tokens == tokens:
                serial = init.serial
                rows = [r for p in rig.worker.plans for r in p.rows if r.serial == serial]
                return rows[0]
    raise AssertionError(f"{name} was never admitted")


def test_a_long_prompt_needs_a_window_and_a_chunk():
    """1,000 tokens and 60 of an answer through 6 window pages, which hold 24 tokens."""
    rng = random.Random(1)
    rig = make(pages=6, num_pages=300, max_prefill_tokens=8)
    assert served(rig, "long", prompt_of(rng, 1000), max_tokens=60) == 0
    rig.check_idle()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("tokens", "page_size"), [(1, 4), (2, 1), (4, 1), (8, 4), (4, 16), (33, 16)]
)
def test_the_least_pool_is_enough_for_a_request_alone(tokens: int, page_size: int, overlap: bool):
    rng = random.Random(2)
    least = -(-(tokens - 1) // page_size) + 2
    rig = make(tokens=tokens, pages=least, page_size=page_size, overlap=overlap)
    for length in (1, 7, 60, 61, 150):
        served(rig, str(length), prompt_of(rng, length), max_tokens=40)
    assert rig.loop.stats().retractions_total == 0
    rig.check_idle()


@pytest.mark.parametrize(("owners", "placement"), [(2, "striped"), (3, "contiguous")])
@pytest.mark.parametrize(("tokens", "page_size"), [(1, 4), (8, 4), (33, 16)])
def test_the_least_pool_of_each_rank_is_enough_too(
    tokens: int, page_size: int, owners: int, placement: str
):
    """Wherever its full pages lie, all on one rank included, their window pages have room there."""
    rng = random.Random(2)
    least = -(-(tokens - 1) // page_size) + 2
    ranks = {"num_owners": owners, "placement": placement}
    rig = make(tokens=tokens, pages=least, page_size=page_size, num_pages=60, **ranks)
    for length in (1, 7, 60, 61, 150, 151, 152, 300):
        served(rig, str(length), prompt_of(rng, length), max_tokens=40)
    assert rig.loop.stats().retractions_total == 0
    rig.check_idle()


def test_a_pool_in_which_a_request_could_come_to_a_halt_is_refused_at_once():
    with pytest.raises(ConfigError, match="a window of 33 tokens needs 4 window pages"):
        make(tokens=33, page_size=16, pages=3, num_pages=100)
    make(tokens=33, page_size=16, pages=3, num_pages=3)  # no request can be longer


def test_what_fits_neither_pool_is_refused():
    rig = make(num_pages=10, pages=10)
    with pytest.raises(BadRequest, match="need 11 KV pages"):
        rig.add("r", prompt_of(random.Random(3), 41), max_tokens=1)


def test_the_next_turn_hits_the_tail_of_the_last_one():
    """O-32: whatever was evicted in between, but for the last tails."""
    rng = random.Random(4)
    rig = make(pages=12)
    prompt = prompt_of(rng, 41)
    served(rig, "first", prompt, max_tokens=20)
    answer = rig.answers["first"]
    for turn in range(4):
        prompt = prompt + answer + prompt_of(rng, 9)
        before = (len(prompt) - 9 - 1) // 4 * 4  # the last token of an answer has no state
        assert served(rig, f"turn{turn}", prompt, max_tokens=20) == before
        answer = rig.answers[f"turn{turn}"]
        served(rig, f"other{turn}", prompt_of(rng, 30))
    rig.check_idle()


def test_a_lost_window_costs_a_restart_and_not_the_whole_prefix():
    """Start at (L P - (W - 1)) down to a page, less (Ls - 1)(W - 1), down to a page."""
    rng = random.Random(5)
    rig = make(tokens=8, layers=3)
    prompt = prompt_of(rng, 101)
    served(rig, "first", prompt)
    rig.cache.evict_window(100)
    cached = served(rig, "again", prompt)
    row = first_row(rig, "again")
    assert (row.start, row.write_from, row.window_from) == (76, 100, 76)
    assert cached == 76
    stats = rig.loop.stats()
    assert (stats.restarts_total, stats.restarted_tokens_total) == (1, 24)
    assert served(rig, "third", prompt) == 100, "the restart has revived the tail"
    rig.check_idle()


def test_a_restart_begins_at_a_valid_length_where_that_is_later():
    rng = random.Random(6)
    rig = make(tokens=8, layers=9, checkpoint=5)
    prompt = prompt_of(rng, 101)
    served(rig, "first", prompt)
    window = rig.cache.leader.window
    end = rig.cache.match(rig.requests["first"].namespace, rig.requests["first"].tokens)
    window._evict(end.window_refs()[-2:].tolist())  # the tail, not the checkpoint at page 20
    assert served(rig, "again", prompt) == 92
    row = first_row(rig, "again")
    assert (row.start, row.write_from, row.window_from) == (92, 100, 0)
    rig.check_idle()


def test_two_with_the_same_lost_window_make_it_once():
    """The second waits until the first has revived the tail, and then hits it."""
    rng = random.Random(7)
    rig = make(tokens=8, layers=3, max_prefill_tokens=4)
    head = prompt_of(rng, 100)
    served(rig, "first", head + prompt_of(rng, 5))
    rig.cache.evict_window(100)
    rig.add("a", head + prompt_of(rng, 9), max_tokens=4)
    rig.add("b", head + prompt_of(rng, 9), max_tokens=4)
    rig.run()
    assert rig.last["a"].cached.total == 76
    assert rig.last["b"].cached.total == 100
    rig.check_idle()


def test_requests_with_a_common_prefix_compute_it_once():
    rng = random.Random(8)
    rig = make(max_prefill_tokens=8)
    head = prompt_of(rng, 80)
    for name in "abc":
        rig.add(name, head + prompt_of(rng, 6), max_tokens=3)
    rig.run()
    assert [rig.last[name].cached.total for name in "abc"] == [0, 80, 80]
    rig.check_idle()


def test_when_window_pages_run_out_the_newest_gives_its_own_back():
    rng = random.Random(9)
    rig = make(tokens=16, pages=9, headroom_tokens=0)
    rig.scheduler._windows.has_room = lambda request, running: True
    for number in range(4):
        rig.add(str(number), prompt_of(rng, 20), max_tokens=50)
    rig.run()
    stats = rig.loop.stats()
    assert stats.retractions_total > 0
    assert rig.last["0"].cached.total == 0
    rig.check_idle()


def test_admission_leaves_room_for_the_windows_of_those_that_run():
    rng = random.Random(10)
    rig = make(tokens=16, pages=13, headroom_tokens=0)
    for number in range(4):
        rig.add(str(number), prompt_of(rng, 20), max_tokens=50)
    rig.step(6)
    assert rig.scheduler.num_running == 2  # 6 pages each: a tail of 4, two in flight
    rig.run()
    assert rig.loop.stats().retractions_total == 0
    rig.check_idle()


def test_window_pages_are_told_by_component_and_freed_pages_apart():
    rng = random.Random(11)
    rig = make(pages=8)
    served(rig, "r", prompt_of(rng, 90), max_tokens=30)
    plans = rig.worker.plans
    assert {u.component for p in plans for u in p.table_updates} == {0, 1}
    assert sum(len(p.freed_window_pages) for p in plans) > 10
    assert sum(len(p.freed_pages) for p in plans) == 0
    rig.check_idle()


def test_an_abort_or_a_flush_in_the_middle_leaves_no_window_page_behind():
    rng = random.Random(12)
    for moment in range(12):
        rig = make(max_prefill_tokens=8)
        rig.add("a", prompt_of(rng, 40), max_tokens=20)
        rig.add("b", prompt_of(rng, 40), max_tokens=20)
        rig.step(moment)
        rig.loop.flush()
        rig.step()
        rig.loop.abort("a")
        rig.run()
        rig.check_idle()


def without_write_from(plan: StepPlan) -> StepPlan:
    return replace(plan, rows=tuple(replace(row, write_from=0) for row in plan.rows))


def without_window_from(plan: StepPlan) -> StepPlan:
    return replace(plan, rows=tuple(replace(row, window_from=0) for row in plan.rows))


def without_window_updates(plan: StepPlan) -> StepPlan:
    kept = tuple(u for u in plan.table_updates if u.component == 0 or plan.step % 4 == 0)
    return replace(plan, table_updates=kept)


def one_page_up(plan: StepPlan) -> StepPlan:
    """A restart that begins a page too late reads what is not right."""
    rows = tuple(
        replace(
            row,
            start=row.start + 4,
            count=row.count - 4,
            tokens=row.tokens[16:],
            window_from=row.window_from + 4,
        )
        if 0 < row.window_from == row.start and row.count > 4
        else row
        for row in plan.rows
    )
    return replace(plan, rows=rows)


@pytest.mark.parametrize(
    "spoil", [without_write_from, without_window_from, without_window_updates, one_page_up]
)
def test_a_spoilt_plan_is_noticed(spoil):
    """Each of these would give wrong state to others, or wrong answers."""
    rng = random.Random(13)
    rig = make(tokens=8, layers=3)
    submit = rig.worker.submit
    rig.worker.submit = lambda plan: submit(spoil(plan))
    prompt = prompt_of(rng, 101)
    rig.add("first", prompt, max_tokens=30)
    while rig.step():
        pass
    rig.cache.evict_window(100)
    rig.add("again", prompt, max_tokens=30) if rig.loop.dead is None else None
    while rig.step():
        pass
    assert rig.loop.dead is not None


def test_an_early_release_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """A lease that lets go of one page too many."""
    from phloem.cache.window_lease import WindowLease

    advance = WindowLease.advance
    monkeypatch.setattr(WindowLease, "advance", lambda lease, at: advance(lease, at + 4))
    rng = random.Random(14)
    rig = make(tokens=8, pages=5, cache_enabled=False)
    rig.add("a", prompt_of(rng, 60), max_tokens=30)
    while rig.step():
        pass
    assert rig.loop.dead is not None
