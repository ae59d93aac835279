"""A safeguard of the window side is taken away, and something must notice."""

from __future__ import annotations

import random

import pytest

from phloem.cache.window_host import WindowHost
from phloem.cache.window_ledger import WindowLedger
from phloem.core.errors import PhloemError
from phloem.core.transfer import TransferKind
from phloem.kv.keys import KeyFacts
from phloem.sim.window import PageFault
from phloem.tiers.flights import Flights
from phloem.tiers.loads import LoadEnd, Loads
from phloem.tiers.window_prefetch import TailReads
from tests.sched.rig import prompt_of
from tests.tiers import test_window_cases as cases


def host_loads() -> None:
    cases.test_a_prefix_that_left_the_device_comes_back_with_its_tail_alone()


def storage_reads() -> None:
    cases.test_only_the_tail_of_the_longest_restorable_length_is_read()


def a_copy_under_pressure() -> None:
    """A tail is evicted, and its pages are used for others, while it is being copied."""
    rng = random.Random(1)
    held = {"on": True}
    rig = cases.make_rig(
        device=3 * cases.TAIL + 2,
        transfers={"blocked": lambda t: held["on"] and t.component == 1},
    )
    prompt = prompt_of(rng, 41)
    rig.add("first", prompt, max_tokens=1)
    while "first" not in rig.last:
        rig.step()
    rig.cache.evict_window(100)
    rig.add("other", prompt_of(rng, 41), max_tokens=1)
    while "other" not in rig.last:
        rig.step()
    held["on"] = False
    rig.run()
    cases.push_out(rig, rng)
    assert cases.ask(rig, "again", prompt).host == 40
    rig.check_idle()


def a_load_under_pressure() -> None:
    """The slots of a tail that is being loaded are evicted, and written to by others."""
    rng = random.Random(2)
    held = {"on": False}
    rig = cases.make_rig(
        host=2 * (cases.TAIL + 1),
        transfers={
            "blocked": lambda t: (
                held["on"] and t.component == 1 and t.kind is TransferKind.LOAD_BACK
            )
        },
    )
    prompt = prompt_of(rng, 41)
    cases.ask(rig, "first", prompt)
    cases.push_out(rig, rng)
    held["on"] = True
    rig.add("again", prompt, max_tokens=1)
    rig.step()
    host = rig.cache.leader.window_host
    host.evict(100)
    taken = host.allocate(host.free_pages)
    load = next(t for t in rig.transfers.log if t.kind is TransferKind.LOAD_BACK and t.component)
    assert not set(load.host.tolist()) & set(memoryview(taken).cast("q").tolist())
    host.free(taken)
    held["on"] = False
    rig.run()
    rig.check_idle()


def failing_copies() -> None:
    """Nothing that is on the host is whole; a restart finds that out, if nobody knows."""
    rng = random.Random(3)
    rig = cases.make_rig(
        transfers={"fails": lambda t: t.kind is TransferKind.BACKUP_HOST and t.component == 1}
    )
    prompt = prompt_of(rng, 41)
    cases.ask(rig, "first", prompt)
    cases.push_out(rig, rng, component=1)
    cases.ask(rig, "again", prompt)
    rig.check_idle()


def failing_loads() -> None:
    cases.test_half_a_load_is_no_load(1)


def slow_loads() -> None:
    """Full pages are there long before the tail."""
    rng = random.Random(4)
    for seed in range(6):
        rig = cases.make_rig(transfers={"seed": seed})
        prompt = prompt_of(rng, 41)
        cases.ask(rig, "first", prompt)
        cases.push_out(rig, rng)
        assert cases.ask(rig, "again", prompt, max_tokens=4).host == 40
        rig.check_idle()


def keys() -> None:
    cases.test_a_restarted_process_finds_the_tail_and_others_never_do()


def no_holds(patch: pytest.MonkeyPatch) -> None:
    """Host slots may be reused while a load reads them."""
    for name in ("hold", "release"):
        patch.setattr(WindowHost, name, lambda self, slots: None)
        patch.setattr(WindowLedger, name, lambda self, slots: None)


def no_locks_of_backups(patch: pytest.MonkeyPatch) -> None:
    """Window pages may leave the device while they are copied."""
    begin, end = WindowHost.begin_backup, WindowHost.end_backup
    lock, unlock = WindowLedger.lock, WindowLedger.unlock

    def without(method):
        def call(self, *args, **kwargs):
            patch.setattr(WindowLedger, "lock", lambda self, pages: None)
            patch.setattr(WindowLedger, "unlock", lambda self, pages: None)
            try:
                return method(self, *args, **kwargs)
            finally:
                patch.setattr(WindowLedger, "lock", lock)
                patch.setattr(WindowLedger, "unlock", unlock)

        return call

    patch.setattr(WindowHost, "begin_backup", without(begin))
    patch.setattr(WindowHost, "end_backup", without(end))


def failed_copies_count_as_done(patch: pytest.MonkeyPatch) -> None:
    end = WindowHost.end_backup
    patch.setattr(
        WindowHost, "end_backup", lambda self, backup, *, done: end(self, backup, done=True)
    )


def half_loads_count_as_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Loads,
        "take_ended",
        lambda self, take=Loads.take_ended: [LoadEnd(e.id, True) for e in take(self)],
    )


def steps_wait_for_full_pages_alone(patch: pytest.MonkeyPatch) -> None:
    of = Loads.transfers_of
    patch.setattr(Loads, "transfers_of", lambda self, load_id: of(self, load_id)[:1])


def pages_one_place_further(patch: pytest.MonkeyPatch) -> None:
    """A load takes the window state of each page from its neighbour's slot."""
    submit = Flights.submit

    def shifted(self, kind, on_end, *, host=b"", component=0, **kwargs):
        if component and kind is TransferKind.LOAD_BACK and len(host) > 8:
            host = host[8:] + host[:8]
        return submit(self, kind, on_end, host=host, component=component, **kwargs)

    patch.setattr(Flights, "submit", shifted)


def tails_arrive_somewhere_else(patch: pytest.MonkeyPatch) -> None:
    """What comes from storage is taken for the window state of the pages one before."""
    arrived = TailReads.arrived
    patch.setattr(
        TailReads,
        "arrived",
        lambda self, read, pages, slots, *, good: arrived(
            self, read, [page - 1 for page in pages], slots, good=good
        ),
    )


def a_tail_is_one_page_shorter(patch: pytest.MonkeyPatch) -> None:
    init = TailReads.__init__

    def shorter(self, *args) -> None:
        init(self, *args)
        self._tail_pages -= 1

    patch.setattr(TailReads, "__init__", shorter)


def keys_without_windows(patch: pytest.MonkeyPatch) -> None:
    facts = KeyFacts.as_fact

    def without(self):
        return {name: fact for name, fact in facts(self).items() if name != "window_kv"}

    patch.setattr(KeyFacts, "as_fact", without)


@pytest.mark.parametrize(
    ("mutate", "watch"),
    [
        (no_holds, a_load_under_pressure),
        (no_locks_of_backups, a_copy_under_pressure),
        (failed_copies_count_as_done, failing_copies),
        (half_loads_count_as_done, failing_loads),
        (steps_wait_for_full_pages_alone, slow_loads),
        (pages_one_place_further, host_loads),
        (tails_arrive_somewhere_else, storage_reads),
        (a_tail_is_one_page_shorter, storage_reads),
        (keys_without_windows, keys),
    ],
)
def test_a_missing_safeguard_is_noticed(monkeypatch: pytest.MonkeyPatch, mutate, watch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, PhloemError, PageFault)):
        watch()


def test_with_all_safeguards_nothing_is_noticed():
    for watch in (
        host_loads,
        storage_reads,
        slow_loads,
        failing_copies,
        failing_loads,
        a_copy_under_pressure,
        a_load_under_pressure,
        keys,
    ):
        watch()
