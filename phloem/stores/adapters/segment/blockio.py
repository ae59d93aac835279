"""Block I/O on one file: O_DIRECT where the filesystem has it, scatter lists, aligned buffers."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from phloem.stores.adapters.segment.format import BLOCK, padded
from phloem.stores.backend import Item, num_bytes

__all__ = ["BlockFile", "Scratch", "Window", "digest_of", "drain_bounce", "fill_bounce", "window"]

IOV_MAX = 1024


def _is_aligned(view: memoryview) -> bool:
    if len(view) % BLOCK:
        return False
    address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
    return bool(address % BLOCK == 0)


class Scratch:
    """Aligned memory of one thread, given out piece by piece, taken back all at once."""

    def __init__(self, size_bytes: int = 1 << 20) -> None:
        self._view = memoryview(mmap.mmap(-1, padded(size_bytes)))
        self._used = 0
        self._old: list[memoryview] = []

    def take(self, num: int) -> memoryview:
        """An aligned buffer of `num` bytes (whole blocks), valid until `reset`."""
        assert num % BLOCK == 0, f"{num} bytes are not whole blocks"
        if self._used + num > len(self._view):
            self._old.append(self._view)
            self._view = memoryview(mmap.mmap(-1, max(num, 2 * len(self._view))))
            self._used = 0
        piece = self._view[self._used : self._used + num]
        self._used += num
        return piece

    def reset(self) -> None:
        """Everything taken is free again."""
        self._old.clear()
        self._used = 0


class Window(NamedTuple):
    """How an item's bytes meet the disk: aligned buffers, and what to copy through `bounce`.

    `views` cover the padded object. `bounce` holds the object's bytes from `start` on (none if the
    item's own buffers are aligned and whole).
    """

    views: list[memoryview]
    bounce: memoryview | None
    start: int


def window(item: Item, scratch: Scratch) -> Window:
    """The longest aligned beginning of the item is used in place, the rest goes through scratch."""
    views: list[memoryview] = []
    start = 0
    for part in item.parts:
        if not _is_aligned(part):
            body = part[: len(part) // BLOCK * BLOCK]
            if len(body) and _is_aligned(body):
                views.append(body)
                start += len(body)
            break
        views.append(part)
        start += len(part)
    rest = num_bytes(item) - start
    if not rest:
        return Window(views, None, start)
    bounce = scratch.take(padded(rest))
    return Window([*views, bounce], bounce, start)


def fill_bounce(item: Item, win: Window) -> None:
    """Before a write: copy what is not written in place, and zero the padding."""
    if win.bounce is None:
        return
    at = 0
    for mine, _ in _rest(item, win.start):
        win.bounce[at : at + len(mine)] = mine
        at += len(mine)
    win.bounce[at:] = bytes(len(win.bounce) - at)


def drain_bounce(item: Item, win: Window) -> None:
    """After a read: copy what was not read in place."""
    if win.bounce is None:
        return
    for mine, at in _rest(item, win.start):
        mine[:] = win.bounce[at : at + len(mine)]


def _rest(item: Item, start: int) -> list[tuple[memoryview, int]]:
    """The item's buffers from byte `start` on, each with its place in the bounce buffer."""
    out = []
    passed = 0
    at = 0
    for part in item.parts:
        mine = part[max(0, start - passed) :]
        passed += len(part)
        if len(mine):
            out.append((mine, at))
            at += len(mine)
    return out


def digest_of(item: Item) -> int:
    """xxh3 of the object's bytes."""
    if len(item.parts) == 1:
        return xxhash.xxh3_64_intdigest(item.parts[0])
    digest = xxhash.xxh3_64()
    for part in item.parts:
        digest.update(part)
    return digest.intdigest()


class BlockFile:
    """An open file. Offsets, lengths and buffers must be aligned; a read past the end is short.

    The descriptor is closed when the last reference goes: a thread that still reads must never
    find another file behind the same number.
    """

    def __init__(self, path: str, *, create_bytes: int | None = None) -> None:
        """Open for reading and writing; with `create_bytes` make and preallocate it first.

        Raises OSError, after removing what it made.
        """
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC
        if create_bytes is not None:
            self._create(path, create_bytes)
        try:
            self.fd = os.open(path, flags | os.O_DIRECT)
            self.is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, flags)
            self.is_direct = False
        weakref.finalize(self, os.close, self.fd)

    @staticmethod
    def _create(path: str, size_bytes: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.ftruncate(fd, 0)
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def read(self, views: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers; returns how many bytes there were."""
        return _transfer(os.preadv, self.fd, views, offset)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write all of the buffers. Raises OSError; then any part may have been written."""
        wanted = sum(map(len, views))
        if _transfer(os.pwritev, self.fd, views, offset) != wanted:
            raise OSError(errno.EIO, "short write", self.path)

    def preallocate(self, size_bytes: int) -> None:
        """Make sure that writing within `size_bytes` needs no new blocks. Raises OSError."""
        if os.fstat(self.fd).st_blocks * 512 < size_bytes:  # else not even a journal entry
            os.posix_fallocate(self.fd, 0, size_bytes)

    def mtime_ns(self) -> int:
        """When it was written last."""
        return os.fstat(self.fd).st_mtime_ns

    def sync(self) -> None:
        """Wait until what was written would survive a loss of power."""
        os.fdatasync(self.fd)


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    views: Sequence[memoryview],
    offset: int,
) -> int:
    """Repeat preadv or pwritev until all is done or nothing more comes."""
    todo = list(views)
    total = 0
    while todo:
        moved = call(fd, todo[:IOV_MAX], offset + total)
        if moved <= 0:
            break
        total += moved
        if moved == sum(map(len, todo)):
            break
        while todo and moved >= len(todo[0]):
            moved -= len(todo.pop(0))
        if moved:
            todo[0] = todo[0][moved:]
            if moved % BLOCK:  # only at the end of a file: no aligned retry is possible
                break
    return total
