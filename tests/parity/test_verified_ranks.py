"""Case O-27 with real ranks: every rank brings its own free pages to every step."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phloem.core.group import OpKind
from phloem.replica import commands
from phloem.tiers import TierConfig
from phloem.worker import Replica
from tests.parity.rig import Cold, Rig, check_all
from tests.parity.test_journeys import words


@pytest.mark.parametrize("overlap", [True, False])
def test_o27_four_ranks_agree_in_every_step(
    tiny: Path, cold: Cold, tmp_path: Path, overlap: bool
) -> None:
    """Aborts, evictions, retractions, loads from host and storage: no rank waits in a collective
    that another one leaves out, since the step's record says that there is one."""
    rng = random.Random(27)
    with Rig(
        tiny,
        page_size=4,
        num_pages=48,
        host_pages=60,
        store=tmp_path,
        tiers=TierConfig(prefetch_policy="wait_complete"),
        max_prefill_tokens=20,
        max_running=4,
        overlap=overlap,
        ranks=4,
        verify=True,
    ) as rig:
        heads = [words(seed, 30) for seed in range(4)]
        names = []
        for i in range(30):
            prompt = rng.choice(heads) + words(i, rng.randrange(1, 20))
            names.append(rig.add(prompt, rng.randrange(1, 12)))
            for _ in range(rng.randrange(4)):
                rig.loop.step()
            if rng.random() < 0.3:
                rig.loop.abort(rng.choice(names))
        rig.loop.run_until_idle()
        own = rig.loaded.worker._own._runner._group
        assert own.traffic()[OpKind.ALL_REDUCE].calls == rig.scheduler.stats().steps_total
        assert rig.cache.leader.evicted_pages > 0
        check_all(rig, cold)


class Deaf:
    """Another copy, which does not hear one command: the n-th of a kind."""

    def __init__(self, inner: Replica, op: int, missed: int) -> None:
        self._inner, self._op, self._left = inner, op, missed
        self.missed_in: int | None = None  # the record
        self.records = 0

    def apply(self, log: bytes) -> None:
        inner, records = self._inner, self.records
        inner.apply(b"")  # made now, if it is not
        real = inner._state.apply

        def apply(command: tuple[Any, ...]) -> Any:
            if command[0] == self._op:
                self._left -= 1
                if self._left == 0:
                    self.missed_in = records
                    return None
            return real(command)

        state, inner._state = inner._state, SimpleNamespace(apply=apply)
        inner.apply(log)
        inner._state = state
        self.records += 1

    def digest(self) -> str:
        return self._inner.digest()

    def free_by_pool(self) -> dict[str, int]:
        return self._inner.free_by_pool()


class DeafRig(Rig):
    deaf: Deaf

    def _replica(self, rank: int) -> Replica:
        replica = super()._replica(rank)
        if rank != 2:
            return replica
        self.deaf = Deaf(replica, commands.FREE, 3)
        return self.deaf


def test_o27_a_copy_that_misses_one_free_is_caught_in_that_step(tiny: Path) -> None:
    """Digests are compared now and then; free pages in every step, before it is computed."""
    rig = DeafRig(
        tiny, page_size=4, num_pages=48, ranks=3, prefix_cache=False, verify=True, digest_every=1000
    )
    for seed in range(8):
        rig.add(words(seed, 9 + seed), 1 + seed % 3)
    while rig.loop.dead is None and rig.loop.step():
        pass
    rig.recorder.close()
    step = rig.deaf.missed_in
    assert step is not None
    assert rig.loop.dead is not None
    named = "rank 2 failed: its copy of the cache has other free pages than the leader's"
    assert f"{named} at step {step}: " in rig.loop.dead
    assert " in pages of owner " in rig.loop.dead
