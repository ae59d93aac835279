"""A storage directory from outside: beside an engine, after one, damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from phloem.core.clock import MonotonicClock
from phloem.core.errors import ConfigError
from phloem.core.store import Status
from phloem.stores import StoreOptions, open_store
from phloem.stores.adapters.segment.inspect import DirectoryView
from tests.stores.rig import Rig, key_of

SIZE, LENGTH = 4 << 20, 5000


def fill(path: Path, names: range) -> Rig:
    rig = Rig(
        open_store("segment", StoreOptions(location=str(path), size_bytes=SIZE), MonotonicClock()),
        MonotonicClock(),
    )
    assert set(rig.put(list(names), LENGTH)) == {Status.OK}
    return rig


def test_what_is_there_is_listed_in_the_order_of_writing(tmp_path: Path) -> None:
    with fill(tmp_path, range(5)):
        view = DirectoryView(str(tmp_path))
        found = {each.key: each.length for each in view.objects()}
        assert found == {key_of(name): LENGTH for name in range(5)}
        assert view.used_bytes <= view.capacity_bytes <= SIZE
        view.close()


def test_verify_finds_the_damaged_object_and_no_other(tmp_path: Path) -> None:
    fill(tmp_path, range(6)).close()
    view = DirectoryView(str(tmp_path))
    victim = view.objects()[3]
    view.close()
    with open(tmp_path / f"segment-{victim.segment:08d}.kv", "r+b") as file:
        file.seek(victim.offset + 100)
        byte = file.read(1)
        file.seek(victim.offset + 100)
        file.write(bytes([byte[0] ^ 1]))
    view = DirectoryView(str(tmp_path))
    report = view.verify()
    view.close()
    assert report.bad in ([victim.key], [])  # in a torn tail it is not even believed
    assert report.statuses[Status.OK] == 5
    assert report.objects == 5 + len(report.bad)


def test_verify_of_a_sound_directory_is_good(tmp_path: Path) -> None:
    fill(tmp_path, range(4)).close()
    view = DirectoryView(str(tmp_path))
    report = view.verify()
    view.close()
    assert report.good
    assert (report.objects, report.num_bytes) == (4, 4 * LENGTH)


def test_clear_refuses_while_an_engine_is_there_and_empties_afterwards(tmp_path: Path) -> None:
    rig = fill(tmp_path, range(3))
    view = DirectoryView(str(tmp_path))
    with pytest.raises(ConfigError, match="in use by another process"):
        view.clear()
    rig.close()
    assert view.clear() > 0
    assert view.objects() == []
    view.close()
    with fill(tmp_path, range(2)) as rig:  # and it can be used again
        assert rig.store.stats().objects == 2


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no storage directory"):
        DirectoryView(str(tmp_path))
    with pytest.raises(ConfigError, match="no storage directory"):
        DirectoryView(str(tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []
