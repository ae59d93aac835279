"""Drops that outlast the process: a small log beside the segments.

    DIR/phloem-store.dropped   records of 24 bytes, added under the directory's lock

    record   generation 8, block 4, tag of the key 4, xxh3 of these 8

A record means the object that lies at that block in that life of a segment; once the segment is
recycled it means nothing. With tag 0 it means all objects of that life before that block.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from phloem.stores.adapters.segment.format import BLOCK, Entry

__all__ = ["LOG_BYTES", "MAX_DROPS", "Drop", "DropLog", "drop_of"]

_BODY = struct.Struct("<QII")
_DIGEST = struct.Struct("<Q")
_RECORD_BYTES = _BODY.size + _DIGEST.size
LOG_BYTES = 8 * BLOCK
MAX_DROPS = LOG_BYTES // _RECORD_BYTES
_ALL = 0


class Drop(NamedTuple):
    """One record."""

    generation: int
    block: int
    tag: int

    @classmethod
    def all_before(cls, generation: int, offset: int) -> Drop:
        """Everything that lies before `offset`."""
        return cls(generation, offset // BLOCK, _ALL)


def drop_of(generation: int, key: bytes, offset: int) -> Drop:
    """The record that means one object."""
    return Drop(generation, offset // BLOCK, _tag(key))


def _tag(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) & 0xFFFFFFFF | 1


class DropLog:
    """The log and what it says. Thread-safe; whoever writes holds the directory's lock."""

    def __init__(self, path: str, *, sync: bool = False) -> None:
        self._path = path
        self._sync = sync
        self._lock = threading.Lock()
        self._signature: tuple[int, int, int] | None = None
        self._tags: dict[tuple[int, int], int] = {}  # (generation, block) -> tag
        self._before: dict[int, int] = {}  # generation -> block

    def covers(self, generation: int, entry: Entry) -> bool:
        """Whether that object was dropped."""
        block = entry.offset // BLOCK
        with self._lock:
            if block < self._before.get(generation, 0):
                return True
            return self._tags.get((generation, block)) == _tag(entry.key)

    def drops(self) -> list[Drop]:
        """All records."""
        with self._lock:
            before = [Drop(generation, block, _ALL) for generation, block in self._before.items()]
            return before + [Drop(*place, tag) for place, tag in self._tags.items()]

    def reload(self) -> bool:
        """Read the log again if it has changed; returns whether it had. A damaged record is none.

        An unreadable log says nothing: what was dropped may then be offered again.
        """
        with self._lock:
            try:
                signature = _signature(os.stat(self._path))
                if signature == self._signature:
                    return False
                with open(self._path, "rb") as file:
                    data = file.read(LOG_BYTES)
            except OSError:
                signature, data = None, b""
                if self._signature is None:
                    return False
            self._signature = signature
            self._tags.clear()
            self._before.clear()
            self._learn(_unpack(data))
            return True

    def append(self, drops: Iterable[Drop]) -> bool:
        """Add records; False and nothing added if there is no room. May raise OSError."""
        self.reload()
        data = _pack(drops)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # What a crash left of a record at the end is written over.
            end = os.fstat(fd).st_size // _RECORD_BYTES * _RECORD_BYTES
            if end + len(data) > LOG_BYTES:
                return False
            with self._lock:
                self._write(fd, data, end)
        finally:
            os.close(fd)
        return True

    def rewrite(self, drops: Iterable[Drop]) -> bool:
        """Put these records in the place of all; False if they are too many. May raise OSError."""
        data = _pack(drops)
        if len(data) > LOG_BYTES:
            return False
        path = self._path + ".tmp"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with self._lock:
                self._tags.clear()
                self._before.clear()
                self._write(fd, data, 0)
        finally:
            os.close(fd)
        os.replace(path, self._path)
        return True

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        """Remember, then write: what was dropped is not served even if the disk refuses."""
        self._learn(_unpack(data))
        if os.pwrite(fd, data, offset) != len(data):
            raise OSError(errno.EIO, "short write", self._path)
        if self._sync:
            os.fsync(fd)
        self._signature = _signature(os.fstat(fd))

    def _learn(self, drops: Iterable[Drop]) -> None:
        for generation, block, tag in drops:
            if tag == _ALL:
                self._before[generation] = max(block, self._before.get(generation, 0))
            else:
                self._tags[generation, block] = tag


def _signature(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _pack(drops: Iterable[Drop]) -> bytes:
    bodies = [_BODY.pack(*drop) for drop in drops]
    return b"".join(body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body)) for body in bodies)


def _unpack(data: bytes) -> list[Drop]:
    drops = []
    for at in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
        body = data[at : at + _BODY.size]
        (digest,) = _DIGEST.unpack_from(data, at + _BODY.size)
        if digest == xxhash.xxh3_64_intdigest(body):
            drops.append(Drop(*_BODY.unpack(body)))
    return drops
