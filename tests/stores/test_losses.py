"""What a store has lost is told once, late enough, and within bounds."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from phloem.core.store import Gone, Op, Span, Status, Verb
from phloem.stores import Item
from phloem.stores.adapters.memory import MemoryBackend
from phloem.stores.adapters.segment import SegmentBackend
from phloem.stores.losses import Losses
from tests.stores.rig import OK, Rig, key_of, make_rig

PAGE = 20_000
SMALL = {"size_bytes": 1 << 20, "segment_bytes": 128 << 10}


def never(_key: bytes) -> bool:
    return False


def names_in(rig: Rig, names: Sequence[str]) -> set[str]:
    rig.pump()
    return {name for name in names if key_of(name) in rig.gone}


class _Lingering(MemoryBackend):
    """A put of one key stores it at once and returns when the test says so."""

    def __init__(self, size_bytes: int, slow: bytes) -> None:
        super().__init__(size_bytes)
        self._slow = slow
        self.stored, self.go_on = threading.Event(), threading.Event()

    def put(self, items: Sequence[Item]) -> list[Status]:
        statuses = super().put(items)
        if items[0].key == self._slow:
            self.stored.set()
            assert self.go_on.wait(60)
        return statuses


def test_a_loss_is_not_told_before_the_older_answer_of_its_key() -> None:
    """Else whoever hears of it first would take the OK, that comes later, for the truth."""
    backend = _Lingering(3 * 4096, key_of("early"))
    with make_rig(backend) as rig:
        early = rig.submit(rig.put_op(["early"], 4096))
        assert backend.stored.wait(60)
        for turn in range(4):
            span = (Span(0, 8192, 4096),)
            assert rig.run(Op(verb=Verb.PUT, keys=(key_of(turn),), spans=span)) == (OK,)
        rig.pump()
        assert rig.gone == {key_of(0), key_of(1)}
        backend.go_on.set()
        assert rig.answer(early).statuses == (OK,)
        rig.pump()
        assert rig.gone == {key_of("early"), key_of(0), key_of(1)}


def test_more_losses_than_can_be_remembered_are_told_as_such_once() -> None:
    losses = Losses(max_keys=3)
    for name in range(5):
        losses.add(key_of(name))
    kept = tuple(key_of(name) for name in range(2, 5))
    assert losses.take(never, never) == Gone(kept, overflowed=True)
    assert losses.take(never, never) == Gone()
    losses.add(key_of(9))
    assert losses.take(never, never) == Gone((key_of(9),))


def test_what_came_back_is_not_told_and_what_is_under_way_waits() -> None:
    losses = Losses()
    for name in range(3):
        losses.add(key_of(name))
    assert losses.take({key_of(0)}.__contains__, {key_of(1)}.__contains__) == Gone((key_of(2),))
    assert losses.take(never, never) == Gone((key_of(1),))


def test_what_a_neighbour_recycles_is_told(tmp_path: Path) -> None:
    with make_rig(SegmentBackend(str(tmp_path), **SMALL)) as first:
        first.put(["old"], PAGE)
        first.put([f"fill-{i}" for i in range(8)], PAGE)
        with make_rig(SegmentBackend(str(tmp_path), **SMALL)) as second:
            for turn in range(20):
                second.put([f"{turn}-{i}" for i in range(5)], PAGE)
        first.get(["old"], PAGE)
        first.until(lambda: names_in(first, ["old"]) == {"old"})


def test_a_damaged_object_is_told(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(5)]
    with make_rig(SegmentBackend(str(tmp_path), **SMALL)) as rig:
        rig.put(names, PAGE)
        (file,) = tmp_path.glob("segment-*")
        with open(file, "r+b") as raw:
            os.pwrite(raw.fileno(), b"damage", 8192 + 3 * 20_480 + 77)
        assert rig.get(names, PAGE) == (OK, OK, OK, Status.CORRUPT, OK)
        assert names_in(rig, names) == {"n3"}


def test_the_objects_of_a_removed_segment_are_told(tmp_path: Path) -> None:
    backend = SegmentBackend(str(tmp_path), **SMALL)
    with make_rig(backend) as rig:
        rig.put(["a", "b"], PAGE)
        for file in tmp_path.glob("segment-*"):
            file.unlink()
        backend._catalog.refresh()
        assert names_in(rig, ["a", "b"]) == {"a", "b"}
