"""The segment store against its disk: damage, bounds, restarts, neighbours."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from phloem.core.errors import ConfigError
from phloem.core.store import Status
from phloem.stores.adapters.segment import SegmentBackend
from phloem.stores.adapters.segment.blockio import BlockFile
from phloem.stores.adapters.segment.directory import choose_geometry
from tests.stores.driver import disk_bytes
from tests.stores.rig import MISS, OK, Rig, bytes_of, item_of, key_of, make_rig

SIZE = 4 << 20
PAGE = 20_000
PAGES = [f"page-{i}" for i in range(10)]


class Place:
    """One directory, opened as often as a test wants."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.backend: SegmentBackend | None = None

    def open(self, size: int = SIZE, **more: int) -> Rig:
        self.backend = SegmentBackend(self.path, size, **more)
        return make_rig(self.backend)

    def files(self) -> list[str]:
        return sorted(str(p) for p in Path(self.path).glob("segment-*"))

    def find(self, name: str) -> tuple[str, int]:
        """The file that holds an object, and where."""
        for path in self.files():
            at = Path(path).read_bytes().find(bytes_of(name, PAGE))
            if at >= 0:
                return path, at
        raise AssertionError(f"{name} is not on disk")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store")


def cut_in_half(place: Place) -> None:
    path, at = place.find(PAGES[5])
    os.truncate(path, at + PAGE // 2)


def cut_to_nothing(place: Place) -> None:
    os.truncate(place.find(PAGES[5])[0], 0)


def flip_a_byte(place: Place) -> None:
    path, at = place.find(PAGES[5])
    with open(path, "r+b") as file:
        file.seek(at + 777)
        byte = file.read(1)
        file.seek(at + 777)
        file.write(bytes([byte[0] ^ 0x10]))


def remove(place: Place) -> None:
    os.unlink(place.find(PAGES[5])[0])


# The damage, and how long a prefix it may leave while the store is open, and after a restart. A
# restart reads heads only, so pages that were cut off are offered once and then never again.
DAMAGE = [
    (cut_in_half, {5}, {5}),
    (cut_to_nothing, {0}, {0}),
    (flip_a_byte, {5}, {5}),
    (remove, {10, 0}, {0}),  # the open file may be read on; a look at the directory ends it
]


@pytest.mark.parametrize(("damage", "open_ok", "restart_ok"), DAMAGE)
@pytest.mark.parametrize("restart", [False, True])
def test_o23_the_prefix_before_the_damage_serves_and_the_rest_is_a_miss(
    place: Place, damage: object, open_ok: set[int], restart_ok: set[int], restart: bool
) -> None:
    """O-23 a to d: also afterwards the store works, and offers nothing that is bad."""
    rig = place.open()
    rig.put(PAGES, PAGE)
    if restart:
        rig.close()
    damage(place)  # type: ignore[operator]
    if restart:
        rig = place.open()
    with rig:
        statuses = rig.get(PAGES, PAGE)
        leading = next((i for i, s in enumerate(statuses) if s is not OK), 10)
        assert leading in (restart_ok if restart else open_ok)
        again = tuple(OK if status is OK else MISS for status in statuses)
        assert rig.probe(PAGES) == again, "something bad was offered again"
        assert rig.get(PAGES, PAGE) == again
        place.backend._catalog.refresh()
        assert rig.put(PAGES, PAGE) == (OK,) * 10
        assert rig.get(PAGES, PAGE) == (OK,) * 10
        assert disk_bytes(place.path) <= SIZE
    with place.open() as rig:
        assert rig.get(PAGES, PAGE).count(OK) >= 9


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_o23e_an_unreadable_file_is_a_miss_and_the_store_lives(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with place.open() as rig:
        rig.put(PAGES, PAGE)
        bad, at = place.find(PAGES[5])
        real = BlockFile.read

        def read(self: BlockFile, views: list[memoryview], offset: int) -> int:
            end = offset + sum(map(len, views))
            if self.path == bad and offset < at + PAGE and end > at:
                raise OSError(code, os.strerror(code), bad)
            return real(self, views, offset)

        monkeypatch.setattr(BlockFile, "read", read)
        want = (OK,) * 5 + (Status.ERROR,) + (OK,) * 4
        assert rig.get(PAGES, PAGE) == want, "one bad page cost its neighbours"
        assert rig.probe(PAGES) == tuple(OK if s is OK else MISS for s in want)
        assert rig.put(["more"], PAGE) == (OK,)
        assert rig.get(["more"], PAGE) == (OK,)


def test_o23e_a_directory_of_files_that_cannot_be_opened(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """chmod 000 (as root it would change nothing, so `open` refuses): misses, then replaced."""
    with place.open(segment_bytes=512 << 10) as rig:
        rig.put(PAGES, PAGE)
    unreadable = set(place.files())
    real = os.open

    def refuse(path: str, *args: int, **more: int) -> int:
        if path in unreadable and os.path.exists(path):
            raise PermissionError(errno.EACCES, "injected", path)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", refuse)
    with place.open(segment_bytes=512 << 10) as rig:
        assert rig.get(PAGES, PAGE) == (MISS,) * 10
        for turn in range(40):
            names = [f"{turn}-{i}" for i in range(10)]
            assert rig.put(names, PAGE) == (OK,) * 10
            assert rig.get(names, PAGE) == (OK,) * 10
            assert disk_bytes(place.path) <= SIZE


def test_random_damage_never_serves_a_wrong_page(place: Place) -> None:
    """Bits flipped, blocks zeroed and blocks swapped all over the files, again and again."""
    draw = random.Random(5)
    rig = place.open(segment_bytes=256 << 10)
    served = 0
    for turn in range(40):
        with rig:
            names = [f"{turn}-{i}" for i in range(12)]
            rig.put(names, 6000)
            for path in place.files():
                with open(path, "r+b") as file:
                    harm(file.fileno(), os.path.getsize(path) // 4096, draw)
            served += rig.get(names, 6000).count(OK)
        rig = place.open(segment_bytes=256 << 10)
        served += rig.get([f"{turn - 1}-{i}" for i in range(12)], 6000).count(OK)
    rig.close()
    assert served > 100


def harm(fd: int, blocks: int, draw: random.Random) -> None:
    block = draw.randrange(blocks) * 4096
    data = bytearray(os.pread(fd, 4096, block))
    kind = draw.randrange(3)
    if kind == 0:
        data[draw.randrange(4096)] ^= 1 << draw.randrange(8)
        os.pwrite(fd, data, block)
    elif kind == 1:
        os.pwrite(fd, bytes(4096), block)
    else:
        other = draw.randrange(blocks) * 4096
        os.pwrite(fd, os.pread(fd, 4096, other), block)
        os.pwrite(fd, data, other)


def test_o23f_leftovers_of_an_interrupted_start_do_no_harm(place: Place) -> None:
    with place.open() as rig:
        rig.put(PAGES, PAGE)
    stray = Path(place.path, "phloem-store.json.tmp")
    stray.write_text('{"format": 1, "segm')
    foreign = Path(place.path, "notes.txt")
    foreign.write_text("not ours")
    with place.open(size=SIZE * 2) as rig:
        assert rig.get(PAGES, PAGE) == (OK,) * 10
    assert not stray.exists()
    assert foreign.read_text() == "not ours"


def test_o26_the_cap_holds_at_all_times_and_counts_what_is_there_at_start(place: Place) -> None:
    """Cap 1 MB, 5 MB written, then the same again on what the first run has left."""
    for run in range(2):
        with place.open(size=1 << 20) as rig:
            assert disk_bytes(place.path) <= 1 << 20
            for turn in range(50):
                names = [f"{run}-{turn}-{i}" for i in range(5)]
                assert rig.put(names, PAGE) == (OK,) * 5
                assert disk_bytes(place.path) <= 1 << 20
                assert rig.get(names, PAGE) == (OK,) * 5


def test_o26_a_smaller_cap_shrinks_and_a_larger_one_keeps(place: Place) -> None:
    names = [f"n{i}" for i in range(100)]
    with place.open(size=4 << 20, segment_bytes=128 << 10) as rig:
        rig.put(names, PAGE)
    with place.open(size=1 << 20) as rig:
        assert disk_bytes(place.path) <= 1 << 20
        kept = rig.get(names, PAGE)
        assert kept.count(OK) >= 20
        assert kept[-10:] == (OK,) * 10, "the youngest were not kept"
    with place.open(size=8 << 20) as rig:
        assert rig.get(names, PAGE) == kept


@contextlib.contextmanager
def small_filesystem(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_o26_a_disk_that_is_really_full_costs_nothing_but_the_writes(tmp_path: Path) -> None:
    """ENOSPC of a tmpfs of 1 MB under a cap of 5 MB; then full to the last byte; then room."""
    with small_filesystem(tmp_path / "mnt", "1m") as mnt:
        place = Place(mnt / "store")
        with place.open(size=5 << 20, segment_bytes=256 << 10) as rig:
            for turn in range(30):
                names = [f"{turn}-{i}" for i in range(5)]
                assert rig.put(names, PAGE) == (OK,) * 5, "own eviction makes room"
                assert rig.get(names, PAGE) == (OK,) * 5
            assert rig.store.stats().detail("create_errno_28") > 0
    with small_filesystem(tmp_path / "mnt2", "1m") as mnt:
        with contextlib.suppress(OSError), open(mnt / "ballast", "wb", buffering=0) as ballast:
            while ballast.write(bytes(4096)):
                pass
        os.truncate(mnt / "ballast", os.path.getsize(mnt / "ballast") - 16_384)
        place = Place(mnt / "store")
        with place.open(size=5 << 20, segment_bytes=256 << 10) as rig:
            assert rig.put(PAGES, PAGE) == (Status.FULL,) * 10
            assert rig.get(PAGES, PAGE) == (MISS,) * 10
            assert place.files() == [], "a partial file remains"
            os.unlink(mnt / "ballast")
            assert rig.put(PAGES, PAGE) == (OK,) * 10
            assert rig.get(PAGES, PAGE) == (OK,) * 10


@pytest.mark.parametrize(("code", "status"), [(28, Status.FULL), (5, Status.ERROR)])
def test_a_write_that_fails_is_skipped_counted_and_never_visible(
    place: Place, monkeypatch: pytest.MonkeyPatch, code: int, status: Status
) -> None:
    with place.open() as rig:
        assert rig.put(["before"], PAGE) == (OK,)
        real = BlockFile.write

        def write(self: BlockFile, views: list[memoryview], offset: int) -> None:
            real(self, views[: len(views) // 2], offset)
            monkeypatch.setattr(BlockFile, "write", real)
            raise OSError(code, os.strerror(code), self.path)

        monkeypatch.setattr(BlockFile, "write", write)
        assert rig.put(PAGES, PAGE) == (status,) * 10
        assert rig.probe(PAGES) == (MISS,) * 10
        assert rig.get(["before"], PAGE) == (OK,)
        assert rig.put(PAGES[:3], PAGE) == (OK,) * 3
        assert rig.store.stats().detail(f"write_errno_{code}") == 1
    with place.open() as rig:
        assert rig.get(["before", *PAGES], PAGE) == (OK,) * 4 + (MISS,) * 7


def test_a_restart_goes_on_in_the_segment_that_was_left(place: Place) -> None:
    """Twenty restarts with a little work each do not eat twenty segments."""
    for turn in range(20):
        with place.open(segment_bytes=1000 << 10) as rig:
            rig.put([f"n{turn}"], PAGE)
    assert len(place.files()) == 1
    with place.open(segment_bytes=1000 << 10) as rig:
        assert rig.get([f"n{i}" for i in range(20)], PAGE) == (OK,) * 20


def test_of_a_torn_frame_what_is_whole_survives_further_work(place: Place) -> None:
    """The good pages around the torn one stay, also when the next process goes on behind them."""
    with place.open() as rig:
        rig.put(PAGES, PAGE)
    flip_a_byte(place)
    want = (OK,) * 5 + (MISS,) + (OK,) * 4
    for turn in range(3):
        with place.open() as rig:
            assert rig.probe(PAGES) == want
            assert rig.put([f"more-{turn}"], PAGE) == (OK,)
            assert rig.get(PAGES, PAGE) == want
            assert rig.get([f"more-{i}" for i in range(turn + 1)], PAGE) == (OK,) * (turn + 1)
    assert len(place.files()) == 1


def test_padding_on_disk_is_zero(place: Place) -> None:
    """What other objects left in the bounce buffer does not reach the disk a second time."""
    with place.open() as rig:
        rig.put(["a"], 8000, base=1)
        rig.put(["b"], 4100, base=1)
    data = Path(place.files()[0]).read_bytes()
    end = data.find(bytes_of("b", 4100)) + 4100
    assert data[end : end + 8192 - 4100] == bytes(8192 - 4100)


def test_two_users_share_what_each_writes_and_write_different_files(place: Place) -> None:
    with place.open() as first:
        other = place.open()
        with other:
            first.put(["a"], PAGE)
            other.put(["b"], PAGE)
            assert len(place.files()) == 2
            place.backend._catalog.refresh()
            assert other.get(["a", "b"], PAGE) == (OK, OK)
            other.until(lambda: first.get(["a", "b"], PAGE) == (OK, OK))


def test_another_size_is_refused_while_the_directory_is_in_use(place: Place) -> None:
    with place.open() as rig:
        rig.put(["a"], PAGE)
        with pytest.raises(ConfigError, match="in use by another process"):
            SegmentBackend(place.path, SIZE * 2)
        with place.open() as second:
            assert second.get(["a"], PAGE) == (OK,)


def test_what_a_neighbour_recycled_is_a_miss_not_a_fault(place: Place) -> None:
    with place.open(size=1 << 20, segment_bytes=128 << 10) as first:
        first.put(["old"], PAGE)
        first.put([f"fill-{i}" for i in range(8)], PAGE)  # seals the first segment
        with place.open(size=1 << 20, segment_bytes=128 << 10) as second:
            for turn in range(20):
                second.put([f"{turn}-{i}" for i in range(5)], PAGE)
        assert first.get(["old"], PAGE) == (MISS,)
        assert first.store.stats().detail("corrupt") == 0


def test_read_objects_outlive_unread_ones(place: Place) -> None:
    """Eviction goes by segment, but what was read gets a second chance, and only one."""
    with place.open(size=2 << 20, segment_bytes=128 << 10) as rig:
        rig.put(["hot", "cold"], PAGE)
        kept = []
        for turn in range(60):
            rig.put([f"{turn}-{i}" for i in range(4)], PAGE)
            if turn < 30:
                assert rig.get(["hot"], PAGE) == (OK,)
            kept.append(rig.probe(["hot", "cold"]))
        assert kept[30] == (OK, MISS)
        assert kept[-1] == (MISS, MISS)
        assert rig.store.stats().detail("rescued_objects") > 0


def test_a_slow_writers_young_objects_are_not_evicted_as_old(place: Place) -> None:
    """Age is when a segment was written last, not when its writer took it."""
    size = {"size": 1 << 20, "segment_bytes": 128 << 10}
    with place.open(**size) as slow, place.open(**size) as fast:
        slow.put(["first"], PAGE)
        for turn in range(4):
            fast.put([f"{turn}-{i}" for i in range(5)], PAGE)
        slow.put(["young-0", "young-1", "young-2", "young-3"], PAGE)
        slow.put(["leaves it"], PAGE)
        fast.put([f"more-{i}" for i in range(8)], PAGE)
        names = [f"young-{i}" for i in range(4)]
        assert slow.get(names, PAGE) == (OK,) * 4


def test_objects_under_way_of_two_engines_never_meet(place: Place) -> None:
    """O-14 at the store: the same tokens under another namespace are another key."""
    with place.open() as one, place.open() as two:
        one.put(["ns1/page"], PAGE)
        place.backend._catalog.refresh()
        assert two.get(["ns2/page"], PAGE) == (MISS,)
        assert two.get(["ns1/page"], PAGE) == (OK,)


def test_equal_hashes_in_memory_do_not_mix_keys(place: Place) -> None:
    """O-16: with every key in one bucket of the index, keys are still compared in full."""

    class Same(bytes):
        def __hash__(self) -> int:
            return 1

    with place.open() as rig:
        backend = place.backend
        items = [item_of(i, 4096)._replace(key=Same(key_of(i))) for i in range(20)]
        assert backend.put(items) == [OK] * 20
        for i in random.Random(1).sample(range(40), 40):
            got = item_of(i, 4096)._replace(key=Same(key_of(i)))
            right = bytes(got.parts[0])
            got.parts[0][:] = bytes(4096)
            status = backend.get([got])[0]
            assert status is (OK if i < 20 else MISS)
            assert (bytes(got.parts[0]) == right) is (i < 20)
        assert rig.store.stats().objects == 20


def test_o22_eviction_between_probe_and_get_is_a_miss(place: Place) -> None:
    with place.open(size=1 << 20, segment_bytes=128 << 10) as rig:
        rig.put(PAGES[:3], PAGE)
        assert rig.probe(PAGES[:3]) == (OK,) * 3
        for turn in range(20):
            rig.put([f"{turn}-{i}" for i in range(5)], PAGE)
        assert rig.get(PAGES[:3], PAGE) == (MISS,) * 3
        assert rig.put(PAGES[:3], PAGE) == (OK,) * 3
        for path in place.files():
            os.unlink(path)
        place.backend._catalog.refresh()
        assert rig.get(PAGES[:3], PAGE) == (MISS,) * 3


@pytest.mark.parametrize("size", [0, 10_000, 100_000])
def test_a_cap_too_small_is_refused_with_a_reason(place: Place, size: int) -> None:
    with pytest.raises(ConfigError, match="raise --storage-size"):
        SegmentBackend(place.path, size)


def test_a_path_that_is_no_directory_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot use storage directory"):
        SegmentBackend(str(tmp_path / "file"), SIZE)


def test_a_directory_of_another_format_is_refused_not_erased(place: Place) -> None:
    with place.open() as rig:
        rig.put(PAGES, PAGE)
    marker = Path(place.path, "phloem-store.json")
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="has format 2"):
        place.open()
    assert place.files()


@pytest.mark.parametrize("size", [1 << 20, 10 << 20, 1 << 30, 20 * 10**9, 4 << 40])
def test_geometry_uses_the_room_and_stays_within(size: int) -> None:
    geometry = choose_geometry(size)
    used = geometry.segment_bytes * geometry.num_segments + 4096
    assert used <= size
    assert used > 0.85 * size
    assert 4 <= geometry.num_segments <= 8192
