"""Requests that are queued together for the same stored pages read them once."""

from __future__ import annotations

import random

import pytest

from phloem.cache import WindowConfig
from phloem.core.transfer import Transfer, TransferKind
from phloem.sim import SimStorage
from phloem.tiers import TierConfig
from tests.sched.rig import Rig, prompt_of

P = 4
PAGES = 100  # more than one run


def warm(storage: SimStorage, prompt: list[int], **more) -> None:
    rig = start(storage, **more)
    rig.add("first", prompt, max_tokens=1)
    rig.run()
    assert rig.tiers is not None
    assert rig.tiers.flush(60.0) == 0
    rig.check_idle()


def start(storage: SimStorage, **more) -> Rig:
    config = TierConfig(prefetch_policy="wait_complete")
    return Rig(
        page_size=P, num_pages=150, host_pages=900, tiers=config, storage=storage,
        max_model_len=1000, **more,
    )  # fmt: skip


def pages_read(rig: Rig, component: int = 0) -> int:
    kind = TransferKind.PREFETCH
    reads = [t for t in rig.transfers.log if (t.kind, t.component) == (kind, component)]
    return sum(t.num_pages for t in reads)


def test_five_requests_with_one_prefix_read_it_once():
    storage, rng = SimStorage(), random.Random(1)
    head = prompt_of(rng, PAGES * P)
    warm(storage, head + [1])
    rig = start(storage)
    for number in range(5):
        rig.add(f"r{number}", head + prompt_of(rng, 3), max_tokens=2)
    rig.run()
    rig.check_answers()
    rig.check_idle()
    assert pages_read(rig) == PAGES
    assert sum(chunk.cached.total for chunk in rig.last.values()) == 5 * PAGES * P
    assert rig.last["r0"].cached.storage == PAGES * P


def test_when_the_reader_leaves_the_next_one_reads_on():
    storage, rng = SimStorage(), random.Random(2)
    head = prompt_of(rng, PAGES * P)
    warm(storage, head + [1])
    closed = {"on": True}
    rig = start(
        storage,
        transfers={"blocked": lambda t: closed["on"] and t.kind is TransferKind.PREFETCH},
    )
    for number in range(3):
        rig.add(f"r{number}", head + prompt_of(rng, 3), max_tokens=2)
    while not pages_read(rig):
        rig.step()
    rig.loop.abort("r0")
    closed["on"] = False
    rig.run()
    rig.check_answers()
    rig.check_idle()
    assert pages_read(rig) <= PAGES + 64  # one run was begun in vain
    assert rig.last["r1"].cached.storage == PAGES * P
    assert rig.last["r2"].cached.total == PAGES * P


WINDOW = WindowConfig(tokens=3 * P, layers=2, pages=(150,), host_pages=100)
TAIL = 3


def test_five_requests_with_one_prefix_read_its_tail_once():
    """All are there before it has been read: four of them wait for the first one's read."""
    storage, rng = SimStorage(), random.Random(3)
    head = prompt_of(rng, PAGES * P)
    warm(storage, head + [1], window=WINDOW)
    rig = start(storage, window=WINDOW)
    for number in range(5):
        rig.add(f"r{number}", head + prompt_of(rng, 3), max_tokens=2)
    rig.run()
    rig.check_answers()
    rig.check_idle()
    assert (pages_read(rig), pages_read(rig, 1)) == (PAGES, TAIL)
    assert sum(chunk.cached.total for chunk in rig.last.values()) == 5 * PAGES * P


def test_when_the_reader_of_a_tail_leaves_another_one_reads_it():
    storage, rng = SimStorage(), random.Random(4)
    head = prompt_of(rng, PAGES * P)
    warm(storage, head + [1], window=WINDOW)
    closed = {"on": True}

    def blocked(transfer: Transfer) -> bool:
        return closed["on"] and transfer.kind is TransferKind.PREFETCH and transfer.component == 1

    rig = start(storage, window=WINDOW, transfers={"blocked": blocked})
    for number in range(3):
        rig.add(f"r{number}", head + prompt_of(rng, 3), max_tokens=2)
    while not pages_read(rig, 1):
        rig.step()
    rig.loop.abort("r0")
    closed["on"] = False
    rig.run()
    rig.check_answers()
    rig.check_idle()
    assert pages_read(rig, 1) <= 2 * TAIL  # once in vain
    assert [rig.last[name].cached.total for name in ("r1", "r2")] == [PAGES * P] * 2


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_that_fails_does_not_take_the_others_with_it(seed: int):
    storage, rng = SimStorage(), random.Random(seed)
    head = prompt_of(rng, PAGES * P)
    warm(storage, head + [1])
    left = {"failures": 1}

    def fails(transfer: Transfer) -> bool:
        left["failures"] -= transfer.kind is TransferKind.PREFETCH
        return transfer.kind is TransferKind.PREFETCH and left["failures"] >= 0

    rig = start(storage, transfers={"fails": fails, "seed": seed})
    for number in range(3):
        rig.add(f"r{number}", head + prompt_of(rng, 3), max_tokens=2)
    rig.run()
    rig.check_answers()
    rig.check_idle()
    assert rig.last["r1"].cached.total + rig.last["r2"].cached.total == 2 * PAGES * P
