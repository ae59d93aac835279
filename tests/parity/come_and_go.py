"""A seeded session of requests that come and go over a pool that is too small for them."""

from __future__ import annotations

import random

from tests.parity.rig import Rig
from tests.parity.test_journeys import words

__all__ = ["come_and_go"]


def come_and_go(rig: Rig, rng: random.Random, num_requests: int) -> None:
    """Chunks, decodes and hits in one step, retractions and aborts: owners change all the time."""
    heads = [words(rng.randrange(999), rng.randrange(5, 40)) for _ in range(3)]
    names = []
    for i in range(num_requests):
        prompt = rng.choice(heads) + words(i, rng.randrange(1, 20))
        names.append(rig.add(prompt, rng.randrange(1, 30)))
        for _ in range(rng.randrange(4)):
            rig.loop.step()
        if rng.random() < 0.2:
            rig.loop.abort(rng.choice(names))
    rig.loop.run_until_idle()
    assert sum(answer.cached for answer in rig.answers.values()) > 0
    assert rig.cache.leader.evicted_pages > 0
