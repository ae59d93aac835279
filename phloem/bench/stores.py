"""Micro-benchmark: the segment store against raw O_DIRECT I/O and against one file per page.

    raw      blocks of one preallocated, fully written file; the same number of threads
    store    the whole guarded store, as the tier controller drives it; full and recycling
    files    one file per page: write, (fsync,) rename; open, read, close

All on one filesystem, interleaved round by round; reads come from the device (O_DIRECT, or after
the page cache was told to forget). Every round moves the same bytes in each contestant. Of reads
and writes the *slower* ratio is the headline of `store_over_raw_*`. Objects are dropped between
rounds; what it costs to keep all of them (they were all read) is `store_write_all_kept_over_raw`.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from phloem.core.clock import MonotonicClock
from phloem.core.store import KEY_BYTES, Arena, Op, PageStore, Span, Status, Verb
from phloem.stores import StoreOptions, open_store

__all__ = ["run"]

SIZES = {"64k": 64 << 10, "256k": 256 << 10, "1m": 1 << 20}
NUM_THREADS = 4
BATCH_BYTES = 32 << 20  # one operation of the controller
PATIENCE_S = 120.0


def run(quick: bool = False) -> dict[str, Any]:
    """Measure; at most 1.6 GB of disk for some tens of seconds, in the current directory."""
    num_bytes = (32 if quick else 128) << 20
    num_rounds = 3 if quick else 7
    results: list[dict[str, Any]] = []
    against_files: list[float] = []
    arena = memoryview(mmap.mmap(-1, num_bytes))
    arena[:] = os.urandom(1 << 20) * (num_bytes >> 20)
    # Nothing is removed between the sizes: the discard of its blocks would disturb the next one.
    with _directory() as path:
        for label, size in SIZES.items():
            results += _against_raw(_subdirectory(path, label), arena, label, size, num_rounds)
    with _directory() as path:
        for label, size in SIZES.items():
            results += _against_files(path, arena, label, size, num_rounds)
            against_files.append(results[-1]["value"])
    mean = math.exp(statistics.fmean(map(math.log, against_files)))
    results.append(_result("store_over_file_per_page", mean, samples=against_files))
    return {"bench": "stores", "results": results}


@contextmanager
def _directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix=".bench-stores-", dir=os.getcwd())
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _subdirectory(path: str, name: str) -> str:
    path = os.path.join(path, name)
    os.mkdir(path)
    return path


def _result(name: str, value: float, samples: Any, unit: str = "ratio") -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": unit, "samples": samples}


class _Raw:
    """O_DIRECT I/O of whole blocks, round and round in a file as large as the store."""

    def __init__(self, path: str, arena: memoryview, size: int) -> None:
        self._arena, self._size = arena, size
        self._fd = os.open(os.path.join(path, "raw"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        self._num_blocks = _footprint(arena) // size
        os.posix_fallocate(self._fd, 0, self._num_blocks * size)
        self._first = 0
        for _ in range(
            _footprint(arena) // len(arena) + 1
        ):  # every block has been written at least once
            self.write()

    def write(self) -> None:
        self._first += len(self._arena) // self._size
        _in_threads(len(self._arena) // self._size, self._write_block)

    def read(self) -> None:
        _in_threads(len(self._arena) // self._size, self._read_block)

    def _view(self, index: int) -> memoryview:
        return self._arena[index * self._size : (index + 1) * self._size]

    def _place(self, index: int) -> int:
        return (self._first + index) % self._num_blocks * self._size

    def _write_block(self, index: int) -> None:
        _check(os.pwrite(self._fd, self._view(index), self._place(index)), self._size)

    def _read_block(self, index: int) -> None:
        _check(os.preadv(self._fd, [self._view(index)], self._place(index)), self._size)

    def close(self) -> None:
        os.close(self._fd)


class _Files:
    """One file per page, durable like the store with `sync`: fsync of each file and directory."""

    def __init__(self, path: str, arena: memoryview, size: int, *, sync: bool) -> None:
        self._arena, self._size, self._sync = arena, size, sync
        self._path = os.path.join(path, "files")
        os.mkdir(self._path)
        self._directory = os.open(self._path, os.O_RDONLY)

    def write(self) -> None:
        _in_threads(len(self._arena) // self._size, self._write_page)
        if self._sync:
            os.fsync(self._directory)

    def read(self) -> None:
        _in_threads(len(self._arena) // self._size, self._read_page)

    def _name(self, index: int) -> str:
        return os.path.join(self._path, f"{index:064x}.bin")

    def _write_page(self, index: int) -> None:
        view = self._arena[index * self._size : (index + 1) * self._size]
        fd = os.open(self._name(index) + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            _check(os.write(fd, view), self._size)
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(self._name(index) + ".tmp", self._name(index))

    def _read_page(self, index: int) -> None:
        view = self._arena[index * self._size : (index + 1) * self._size]
        fd = os.open(self._name(index), os.O_RDONLY)
        try:
            _check(os.readv(fd, [view]), self._size)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """Make the page cache drop what was written, so that reads come from the device."""
        for entry in os.scandir(self._path):
            fd = os.open(entry.path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        os.close(self._directory)


class _Store:
    """The guarded segment store, larger than one round: every round recycles."""

    def __init__(self, path: str, arena: memoryview, size: int, *, sync: bool) -> None:
        self._arena, self._size = arena, size
        self._clock = MonotonicClock()
        options = StoreOptions(
            location=os.path.join(path, "store"),
            size_bytes=_footprint(arena),
            num_threads=NUM_THREADS,
            sync=sync,
        )
        self._store: PageStore = open_store("segment", options, self._clock)
        self._store.attach([Arena(0, arena)])
        self._round = 0
        self._keys: tuple[bytes, ...] = ()
        for _ in range(
            _footprint(arena) // len(arena) + 1
        ):  # every segment has been written at least once
            self.write()
            self.forget()

    def write(self) -> None:
        self._round += 1
        count = len(self._arena) // self._size
        names = range(self._round * count, (self._round + 1) * count)
        self._keys = tuple(name.to_bytes(KEY_BYTES, "little") for name in names)
        self._do(Verb.PUT)

    def read(self) -> None:
        self._do(Verb.GET)

    def read_what_is_there(self) -> None:
        """All that was written last, as far as it was not evicted by the same round."""
        self._do(Verb.GET, Status.OK, Status.MISS)

    def forget(self) -> None:
        """So that the next round evicts without keeping what was read."""
        self._do(Verb.DROP)

    def _do(self, verb: Verb, *allowed: Status) -> None:
        """All keys, in batches, all submitted at once."""
        deadline = self._clock.now_s() + PATIENCE_S
        step = BATCH_BYTES // self._size
        waiting = set()
        for first in range(0, len(self._keys), step):
            keys = self._keys[first : first + step]
            places = range(first, first + len(keys))
            spans = tuple(Span(0, i * self._size, self._size) for i in places)
            op = Op(verb=verb, keys=keys, spans=() if verb is Verb.DROP else spans)
            waiting.add(self._store.submit(op, deadline))
        while waiting:
            self._store.wait(1.0)
            for done in self._store.poll().done:
                waiting.discard(done.ticket)
                if not set(done.statuses) <= set(allowed or (Status.OK,)):
                    raise RuntimeError(f"{verb.value} in the bench: {set(done.statuses)}")

    def close(self) -> None:
        self._store.close(self._clock.now_s() + PATIENCE_S)


def _against_raw(
    path: str, arena: memoryview, label: str, size: int, num_rounds: int
) -> list[dict[str, Any]]:
    raw, store = _Raw(path, arena, size), _Store(path, arena, size, sync=False)
    pairs: dict[str, list[tuple[float, float]]] = {"write": [], "read": [], "all_kept": []}
    for turn in range(num_rounds):
        pairs["write"].append(_pair(raw.write, store.write, turn))
        pairs["read"].append(_pair(raw.read, store.read, turn))
        store.forget()
    for turn in range(num_rounds if label == "256k" else 0):
        store.read_what_is_there()
        pairs["all_kept"].append(_pair(raw.write, store.write, turn))
    raw.close()
    store.close()
    out = []
    for verb in ("write", "read"):
        out.append(_speed_ratio(f"store_{verb}_over_raw_{label}", pairs[verb], len(arena)))
    out.append(
        _result(f"store_over_raw_{label}", min(r["value"] for r in out), samples=_values(out))
    )
    if pairs["all_kept"]:
        name = f"store_write_all_kept_over_raw_{label}"
        out.append(_speed_ratio(name, pairs["all_kept"], len(arena)))
    return out


def _against_files(
    path: str, arena: memoryview, label: str, size: int, num_rounds: int
) -> list[dict[str, Any]]:
    """Last comes the headline: durable writes plus reads of the same bytes."""
    part = arena[: len(arena) // (4 if size < 256 << 10 else 1)]  # fsync of small files is slow
    out = []
    for suffix, sync in (("_no_sync", False), ("", True)):
        place = _subdirectory(path, label + suffix)
        files, store = _Files(place, part, size, sync=sync), _Store(place, part, size, sync=sync)
        pairs: dict[str, list[tuple[float, float]]] = {"write": [], "read": [], "both": []}
        for turn in range(num_rounds):
            write = _pair(files.write, store.write, turn)
            files.forget()
            read = _pair(files.read, store.read, turn)
            pairs["write"].append(write)
            pairs["read"].append(read)
            pairs["both"].append((write[0] + read[0], write[1] + read[1]))
            store.forget()
        files.close()
        store.close()
        shutil.rmtree(place)
        for verb, name in (("write", "_write"), ("read", "_read"), ("both", "")):
            name = f"store{name}_over_file_per_page{suffix}_{label}"
            out.append(_speed_ratio(name, pairs[verb], len(part) * (2 if verb == "both" else 1)))
    return out


def _speed_ratio(name: str, pairs: list[tuple[float, float]], num_bytes: int) -> dict[str, Any]:
    """The median of the pairs' ratios; the samples are GB/s of both."""
    ratio = statistics.median(other / mine for other, mine in pairs)
    speeds = {
        "other_gb_per_s": [round(num_bytes / other / 1e9, 3) for other, _ in pairs],
        "store_gb_per_s": [round(num_bytes / mine / 1e9, 3) for _, mine in pairs],
    }
    return _result(name, ratio, samples=speeds)


def _values(results: list[dict[str, Any]]) -> list[float]:
    return [result["value"] for result in results]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _pair(other: Callable[[], None], mine: Callable[[], None], turn: int) -> tuple[float, float]:
    """Seconds of both, one directly after the other; who goes first alternates."""
    if turn % 2:
        mine_s = _seconds(mine)
        return _seconds(other), mine_s
    return _seconds(other), _seconds(mine)


def _check(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise RuntimeError(f"moved {moved} of {wanted} bytes")


def _footprint(arena: memoryview) -> int:
    """Bytes of disk: enough segments that a round does not evict its own beginning."""
    return max(2 * len(arena), 256 << 20)


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Do work(0) ... work(count - 1) in NUM_THREADS threads, interleaved."""
    failed: list[BaseException] = []

    def share(first: int) -> None:
        try:
            for index in range(first, count, NUM_THREADS):
                work(index)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=share, args=(k,)) for k in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
