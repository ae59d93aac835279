"""Pages to storage and back: whole pages or none, quarantine, stores that come and go."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from phloem.core.store import Verb
from phloem.core.transfer import TransferKind
from phloem.stores import GuardPolicy, guarded
from phloem.stores.adapters.memory import MemoryBackend
from phloem.stores.faulty import Fault, FaultyBackend
from tests.transfer.rig import Rig, link

BACKUP, PREFETCH = TransferKind.BACKUP_STORAGE, TransferKind.PREFETCH
PROBE = TransferKind.PROBE


@pytest.fixture
def backend():
    backend = FaultyBackend(MemoryBackend(1 << 20))
    yield backend
    backend.release()


@pytest.fixture
def rig(backend):
    with Rig() as rig:
        policy = GuardPolicy(failures_to_open=100, bad_key_s=0.0)
        rig.engine.storage.attach(guarded(backend, rig.clock, policy=policy))
        yield rig
        backend.release()


def put(rig: Rig, slots: list[int]) -> None:
    """Store host pages under links of the same names."""
    rig.fill_host(slots)
    done = rig.finish(rig.submit(BACKUP, host=slots, links=tuple(map(link, slots)))).done
    assert done.all()


def test_pages_come_back_by_their_links_into_other_slots(rig):
    put(rig, [0, 1, 2])
    result = rig.finish(rig.submit(PREFETCH, host=[7, 9, 8], links=(link(2), link(5), link(0))))
    assert result.done.tolist() == [True, False, True]
    assert result.error is None  # a miss is no error
    assert rig.arena.read_page(7) == rig.page(1002)
    assert rig.arena.read_page(8) == rig.page(1000)


def test_a_probe_tells_what_is_there_and_moves_nothing(rig):
    put(rig, [0, 1])
    before = rig.arena.bytes.tobytes()
    result = rig.finish(rig.submit(PROBE, links=(link(0), link(3), link(1))))
    assert result.done.tolist() == [True, False, True]
    assert result.num_bytes == 0
    assert rig.arena.bytes.tobytes() == before


def test_o20_a_page_with_half_its_objects_is_no_page(rig, backend):
    """Half of the batch fails: of two pages with two head groups each, the second has none."""
    rig.fill_host([0, 1, 2])
    backend.script(Verb.PUT, Fault.HALF)
    links = (link(0), link(1), link(2))
    result = rig.finish(rig.submit(BACKUP, host=[0, 1, 2], links=links))
    assert result.done.tolist() == [True, False, False]  # page 1 has one object of two
    assert result.error == "error"
    assert rig.finish(rig.submit(PROBE, links=links)).done.tolist() == [True, False, False]


def test_a_corrupt_object_spoils_its_page_only(rig, backend):
    put(rig, [0, 1])
    backend.script(Verb.GET, Fault.CORRUPT)
    result = rig.finish(rig.submit(PREFETCH, host=[5, 6], links=(link(0), link(1))))
    assert result.done.tolist() == [False, False]  # every second object is hit: one of each page
    assert result.error == "corrupt"


def test_o19_pages_of_a_hung_read_are_held_until_it_returns(rig, backend):
    put(rig, [0, 1])
    backend.script(Verb.GET, Fault.HANG)
    started_s = rig.clock.now_s()
    read = rig.submit(PREFETCH, host=[5, 6], links=(link(0), link(1)), deadline_s=started_s + 0.02)
    result = rig.finish(read)
    assert not result.done.any()
    assert result.held is not None
    assert result.held.tolist() == [True, True]
    rig.pump()
    assert rig.released == []
    backend.release()
    while not rig.released:
        rig.pump(1.0)
    assert rig.released == [read]


def test_cancel_answers_a_hung_transfer_now(rig, backend):
    put(rig, [0])
    backend.script(Verb.GET, Fault.HANG)
    read = rig.submit(PREFETCH, host=[5], links=(link(0),))
    rig.engine.cancel(read)
    result = rig.finish(read)
    assert not result.done.any()
    assert result.error == "cancelled"


def test_without_a_store_the_tier_is_empty(backend):
    with Rig() as rig:
        for kind in (BACKUP, PREFETCH):
            result = rig.finish(rig.submit(kind, host=[1], links=(link(1),)))
            assert result.done.tolist() == [False]
            assert result.error == "no storage is attached"
        assert rig.finish(rig.submit(PROBE, links=(link(1),))).done.tolist() == [False]


def test_a_store_can_be_detached_in_the_middle_of_a_read_and_another_attached(rig, backend):
    put(rig, [0, 1])
    backend.script(Verb.GET, Fault.HANG)
    read = rig.submit(PREFETCH, host=[5], links=(link(0),))
    rig.engine.storage.detach(timeout_s=0.02)
    result = rig.finish(read)
    assert not result.done.any()
    assert not rig.engine.storage.attached
    assert rig.finish(rig.submit(PREFETCH, host=[6], links=(link(0),))).done.tolist() == [False]
    other = MemoryBackend(1 << 20)
    rig.engine.storage.attach(guarded(other, rig.clock))
    put(rig, [2])
    assert rig.finish(rig.submit(PREFETCH, host=[7], links=(link(2),))).done.tolist() == [True]
    if result.held is not None:  # the thread had begun before the store was closed
        backend.release()
        while not rig.released:
            rig.pump(1.0)
        assert rig.released == [read]


def test_an_empty_transfer_has_a_result(rig):
    assert len(rig.finish(rig.submit(PREFETCH)).done) == 0


def resident_pages() -> int:
    """Memory pages of this process that are in use."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])


def test_o21_a_thousand_transfers_cut_short_leave_nothing_behind(rig, backend):
    """Cancelled at once, at their deadline or never; every one is answered and every page freed,
    and the process is no larger afterwards (but for 2 %)."""
    put(rig, [0, 1, 2])
    backend.set_rates({Fault.DELAY: 0.3, Fault.ERROR: 0.1})
    held = set()
    resident = 0
    for number in range(1000):
        if number == 200:  # by now everything has been used once
            resident = resident_pages()
        late = rig.clock.now_s() + (0.0 if number % 3 == 1 else 60.0)
        links = (link(number % 3), link(99))
        read = rig.submit(PREFETCH, host=[5, 6], links=links, deadline_s=late)
        if number % 3 == 0:
            rig.engine.cancel(read)
        if rig.finish(read).held is not None:
            held.add(read)
        while held - set(rig.released):  # as the controller does: not used before it is released
            rig.pump(1.0)
    rig.pump()
    assert resident_pages() <= 1.02 * resident
    assert len(rig.results) == 1001
    assert sorted(rig.released) == sorted(held)
    assert not rig.engine.storage.busy
    assert rig.engine.storage.stats().held_spans == 0
