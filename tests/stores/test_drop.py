"""A drop outlasts the process, costs a bounded log, and never hides what was put later."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from phloem.core.store import Status
from phloem.stores.adapters.segment import SegmentBackend, droplog
from phloem.stores.adapters.segment.droplog import LOG_BYTES, MAX_DROPS, Drop, DropLog, drop_of
from phloem.stores.adapters.segment.format import Entry
from phloem.stores.adapters.segment.index import Segment
from phloem.stores.adapters.segment.inspect import DirectoryView
from phloem.stores.adapters.segment.writer import SegmentWriter
from phloem.stores.backend import Item
from tests.stores.driver import disk_bytes
from tests.stores.rig import MISS, OK, Rig, item_of, key_of, make_rig

PAGE = 5000
SIZE = 4 << 20


def opened(path: Path, segment_bytes: int = 256 << 10) -> Rig:
    return make_rig(SegmentBackend(str(path), SIZE, segment_bytes=segment_bytes))


def log_of(path: Path) -> Path:
    return path / "phloem-store.dropped"


def test_what_was_dropped_stays_away_over_restarts_and_recycling(tmp_path: Path) -> None:
    """Random puts, drops, reads and restarts against a set: nothing dropped is ever offered."""
    draw = random.Random(3)
    rig, dropped, count = opened(tmp_path), [], 0
    for _ in range(12):
        for _ in range(15):
            names = list(range(count, count + draw.randrange(1, 12)))
            count += len(names)
            assert set(rig.put(names, PAGE)) == {OK}
            rig.get(names[:3], PAGE)  # some are carried over when their segment is recycled
            gone = draw.sample(range(max(0, count - 150), count), 2)
            assert rig.drop(gone) == (OK, OK)
            dropped += gone
        rig.close()
        rig = opened(tmp_path)
        assert set(rig.probe(dropped)) == {MISS}
        alive = [n for n in range(max(0, count - 150), count) if n not in dropped]
        assert set(rig.get(alive, PAGE)) == {OK}
        assert disk_bytes(str(tmp_path)) <= SIZE
    rig.close()


def test_what_is_put_again_after_its_drop_is_there_after_a_restart(tmp_path: Path) -> None:
    """Also when the drop left the last frame of the segment without any object."""
    for turn in range(4):
        with opened(tmp_path) as rig:
            if turn:
                assert rig.get(["a"], PAGE) == (OK,)
            rig.drop(["a"])
        with opened(tmp_path) as rig:
            assert rig.probe(["a"]) == (MISS,)
            assert rig.put(["a"], PAGE) == (OK,)


def test_of_two_copies_none_comes_back(tmp_path: Path) -> None:
    """Two processes stored the same object before they saw each other's."""
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put(["a", "b"], PAGE)
        two.put(["b", "a"], PAGE)
        one.until(lambda: two.store.stats().objects == 2 and one.store.stats().objects == 2)
    with opened(tmp_path) as rig:
        rig.drop(["a"])
    with opened(tmp_path) as rig:
        assert rig.probe(["a", "b"]) == (MISS, OK)


def test_a_neighbour_learns_of_a_drop_and_is_told(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        one.put(["a", "b"], PAGE)
        two.until(lambda: two.get(["a", "b"], PAGE) == (OK, OK))
        one.drop(["a"])
        two.until(lambda: two.get(["a", "absent"], PAGE) == (MISS, MISS))
        two.until(lambda: two.gone == {key_of("a")})
        assert two.get(["b"], PAGE) == (OK,)
        assert one.gone == set()


def test_an_operators_view_does_not_list_what_was_dropped(tmp_path: Path) -> None:
    with opened(tmp_path) as rig:
        rig.put(["a", "b"], PAGE)
        rig.drop(["a"])
    view = DirectoryView(str(tmp_path))
    assert [each.key for each in view.objects()] == [key_of("b")]
    assert view.verify().objects == 1
    view.clear()
    assert not log_of(tmp_path).exists()
    view.close()


def test_more_drops_than_the_log_holds_keep_it_within_bounds(tmp_path: Path) -> None:
    """First by giving up what means nothing any more, then at the cost of a segment's others."""
    backend = SegmentBackend(str(tmp_path), 64 << 20, segment_bytes=2 << 20)
    names = [f"n{i}" for i in range(2 * MAX_DROPS)]
    items = [item_of(name, 100) for name in names]
    assert set(backend.put(items)) == {OK}
    dropped = names[::2] + names[1::4]
    for first in range(0, len(dropped), 100):
        keys = [key_of(name) for name in dropped[first : first + 100]]
        assert backend.drop(keys) == [OK] * len(keys)
        assert log_of(tmp_path).stat().st_size <= LOG_BYTES
    assert dict(backend.usage().details)["droplog_compacted"] >= 1
    kept = backend.probe([item.key for item in items])
    told = backend.gone(lambda _key: False).keys
    backend.close()
    backend = SegmentBackend(str(tmp_path), 64 << 20, segment_bytes=2 << 20)
    assert backend.probe([item.key for item in items]) == kept
    assert not set(dropped) & {n for n, s in zip(names, kept, strict=True) if s is OK}
    lost = {n for n, s in zip(names, kept, strict=True) if s is MISS} - set(dropped)
    assert lost, "the log never had to give up a segment"
    told_alone = set(told) - {key_of(name) for name in dropped}
    assert {key_of(name) for name in lost} == told_alone, "lost without a word"
    backend.close()


def test_a_damaged_log_loses_its_damaged_records_only(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    log = DropLog(path)
    entries = [Entry(key_of(i), 100, 8192 + 4096 * i, 0) for i in range(20)]
    assert log.append([drop_of(7, e.key, e.offset) for e in entries])
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff", 24 * 5 + 3)
        os.truncate(path, 24 * 18 + 11)  # a record was torn when power went
    log = DropLog(path)
    assert log.reload()
    assert [log.covers(7, e) for e in entries] == [i != 5 and i < 18 for i in range(20)]
    assert not any(log.covers(8, e) for e in entries), "another life"
    assert not any(log.covers(7, e._replace(key=key_of("x"))) for e in entries)
    assert log.append([Drop.all_before(7, entries[3].offset)])
    log = DropLog(path)
    log.reload()
    assert [log.covers(7, e) for e in entries] == [i != 5 and i < 18 for i in range(20)]
    assert log.covers(7, entries[2]._replace(key=key_of("x")))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_drop_that_cannot_be_noted_says_so_and_holds_for_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(_fd: int, _data: bytes, _offset: int) -> int:
        raise OSError(code, os.strerror(code))

    with opened(tmp_path) as rig:
        rig.put(["a", "b"], PAGE)
        with monkeypatch.context() as patch:
            patch.setattr(droplog.os, "pwrite", refuse)
            assert rig.drop(["a"]) == (Status.BUSY,)
        assert rig.probe(["a", "b"]) == (MISS, OK)
        assert rig.store.stats().detail(f"drop_errno_{code}") == 1
        assert rig.store.stats().detail("drops_not_noted") == 1


def test_a_drop_catches_what_is_on_its_way_to_another_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is being carried over is in no index; dropped then, it must not be back."""
    real, drops = SegmentWriter._rewrite, []

    def rewrite(self: SegmentWriter, segment: Segment, rescued: list[Item]) -> None:
        if key_of("hot") in {item.key for item in rescued} and not drops:
            drops.append(threading.Thread(target=lambda: backend.drop([key_of("hot")])))
            drops[0].start()
            drops[0].join(0.2)  # if it need not wait, it is through by now
        real(self, segment, rescued)

    monkeypatch.setattr(SegmentWriter, "_rewrite", rewrite)
    backend = SegmentBackend(str(tmp_path), 1 << 20, segment_bytes=128 << 10)
    backend.put([item_of("hot", PAGE)])
    for turn in range(100):
        backend.get([item_of("hot", PAGE)])
        backend.put([item_of(f"{turn}-{i}", PAGE) for i in range(4)])
        if drops:
            break
    drops[0].join()
    assert backend.probe([key_of("hot")]) == [MISS]
    backend.close()
    backend = SegmentBackend(str(tmp_path), 1 << 20, segment_bytes=128 << 10)
    assert backend.probe([key_of("hot")]) == [MISS]
    backend.close()
