"""What `bench stores` compares: the segment store, raw blocks, and one file per page.

All move slices of the arena: `write` a new one, `read` the oldest that was not read. The same
threads, buffers and bytes, and each is full before it is timed: what is written replaces something.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from phloem.core.clock import MonotonicClock
from phloem.core.store import KEY_BYTES, Arena, Op, PageStore, Span, Status, Verb
from phloem.stores import StoreOptions, open_store

__all__ = ["FOOTPRINT_BYTES", "NUM_THREADS", "FilePerPage", "RawBlocks", "Rival", "Segments"]

NUM_THREADS = 4
FOOTPRINT_BYTES = 512 << 20  # of each rival on disk
NUM_FILE_SLICES = 4  # as many files as can be waited for
OP_BYTES = 32 << 20  # one operation of the controller
PATIENCE_S = 120.0


class Rival(Protocol):
    """One contestant."""

    def write(self) -> None: ...

    def read(self) -> None: ...

    def prepare_read(self) -> None:
        """Make sure that the next two reads come from the device. Not timed."""
        ...

    def close(self) -> None: ...


class _Crew:
    """Threads that exist before the clock starts; whoever is free takes the next page."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self.run(NUM_THREADS, lambda _: None)

    def run(self, count: int, work: Callable[[int], None]) -> None:
        numbers = itertools.count()

        def share(_: int) -> None:
            while (index := next(numbers)) < count:
                work(index)

        for _ in self._pool.map(share, range(NUM_THREADS)):
            pass

    def close(self) -> None:
        self._pool.shutdown()


class RawBlocks:
    """O_DIRECT I/O of blocks of one preallocated file, in the order in which they lie."""

    def __init__(self, path: str, slice_: memoryview, size: int) -> None:
        self._slice, self._size = slice_, size
        self._fd = os.open(os.path.join(path, "raw"), os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        self._crew = _Crew()
        self._num_slices = FOOTPRINT_BYTES // len(slice_)
        os.posix_fallocate(self._fd, 0, self._num_slices * len(slice_))
        self._written = self._read = 0
        for _ in range(self._num_slices):  # every block has been written once
            self.write()
        self._read = self._written - 2

    def write(self) -> None:
        start = self._written % self._num_slices * len(self._slice)
        self._written += 1

        def work(index: int) -> None:
            _check(os.pwrite(self._fd, self._view(index), start + index * self._size), self._size)

        self._crew.run(len(self._slice) // self._size, work)

    def read(self) -> None:
        start = self._read % self._num_slices * len(self._slice)
        self._read += 1

        def work(index: int) -> None:
            place = start + index * self._size
            _check(os.preadv(self._fd, [self._view(index)], place), self._size)

        self._crew.run(len(self._slice) // self._size, work)

    def prepare_read(self) -> None:
        """Nothing is cached."""

    def _view(self, index: int) -> memoryview:
        return self._slice[index * self._size : (index + 1) * self._size]

    def close(self) -> None:
        self._crew.close()
        os.close(self._fd)


class FilePerPage:
    """A file per page: write, (fsync,) rename over an old one; after a slice (fsync of the
    directory). Reads after the page cache was told to forget."""

    def __init__(self, path: str, slice_: memoryview, size: int, *, sync: bool) -> None:
        self._slice, self._size, self._sync = slice_, size, sync
        self._path = os.path.join(path, "files")
        os.mkdir(self._path)
        self._directory = os.open(self._path, os.O_RDONLY)
        self._crew = _Crew()
        self._count = len(slice_) // size
        self._num_slices = NUM_FILE_SLICES
        self._written = self._read = 0
        for _ in range(self._num_slices):
            self.write()
        self._read = self._written - 2

    def write(self) -> None:
        turn = self._written
        self._written += 1
        self._crew.run(self._count, lambda index: self._write_page(self._name(turn, index), index))
        if self._sync:
            os.fsync(self._directory)

    def read(self) -> None:
        turn = self._read
        self._read += 1
        self._crew.run(self._count, lambda index: self._read_page(self._name(turn, index), index))

    def prepare_read(self) -> None:
        for turn in (self._read, self._read + 1):
            for index in range(self._count):
                fd = os.open(self._name(turn, index), os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def _name(self, turn: int, index: int) -> str:
        number = turn % self._num_slices * self._count + index
        return os.path.join(self._path, f"{number:064x}.bin")

    def _write_page(self, name: str, index: int) -> None:
        fd = os.open(name + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            _check(os.write(fd, self._view(index)), self._size)
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(name + ".tmp", name)

    def _read_page(self, name: str, index: int) -> None:
        fd = os.open(name, os.O_RDONLY)
        try:
            _check(os.readv(fd, [self._view(index)]), self._size)
        finally:
            os.close(fd)

    def _view(self, index: int) -> memoryview:
        return self._slice[index * self._size : (index + 1) * self._size]

    def close(self) -> None:
        self._crew.close()
        os.close(self._directory)


class Segments:
    """The whole guarded store, driven as the tier controller does: some operations at once."""

    def __init__(
        self, path: str, slice_: memoryview, size: int, *, sync: bool, keep_read: bool = False
    ) -> None:
        self._slice, self._size, self._keep_read = slice_, size, keep_read
        self._clock = MonotonicClock()
        options = StoreOptions(
            location=os.path.join(path, "store"),
            size_bytes=FOOTPRINT_BYTES,
            num_threads=NUM_THREADS,
            sync=sync,
        )
        self._store: PageStore = open_store("segment", options, self._clock)
        self._store.attach([Arena(0, slice_)])
        self._count = len(slice_) // size
        self._num_written = 0
        self._unread: deque[tuple[bytes, ...]] = deque()
        self._was_read: list[bytes] = []
        self._spans = tuple(Span(0, i * size, size) for i in range(self._count))
        for _ in range(FOOTPRINT_BYTES // len(slice_) + 1):  # every segment has been written once
            self.write()
        while len(self._unread) > 2:
            self._unread.popleft()

    def write(self) -> None:
        first = self._num_written * self._count
        self._num_written += 1
        names = range(first, first + self._count)
        keys = tuple(name.to_bytes(KEY_BYTES, "little") for name in names)
        self._unread.append(keys)
        self._do(Verb.PUT, keys, Status.OK)

    def read(self) -> None:
        keys = self._unread.popleft()
        self._was_read += keys
        allowed = (Status.OK, Status.MISS) if self._keep_read else (Status.OK,)
        self._do(Verb.GET, keys, *allowed)

    def prepare_read(self) -> None:
        """Nothing is cached; but forget what was read, or eviction would carry it over."""
        keys, self._was_read = tuple(self._was_read), []
        if keys and not self._keep_read:
            self._do(Verb.DROP, keys, Status.OK)

    def _do(self, verb: Verb, keys: tuple[bytes, ...], *allowed: Status) -> None:
        deadline = self._clock.now_s() + PATIENCE_S
        step = OP_BYTES // self._size
        waiting = set()
        for first in range(0, len(keys), step):
            spans = () if verb is Verb.DROP else self._spans[first : first + step]
            op = Op(verb=verb, keys=keys[first : first + step], spans=spans)
            waiting.add(self._store.submit(op, deadline))
        while waiting:
            self._store.wait(1.0)
            for done in self._store.poll().done:
                waiting.remove(done.ticket)
                if not set(done.statuses) <= set(allowed):
                    raise RuntimeError(f"{verb.value} in the bench: {set(done.statuses)}")

    def close(self) -> None:
        self._store.close(self._clock.now_s() + PATIENCE_S)


def _check(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise RuntimeError(f"moved {moved} of {wanted} bytes")
