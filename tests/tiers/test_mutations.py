"""A suite that stays green is the defect: a safeguard is taken away, and something must notice."""

from __future__ import annotations

import pytest

from phloem.cache.host_ledger import HostLedger
from phloem.cache.leader import Leader
from phloem.core.errors import PhloemError
from phloem.sched.scheduler import Scheduler
from phloem.sim import SimStorage, SimTransfers
from phloem.tiers.controller import TierController
from phloem.tiers.flights import Flights
from tests.sched.test_host_tier import walk
from tests.tiers import test_cases


def walks(seeds: int = 14) -> None:
    for seed in range(seeds):
        walk(seed, page_size=4, steps=150, storage=SimStorage())


def protected_source() -> None:
    test_cases.test_o19_the_source_of_a_load_is_protected_until_it_has_ended(True)


def waiting_load() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_cases.test_a_load_waits_for_the_step_that_may_still_use_its_pages(patch)


def no_holds(patch: pytest.MonkeyPatch) -> None:
    """Host slots may be reused while a load reads them."""
    patch.setattr(HostLedger, "hold", lambda self, slots: None)
    patch.setattr(HostLedger, "release", lambda self, slots: None)


def no_backup_locks(patch: pytest.MonkeyPatch) -> None:
    """Pages may leave the device while they are copied."""
    lock, unlock = Leader.lock, Leader.unlock
    begin, end = Leader.begin_backup, Leader.end_backup

    def without(method):
        def call(self, *args, **kwargs):
            patch.setattr(Leader, "lock", lambda self, node, above: None)
            patch.setattr(Leader, "unlock", lambda self, node: None)
            try:
                return method(self, *args, **kwargs)
            finally:
                patch.setattr(Leader, "lock", lock)
                patch.setattr(Leader, "unlock", unlock)

        return call

    patch.setattr(Leader, "begin_backup", without(begin))
    patch.setattr(Leader, "end_backup", without(end))


def no_wait_for_the_step_before(patch: pytest.MonkeyPatch) -> None:
    """A load may write to pages that the step in flight still uses."""
    start = TierController.start_load
    patch.setattr(
        TierController,
        "start_load",
        lambda self, reservation, *, after_step: start(self, reservation, after_step=-1),
    )


def no_wait_for_loads(patch: pytest.MonkeyPatch) -> None:
    """A step may read pages before they are there."""
    patch.setattr(SimTransfers, "wait_layer", lambda self, ids, layer: None)


def failed_loads_count_as_done(patch: pytest.MonkeyPatch) -> None:
    ended = Scheduler.loads_ended

    def all_well(self, ends):
        ended(self, [type(end)(end.id, True) for end in ends])

    patch.setattr(Scheduler, "loads_ended", all_well)


def failed_backups_count_as_done(patch: pytest.MonkeyPatch) -> None:
    end = Leader.end_backup
    patch.setattr(
        Leader,
        "end_backup",
        lambda self, backup, *, done, demote=False: end(self, backup, done=True, demote=demote),
    )


def pages_one_place_further(patch: pytest.MonkeyPatch) -> None:
    """A load takes each page from its neighbour's slot."""
    submit = Flights.submit

    def shifted(self, kind, on_end, *, host=b"", device=b"", **kwargs):
        if device and len(host) > 8:
            host = host[8:] + host[:8]
        return submit(self, kind, on_end, host=host, device=device, **kwargs)

    patch.setattr(Flights, "submit", shifted)


@pytest.mark.parametrize(
    ("mutate", "watch"),
    [
        (no_holds, protected_source),
        (no_backup_locks, walks),
        (no_wait_for_the_step_before, waiting_load),
        (no_wait_for_loads, walks),
        (failed_loads_count_as_done, walks),
        (failed_backups_count_as_done, walks),
        (pages_one_place_further, walks),
    ],
)
def test_a_missing_safeguard_is_noticed(monkeypatch: pytest.MonkeyPatch, mutate, watch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, PhloemError)):
        watch()


def test_with_all_safeguards_nothing_is_noticed():
    walks(4)
    protected_source()
    waiting_load()
