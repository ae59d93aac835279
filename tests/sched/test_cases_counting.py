"""Cases about counters: every fact once."""

from __future__ import annotations

import random

import pytest

from phloem.sched import scheduler as scheduler_module
from tests.sched.rig import Rig, prompt_of

PAGE_SIZES = [1, 4, 16]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_o08_retractions_change_no_hit_counter(page_size: int):
    """A re-admitted request finds its own pages: that is no hit."""
    rng = random.Random(8)
    rig = Rig(page_size=page_size, num_pages=128 // page_size, headroom_tokens=0)
    lengths = {str(number): 20 + number for number in range(6)}
    for name, length in lengths.items():
        rig.add(name, prompt_of(rng, length), max_tokens=60)
    states = list(rig.scheduler._requests.values())
    rig.run()
    most = max(state.retractions for state in states)
    assert most >= 2, "no request was retracted twice: the case is not met"
    stats = rig.loop.stats()
    assert stats.prompt_tokens_total == sum(lengths.values())
    assert stats.cached_tokens_total.total == 0
    assert stats.recomputed_tokens_total > 0
    assert stats.generated_tokens_total == 6 * 60
    assert all(chunk.cached.total == 0 for chunk in rig.last.values())
    rig.check_idle()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_o09_failed_attempts_to_admit_count_nothing(page_size: int):
    """A hundred passes without room, then one admission: one prompt, one hit."""
    rng = random.Random(9)
    rig = Rig(page_size=page_size, num_pages=416 // page_size)
    head = prompt_of(rng, 128)
    rig.add("head", head, max_tokens=1)
    rig.run()
    rig.add("long", prompt_of(rng, 160), max_tokens=120)
    rig.step(3)
    rig.add("half", head + prompt_of(rng, 128), max_tokens=10)
    before = rig.loop.stats()
    rig.step(100)
    assert rig.loop.stats().queued == 1, "it was let in too early: the case is not met"
    assert rig.loop.stats().prompt_tokens_total == before.prompt_tokens_total
    assert rig.loop.stats().cached_tokens_total == before.cached_tokens_total
    rig.run()
    after = rig.loop.stats()
    assert after.prompt_tokens_total == before.prompt_tokens_total + 256
    cached = after.cached_tokens_total.total - before.cached_tokens_total.total
    assert cached == rig.last["half"].cached.total == 128
    rig.check_idle()


def test_counters_add_up():
    """Finished by reason, refused, steps and tokens equal what was seen from outside."""
    rig = Rig(page_size=4, num_pages=32, max_queued=3)
    for number in range(3):
        rig.add(f"{number}", [number] * 9, max_tokens=4)
    with pytest.raises(scheduler_module.Overloaded):
        rig.add("too many", [1], max_tokens=1)
    rig.step(2)
    rig.loop.abort("1")
    rig.run()
    stats = rig.loop.stats()
    assert dict(stats.finished_total) == {"stop": 0, "length": 2, "abort": 1, "error": 0}
    assert stats.refused_total == 1
    assert stats.steps_total == len(rig.worker.plans)
    assert stats.generated_tokens_total == sum(len(a) for a in rig.answers.values())
    assert (stats.running, stats.queued) == (0, 0)
    rig.check_idle()
