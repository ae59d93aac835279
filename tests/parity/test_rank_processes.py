"""Hazards between processes: pages that others still read, tokens that others have sampled.

Every rank is a process; freed pages are NaN, every rank gives its core away at random, digests of
the cache are compared in every step.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words

STEPS = 1000


@pytest.mark.parametrize(("ranks", "host_pages"), [(2, 96), (3, 0)])
def test_processes_that_share_a_small_pool(
    tiny: Path, cold: Cold, ranks: int, host_pages: int
) -> None:
    """Seeded requests that share heads, are retracted, aborted and evicted: 1,000 steps each."""
    rng = random.Random(ranks)
    with Rig(
        tiny,
        page_size=4,
        num_pages=30,
        host_pages=host_pages,
        max_prefill_tokens=24,
        max_running=4,
        ranks=ranks,
        processes=True,
    ) as rig:
        heads = [words(rng.randrange(999), rng.randrange(8, 24)) for _ in range(4)]
        names = []
        while rig.scheduler.stats().steps_total < STEPS:
            if rig.scheduler.num_unfinished < 5:
                prompt = rng.choice(heads) + words(len(names), rng.randrange(1, 16))
                names.append(rig.add(prompt, rng.randrange(1, 70)))
            if rng.random() < 0.02:
                rig.loop.abort(rng.choice(names))
            rig.loop.step()
        rig.loop.run_until_idle()
        stats = rig.scheduler.stats()
        assert stats.retractions_total > 0
        assert rig.cache.leader.evicted_pages > STEPS // 10
        assert sum(answer.cached for answer in rig.answers.values()) > 0
        messages = rig.loaded.worker.messages
        assert set(messages.values()) == {messages[1]}
        assert messages[1] <= stats.steps_total + len(names)  # a step each, and cancellations
        check_all(rig, cold)
